"""`brorl.api.evaluate` against `brorl eval`: the same responses, numbers and files, from Python."""

import json
import shutil
from dataclasses import asdict
from html import unescape
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import yaml
from pyarrow import parquet
from rich.console import Console

from brorl.api.arguments import resolve_config
from brorl.api.evaluate import evaluate, make_request
from brorl.errors import UserError
from brorl.evaluation.datasets import NO_LIMIT
from run_support import command, save_tiny_model

QUICK: dict[str, Any] = {"samples": 8, "evaluation": {"num_prompts": 4}, "engine.threads": 1}


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(autouse=True)
def several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.evaluation.preparation._MIN_PROMPTS", 2)
    monkeypatch.setattr("brorl.evaluation.preparation._MAX_PROMPTS", 2)


def content(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("responses/*")) for row in parquet.read_table(file).to_pylist()]


def stored(folder: Path) -> Any:
    return json.loads((folder / "evaluation.json").read_text())


@pytest.mark.slow
def test_a_revision_of_a_model_on_the_hub_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline machine has two revisions in its cache, one of which is not even a model."""
    name, commit = "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B", "b" * 40
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    save_tiny_model(repository / "snapshots" / commit)
    (repository / "snapshots" / "main").mkdir()
    (repository / "refs").mkdir()
    for revision, of_revision in (("brorl", commit), ("main", "main")):
        (repository / "refs" / revision).write_text(of_revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    options = ("--data=countdown", "--samples=8", "--max-new-tokens=3", "--evaluation.num_prompts=4")
    outcome = command("eval", f"{name}@brorl", *options, "--output-dir=of_revision")
    assert outcome.code == 0, outcome
    assert json.loads(Path("of_revision/env.json").read_text())["model_commit"] == commit
    same = command("eval", repository / "snapshots" / commit, *options, "--output-dir=of_folder")
    assert same.code == 0, same
    assert content(Path("of_revision")) == content(Path("of_folder"))
    refused = command("eval", name, *options)
    assert refused.code == 2
    assert "the model was not downloaded before" in refused.err


@pytest.mark.slow
def test_the_function_and_the_command_give_the_same_evaluation(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    capsys.readouterr()
    seed, top_p = int(rng.integers(1000)), float(rng.uniform(0.5, 1))
    result = evaluate(
        model, data="countdown", ks=[4, 1], temperature=1.3, top_p=top_p, max_new_tokens=3, output_dir="python",
        seed=seed, progress=False, **QUICK,
    )  # fmt: skip
    assert capsys.readouterr() == ("", "")
    outcome = command(
        "eval", model, "--data=countdown", "--samples=8", "--ks=1,4", "--temperature=1.3", f"--top-p={top_p}",
        "--max-new-tokens=3", "--output-dir=command", f"--seed={seed}", "--evaluation.num_prompts=4",
        "--engine.threads=1",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    assert result.path == Path("python")
    assert content(Path("python")) == content(Path("command"))
    assert Path("python/settings.json").read_bytes() == Path("command/settings.json").read_bytes()

    record = stored(Path("command"))
    assert stored(result.path)["prompts"] == record["prompts"] == [asdict(prompt) for prompt in result.prompts]
    assert {int(k): at for k, at in record["overall"]["pass_at"].items()} == asdict(result.overall)["pass_at"]
    correct = [row["correct"] for row in content(result.path) for _ in range(row["count"])]
    assert result.by_source["countdown"].pass_at[1].value == pytest.approx(np.mean(correct))

    for estimate in result.overall.pass_at.values():
        shown = f"{estimate.value:.3f} [{estimate.low:.2f}, {estimate.high:.2f}]"
        console = Console(width=80)
        with console.capture() as capture:
            console.print(result)
        assert shown in capture.get()
        assert shown in unescape(result._repr_html_())
        assert shown in outcome.out


def test_an_evaluation_does_not_care_how_a_run_overlaps_its_work() -> None:
    """`async` would need an importance correction."""
    settings = {"cluster.nodes": 1, "cluster.mode": "async"}
    sampled = {"samples": 8, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    request = make_request("quickstart", (), (1,), None, sampled, settings)
    assert (request.config.cluster.nodes, request.config.cluster.mode) == (1, "sync")
    with pytest.raises(UserError, match=r"cluster\.mode"):
        evaluate("quickstart", progress=False, **QUICK, **{"cluster.mode": "sometimes"})


@pytest.mark.parametrize(
    ("of_training", "arguments", "overrides"),
    [
        ({"evaluation": {"best_k": 16}}, {"samples": 8}, {}),
        (
            {"phases": [{"name": "a", "until": 0.5, "until_coverage_stalls": 3}, {"name": "b", "until": 1}]},
            {"samples": 1, "temperature": 0.0},
            {},
        ),
        ({"engine": {"clock": "cpu", "threads": 1}}, {}, {"engine.threads": 2}),
        ({"dtype": "bfloat16", "importance": {"correction": "truncate"}}, {}, {"dtype": "float32"}),
        ({"engine": {"dtype": "bfloat16"}}, {}, {"dtype": "float64", "engine.dtype": "auto"}),
    ],
)
def test_the_training_of_a_run_does_not_limit_its_evaluation(
    of_training: dict[str, Any], arguments: dict[str, Any], overrides: dict[str, Any], short_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(short_run, run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["evaluation"] |= {
        "rollouts_per_prompt": 16,
        "ks": [1, 16],
        "every": 1,
        "num_prompts": 4,
        "skip_prompts": 2,
    }
    settings["importance"]["correction"] = "truncate"
    settings["optimizer"]["old_logprobs"] = "recompute"
    for name, value in of_training.items():
        settings[name] = settings[name] | value if isinstance(value, dict) else value
    if "dtype" in of_training:
        settings["optimizer"]["old_logprobs"] = "engine"
    if "phases" in of_training:
        del settings["advantage"]
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    resolve_config(run / "config.yaml", {})  # a recipe of training
    sampled = {"samples": 8, "temperature": 1.0, "top_p": 1.0, "seed": 0} | arguments
    evaluation = make_request(str(run), (), (1,), None, sampled, overrides).config.evaluation
    assert (evaluation.rollouts_per_prompt, evaluation.temperature) == (sampled["samples"], sampled["temperature"])
    assert (evaluation.num_prompts, evaluation.skip_prompts) == (NO_LIMIT, 0)  # also those that tuning did not use


def test_an_evaluation_samples_what_the_run_samples(short_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(short_run, run)
    settings = yaml.safe_load((run / "config.yaml").read_text())

    def drawn(of_run: dict[str, Any], top_p: float | None = None, **given: Any) -> tuple[float, int, int]:
        (run / "config.yaml").write_text(yaml.safe_dump(settings | {"sampling": settings["sampling"] | of_run}))
        sampled = {"samples": 8, "temperature": 1.0, "top_p": top_p, "seed": 0}
        options = {f"evaluation.{name}": value for name, value in given.items()}
        found = make_request(str(run), (), (1,), None, sampled, options).config.evaluated_sampling
        return found.top_p, found.top_k, found.min_new_tokens

    of_run = {"top_p": 0.8, "top_k": 9, "min_new_tokens": 2}
    rows = (
        (({}, None), (0.95, 0, 0)),
        ((of_run, None), (0.8, 9, 2)),
        ((of_run, 1.0, {"top_k": 0, "min_new_tokens": 0}), (1.0, 0, 0)),
        ((of_run | {"top_p": 0.99}, None, {"top_k": 7}), (0.95, 7, 2)),
    )
    for (of_this, top_p, *given), expected in rows:
        assert drawn(of_this, top_p, **(given[0] if given else {})) == expected
    with pytest.raises(UserError, match=r"sampling\.min_new_tokens = 2 must be below evaluation\.max_new_tokens = 2"):
        make_request(str(run), (), (1,), 2, {"samples": 8, "temperature": 1.0, "top_p": 1.0, "seed": 0}, {})


@pytest.mark.slow
def test_the_stored_settings_name_what_decides_responses_and_verdicts() -> None:
    """Evaluations in 16 and in 32 bits are different ones, and so are those with another sandbox."""
    usual = evaluate("quickstart", output_dir="usual", progress=False, **QUICK)
    assert "engine" not in usual.settings
    assert set(usual.settings["verification"]) == {"timeout_s", "memory_mib", "functions"}
    own = {"engine.dtype": "bfloat16", "verification.batch_timeout_s": 99.0}
    evaluated = evaluate("quickstart", output_dir="own", progress=False, **QUICK, **own)
    assert evaluated.settings["engine"] == {"dtype": "bfloat16"}
    assert evaluated.settings["verification"]["batch_timeout_s"] == 99
    with pytest.raises(UserError, match="usual"):
        evaluate("quickstart", output_dir="usual", progress=False, **QUICK, **own)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ks": [16]}, "`ks` must be between 1 and `samples` = 8, got (16,)"),
        ({"ks": []}, "`ks` must be between 1 and `samples` = 8, got ()"),
        ({"max_new_tokens": 0}, "`max_new_tokens`: the value should be greater than or equal to 1, not 0"),
        ({"temperature": float("nan")}, "`temperature`: the value should be a finite number, not nan"),
        ({"loss": {"clip_high": 0.3}}, "loss.clip_high is not a setting of an evaluation; the settings are: device"),
        ({"model": "other"}, "model is not a setting of an evaluation"),
        ({"prompt": {"template": "none"}}, "prompt.template must contain {prompt} once"),
        ({"data": "chess.jsonl"}, "there is no file or folder chess.jsonl"),
    ],
)
def test_wrong_arguments_are_rejected_before_any_work(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        evaluate("quickstart", progress=False, **{**QUICK, **arguments})
    assert said in str(caught.value)
    assert not list(Path().iterdir())
