"""A run that was killed, interrupted or out of disk space at any instant goes on as if nothing had happened."""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from brorl.runs.checkpoint import load_state
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import total_cost
from child_runs import ChildRuns, Harm
from run_support import (
    SMALL,
    Outcome,
    assert_identical,
    assert_same_run,
    command,
    leftovers,
    metrics_without_times,
)

STEPS, EVERY = 4, 2
PLAIN = (*SMALL, f"--steps={STEPS}", f"--checkpoint_every={EVERY}", "--keep_checkpoints=1")
KILLED = -9


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> ChildRuns:
    return ChildRuns(tmp_path_factory.mktemp("runs"))


class Reference(NamedTuple):
    """A run that nothing happened to, and its settings."""

    path: Path
    settings: tuple[str, ...]
    seed: int


@pytest.fixture(scope="module")
def reference(child: ChildRuns) -> Reference:
    """The run of the first seed that carries groups over the checkpoint in its middle."""
    for seed in range(20):
        path = child.folder / f"reference-{seed}"
        settings = (*PLAIN, f"--seed={seed}")
        outcome = child("train", *settings, "--output_dir", path)
        assert outcome.code == 0, outcome.err
        if metrics_without_times(path)[EVERY]["kept"]["carried"]:
            return Reference(path, settings, seed)
    raise AssertionError("no seed carries groups over the checkpoint")


@pytest.fixture
def run(child: ChildRuns) -> Iterator[Path]:
    folder = child.folder / "run"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def with_all_checkpoints(child: ChildRuns, reference: Reference) -> Path:
    """The reference with both of its checkpoints."""
    path = child.folder / "all-checkpoints"
    assert child("train", *reference.settings, "--keep_checkpoints=0", "--output_dir", path).code == 0
    return path


def check_beginning(run: Path, reference: Reference, num_steps: int) -> None:
    """Check that the whole metrics records are those of the reference, step 0 to `num_steps`."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True) if num_steps >= 0 else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    for record in records:
        record.pop("seconds", None)
        record.get("evaluation", {}).pop("seconds", None)
    assert records == metrics_without_times(reference.path)[: num_steps + 1]


def last_complete(run: Path) -> str | None:
    names = sorted(p.parent.name for p in run.glob("checkpoints/step-*/COMMIT"))
    return names[-1] if names else None


def go_on(child: ChildRuns, run: Path, reference: Reference, *harms: Harm) -> Outcome:
    """Resume, or begin again if the run was killed before it had a config."""
    if (run / "config.yaml").exists():
        return child("resume", run, harms=harms)
    return child("train", *reference.settings, "--output_dir", run, harms=harms)


@pytest.mark.slow
def test_the_reference_carries_groups_and_learns(reference: Reference) -> None:
    """Otherwise the tests below would prove little."""
    records = metrics_without_times(reference.path)
    assert records[EVERY]["kept"]["carried"] > 0
    assert [r["step"] for r in records] == list(range(STEPS + 1))
    assert all(r["update"]["grad_norm"] > 0 for r in records[1:])
    assert [p.name for p in (reference.path / "checkpoints").iterdir()] == [f"step-{STEPS:06d}"]


class Instant(NamedTuple):
    """How a run is killed; the last step in its metrics and its last checkpoint then. Updates 5 and 6 are of step 3."""

    harm: Harm
    step: int
    checkpoint: str | None


INSTANTS = {
    "in the first evaluation": Instant(Harm("kill", r"open a .*metrics\.jsonl"), -1, None),
    "in the first step": Instant(Harm("kill", r"update 1$"), 0, None),
    "in the first checkpoint": Instant(Harm("kill", r"open w .*step-000002.*COMMIT"), 2, None),
    "between two updates of a step": Instant(Harm("kill", r"update 5$"), 2, "step-000002"),
    "after the last update of a step": Instant(Harm("kill", r"update 6$"), 2, "step-000002"),
    "before rollouts have their name": Instant(Harm("kill", r"rename .*step-000003\.parquet"), 2, "step-000002"),
    "in a metrics record": Instant(Harm("tear", r"open a .*metrics\.jsonl", nth=4), 2, "step-000002"),
    "before an evaluation has its name": Instant(
        Harm("kill", r"rename .*evaluations/\.?step-000004\.parquet"), 3, "step-000002"
    ),
    "in the middle of the trainer's state": Instant(Harm("kill", r"half .*step-000004"), 4, "step-000002"),
    "before COMMIT": Instant(Harm("kill", r"open w .*step-000004.*COMMIT"), 4, "step-000002"),
    "before a checkpoint has its name": Instant(Harm("kill", r"rename .*step-000004$"), 4, "step-000002"),
    "before an old checkpoint is withdrawn": Instant(Harm("kill", r"unlink .*step-000002/COMMIT"), 4, "step-000004"),
    "after an old checkpoint is withdrawn": Instant(
        Harm("kill", r"unlink (?!.*COMMIT)(?!.*tmp)(?!.*parquet)"), 4, "step-000004"
    ),
}


# Each kill comes in a later part of the run than the one before it. The steps up to it show that the run was resumed
# correctly: they are those of the reference.
@pytest.mark.slow
@pytest.mark.parametrize(
    "instants",
    [
        (
            "in the first evaluation",
            "between two updates of a step",
            "before an evaluation has its name",
            "after an old checkpoint is withdrawn",
        ),
        (
            "in the first step",
            "before rollouts have their name",
            "in the middle of the trainer's state",
            "before an old checkpoint is withdrawn",
        ),
        ("in the first checkpoint", "in a metrics record", "before COMMIT"),
        ("after the last update of a step", "before a checkpoint has its name"),
    ],
    ids=" | ".join,
)
def test_killed_run_resumes_bitwise(
    instants: tuple[str, ...], child: ChildRuns, run: Path, reference: Reference
) -> None:
    for name in instants:
        instant = INSTANTS[name]
        assert go_on(child, run, reference, instant.harm).code == KILLED, name
        assert last_complete(run) == instant.checkpoint, name
        check_beginning(run, reference, instant.step)
    outcome = child("resume", run)
    assert outcome.code == 0, outcome.err
    assert_same_run(run, reference.path)


def test_every_instant_is_tried() -> None:
    (instants,) = [m.args[1] for m in test_killed_run_resumes_bitwise.pytestmark if m.name == "parametrize"]
    assert sorted(itertools.chain(*instants)) == sorted(INSTANTS)


@pytest.mark.slow
def test_killed_at_any_instant_and_killed_again_while_resuming(
    child: ChildRuns, run: Path, reference: Reference, rng: np.random.Generator
) -> None:
    """Instants are counted in calls of Python functions: the same in every run, and as fine as Python goes."""
    calls = child("train", *reference.settings, "--output_dir", child.folder / "counted", count_calls=True).calls
    assert calls > 10_000
    for _ in range(2):
        shutil.rmtree(run, ignore_errors=True)
        first = Harm("kill", f"call {rng.integers(calls)}")
        assert child("train", *reference.settings, "--output_dir", run, harms=[first]).code == KILLED
        again = Harm("kill", f"call {rng.integers(calls // 3)}")
        assert go_on(child, run, reference, again).code in (KILLED, 0)
        outcome = go_on(child, run, reference)
        assert outcome.code == 0, (first, again, outcome.err)
        assert_same_run(run, reference.path)


@pytest.mark.slow
def test_killed_while_going_back_to_a_checkpoint(child: ChildRuns, run: Path, reference: Reference) -> None:
    killed = child(
        "train", *reference.settings, "--output_dir", run, harms=[Harm("kill", r"open w .*step-000004.*COMMIT")]
    )
    assert killed.code == KILLED
    for event in (r"rename .*metrics\.jsonl", r"unlink .*step-00000[34]\.parquet"):
        assert child("resume", run, harms=[Harm("kill", event)]).code == KILLED
    assert child("resume", run).code == 0
    assert_same_run(run, reference.path)


def test_one_signal_finishes_the_step(child: ChildRuns, run: Path, reference: Reference) -> None:
    """SIGINT in step 1, and SIGTERM in step 3."""
    for step, harm in ((1, Harm("interrupt", r"update 1$")), (3, Harm("terminate", r"update 3$"))):
        stopped = go_on(child, run, reference, harm)
        assert stopped.code == 130
        assert f"brorl resume {run}" in stopped.said
        assert f"finishing step {step}, then saving" in stopped.said
        assert f"stopped after step {step}" in stopped.said
        assert last_complete(run) == f"step-{step:06d}"
        check_beginning(run, reference, step)
    assert child("resume", run).code == 0
    assert_same_run(run, reference.path)


@pytest.mark.slow
def test_signals_before_the_first_step_and_the_first_checkpoint(
    child: ChildRuns, run: Path, reference: Reference
) -> None:
    """The first call of the engine is that of the evaluation."""
    stopped = child("train", *reference.settings, "--output_dir", run, harms=[Harm("interrupt", r"sample 1$")])
    assert stopped.code == 130
    assert "stopping now: training has not begun" in stopped.said
    assert "stopped before the first step" in stopped.said
    assert f"brorl resume {run}" in stopped.said
    assert metrics_without_times(run) == []
    assert last_complete(run) is None

    harms = [Harm("interrupt", r"update 1$"), Harm("interrupt", r"update 2$")]
    stopped = child("resume", run, harms=harms)
    assert stopped.code == 130
    assert f"there is no checkpoint yet; start again from step 0 with: brorl resume {run}" in stopped.said
    assert child("resume", run).code == 0
    assert_same_run(run, reference.path)


@pytest.mark.slow
def test_a_signal_while_sampling_loses_nothing_that_was_learned(
    child: ChildRuns, run: Path, reference: Reference
) -> None:
    """In the last round of each step: the state after the step before it is saved, with what that had carried."""
    records = metrics_without_times(reference.path)
    rounds = [r.get("sampling", {}).get("rounds", 0) for r in records]
    for step in range(1, STEPS + 1):
        evaluated = "evaluation" in records[step - 1]  # in this process, as is the step before if that was stopped
        call = rounds[step] + evaluated + rounds[step - 1]
        stopped = go_on(child, run, reference, Harm(("interrupt", "terminate")[step % 2], rf"sample {call}$"))
        assert stopped.code == 130
        assert f"stopping now and saving the state after step {step - 1}; step {step} has not updated" in stopped.said
        assert f"stopped after step {step - 1}" in stopped.said
        assert last_complete(run) == f"step-{step - 1:06d}"
        check_beginning(run, reference, step - 1)
    assert child("resume", run).code == 0
    assert_same_run(run, reference.path)


@pytest.mark.slow
def test_two_signals_discard_the_step(child: ChildRuns, run: Path, reference: Reference) -> None:
    for first, second in ((r"update 5$", r"update 6$"), (r"update 1$", r"open w .*step-000003.*COMMIT")):
        stopped = go_on(child, run, reference, Harm("interrupt", first), Harm("interrupt", second))
        assert stopped.code == 130
        assert "Traceback" not in stopped.said
        assert f"resume from step-000002 with: brorl resume {run}" in stopped.said
        assert last_complete(run) == "step-000002"
        kept = torch.load(run / "checkpoints/step-000002/trainer_state.pt", weights_only=True)
        assert kept["step"] == 2
    assert child("resume", run).code == 0
    assert_same_run(run, reference.path)


@pytest.mark.slow
def test_signal_in_the_last_step_lets_the_run_finish(child: ChildRuns, run: Path, reference: Reference) -> None:
    harms = [Harm("interrupt", rf"update {2 * STEPS}$")]
    assert child("train", *reference.settings, "--output_dir", run, harms=harms).code == 0
    assert_same_run(run, reference.path)


def check_full_disk(stopped: Outcome, run: Path) -> None:
    assert stopped.code == 1, stopped.err
    assert "could not write" in stopped.err
    assert len(stopped.err.splitlines()) == 1
    assert "Traceback" not in stopped.said
    assert last_complete(run) == "step-000002"
    assert not leftovers(run)


@pytest.mark.slow
def test_full_disk_stops_with_a_message_and_an_intact_checkpoint(
    child: ChildRuns, run: Path, reference: Reference
) -> None:
    """Writes beyond a size fail in the kernel, in the middle of a file: of rollouts, on resume, and of the weights."""
    rollouts = r"open .*step-000003\.parquet\.tmp"
    check_full_disk(go_on(child, run, reference, Harm("limit", rollouts, size=1000)), run)

    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "run.log"}
    check_full_disk(child("resume", run, harms=[Harm("limit", r"open r .*config\.yaml", size=100)]), run)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "run.log"} == before

    check_full_disk(child("resume", run, harms=[Harm("limit", rollouts, size=300_000)]), run)
    assert child("resume", run).code == 0
    assert_same_run(run, reference.path)


@pytest.mark.slow
def test_full_disk_at_the_log_the_metrics_and_the_trainers_state(
    child: ChildRuns, run: Path, reference: Reference
) -> None:
    stopped = go_on(child, run, reference, Harm("limit", r"open a .*run\.log", nth=8, size=400))
    assert stopped.code == 1, stopped.err
    assert "could not write" in stopped.err
    assert "Traceback" not in stopped.said

    lines = (reference.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    half = sum(map(len, lines[:3])) + len(lines[3]) // 2  # of the fourth line
    check_full_disk(child("resume", run, harms=[Harm("limit", r"open a .*metrics\.jsonl", nth=4, size=half)]), run)
    trainers_state = Harm("limit", r"open .*step-000003\.parquet\.tmp", size=900_000)
    check_full_disk(child("resume", run, harms=[trainers_state]), run)
    assert child("resume", run).code == 0
    assert_same_run(run, reference.path)


@pytest.mark.slow
def test_more_steps_go_on_bitwise_and_an_interruption_does_not_forget_them(
    child: ChildRuns, run: Path, reference: Reference
) -> None:
    """A run of 2 steps that is resumed with 4 equals a run of 4 steps; `brorl resume RUN` continues to 4 too."""
    assert child("train", *reference.settings, "--steps=2", "--output_dir", run).code == 0
    stopped = child("resume", run, f"--steps={STEPS}", harms=[Harm("interrupt", r"update 1$")])
    assert stopped.code == 130
    outcome = child("resume", run)
    assert outcome.code == 0
    assert f"finished {STEPS} steps" in outcome.said
    assert_same_run(run, reference.path)


def test_resume_of_a_finished_run_changes_nothing(child: ChildRuns, run: Path, reference: Reference) -> None:
    shutil.copytree(reference.path, run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in ("run.log", "env.json")}
    outcome = child("resume", run)
    assert outcome.code == 0
    assert f"finished {STEPS} steps" in outcome.said
    after = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in ("run.log", "env.json")}
    assert after == before


def test_other_settings_cannot_change_on_resume(child: ChildRuns, reference: Reference) -> None:
    outcome = child("resume", reference.path, "--loss.clip_high=0.3")
    assert outcome.code == 2
    assert "cannot be changed on resume" in outcome.err
    assert "steps" in outcome.err


@pytest.mark.slow
def test_checkpoint_without_commit_is_no_checkpoint(
    child: ChildRuns, run: Path, reference: Reference, with_all_checkpoints: Path
) -> None:
    shutil.copytree(with_all_checkpoints, run)
    older, newest = sorted((run / "checkpoints").iterdir())
    states = [torch.load(p / "trainer_state.pt", weights_only=True) for p in (older, newest)]
    with pytest.raises(AssertionError):  # the comparison that the tests above rest on does see a difference
        assert_identical(states[0], states[1])
    assert states[0]["carried"]

    (newest / "COMMIT").unlink()
    (newest / "trainer_state.pt").write_bytes(b"broken")
    outcome = child("resume", run)
    assert outcome.code == 0
    assert f"resuming after step {EVERY}" in outcome.said
    assert_same_run(run, reference.path)


def test_step_0_is_recorded_once_although_the_first_step_found_nothing(
    child: ChildRuns, run: Path, reference: Reference
) -> None:
    """At a temperature of almost 0 all rollouts of a group agree, so that no group is mixed."""
    cold = (*reference.settings, "--sampling.temperature=1e-6", "--dynamic_sampling.max_tries=2")
    stopped = child("train", *cold, "--output_dir", run)
    assert stopped.code == 1  # not one step was made
    assert "no group was mixed (correct and incorrect rollouts) in 2 rounds in a row" in stopped.said
    assert f"try again with new samples: brorl resume {run}" in stopped.said
    assert last_complete(run) == "step-000000"
    assert child("resume", run).code == 1
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "end_reason" not in r] == [0]


def prompts_of_step_1(run: Path) -> list[str]:
    return pq.read_table(run / "rollouts/step-000001.parquet")["prompt_id"].to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint_every", "events"),
    [
        (1, (r"rename .*step-000000$", r"half .*step-000000")),
        (5, (r"open a .*metrics\.jsonl", r"unlink .*step-000000/COMMIT")),
    ],
)
def test_each_resume_of_a_run_that_found_nothing_is_one_more_attempt_whose_cost_stays(
    checkpoint_every: int, events: tuple[str, str], child: ChildRuns, run: Path, reference: Reference
) -> None:
    """Three attempts, each with prompts of its own; kills in the second change nothing."""
    cold = (*reference.settings, "--sampling.temperature=1e-6", "--dynamic_sampling.max_tries=1")
    cold = (*cold, f"--checkpoint_every={checkpoint_every}", "--budget.unit=samples", "--budget.limit=1e6")
    whole = run / "whole"
    again = [run / f"again-{i}" for i in range(len(events))]
    assert child("train", *cold, "--output_dir", whole).code == 1
    first = prompts_of_step_1(whole)
    for path in again:
        shutil.copytree(whole, path, symlinks=True)
    second, third = attempts(child, whole)
    assert first != second != third != first
    records = metrics_without_times(whole)
    assert [(r["step"], r.get("attempt")) for r in records] == [(0, None), (1, 0), (1, 1), (1, 2)]
    assert all(r["sampling"]["samples"] > 0 for r in records[1:])
    state = load_state(whole / "checkpoints/step-000000")
    for event, path in zip(events, again, strict=True):
        assert child("resume", path, harms=[Harm("kill", event)]).code == KILLED
        assert attempts(child, path)[-1] == third
        assert not leftovers(path)
        assert metrics_without_times(path) == records
        spent = total_cost(RunDirectory(path).read_metrics())
        assert (spent.steps, spent.samples) == (0, sum(r["sampling"]["samples"] for r in records[1:]))
        state_again = load_state(path / "checkpoints/step-000000")
        assert state_again.collector.attempts == state.collector.attempts == 3
        assert_identical(state_again.collector.stream, state.collector.stream)


def attempts(child: ChildRuns, run: Path) -> list[list[str]]:
    """Resume a run that finds nothing until it has made three attempts; return the prompts of each that was made."""
    prompts = []
    while len(metrics_without_times(run)) < 4:
        assert child("resume", run).code == 1
        prompts.append(prompts_of_step_1(run))
    return prompts


def test_failed_resume_deletes_nothing(child: ChildRuns, run: Path, reference: Reference) -> None:
    shutil.copytree(reference.path, run)
    (run / "metrics.jsonl").unlink()
    (run / f"checkpoints/step-{STEPS:06d}/model.safetensors").unlink()
    before = sorted(run.rglob("*"))
    outcome = child("resume", run)
    assert outcome.code == 2
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("folder_too", [True, False])
def test_resume_without_the_checkpoints_is_refused_and_keeps_the_metrics(
    folder_too: bool, child: ChildRuns, run: Path, reference: Reference
) -> None:
    shutil.copytree(reference.path, run)
    shutil.rmtree(run / "checkpoints")
    if not folder_too:
        (run / "checkpoints").mkdir()
    before = (run / "metrics.jsonl").read_bytes()
    outcome = child("resume", run)
    assert outcome.code == 2
    assert f"{run}/checkpoints no longer has a complete checkpoint; restore the checkpoints" in outcome.err
    assert f"brorl train {run}/config.yaml --output_dir null" in outcome.err
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_setting_that_was_edited_in_the_run_is_refused(child: ChildRuns, run: Path, reference: Reference) -> None:
    shutil.copytree(reference.path, run)
    config = run / "config.yaml"
    written = config.read_text()
    for name, before, now in (("rollouts_per_prompt", 16, 32), ("seed", reference.seed, reference.seed + 1)):
        assert f"\n{name}: {before}\n" in written
        config.write_text(written.replace(f"\n{name}: {before}\n", f"\n{name}: {now}\n"))
        outcome = child("resume", run)
        assert outcome.code == 2
        assert f"{name} was {before} when the run began, but {config} now has {now}; change it back" in outcome.err
    config.write_text(re.sub(r"memory_gib:\s+4\.0", "memory_gib: 3.0", written))  # changes no result
    assert config.read_text() != written
    assert child("resume", run, "--engine.threads=2").code == 0
    assert_same_run(run, reference.path)


@pytest.mark.slow
def test_a_damaged_checkpoint_names_the_one_before_it(
    child: ChildRuns, run: Path, reference: Reference, with_all_checkpoints: Path
) -> None:
    shutil.copytree(with_all_checkpoints, run)
    newest = run / "checkpoints/step-000004"

    def refused() -> str:
        outcome = child("resume", run)
        assert outcome.code == 2
        assert outcome.err.count("\n") == 1
        assert f"resume from step-000002 with: rm -r {newest} && " in outcome.err
        assert f"brorl resume {run}" in outcome.err
        return outcome.err

    for file in ("model.safetensors", "trainer_state.pt", "tokenizer.json"):
        whole = (newest / file).read_bytes()
        (newest / file).write_bytes(whole[: len(whole) // 2])
        error = f"checkpoint {newest} is damaged: {file} has {len(whole) // 2:,} bytes, not {len(whole):,}"
        assert error in refused()
        (newest / file).write_bytes(whole[:-64] + bytes(byte ^ 1 for byte in whole[-64:]))  # of the right size
        assert f"checkpoint {newest} is damaged: the content of {file} has changed" in refused()
        (newest / file).write_bytes(whole)
    shutil.rmtree(newest)
    assert child("resume", run).code == 0
    assert_same_run(run, reference.path)


def test_lost_lines_of_metrics_are_refused(child: ChildRuns, run: Path, with_all_checkpoints: Path) -> None:
    """A resumed run would have a hole in its metrics for good."""
    shutil.copytree(with_all_checkpoints, run)
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    middle, truncated = [*lines[:2], *lines[3:]], [*lines[:-1], lines[-1][:-20]]
    for damaged, lost in ((middle, 2), (truncated, json.loads(lines[-1])["step"])):
        file.write_text("".join(damaged))
        outcome = child("resume", run)
        assert outcome.code == 2
        assert f"{file} has no line for step {lost}, although" in outcome.err
        assert file.read_text() == "".join(damaged)


def test_a_damaged_checkpoint_that_is_the_only_one(child: ChildRuns, run: Path, reference: Reference) -> None:
    shutil.copytree(reference.path, run)
    (run / f"checkpoints/step-{STEPS:06d}/config.json").unlink()
    outcome = child("resume", run)
    assert outcome.code == 2
    assert "is damaged: config.json is missing; there is no earlier one; start a new run: brorl train" in outcome.err


def test_run_directory_with_an_empty_config(child: ChildRuns, run: Path) -> None:
    """A full disk or a kill while config.yaml was written."""
    run.mkdir()
    (run / "config.yaml").write_text("")
    outcome = child("resume", run)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert "config.yaml" in outcome.err


@pytest.mark.slow
def test_of_two_runs_with_one_directory_one_is_refused_and_the_other_runs_on(child: ChildRuns, run: Path) -> None:
    settings = (*PLAIN, "--output_dir", run)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(child, "train", *settings)
        outcomes = sorted([command("train", *settings), other.result()])
    assert [outcome.code for outcome in outcomes] == [0, 2], outcomes
    refused = outcomes[1].err
    assert refused.count("\n") == 1
    assert f"another process is working on {run}" in refused or f"{run} exists and is not empty" in refused
    assert last_complete(run) == f"step-{STEPS:06d}"
    assert [record["step"] for record in metrics_without_times(run)] == list(range(STEPS + 1))


@pytest.mark.slow
def test_a_killed_run_with_a_budget_ends_where_the_uninterrupted_one_does(child: ChildRuns, tmp_path: Path) -> None:
    budget = (
        "--budget.unit=samples",
        "--budget.limit=250",
        "--budget.eval_points=[100]",
        "--steps=50",
        "--evaluation.every=0",
    )
    falling = ("--optimizer.schedule=cosine", "--optimizer.ema_decay=0.8", "--optimizer.states=8bit")
    order = ("--advantage.estimator=maxrl", "--advantage.final_order=1", "--advantage.final_order_at=0.5")
    settings = (*SMALL, *budget, *falling, *order, "--checkpoint_every=2")
    assert child("train", *settings, "--output_dir", tmp_path / "whole").code == 0
    records = metrics_without_times(tmp_path / "whole")
    assert records[-1]["step"] >= 3
    assert records[-1]["update"]["learning_rate"] < records[-2]["update"]["learning_rate"]
    assert "ema_evaluation" in records[-1]
    harms = [Harm("kill", "update 5")]
    assert child("train", *settings, "--output_dir", tmp_path / "killed", harms=harms).code == -9
    assert child("resume", tmp_path / "killed").code == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
