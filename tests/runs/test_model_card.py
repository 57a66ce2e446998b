"""Model cards: their numbers against an independent reading of the records, their metadata by the hub's own reader."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, AutoTokenizer

import brorl
from brorl.runs.checkpoint import find_damage
from brorl.runs.model_card import model_card, upload_command
from brorl.runs.run_directory import StoredRun
from made_up_runs import typed
from run_support import SMALL, command

STEPS = 3  # with an evaluation of every second one, and averaged weights
SETTINGS = {
    "model": "org/base@v2",
    "rollouts_per_prompt": "128",
    "prompts_per_step": "4",
    "data.sources": '[{"path": "org/questions@abc"}, {"path": "/home/me/mine.jsonl"}, {"gym": ["acre"]}]',
    "data.held_out_fraction": "0.1",
    "advantage.estimator": "rloo",
    "prompt.template": "Q: {prompt}\nA:",
    "rewards.terms.brief": '{"function": "/home/me/rewards.py:brief"}',
    "lora.rank": "0",
    "evaluation.temperature": "0.6",
    "evaluation.top_p": "null",
    "evaluation.max_new_tokens": "null",
    "sampling.top_p": "0.8",
    "sampling.top_k": "9",
    "sampling.max_new_tokens": "77",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card") / "run"
    settings = (*SMALL, f"--steps={STEPS}", "--checkpoint_every=1", "--keep_checkpoints=0", "--optimizer.ema_decay=0.9")
    outcome = command("train", *settings, "--evaluation.num_prompts=12", "--output_dir", path)
    assert outcome.code == 0, outcome.err
    return path


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def cells(text: str, first: str) -> list[str]:
    (line,) = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", text, re.M)
    return [cell.strip() for cell in line.split("|")]


def made_up(records: list[dict[str, Any]], environment: dict[str, Any] | None = None, **settings: str) -> StoredRun:
    return StoredRun(Path("run"), "run", SETTINGS | settings, environment or {}, typed(records))


@pytest.mark.parametrize("folder", ["", "ema"])
def test_every_number_is_one_of_the_records(run: Path, folder: str) -> None:
    key = "ema_evaluation" if folder else "evaluation"
    records = records_of(run)
    for step in range(1, STEPS + 1):
        card = ModelCard.load(run / "checkpoints" / f"step-{step:06d}" / folder / "README.md")
        done = [r["sampling"] for r in records if 1 <= r["step"] <= step]
        samples, tokens = (sum(s[name] for s in done) for name in ("samples", "sampled_tokens"))
        assert cells(card.text, "rollouts") == [f"{samples:,} ({tokens:,} tokens)"]
        assert cells(card.text, "steps") == [f"{step}, averaged weights" if folder else f"{step}"]
        assert cells(card.text, "rollouts per prompt (N)") == ["16"]
        measured = [records[0]["evaluation"], *([records[step][key]] if key in records[step] else [])]
        assert len(measured) == (1 if step == 1 else 2)
        for k in ("1", "4"):
            expected = [e["pass_at"][k] for e in measured]
            assert cells(card.text, f"pass@{k}") == [
                f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in expected
            ]
        assert f"over {measured[0]['num_prompts']} prompts" in card.text
        assert f"brorl {brorl.__version__}" in card.text
        assert str(run.parent) not in card.text


def test_the_hub_reads_the_metadata(run: Path) -> None:
    data = ModelCard.load(run / "checkpoints" / f"step-{STEPS:06d}" / "README.md").data
    assert (data.library_name, data.pipeline_tag, data.license, data.base_model) == (
        "transformers", "text-generation", None, None,
    )  # fmt: skip
    card = ModelCard(model_card(made_up([{"step": 0}], {"model_commit": "f00"}, **{"lora.rank": "8"}), 0))
    assert (card.data.base_model, card.data.library_name) == ("org/base", "peft")
    assert card.data.to_dict()["base_model_relation"] == "adapter"
    assert card.data.datasets == ["org/questions"]
    assert cells(card.text, "base model") == ["[org/base](https://huggingface.co/org/base) at `f00`"]
    assert "`mine.jsonl`, Reasoning Gym (acre)" in card.text
    assert "/home/me" not in card.content


def test_what_was_not_measured_has_no_number() -> None:
    scores = {"pass_at": {"1": {"value": 0.5, "low": 0.25, "high": 0.75}}, "by_source": {}}
    scores |= {"num_prompts": 3, "num_samples": 1}
    assert "pass@" not in model_card(made_up([{"step": 0}]), 0)
    trained = {"step": 1, "sampling": {"samples": 1, "sampled_tokens": 1, "unique_tokens": 1}, "seconds": {"total": 1}}
    after = model_card(made_up([{"step": 0}, trained | {"update": {}, "evaluation": scores}]), 1)
    assert cells(after, "pass@1") == ["0.500 [0.250, 0.750]"]
    assert "temperature 0.6, top-p 0.8, top-k 9, at most 77 tokens" in after
    # A step without an update evaluates the weights of the one before.
    none = [{"step": 0}, trained | {"update": {}}, trained | {"step": 2, "attempt": 0, "evaluation": scores}]
    assert cells(model_card(made_up(none), 1), "pass@1") == ["0.500 [0.250, 0.750]"]
    assert "pass@" not in model_card(made_up(none), 2)


def test_the_base_of_a_later_stage_is_that_of_the_first(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "env.json").write_text(json.dumps({"continued_from": None, "model_commit": "abc"}))
    before = {"checkpoint": str(first / "checkpoints" / "step-000007"), "step": 7, "model": "org/base"}
    card = model_card(made_up([{"step": 0}], {"continued_from": before}, model=before["checkpoint"]), 0)
    assert cells(card, "base model") == ["[org/base](https://huggingface.co/org/base) at `abc`"]
    assert cells(card, "continued from")[0].startswith("step 7 of a different run")
    assert str(tmp_path) not in card


def test_an_edited_card_is_no_damage(run: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(run / "checkpoints" / f"step-{STEPS:06d}", tmp_path / "checkpoint")
    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\n")
    assert find_damage(checkpoint) is None
    (checkpoint / "config.json").write_text("{}")
    assert find_damage(checkpoint) is not None


def test_the_upload_is_the_model_and_its_card(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / f"step-{STEPS:06d}"
    words = shlex.split(upload_command(checkpoint))
    assert words[:5] == ["hf", "upload", "NAME/MODEL", str(checkpoint), "."]
    excluded = [word for flag, word in zip(words[5::2], words[6::2], strict=True) if flag == "--exclude"]
    files = [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()]
    for name in filter_repo_objects(files, ignore_patterns=excluded):
        shutil.copy(checkpoint / name, tmp_path / name)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= left
    assert not left & {"COMMIT", "trainer_state.pt", "ema"}
    AutoModelForCausalLM.from_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
