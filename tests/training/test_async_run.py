"""Whole asynchronous runs: with a real learner, in threads, and killed and resumed."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_support import WordyEngine, by_tokens, collector_over
from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.settings import AdvantageSettings, ImportanceCorrection, RewardShaping
from brorl.assemble import build_run
from brorl.config.reading import make_config, read_recipe
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import SampleTask, TaskResult
from brorl.rollout.native_engine import NativeEngine
from brorl.runs.checkpoint import TrainerState
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import StepRecord
from brorl.sampling import SamplingParams
from brorl.training.async_collector import AsyncCollector
from brorl.training.learner import TreeLearner
from brorl.training.loop import Ending, train_run
from brorl.training.run import TrainingRun
from brorl.verdict import Verdict
from brorl.verification.grade import Grader
from foreground_collector import ForegroundCollector
from recipes import recipe
from run_support import assert_same_run
from small_models import small_model
from virtual_pool import VirtualPool

RIGHT, EOS = 3, 0
RLOO = advantage_estimator(AdvantageSettings(estimator="rloo"))


class FirstToken:
    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        correct = [text.split()[0] == str(RIGHT) for _, text in items]
        return [Verdict(c, float(c), None, "correct" if c else "wrong", 0.0) for c in correct]


@pytest.mark.slow
def test_a_run_in_a_thread_learns(rng: np.random.Generator) -> None:
    """The collector's thread verifies while the learner learns: the fraction of the right first token rises."""
    model = small_model(vocab_size=8, seed=int(rng.integers(1 << 30)), scale=0.05, dtype=torch.float32)
    settings = recipe(
        learning_rate=3e-3,
        old_logprobs="recompute",
        importance=ImportanceCorrection(correction="truncate", high=5.0),
    )
    learner = TreeLearner(model, settings)
    prompts = [Prompt(f"p{i}", str(i), (1 + i, 5), "", "first") for i in range(6)]
    pool = VirtualPool(NativeEngine(copy.deepcopy(model), EOS), 2, lambda *_: 0.0)  # done as soon as it is asked
    collector = collector_over(
        pool,
        stream=PromptStream(prompts, 0),
        # Truncated responses count too. Else the model can unlearn its right first token when it repeats it to the end.
        grader=Grader(
            {"first": FirstToken()}, lambda tokens: " ".join(map(str, tokens)), RewardShaping(stop_properly=1.0)
        ),
        max_new_tokens=5,
        rollouts_per_prompt=32,
        enabled=False,
        kind=AsyncCollector,
    )
    fractions, mismatch, staleness = [], [], []
    try:
        collector.publish(learner.weights(), 0)
        for step in range(1, 31):
            batch = collector.next_batch(step)
            staleness += [step - 1 - group.version for group in batch.groups]
            update = learner.learn(batch.groups, RLOO, step)
            collector.publish(learner.weights(), step)
            fractions.append(sum(g.num_correct for g in batch.groups) / (3 * 32))
            mismatch.append(update.mismatch_mean)
        (tree,) = collector.sampler.sample(SampleTask([(1, 5)], 16, SamplingParams(max_new_tokens=1), 0))
        own = NativeEngine(model, EOS).sample(SampleTask([(1, 5)], 16, SamplingParams(max_new_tokens=1), 0))
        assert tree.responses() == own[0].responses()  # the sampler has the newest weights
    finally:
        collector.close()
    assert min(staleness) >= 0
    assert max(staleness) >= 1
    assert np.mean(fractions[:3]) < 0.4
    assert np.mean(fractions[-3:]) > 0.7
    assert all(m is not None and abs(m - 1) < 0.5 for m in mismatch)


def test_an_exception_in_the_background_reaches_the_loop() -> None:
    class Broken(VirtualPool):
        def done(self, timeout_s: float | None = None) -> list[TaskResult]:  # noqa: ARG002
            raise RuntimeError("no such kernel")

    collector = collector_over(Broken(WordyEngine(), 1, by_tokens), kind=AsyncCollector)
    try:
        collector.publish([], 0)
        with pytest.raises(RuntimeError, match="no such kernel"):
            collector.next_batch(1)
    finally:
        collector.close()


OVERRIDES = {
    "prompts_per_step": 3, "rollouts_per_prompt": 16, "optimizer.mini_batches": 2, "evaluation.num_prompts": 2,
    "evaluation.rollouts_per_prompt": 2, "evaluation.ks": [1], "evaluation.every": 3, "evaluation.keep_best": False,
    "sampling.max_new_tokens": 16, "steps": 6, "checkpoint_every": 2, "keep_checkpoints": 0, "engine.threads": 1,
    "optimizer.old_logprobs": "recompute", "importance.correction": "truncate", "report": False,
    "optimizer.learning_rate": 3e-4, "optimizer.reference_batch": None,
    "data.sources": [{"task": "countdown", "num_numbers": 3, "max_number": 7}],
}  # fmt: skip


class KilledError(Exception):
    pass


def async_run(path: Path, die_at: int = 0) -> tuple[TrainingRun, TrainerState]:
    """Make a run of the shipped model with a collector over a virtual pool; a kill comes after a step's metrics."""

    def report(record: StepRecord) -> None:
        if record.step == die_at and die_at:
            raise KilledError

    path.mkdir(exist_ok=True)
    config = make_config(read_recipe("quickstart"), OVERRIDES, "quickstart")
    directory = RunDirectory(path)
    run, state = build_run(config, directory, report)
    if not directory.begun_file.exists():
        directory.write_begun({}, has_checkpoint=False)
    own, learner = run.collector, run.learner
    model = learner.model  # type: ignore[attr-defined]
    engine = own.engine  # type: ignore[attr-defined]
    pool = VirtualPool(NativeEngine(copy.deepcopy(model), engine.stop_token_ids), 2, by_tokens)
    collector = ForegroundCollector(
        pool=pool, stream=own.stream, grader=own.grader,
        config=recipe(config, max_tries=200, max_staleness=2, prompts_per_task=2),
    )  # fmt: skip
    learn = learner.learn

    def slow_step(*arguments: Any) -> Any:
        pool.advance(9.0)
        return learn(*arguments)

    learner.learn = slow_step  # type: ignore[method-assign]
    collector.load_state(state.collector)
    collector.publish(learner.weights(), state.step)
    return replace(run, collector=collector, diagnostics=replace(run.diagnostics, sampler=collector.sampler)), state


@pytest.mark.slow
def test_a_killed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, rng: np.random.Generator) -> None:
    """Killed at a random step, and resumed from the last checkpoint."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ending, _ = train_run(*async_run(tmp_path / "whole"))
        assert ending is Ending.FINISHED
        torch.manual_seed(0)
        with pytest.raises(KilledError):
            train_run(*async_run(tmp_path / "killed", int(rng.integers(1, 7))))
        torch.manual_seed(0)
        ending, _ = train_run(*async_run(tmp_path / "killed"))
    assert ending is Ending.FINISHED
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    staleness = [r["sampling"]["staleness_max"] for r in records[1:]]
    assert max(staleness) in (1, 2)
    assert all(r["update"]["mismatch_kl"] is not None for r in records[1:])
