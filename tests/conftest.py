"""Random inputs for every test: the same ones in each run, or new ones with BRORL_TEST_SEED=random."""

import gc
import os
import sys
import time
import zlib
from collections.abc import Generator, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from brorl.prompts.countdown import countdown_puzzles
from child_runs import ForkServer
from run_support import SMALL, command

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as an active environment
os.environ["OMP_NUM_THREADS"] = "1"  # the models are tiny, and tests run in parallel; child processes inherit it
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported; see interpreted_kernels
_SEED = os.environ.get("BRORL_TEST_SEED", "0")  # "random", or a number
settings.register_profile(
    "brorl",
    deadline=None,  # no timed assertions
    print_blob=True,
    derandomize=_SEED == "0",
    max_examples=25 if _SEED == "0" else 100,  # derandomized examples are the same in each run
)
settings.load_profile("brorl")
if _SEED == "random":
    _SEED = os.environ["BRORL_TEST_SEED"] = str(int.from_bytes(os.urandom(3)))  # workers inherit it


@pytest.fixture(autouse=True, scope="session")
def puzzles_are_made_once() -> Iterator[None]:
    """Making the puzzles is half of what a small command takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brorl.evaluation.questions.countdown_puzzles", lru_cache(countdown_puzzles))
        yield


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command in an empty folder: what it writes without a folder of its own goes there."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, with a checkpoint and without evaluations; tests only read it."""
    path = tmp_path_factory.mktemp("runs") / "short"
    outcome = command("train", *SMALL, "--steps=1", "--evaluation.num_prompts=0", f"--output_dir={path}", "--seed=5")
    assert outcome.code == 0, outcome
    return path


@pytest.fixture
def no_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take no time: the seconds of a verdict are those of its worker alone."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("linux") and sys.platform != "linux":
        pytest.skip("needs Linux")
    if item.get_closest_marker("vllm") and not find_spec("vllm") and os.environ.get("BRORL_REQUIRE_VLLM") != "1":
        pytest.skip("needs vLLM")


def pytest_configure(config: pytest.Config) -> None:
    """Start the server that forks child runs: one for the session, before the workers start."""
    if not hasattr(config, "workerinput"):
        config.add_cleanup(ForkServer().close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the imports from garbage collection: searching the modules of torch takes half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    return f"inputs from BRORL_TEST_SEED={_SEED} (set it to repeat a run)"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Iterator[np.random.Generator]:
    """A generator of its own for each test: the same numbers for the same seed."""
    print(f"repeat with BRORL_TEST_SEED={_SEED}")
    return np.random.default_rng([int(_SEED), zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def same_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that load a user's file in this process: its folder does not stay on the path of later tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])
