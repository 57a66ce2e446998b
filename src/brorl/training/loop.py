"""The training loop: sample the tree, verify the tree, learn from the tree.

In: the parts of a run, made elsewhere, and the state to start from. Out: a trained model in a run directory. There
is one loop; whether the engine and the learner are local or remote is not its concern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brorl.activity import Observe, Phase, Step, unobserved
from brorl.algorithms.groups import Group
from brorl.cost import UNIT_WORDS, Budget, Cost, cost_of_step, total_cost
from brorl.evaluation.benchmark import Answers, Benchmark
from brorl.rollout.engine import Engine
from brorl.runs.checkpoint import TrainerState, mark_best, save_checkpoint
from brorl.runs.run_directory import Record, RunDirectory
from brorl.seeds import derived_seed
from brorl.training.collect import Collected, Collector, NoMixedGroupsError
from brorl.training.diagnostics import Diagnostics
from brorl.training.learner import Learner
from brorl.training.monitor import Monitor, is_due
from brorl.training.reference_schedule import ReferenceSchedule
from brorl.training.stop_request import StopNow, StopRequest
from brorl.training.stopwatch import Stopwatch

STORED_PROMPTS = 8  # held-out prompts whose responses every evaluation stores
EstimateAdvantages = Callable[[Sequence[Group]], list[NDArray[np.float64]]]


class Ending(Enum):
    """Why a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    NO_MIXED_GROUPS = "no mixed groups"
    COLLAPSED = "collapsed"


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a run.

    Attributes:
        collector: Prompts to groups.
        estimate_advantages: Groups to advantages.
        learner: Groups and advantages to an updated model.
        engine: Samples with the updated weights.
        diagnostics: Measures each step.
        schedule: Says when the reference policy is reset.
        reset_optimizer: Clear the optimizer with it.
        watch: Tells the best evaluation, and signs of collapse.
        benchmark: Held-out prompts; None evaluates nothing.
        evaluate_every: Evaluate after every so many steps, 0 for none (and at the start, the budget's marks and the
            end).
        model: What is saved.
        tokenizer: Saved beside it.
        directory: The run's files.
        steps: Number of steps of the whole run, at most; None if the budget alone ends it.
        budget: What the whole run may cost.
        checkpoint_every: Save after every so many steps (and at the end).
        keep_checkpoints: How many to keep; 0 for all.
        store_rollouts_every: Store every so many steps' rollouts; 0 stores none, and no evaluations' responses.
        seed: Seed of the run.
        report: Gets every line of the metrics as it is written.
        observe: Gets each step, and each phase of it, when it begins.
    """

    collector: Collector
    estimate_advantages: EstimateAdvantages
    learner: Learner
    engine: Engine
    diagnostics: Diagnostics
    schedule: ReferenceSchedule
    reset_optimizer: bool
    watch: Monitor
    benchmark: Benchmark | None
    evaluate_every: int
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    directory: RunDirectory
    steps: int | None
    budget: Budget
    checkpoint_every: int
    keep_checkpoints: int
    store_rollouts_every: int
    seed: int
    report: Callable[[Record], None]
    observe: Observe = unobserved


def train(run: TrainingRun, state: TrainerState, stop: StopRequest | None = None) -> tuple[Ending, str]:
    """Train from `state` to the end of the run, or until a stop is requested.

    A stop request loses nothing that was learned. Before the update of a step it discards what the step has sampled,
    which a resumed run samples again, with the same draws; from then on the step is finished first.

    Args:
        run: The parts.
        state: Where to start; the model, learner and stream already hold it.
        stop: Tells whether to stop; a new one if None. The parts may check it while they work.

    Returns:
        Why the run ended, and a sentence about it.
    """
    carried, attempt = list(state.carried), state.attempts
    with stop or StopRequest() as stop:
        if not run.watch.seen:
            try:
                with stop.discarding():
                    first = {"step": 0, **evaluation_record(run, 0)}
            except StopNow:
                return Ending.INTERRUPTED, "stopped before the first step"
            record_metrics(run, first)
        spent = total_cost(run.directory.read_metrics())
        for step in count(state.step + 1):
            if is_over(run, step - 1, spent):
                break
            run.observe(Step(step))
            clock, position = Stopwatch(run.observe), run.collector.stream.state_dict()
            try:
                with stop.discarding():
                    groups, surplus, collected = run.collector.collect(step, carried, clock, attempt)
                    with clock("diagnostics"):
                        held_out = run.diagnostics.hold_out(step, groups)
            except NoMixedGroupsError as error:
                store_rollouts(run, step, error.collected)
                record_metrics(run, fruitless_record(run, step, attempt, error, clock))
                save(run, step - 1, error.kept, attempts=attempt + 1)
                return Ending.NO_MIXED_GROUPS, str(error)
            except StopNow:
                run.collector.stream.load_state_dict(position)
                save(run, step - 1, carried, attempts=attempt)
                return Ending.INTERRUPTED, f"stopped after step {step - 1}"

            carried, attempt = surplus, 0
            with clock("training"):
                carried = run.learner.with_old_logprobs(carried)
                rewarded = run.learner.penalised(groups)
                update = run.learner.step(rewarded, run.estimate_advantages(rewarded), seed=seed_of(run, step))
            run.engine.load_weights(run.learner.weights())

            with clock("storing"):
                if is_due(step, run.store_rollouts_every):
                    store_rollouts(run, step, collected)
            with clock("diagnostics"):
                measured = run.diagnostics.record(collected.groups, groups, held_out)
            record = {
                "step": step,
                "sampling": collected.summary(),
                "kept": {"groups": len(groups), "carried": len(carried), "samples": num_rollouts(groups)},
                "update": asdict(update),
                **measured,
                "seconds": clock.seconds(),
            }
            before, spent = spent, spent + cost_of_step(record)
            last = is_over(run, step, spent)
            regular = is_due(step, run.evaluate_every)
            if regular or last or run.budget.passes_mark(before, spent):
                record |= evaluation_record(run, step)
            score = run.watch.score(record) if regular else None  # marks do not change what is trained
            if why := run.schedule.after_step(step, update.reference_kl, score):
                run.learner.reset_reference(clear_optimizer=run.reset_optimizer)
                record["reference_reset"] = why
            record_metrics(run, record)

            collapsed = "ended" in record
            ends = last or stop.requested or collapsed
            due = is_due(step, run.checkpoint_every) or ends
            if due or run.watch.best_step == step:
                save(run, step, carried, regular=due)
            if collapsed:
                return Ending.COLLAPSED, f"stopped after step {step}: {record['ended']}"
            if stop.requested and not last:
                return Ending.INTERRUPTED, f"stopped after step {step}"
    return Ending.FINISHED, finish_line(run, spent)


def is_over(run: TrainingRun, step: int, spent: Cost) -> bool:
    """Return whether a run that has done so many steps has reached its number of steps or its budget."""
    return (run.steps is not None and step >= run.steps) or run.budget.is_spent(spent)


def finish_line(run: TrainingRun, spent: Cost) -> str:
    """Say what a run has done, and whether its budget or its number of steps ended it."""
    done = f"finished {spent.steps:,} step{'s' if spent.steps != 1 else ''}"
    unit = run.budget.unit
    if unit == "steps" and run.budget.limit == run.steps:  # no budget besides
        return done
    of_budget = f"{spent.of(unit):,.0f} of {run.budget.limit:,.0f} {UNIT_WORDS[unit]} spent"
    if run.budget.is_spent(spent):
        return f"{done}, ended by the budget: {of_budget}"
    return f"{done}, ended by steps = {run.steps:,}: {of_budget}"


def num_rollouts(groups: Sequence[Group]) -> int:
    """Return the number of rollouts in groups."""
    return sum(g.tree.num_rollouts for g in groups)


def seed_of(run: TrainingRun, step: int) -> int:
    """Return the seed of a step's learner, a pure function of the run's seed and the step."""
    return derived_seed(run.seed, step)


def evaluation_record(run: TrainingRun, step: int) -> Record:
    """Evaluate on held-out prompts after a step, if there are any, and store the responses to a few of them."""
    if run.benchmark is None:
        return {}
    answers = run.benchmark.answer(run.engine)
    if run.store_rollouts_every:
        store_answers(run, run.benchmark, step, answers)
    return {"evaluation": run.benchmark.record(answers)}


def fruitless_record(run: TrainingRun, step: int, attempt: int, error: NoMixedGroupsError, clock: Stopwatch) -> Record:
    """Return the line of a step that found nothing to learn from: why, what looking cost, how good the model is."""
    return {
        "step": step,
        "attempt": attempt,
        "ended": str(error),
        "sampling": error.collected.summary(),
        "kept": {"groups": 0, "carried": len(error.kept), "samples": 0},
        "seconds": clock.seconds(),
        **evaluation_record(run, step),
    }


def record_metrics(run: TrainingRun, record: dict[str, Any]) -> None:
    """Watch, write and report a line of the metrics; a collapse may end the run, and is evaluated then."""
    if sign := run.watch.collapse(record):
        record["collapse"] = sign
        if run.watch.stop:
            record["ended"] = sign
            record |= {} if "evaluation" in record else evaluation_record(run, record["step"])
    run.watch.remember(record)
    run.directory.append_metrics(record)
    run.report(record)


def store_rollouts(run: TrainingRun, step: int, collected: Collected) -> None:
    """Store what a step sampled, unless the run stores none."""
    if run.store_rollouts_every:
        texts = [run.collector.grader.texts(g.tree) for g in collected.groups]
        run.directory.write_rollouts(step, collected.groups, collected.verdicts, texts)


def store_answers(run: TrainingRun, benchmark: Benchmark, step: int, answers: Answers) -> None:
    """Store the responses to the same few prompts at every evaluation, chosen by their place, not by their success."""
    count = len(benchmark.prompts)
    places = np.linspace(0, count - 1, min(STORED_PROMPTS, count)).round().astype(int).tolist()
    grader, verdicts = run.collector.grader, [answers.verdicts[i] for i in places]
    groups = [
        grader.group(benchmark.prompts[i], answers.trees[i], vs, step) for i, vs in zip(places, verdicts, strict=True)
    ]
    run.directory.write_evaluation(step, groups, verdicts, [grader.texts(g.tree) for g in groups])


def save(run: TrainingRun, step: int, carried: Sequence[Group], *, regular: bool = True, attempts: int = 0) -> None:
    """Write a checkpoint of the run after a step, and point to the best one.

    Args:
        run: The parts.
        step: The last step that was made.
        carried: Groups for the next one.
        regular: False if it is saved only for being the best.
        attempts: How often the next step has found nothing to learn from.
    """
    run.observe(Phase("saving", f"step {step}"))
    state = TrainerState(
        step,
        run.learner.state_dict(),
        run.collector.stream.state_dict(),
        tuple(carried),
        run.schedule.state_dict(),
        None if run.benchmark is None else run.benchmark.fingerprint,
        attempts,
    )
    best = run.watch.best_step
    save_checkpoint(run.directory.checkpoints, state, run.model, run.tokenizer, run.keep_checkpoints, best, regular)
    run.directory.note_checkpoint()
    if best == step:
        mark_best(run.directory.checkpoints, step)
