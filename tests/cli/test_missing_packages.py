"""A package that some data needs is missing: one line with the command that installs it, before the model loads."""

import json
import sys
from pathlib import Path

import pytest

from brorl.verification.domains import ifeval
from run_support import command, save_tiny_model

ROWS = [
    {"key": key, "prompt": f"Answer {key} in German.", "instruction_id_list": ["language:response_language"],
     "kwargs": [{"language": "de"}]}
    for key in range(8)
]  # fmt: skip
MISSING = (
    "brorl: the data has instructions about languages, which require the package langdetect; run: pip install 'brorl"
)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = save_tiny_model(tmp_path / "model", characters="".join(map(chr, range(32, 127))))
    return [
        f"--model={model}", "--data.sources=[{path: rows.jsonl, layout: ifeval}]", "--data.held_out_fraction=0.25",
        "--rollouts_per_prompt=2", "--prompts_per_step=2", "--optimizer.mini_batches=1", "--steps=1",
        "--sampling.max_new_tokens=4", "--evaluation.num_prompts=1", "--evaluation.rollouts_per_prompt=2",
        "--evaluation.ks=[1]", "--dynamic_sampling.enabled=false", "--engine.threads=1", "--report=false",
        "--output_dir=run",
    ]  # fmt: skip


@pytest.fixture
def without_langdetect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    monkeypatch.setattr("brorl.training.local_parts.build_model", lambda *_: pytest.fail("the model was loaded"))
    ifeval._instructions.cache_clear()


@pytest.mark.parametrize("name", ["train", "check", "data"])
@pytest.mark.usefixtures("without_langdetect")
def test_ifeval_needs_langdetect_before_the_model_loads(name: str, arguments: list[str]) -> None:
    outcome = command(name, "quickstart", *arguments)
    assert outcome.code == 2
    assert MISSING in outcome.err
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_run_that_is_resumed_needs_langdetect_too(arguments: list[str], request: pytest.FixtureRequest) -> None:
    outcome = command("train", "quickstart", *arguments)
    assert outcome.code == 0, outcome
    request.getfixturevalue("without_langdetect")
    outcome = command("resume", "run", "--steps=2")
    assert outcome.code == 2
    assert MISSING in outcome.err
