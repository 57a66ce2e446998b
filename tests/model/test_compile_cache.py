"""Where compiled code is kept, and what a second process finds there."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from brorl.model.kernels import keep_compiled_code

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which does not exist yet; neither PyTorch nor Triton has a folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")  # so that the variable is restored, also if it is not set now
        monkeypatch.delenv(name)
    return tmp_path / "cache"


@pytest.mark.parametrize("default", [False, True])
def test_compiled_code_is_kept_in_the_cache_folder_of_the_user(
    cache: Path, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of PyTorch set the variable to the default when they are imported."""
    if default:
        monkeypatch.setenv(INDUCTOR, default_cache_dir())
    for _ in range(2):
        keep_compiled_code()
        assert os.environ[INDUCTOR] == str(cache / "brorl" / "torchinductor")
        assert os.environ[TRITON] == str(cache / "brorl" / "torchinductor" / "triton")
    assert stat.S_IMODE((cache / "brorl").stat().st_mode) == 0o700


def test_a_folder_that_the_user_set_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRITON, "/my/triton")
    keep_compiled_code()
    assert os.environ[INDUCTOR] == str(cache / "brorl" / "torchinductor")
    assert os.environ[TRITON] == "/my/triton"
    monkeypatch.setenv(INDUCTOR, "/my/folder")
    monkeypatch.delenv(TRITON)
    keep_compiled_code()
    assert os.environ[INDUCTOR] == "/my/folder"
    assert TRITON not in os.environ


@pytest.mark.parametrize(
    ("function", "error", "folder"),
    [
        ("tempfile.TemporaryFile", OSError("no space left"), None),
        ("getpass.getuser", KeyError("getpwuid(): uid not found"), "/my/folder"),
    ],
)
def test_the_default_remains_on_a_full_disk_and_for_a_user_without_a_name(
    function: str, error: Exception, folder: str | None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> Any:
        raise error

    if folder is not None:
        monkeypatch.setenv(INDUCTOR, folder)
    monkeypatch.setattr(function, fail)
    keep_compiled_code()
    assert os.environ.get(INDUCTOR) == folder
    assert TRITON not in os.environ
    assert not list(cache.rglob("tmp*"))


def test_without_a_cache_folder_the_default_remains(cache: Path) -> None:
    cache.write_text("a file")
    keep_compiled_code()
    assert INDUCTOR not in os.environ
    assert TRITON not in os.environ


CHILD = """
import json
import torch
from attention_stand_in import use_stand_in
from torch._dynamo.utils import counters
from brorl.model.forward import with_packed_passes
from brorl.model.tree_path import TreeForward, chunk_logprobs
from brorl.tree import RolloutTree
from small_models import small_model

use_stand_in()
model = small_model(dtype=torch.float32)
lines = []
forward = with_packed_passes(model, TreeForward(), lines.append, autocast=True)
num_graphs = counters["stats"]["unique_graphs"]
trees = [RolloutTree.from_responses([3, 1], [[i % 17] * 40 for i in range(num_responses)]) for num_responses in (9, 12)]
with torch.autocast("cpu", torch.bfloat16):
    for chunk in chunk_logprobs(model.train(), trees, forward=forward):
        chunk.logprob.sum().backward()
    with torch.no_grad():
        list(chunk_logprobs(model.eval(), trees, forward=forward))
print(json.dumps({
    "lines": lines,
    "graphs": [num_graphs, counters["stats"]["unique_graphs"]],
    **{name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")},
    **{f"inductor_{name}": counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")},
}))
"""


@pytest.mark.slow
def test_a_second_process_finds_every_graph(cache: Path) -> None:
    """Layers with and without a gradient, and the two reductions over the vocabulary. A learner's passes add none."""

    def facts() -> dict[str, Any]:
        support = str(Path(__file__).parents[1] / "support")
        path = os.pathsep.join(filter(None, (support, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        (line,) = found.pop("lines")
        assert line.startswith("the decoder layers are compiled, in ")
        assert line.endswith(f" later runs find the kernels in {cache / 'brorl' / 'torchinductor'}")
        return found

    graphs = [4, 4]
    first, second = facts(), facts()
    assert first == {"graphs": graphs, "hit": 0, "miss": 4, "bypass": 0} | {
        "inductor_hit": 0, "inductor_miss": 5, "inductor_bypass": 0
    }  # fmt: skip
    assert second == {"graphs": graphs, "hit": 4, "miss": 0, "bypass": 0} | {
        "inductor_hit": 5, "inductor_miss": 0, "inductor_bypass": 0
    }  # fmt: skip
