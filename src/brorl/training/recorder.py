"""What a run records: metrics, stored rollouts, evaluations and checkpoints, and the reasons for which it ends.

All decisions depend on the metrics and the schedule only, and a resumed run makes the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path

import numpy as np

from brorl.activity import Phase, Step
from brorl.algorithms.groups import Group
from brorl.cost import cost_of_step, total_cost
from brorl.runs.checkpoint import EMA, TrainerState, mark_best, save_checkpoint
from brorl.runs.model_card import write_card
from brorl.runs.run_directory import Record
from brorl.training.learner import StepMetrics
from brorl.training.run import TrainingRun
from brorl.training.schedule import is_due, is_regular
from brorl.training.source import Batch, NoGroupsError, UnverifiedError
from brorl.training.stop_request import StopNow, StopRequest

STORED_PROMPTS = 8  # held-out prompts whose responses every evaluation stores


class Ending(Enum):
    """Why a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    NO_MIXED_GROUPS = "no mixed groups"
    UNVERIFIED = "unverified"
    COLLAPSED = "collapsed"
    STALLED = "no longer rising"
    PAUSED = "paused"


class Recorder:
    """Writes the records of a run.

    Args:
        run: The parts of the run.
        step: The last step that was done.
        stop: Whether a stop was requested.
    """

    def __init__(self, run: TrainingRun, step: int, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._step = step
        records = run.outputs.directory.read_metrics()
        updates = max((at for at, record in enumerate(records, 1) if "attempt" not in record), default=0)
        self._spent = total_cost(records)
        self._spent_before = total_cost(records[:updates])  # before the next step and its attempts without an update
        self._ending: tuple[Ending, str] | None = None

    def begin(self) -> None:
        """Write the line of step 0, with an evaluation, unless a resumed run has it already.

        Raises:
            StopNow: If a stop is requested.
        """
        if self._run.measurements.monitor.seen:
            return
        with self._stop.discarding():
            record = {"step": 0, **self._evaluate(0)}
        self._run.schedule.reference.after_step(0, None, self._regular_score(record))  # never resets at step 0
        self.write(record)

    def steps(self) -> Iterator[int]:
        """Yield the number of each step until the run ends."""
        while self._ending is None and not self._run.schedule.is_over(self._step, self._spent):
            self._run.algorithm.objective.begin_step(self._run.schedule.fraction_spent(self._step, self._spent))
            self._run.outputs.observe(Step(self._step + 1))
            self._run.clock.restart()
            yield self._step + 1
            self._spent_before = self._spent

    def record(self, step: int, batch: Batch, held_out: Sequence[Group | None], metrics: StepMetrics) -> Record:
        """Return the metrics record of a step, and store the step's rollouts when due."""
        clock = self._run.clock
        with clock("storing"):
            if is_due(step, self._run.schedule.store_rollouts_every):
                self._store_rollouts(step, batch)
        with clock("diagnostics"):
            measured = self._run.measurements.diagnostics.record(batch.complete, batch.groups, held_out)
        samples = sum(g.tree.num_rollouts for g in batch.groups)
        record = {
            "step": step,
            "sampling": batch.summary(),
            "kept": {"groups": len(batch.groups), "carried": batch.num_carried, "samples": samples},
            "update": asdict(metrics),
            **self._run.algorithm.objective.record(),
            **measured,
            "seconds": clock.seconds(),
        }
        self._spent += cost_of_step(record)
        return record

    def evaluate_if_due(self, record: Record) -> None:
        """Evaluate the model and add the result to a step's line, when due."""
        if self._run.schedule.evaluates(record["step"], self._spent_before, self._spent):
            record |= self._evaluate(record["step"])

    def reset_reference_if_due(self, record: Record) -> None:
        """Reset the reference policy and add the reason to a step's line, when due."""
        schedule, score = self._run.schedule, self._regular_score(record)
        if why := schedule.reference.after_step(record["step"], record["update"]["reference_kl"], score):
            self._run.algorithm.learner.reset_reference(schedule.reference.clear_optimizer)
            record["reference_reset"] = why

    def _regular_score(self, record: Record) -> float | None:
        """Return the score of a regular evaluation; None without one."""
        regular = is_regular(record, self._run.schedule.evaluate_every)
        return self._run.measurements.monitor.score(record) if regular else None

    def write(self, record: Record) -> None:
        """Write a metrics record. A collapse is noted in it, and may end the run."""
        monitor, outputs = self._run.measurements.monitor, self._run.outputs
        if sign := monitor.collapse(record):
            record["collapse"] = sign
            if monitor.stop:
                record["ended"] = sign
                record |= {} if "evaluation" in record else self._evaluate(record["step"])
        monitor.remember(record)
        if "ended" not in record and (why := monitor.stall()):
            record["ended"] = why
        self._run.algorithm.objective.remember(record)
        outputs.directory.append_metrics(record)
        outputs.report(record)

    def save_if_due(self, record: Record) -> None:
        """Save a checkpoint after a step, when due; a run that collapsed, stalled, pauses or is stopped ends here."""
        schedule, self._step = self._run.schedule, record["step"]
        over = schedule.is_over(self._step, self._spent)
        pauses = schedule.pauses(self._spent_before, self._spent) and not over
        stopped = self._stop.requested and not over  # a later request ends the run before the next update
        ends = over or pauses or stopped or "ended" in record
        due = is_due(self._step, schedule.checkpoint_every) or ends
        monitor = self._run.measurements.monitor
        if due or monitor.best_step == self._step:
            self._save(regular=due)
        if "ended" in record:
            ending = Ending.COLLAPSED if "collapse" in record and monitor.stop else Ending.STALLED
            self._ending = ending, f"stopped after step {self._step}: {record['ended']}"
        elif pauses:
            self._ending = Ending.PAUSED, f"paused after step {self._step} (budget.pause_at = {schedule.pause_at:g})"
        elif stopped:
            self._ending = Ending.INTERRUPTED, f"stopped after step {self._step}"

    def end(self) -> tuple[Ending, str]:
        """Return why the steps ended, and one line about it."""
        return self._ending or (Ending.FINISHED, self._run.schedule.finish_line(self._spent))

    def end_early(self, reason: NoGroupsError | StopNow) -> tuple[Ending, str]:
        """Save the state before a step that has no update; return why the run ended, and one line about it."""
        if isinstance(reason, NoGroupsError):
            self._store_rollouts(self._step + 1, reason.batch)
            self.write(self._record_without_update(reason))
            self._save()
            lost = isinstance(reason, UnverifiedError)
            return Ending.UNVERIFIED if lost else Ending.NO_MIXED_GROUPS, str(reason)
        if not self._run.measurements.monitor.seen:
            return Ending.INTERRUPTED, "stopped before the first step"
        self._run.algorithm.source.rewind()
        self._save()
        return Ending.INTERRUPTED, f"stopped after step {self._step}"

    def _record_without_update(self, error: NoGroupsError) -> Record:
        """Return the line of a step that did not get its groups: the reason, its cost, and how good the model is."""
        carried = len(self._run.algorithm.source.state().carried)
        return {
            "step": self._step + 1,
            "attempt": error.batch.attempt,
            # A run that infrastructure failures ended has not come to its end: a comparison continues it.
            "stopped" if isinstance(error, UnverifiedError) else "ended": str(error),
            "sampling": error.batch.summary(),
            "kept": {"groups": 0, "carried": carried, "samples": 0},
            "seconds": self._run.clock.seconds(),
            **self._evaluate(self._step + 1),
        }

    def _evaluate(self, step: int) -> Record:
        """Evaluate on the held-out prompts, if there are any, and store the responses to a few of them."""
        benchmark, algorithm = self._run.measurements.benchmark, self._run.algorithm
        if benchmark is None:
            return {}
        groups, seconds = benchmark.answer(algorithm.source.sampler)
        if self._run.schedule.store_rollouts_every:
            self._store_answers(step, groups)
        found = benchmark.record(groups, seconds)
        if found is None:
            return {"evaluation_unverified": sum(group.num_unverified for group in groups)}
        if not (algorithm.averages and step):
            return {"evaluation": found}
        with self._average_in_place(step):
            of_average = benchmark.record(*benchmark.answer(algorithm.source.sampler))
        return {"evaluation": found} | ({} if of_average is None else {"ema_evaluation": of_average})

    @contextmanager
    def _average_in_place(self, step: int) -> Iterator[None]:
        """Sample with the averaged weights within a block."""
        source, learner = self._run.algorithm.source, self._run.algorithm.learner
        learner.exchange_average()
        source.publish(learner.weights(), version=step)
        try:
            yield
        finally:
            learner.exchange_average()
            source.publish(learner.weights(), version=step)

    def _store_rollouts(self, step: int, batch: Batch) -> None:
        """Store the rollouts of a step, unless the run stores none or carried groups filled the step."""
        outputs = self._run.outputs
        if self._run.schedule.store_rollouts_every and batch.sampled:
            groups = sorted(batch.sampled, key=lambda group: group.verified is None)  # those without a group come last
            outputs.directory.write_responses("rollouts", step, groups, [outputs.grader.texts(g.tree) for g in groups])

    def _store_answers(self, step: int, answered: Sequence[Group]) -> None:
        """Store the responses to the same few prompts at every evaluation, chosen by position, not by success."""
        grader, num_prompts = self._run.outputs.grader, len(answered)
        chosen = np.linspace(0, num_prompts - 1, min(STORED_PROMPTS, num_prompts)).round().astype(int).tolist()
        groups = [grader.rewarded(answered[i], step) for i in chosen]
        texts = [grader.texts(g.tree) for g in groups]
        self._run.outputs.directory.write_responses("evaluations", step, groups, texts)

    def _save(self, regular: bool = True) -> None:
        """Write a checkpoint after the last step, and mark the best one."""
        algorithm, outputs = self._run.algorithm, self._run.outputs
        benchmark, best = self._run.measurements.benchmark, self._run.measurements.monitor.best_step
        outputs.observe(Phase("saving", f"step {self._step}"))
        state = TrainerState(
            step=self._step,
            learner=algorithm.learner.state_dict(),
            source=algorithm.source.state(),
            schedule=self._run.schedule.reference.state_dict(),
            held_out=None if benchmark is None else benchmark.fingerprint,
        )

        def save(folder: Path) -> None:
            algorithm.learner.save_pretrained(folder)
            write_card(folder, outputs.directory.path, self._step)
            if algorithm.averages:
                write_card(folder / EMA, outputs.directory.path, self._step, "ema_evaluation")

        folder = outputs.directory.checkpoints
        save_checkpoint(folder, state, save, outputs.tokenizer, outputs.keep_checkpoints, best, regular)
        outputs.directory.note_checkpoint()
        if best == self._step:
            mark_best(folder, self._step)
