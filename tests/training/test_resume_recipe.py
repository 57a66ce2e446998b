"""Both stages of the recipe with every part at work: killed and resumed, they equal what nothing happened to."""

import json
from pathlib import Path

import pytest
import torch

from brorl.runs.checkpoint import best_checkpoint
from child_runs import ChildRuns, Harm
from run_support import assert_same_run, metrics_without_times

KILLED = -9
PROMPTS = "prompts.jsonl"
RECIPE = (
    "small/prorl",
    "--prompts_per_step=4",
    "--steps=4",
    "--checkpoint_every=2",
    "--keep_checkpoints=2",
    "--rewards.cosine_length.every_steps=2",
    "--rewards.cosine_length.on_steps=1",
    "--kl.coefficient=0.01",
    "--reference.reset_every=3",
    "--reference.reset_optimizer=true",
    "--optimizer.learning_rate=1e-3",
    "--optimizer.reference_batch=64",
    "--optimizer.mini_batches=2",
    "--evaluation.every=1",
    "--evaluation.num_prompts=2",
    "--evaluation.rollouts_per_prompt=8",
    "--evaluation.ks=[1, 8]",
    "--report=false",
)
SOURCES = (
    "--data.sources=[{{task: countdown, max_number: 5, weight: 2}}, {{path: {file}, domain: countdown, name: mine}}]"
)
VARIANTS = {
    "ppo, truncated weights, all parameters": (),
    "gspo, masked responses, a subset of them, KL in the reward, adapters": (
        "--loss.kind=gspo",
        "--loss.clip_low=3e-4",
        "--loss.clip_high=4e-4",
        "--loss.aggregation=constant",
        "--importance.correction=sequence_mask",
        "--optimizer.max_responses_per_outcome=2",
        "--kl.placement=reward",
        "--lora.rank=2",
        "--optimizer.learning_rate=1e-2",
    ),
}
INSTANTS = {
    "between two updates": Harm("kill", r"update 5$"),
    "before the link to the best has its name": Harm("kill", r"rename .*/best$", nth=1),
}


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> ChildRuns:
    runs = ChildRuns(tmp_path_factory.mktemp("runs"))
    rows = [
        {"prompt": f"{a} {b} -> {a * b}:", "answer": f"{a} {b} -> {a * b}"} for b in range(2, 9) for a in range(1, b)
    ]
    (runs.folder / PROMPTS).write_text("\n".join(map(json.dumps, rows)))
    return runs


def settings_of(child: ChildRuns, variant: str) -> tuple[str, ...]:
    return (*RECIPE, SOURCES.format(file=child.folder / PROMPTS), *VARIANTS[variant])


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "instant"), list(zip(VARIANTS, INSTANTS, strict=True)))
def test_two_stages_killed_in_each_equal_the_uninterrupted_ones(child: ChildRuns, variant: str, instant: str) -> None:
    settings, harm = settings_of(child, variant), INSTANTS[instant]
    folder = child.folder / variant.split(",")[0]
    first, second = folder / "prorl", folder / "brorl"
    assert child("train", *settings, "--output_dir", first).code == 0
    check_that_every_part_was_at_work(first)
    broader = (*settings, "--rollouts_per_prompt=32", "--prompts_per_step=2", "--optimizer.from_checkpoint=true")
    broader = (*broader, f"--model={first / 'checkpoints' / 'step-000004'}")
    stage = child("train", *broader, "--output_dir", second)
    assert stage.code == 0, stage.err
    assert "continuing from step 4 of a run with N = 16 x 4 prompts, with its optimizer state" in stage.said
    origin = json.loads((second / "env.json").read_text())["continued_from"]
    assert origin["rollouts_per_prompt"] == 16
    assert Path(origin["checkpoint"]) == first / "checkpoints" / "step-000004"

    for reference, given in ((first, settings), (second, broader)):
        again = folder / f"{reference.name}-again"
        assert child("train", *given, "--output_dir", again, harms=[harm]).code == KILLED
        resumed = child("resume", again)
        assert resumed.code == 0, resumed.err
        assert_same_run(again, reference)
        best = best_checkpoint(reference / "checkpoints")
        assert best is not None
        assert best_checkpoint(again / "checkpoints") == again / "checkpoints" / best.name


def check_that_every_part_was_at_work(run: Path) -> None:
    """Otherwise that two runs are equal would prove little."""
    records = metrics_without_times(run)
    assert [r["step"] for r in records if "reference_reset" in r] == [3]
    assert all(r["update"]["reference_kl"] is not None for r in records[1:])
    mismatches = [r["update"]["mismatch_max"] for r in records[1:]]  # a step of carried groups alone has none
    assert any(mismatches)
    assert all(mismatch is None or mismatch >= 1 for mismatch in mismatches)
    assert {s for r in records[1:] for s in r["sampling"].get("by_source", {})} == {"countdown", "mine"}
    assert set(records[0]["evaluation"]["by_source"]) == {"countdown", "mine"}
    rewards = [r["sampling"]["reward"] - r["sampling"]["accuracy"] for r in records[1:]]
    assert any(abs(difference) > 1e-6 for difference in rewards)  # shaped
    best = best_checkpoint(run / "checkpoints")
    assert best is not None
    scores = [r["evaluation"]["pass_at"]["1"]["value"] for r in records[1:]]
    assert best.name == f"step-{1 + scores.index(max(scores)):06d}"
    state = torch.load(best / "trainer_state.pt", weights_only=True)
    assert state["learner"]["reference"]
