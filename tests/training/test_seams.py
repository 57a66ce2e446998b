"""The training loop with other parts: a learner without a model, and a collector that samples ahead."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import brorl
from brorl.activity import Stage
from brorl.algorithms.advantages import EstimateAdvantages
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings, RewardShaping
from brorl.assemble import build_run
from brorl.config.reading import make_config, read_recipe
from brorl.evaluation.evaluator import BatchCounts, Evaluator, PromptBatch, PromptCounts
from brorl.evaluation.settings import EvaluationSettings
from brorl.format import Estimate
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import Engine, SampleTask
from brorl.runs.checkpoint import INITIAL_STATE, is_checkpoint, last_checkpoint, read_state
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import EvaluationRecord, SamplingRecord, SecondsRecord, StepRecord, UpdateRecord
from brorl.training import loop
from brorl.training.batch import Batch
from brorl.training.collector import SyncCollector
from brorl.training.diagnostics import Diagnostics
from brorl.training.learner import Learner
from brorl.training.loop import Ending, Recorder, train_run
from brorl.training.mini_batch import NUM_SUMS, means, zero_sums
from brorl.training.run import TrainingRun, restore
from brorl.training.schedule import ReferenceSchedule, Schedule
from brorl.training.settings import BudgetSettings, CollapseLimits, DiagnosticsSettings, ReferenceSettings
from brorl.training.stop_request import StopRequest
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from brorl.verification.grade import Grader
from recipes import recipe

NUM_PROMPTS, PER_STEP, N, STEPS = 12, 3, 8, 6
RIGHT, WRONG, END = 7, 8, 9


class FirstTokenVerifier:
    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        correct = [text.startswith(str(RIGHT)) for _, text in items]
        return [Verdict(c, float(c), None, "correct" if c else "wrong", 0.0) for c in correct]


@dataclass
class Preference:
    """An engine and a learner without a model: one number, the log-odds of the right token."""

    log_odds: Tensor
    rng: np.random.Generator
    version: int = 0
    trained: list[list[Group]] = field(default_factory=list)

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        assert task.sampling.max_new_tokens == 2
        draws, fraction = np.random.default_rng(task.seed), float(torch.sigmoid(self.log_odds))
        correct_P = draws.binomial(task.num_rollouts, fraction, len(task.prompts))
        lines = [[RIGHT, END]] * task.num_rollouts + [[WRONG, END]] * task.num_rollouts
        logprobs = {RIGHT: np.log(fraction), WRONG: np.log1p(-fraction)}
        return [
            RolloutTree.from_responses(p, rows, [[logprobs[r[0]], 0.0] for r in rows])
            for p, c in zip(task.prompts, correct_P, strict=True)
            for rows in [lines[task.num_rollouts - c : 2 * task.num_rollouts - c]]
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.log_odds, self.version = dict(weights)["log_odds"].clone(), version


class PreferenceLearner:
    def __init__(self) -> None:
        self.log_odds = torch.tensor(-1.0)
        self.trained: list[list[Group]] = []

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        return list(groups)

    def learn(
        self, groups: Sequence[Group], estimate_advantages: EstimateAdvantages, seed: int, lr_scale: float = 1.0
    ) -> UpdateRecord:
        assert seed >= 0
        advantages = estimate_advantages(groups)
        assert lr_scale == 1
        self.trained.append(list(groups))
        gain = sum(float(g.tree.leaf_count @ (a * g.correct_L)) for g, a in zip(groups, advantages, strict=True))
        self.log_odds = self.log_odds + 0.01 * gain
        return UpdateRecord(loss=-gain, grad_norm=gain, trained_nodes=len(groups), nodes_per_pass=1)

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[Any]:
        raise AssertionError(f"no check of {len(trees)} trees is due")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "log_odds", self.log_odds

    def num_parameters(self, only_trainable: bool = False) -> int:
        return 1 + only_trainable

    def save_pretrained(self, folder: Path) -> None:
        (folder / "log_odds.json").write_text(json.dumps(float(self.log_odds)))

    def reset_reference(self, clear_optimizer: bool) -> None:
        raise AssertionError(f"there is no reference (clear_optimizer={clear_optimizer})")

    def state_dict(self) -> dict[str, Any]:
        return {"log_odds": self.log_odds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log_odds = state["log_odds"]

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        raise AssertionError(f"there is no optimizer for {state}")


def run_of(learner: Learner, engine: Engine, path: Path, stop_at: int = STEPS, **changes: Any) -> TrainingRun:
    prompts = [Prompt(f"p{i}", str(i), (100 + i,), str(RIGHT), "first") for i in range(NUM_PROMPTS)]
    grader = Grader({"first": FirstTokenVerifier()}, lambda tokens: " ".join(map(str, tokens)), RewardShaping())
    config = recipe(
        rollouts_per_prompt=N, prompts_per_step=PER_STEP, steps=stop_at, max_new_tokens=2, max_tries=20,
        checkpoint_every=2, keep_checkpoints=0, advantage=AdvantageSettings(estimator="rloo"),
        collapse=CollapseLimits(stop=True), diagnostics=DiagnosticsSettings(held_out_check_every=0),
        **{"evaluation": EvaluationSettings(every=0, keep_best=False), **changes},
    )  # fmt: skip
    collector = SyncCollector(config=config, engine=engine, stream=PromptStream(prompts, 0), grader=grader)
    tokenizer = AutoTokenizer.from_pretrained(Path(brorl.__file__).parent / "quickstart_model")
    return TrainingRun(
        config=config,
        collector=collector,
        learner=learner,
        schedule=Schedule(config),
        diagnostics=Diagnostics(config, collector.sampler, learner, grader),
        evaluator=Evaluator(grader, config.evaluated_sampling, 1),
        held_out=None,
        directory=RunDirectory(path),
        tokenizer=tokenizer,
        grader=grader,
        report=lambda _: None,
    )


def evaluation_of(score: float) -> EvaluationRecord:
    return EvaluationRecord(pass_at={1: Estimate(score, score, score)})


def test_a_step_of_carried_groups_alone_stores_no_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a collector that samples ahead: the readers of stored rollouts need at least one."""
    run = run_of(PreferenceLearner(), Preference(torch.tensor(-1.0), np.random.default_rng(0)), tmp_path)
    next_batch = run.collector.next_batch

    def without_samples(step: int) -> Batch:
        batch = next_batch(step)
        return replace(batch, sampled=[]) if step == 2 else batch

    monkeypatch.setattr(run.collector, "next_batch", without_samples)
    assert train_run(run, INITIAL_STATE)[0] is Ending.FINISHED
    stored = {int(path.stem.rpartition("-")[2]) for path in (tmp_path / "rollouts").iterdir()}
    assert stored == {1, *range(3, STEPS + 1)}


def test_a_pause_that_an_attempt_has_passed_comes_with_the_next_update(tmp_path: Path) -> None:
    """An attempt without an update ends the process; the run that is resumed pauses after the step that it makes."""
    engine = Preference(torch.tensor(-1.0), np.random.default_rng(0))
    run = run_of(PreferenceLearner(), engine, tmp_path, budget=BudgetSettings(limit=1e6, pause_at=50.0))
    cost = SamplingRecord(samples=100, sampled_tokens=200, unique_tokens=50)
    run.directory.append_metrics(StepRecord(step=0))
    run.directory.append_metrics(StepRecord(step=1, attempt=0, sampling=cost, seconds=SecondsRecord(total=1.0)))
    assert train_run(run, INITIAL_STATE) == (Ending.PAUSED, "paused after step 1 (budget.pause_at = 50)")


def test_the_loop_needs_the_protocols_only(tmp_path: Path) -> None:
    """It trains, records and saves a learner and an engine that have no model."""
    learner, engine = PreferenceLearner(), Preference(torch.tensor(-1.0), np.random.default_rng(0))
    run = run_of(learner, engine, tmp_path)
    ending, message = train_run(run, INITIAL_STATE)
    assert (ending, message) == (Ending.FINISHED, f"finished {STEPS} steps")
    assert [g.version for groups in learner.trained for g in groups if g.version == engine.version] == []
    assert engine.version == STEPS
    assert float(engine.log_odds) == float(learner.log_odds) > -1.0
    records = run.directory.read_metrics()
    assert [r.step for r in records] == list(range(STEPS + 1))
    assert [bool(r.update and r.update.loss < 0) for r in records[1:]] == [True] * STEPS
    checkpoint = last_checkpoint(run.directory.checkpoints)
    assert checkpoint is not None
    assert is_checkpoint(checkpoint)
    assert json.loads((checkpoint / "log_odds.json").read_text()) == float(learner.log_odds)
    assert float(read_state(checkpoint).learner["log_odds"]) == float(learner.log_odds)  # type: ignore[index]


@pytest.mark.parametrize("before", [True, False])
def test_a_stop_request_around_the_decision_on_a_checkpoint_loses_no_step_and_saves_once(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, engine = PreferenceLearner(), Preference(torch.tensor(-1.0), np.random.default_rng(0))
    run, stop, save_if_due = run_of(learner, engine, tmp_path), StopRequest(), Recorder.save_if_due
    seen: list[object] = []
    run = replace(run, observe=seen.append)

    def request(recorder: Recorder, record: StepRecord) -> None:
        stop.requested = before  # no checkpoint is due after step 1
        save_if_due(recorder, record)
        stop.requested = True

    monkeypatch.setattr(Recorder, "save_if_due", request)
    assert train_run(run, INITIAL_STATE, stop) == (Ending.INTERRUPTED, "stopped after step 1")
    assert [x for x in seen if isinstance(x, Stage) and x.name == "saving"] == [Stage("saving", "step 1")]
    checkpoint = last_checkpoint(run.directory.checkpoints)
    assert checkpoint is not None
    assert read_state(checkpoint).step == 1
    assert float(read_state(checkpoint).learner["log_odds"]) == float(learner.log_odds)  # type: ignore[index]


def test_an_evaluation_begins_and_ends_with_the_return_of_freed_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Answers:
        def evaluate(self, *_: Any) -> BatchCounts:
            seen.append("answers")
            return BatchCounts((PromptCounts("p", "", "first", 2, 0, 0, 1, 4, 2, 0, 0, num_unverified=2),), 0.0)

    engine = Preference(torch.tensor(-1.0), np.random.default_rng(0))
    run = run_of(PreferenceLearner(), engine, tmp_path, store_rollouts_every=0)
    run = replace(run, evaluator=Answers(), held_out=PromptBatch((), 0))  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "return_freed_memory", lambda: seen.append("returned"))
    assert Recorder(run, 0, StopRequest()).evaluated(StepRecord(step=0)) == StepRecord(step=0, evaluation_unverified=2)
    assert seen == ["returned", "answers", "returned"]


@pytest.mark.parametrize("evaluated", ["evaluation", "evaluation_unverified", None])
def test_a_run_that_stops_at_a_collapse_is_evaluated_once_after_its_last_step(
    evaluated: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the verdicts of the regular evaluation were lost."""
    evaluation = EvaluationSettings(every=1 if evaluated else 0, keep_best=False)
    engine = Preference(torch.tensor(-1.0), np.random.default_rng(0))
    run, steps = run_of(PreferenceLearner(), engine, tmp_path, evaluation=evaluation), []

    def evaluate(_: Recorder, record: StepRecord) -> StepRecord:
        steps.append(record.step)
        if evaluated == "evaluation_unverified":
            return replace(record, evaluation_unverified=3)
        return replace(record, evaluation=evaluation_of(0.5))

    monkeypatch.setattr(Recorder, "evaluated", evaluate)
    monkeypatch.setattr(run.schedule.collapse, "line", lambda record: "a sign" if record.step == 2 else None)
    assert train_run(run, INITIAL_STATE) == (Ending.COLLAPSED, "stopped after step 2: a sign")
    assert steps == ([0, 1, 2] if evaluated else [0, 2])


def test_the_evaluation_of_step_0_is_the_first_to_beat_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = {0: 0.5, 1: 0.4, 2: 0.4, 3: 0.4}
    monkeypatch.setattr(
        Recorder, "evaluated", lambda _, record: replace(record, evaluation=evaluation_of(score[record.step]))
    )
    monkeypatch.setattr(PreferenceLearner, "reset_reference", lambda *_, **__: None)

    def run_with_reference(path: Path, stop_at: int) -> TrainingRun:
        path.mkdir(exist_ok=True)
        engine = Preference(torch.tensor(-1.0), np.random.default_rng(0))
        evaluation, settings = EvaluationSettings(every=1, keep_best=False), ReferenceSettings(reset_patience=2)
        run = run_of(PreferenceLearner(), engine, path, stop_at, evaluation=evaluation, reference=settings)
        run.schedule.reference = ReferenceSchedule(settings, run.schedule.evaluations.regular_score, cooldown=0)
        return run

    def resets(run: TrainingRun) -> list[int]:
        return [r.step for r in run.directory.read_metrics() if r.reference_reset]

    whole = run_with_reference(tmp_path / "whole", 3)
    train_run(whole, INITIAL_STATE)
    train_run(run_with_reference(tmp_path / "parts", 1), INITIAL_STATE)
    resumed = run_with_reference(tmp_path / "parts", 3)
    train_run(resumed, restore(resumed, last_checkpoint(resumed.directory.checkpoints)))
    assert resets(whole) == resets(resumed) == [2]


def test_only_the_source_holds_an_engine(tmp_path: Path) -> None:
    """Diagnostics and evaluation see a sampler that samples with the weights that the collector published last."""
    overrides = {
        "prompts_per_step": 2, "rollouts_per_prompt": 8, "optimizer.mini_batches": 1, "evaluation.num_prompts": 2,
        "evaluation.rollouts_per_prompt": 2, "evaluation.ks": [1], "sampling.max_new_tokens": 6, "steps": 2,
        "diagnostics.held_out_check_every": 1, "diagnostics.held_out_rollouts": 2, "dynamic_sampling.enabled": False,
    }  # fmt: skip
    with torch.random.fork_rng():
        config = make_config(read_recipe("quickstart"), overrides, "quickstart")
        run, state = build_run(config, RunDirectory(tmp_path), lambda _: None)
        collector, versions = run.collector, []
        engine = collector.engine  # type: ignore[attr-defined]
        sampled = engine.sample

        def sample(task: SampleTask) -> Any:
            versions.append((engine.version, task.num_rollouts))
            return sampled(task)

        engine.sample = sample
        assert run.diagnostics.sampler is collector.sampler
        train_run(run, state)
    assert versions == [(0, 2), (0, 8), (0, 2), (1, 8), (1, 2), (2, 2)]  # evaluation, rollouts, check, ..., evaluation


def test_means_divide_each_sum_by_its_own_total(rng: np.random.Generator) -> None:
    sums_S, (weight, sampled, count) = rng.normal(size=NUM_SUMS), rng.uniform(2, 9, 3)
    totals = torch.tensor([weight, sampled, count], dtype=torch.float64)
    names = ("loss", "clip_fraction", "clip_low_fraction", "clip_high_fraction")
    names = (*names, "old_policy_kl", "reference_kl", "bonus_entropy")
    divisors = (1.0, weight, weight, weight, count, sampled, sampled)
    expected = {name: value / by for name, value, by in zip(names, sums_S, divisors, strict=True)}
    assert means(torch.from_numpy(sums_S), totals) == pytest.approx(expected, rel=1e-15)
    assert means(zero_sums(torch.device("cpu")), 0 * totals) == dict.fromkeys(names, 0.0)
