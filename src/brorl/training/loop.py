"""The training loop: sample the tree, verify the tree, learn from the tree. One loop serves local and remote parts.

After each step, `Recorder` writes metrics, stored rollouts, evaluations and checkpoints. Its decisions depend only on
the metrics and the schedule, so a resumed run makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Literal

import numpy as np

from brorl.activity import Stage, Step
from brorl.algorithms.groups import Group
from brorl.evaluation.evaluator import BatchCounts, evaluation_record
from brorl.model.device import return_freed_memory
from brorl.runs.checkpoint import EMA, TrainerState, mark_best, save_checkpoint
from brorl.runs.model_card import write_card
from brorl.runs.step_record import KeptRecord, SecondsRecord, StepRecord, ToolUse, UpdateRecord, is_due, total_cost
from brorl.seeds import derived_seed
from brorl.training.batch import Batch
from brorl.training.collector import NoGroupsError
from brorl.training.run import TrainingRun
from brorl.training.stop_request import StopNow, StopRequest

STORED_PROMPTS = 8  # held-out prompts whose responses every evaluation stores


def train_run(run: TrainingRun, state: TrainerState, stop: StopRequest | None = None) -> tuple[Ending, str]:
    """Train until the schedule, a collapse, or a stop request ends the run.

    A stop request never discards an update. Before a step's update, it discards the step's samples, and a resumed run
    draws them again. Once the update has begun, the step finishes first.

    Args:
        run: The parts of the run, already restored to `state`.
        state: The state after the last completed step.
        stop: The stop request that the parts check while they work; None creates one.

    Returns:
        Why the run ended, and one line about it.
    """
    collector, learner, schedule = run.collector, run.learner, run.schedule
    objective = schedule.objective
    with stop or StopRequest() as stop:
        recorder = Recorder(run, state.step, stop)
        try:
            recorder.begin()
            for step in recorder.steps():
                with stop.discarding():
                    batch = collector.next_batch(step)
                    held_out = run.diagnostics.hold_out(step, batch.groups)

                with run.clock("training"):
                    seed = derived_seed(run.config.seed, step)
                    update = learner.learn(batch.groups, objective.estimate_advantages, seed, objective.lr_scale)
                collector.publish(learner.weights(), version=step)

                record = recorder.record(step, batch, held_out, update)
                if recorder.evaluation_is_due(step):
                    record = recorder.evaluated(record)
                if why := schedule.reference.why_reset(record):
                    learner.reset_reference(run.config.reference.reset_optimizer)
                    record = replace(record, reference_reset=why)
                recorder.save_if_due(recorder.write(record))
        except (NoGroupsError, StopNow) as reason:
            return recorder.end_early(reason)
    return recorder.end()


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
    """Does the bookkeeping of a run: writes records, evaluates, saves checkpoints, and decides when the run ends.

    It starts after `step`, the last completed step.
    """

    def __init__(self, run: TrainingRun, step: int, stop: StopRequest) -> None:
        self._run = run
        self._config = run.config
        self._stop = stop
        self._step = step
        records = run.directory.read_metrics()
        self._spent = total_cost(records)
        # the cost up to the last update; later attempts at the next step found no group
        end = max((line for line, record in enumerate(records, 1) if record.attempt is None), default=0)
        self._spent_before = total_cost(records[:end])
        self._ending: tuple[Ending, str] | None = None

    def begin(self) -> None:
        """Evaluate the untrained model and write the line for step 0, unless a resumed run already has this line."""
        if self._run.schedule.has_begun:
            return
        with self._stop.discarding():
            record = self.evaluated(StepRecord(step=0))
        self.write(record)

    def steps(self) -> Iterator[int]:
        """Yield the number of each step until the run ends."""
        run = self._run
        schedule = run.schedule
        while self._ending is None and not schedule.is_over(self._step, self._spent):
            schedule.objective.begin_step(schedule.fraction_spent(self._step, self._spent))
            run.observe(Step(self._step + 1))
            run.clock.restart()
            yield self._step + 1
            self._spent_before = self._spent

    def record(self, step: int, batch: Batch, held_out: Sequence[Group | None], update: UpdateRecord) -> StepRecord:
        """Return the record of a step. Store the step's rollouts when due."""
        run = self._run
        clock = run.clock
        with clock("storing"):
            if is_due(step, self._config.store_rollouts_every):
                self._store_rollouts(step, batch)
        with clock("diagnostics"):
            coverage, held_out_check = run.diagnostics.record(batch.complete, batch.groups, held_out)
        samples = sum(g.tree.num_rollouts for g in batch.groups)
        trees = [group.tree for group in batch.sampled]
        record = StepRecord(
            step=step,
            sampling=batch.summary(),
            tools=ToolUse(**run.toolbox.metrics(trees)) if run.toolbox else None,
            kept=KeptRecord(groups=len(batch.groups), carried=batch.num_carried, samples=samples),
            update=update,
            objective=run.schedule.objective.record(),
            coverage=coverage,
            held_out_check=held_out_check,
            seconds=SecondsRecord(**clock.seconds()),
        )
        self._spent += record.cost
        return record

    def evaluation_is_due(self, step: int) -> bool:
        """Return whether an evaluation follows this step."""
        return self._run.schedule.evaluates(step, self._spent_before, self._spent)

    def write(self, record: StepRecord) -> StepRecord:
        """Write a record. Return it with any new sign of collapse, and the reason if the run ends here."""
        run = self._run
        schedule = run.schedule
        if sign := schedule.collapse.line(record):
            record = replace(record, collapse=sign)
            if self._config.collapse.stop:
                record = replace(record, end_reason=sign)
                if record.evaluation is None and record.evaluation_unverified is None:
                    record = self.evaluated(record)
        schedule.add(record)
        if record.end_reason is None and (why := schedule.evaluations.why_over()):
            record = replace(record, end_reason=why)
        run.directory.append_metrics(record)
        run.report(record)
        return record

    def save_if_due(self, record: StepRecord) -> None:
        """Save a checkpoint when due. End the run if it collapsed, stalled, pauses or was asked to stop."""
        config = self._config
        schedule = self._run.schedule
        self._step = record.step
        over = schedule.is_over(self._step, self._spent)
        pauses = schedule.pauses(self._spent_before, self._spent) and not over
        stopped = self._stop.requested and not over  # a later request ends the run before the next update
        due = is_due(self._step, config.checkpoint_every) or over or pauses or stopped or record.end_reason is not None
        if due or schedule.evaluations.best_step == self._step:
            self._save(regular=due)
        if record.end_reason is not None:
            ending = Ending.COLLAPSED if record.collapse and config.collapse.stop else Ending.STALLED
            self._ending = ending, f"stopped after step {self._step}: {record.end_reason}"
        elif pauses:
            at = config.budget.pause_at
            self._ending = Ending.PAUSED, f"paused after step {self._step} (budget.pause_at = {at:g})"
        elif stopped:
            self._ending = Ending.INTERRUPTED, f"stopped after step {self._step}"

    def end(self) -> tuple[Ending, str]:
        """Return why the steps ended, and one line about it."""
        return self._ending or (Ending.FINISHED, self._run.schedule.finish_line(self._spent))

    def end_early(self, reason: NoGroupsError | StopNow) -> tuple[Ending, str]:
        """Save the state from before a step without an update. Return why the run ended, and one line about it."""
        if isinstance(reason, NoGroupsError):
            self._store_rollouts(self._step + 1, reason.batch)
            self.write(self._record_without_update(reason))
            self._save()
            return Ending.UNVERIFIED if reason.unverified else Ending.NO_MIXED_GROUPS, str(reason)
        if not self._run.schedule.has_begun:
            return Ending.INTERRUPTED, "stopped before the first step"
        self._run.collector.rewind()
        self._save()
        return Ending.INTERRUPTED, f"stopped after step {self._step}"

    def _record_without_update(self, error: NoGroupsError) -> StepRecord:
        """Return the record of a step that did not get its groups: the reason, the cost and an evaluation."""
        # `failure_reason`: the infrastructure failed, so a comparison resumes the run; `end_reason`: the run is over
        record = StepRecord(
            step=self._step + 1,
            attempt=error.batch.attempt,
            end_reason=None if error.unverified else str(error),
            failure_reason=str(error) if error.unverified else None,
            sampling=error.batch.summary(),
            kept=KeptRecord(carried=len(self._run.collector.state().carried)),
            seconds=SecondsRecord(**self._run.clock.seconds()),
        )
        return self.evaluated(record)

    def evaluated(self, record: StepRecord) -> StepRecord:
        """Add an evaluation on the held-out prompts, if any, to a record. Store the responses to a few of them."""
        run = self._run
        held_out = run.held_out
        ks = self._config.evaluation.ks
        if held_out is None:
            return record

        def store(groups: Sequence[Group], _: BatchCounts) -> None:
            if self._config.store_rollouts_every:
                self._store_answers(record.step, groups)

        return_freed_memory()  # freed by the learner; an evaluation samples more rollouts than a step
        counts = run.evaluator.evaluate(run.collector.sampler, held_out, store)
        return_freed_memory()
        evaluation = evaluation_record(counts, ks)
        if evaluation is None:
            return replace(record, evaluation_unverified=sum(prompt.num_unverified for prompt in counts.prompts))
        version = record.weights_step
        if self._config.optimizer.ema_decay is None or not version:
            return replace(record, evaluation=evaluation)
        with self._average_in_place(version):
            ema_evaluation = evaluation_record(run.evaluator.evaluate(run.collector.sampler, held_out), ks)
        return replace(record, evaluation=evaluation, ema_evaluation=ema_evaluation)

    @contextmanager
    def _average_in_place(self, version: int) -> Iterator[None]:
        """Within a block, sample with the averaged weights."""
        collector, learner = self._run.collector, self._run.learner
        learner.swap_averaged_weights()
        collector.publish(learner.weights(), version=version)
        try:
            yield
        finally:
            learner.swap_averaged_weights()
            collector.publish(learner.weights(), version=version)

    def _store_rollouts(self, step: int, batch: Batch) -> None:
        """Store the rollouts that a step sampled, unless carried groups filled the step."""
        if self._config.store_rollouts_every and batch.sampled:
            groups = sorted(batch.sampled, key=lambda group: group.verified is None)  # unverified prompts come last
            self._store("rollouts", step, groups)

    def _store_answers(self, step: int, answered: Sequence[Group]) -> None:
        """Store the responses to the same few prompts at every evaluation, chosen by position, not success."""
        num_prompts = len(answered)
        chosen = np.linspace(0, num_prompts - 1, min(STORED_PROMPTS, num_prompts)).round().astype(int).tolist()
        self._store("evaluations", step, [self._run.grader.rewarded(answered[i], step) for i in chosen])

    def _store(self, folder: Literal["rollouts", "evaluations"], step: int, groups: Sequence[Group]) -> None:
        with_texts = [replace(group, texts=self._run.grader.texts(group)) for group in groups]
        self._run.directory.write_responses(folder, step, with_texts)

    def _save(self, regular: bool = True) -> None:
        """Write a checkpoint of the last step, and mark it if it is the best."""
        run = self._run
        best = run.schedule.evaluations.best_step
        folder = run.directory.checkpoints
        run.observe(Stage("saving", f"step {self._step}"))
        state = TrainerState(
            step=self._step,
            learner=run.learner.state_dict(),
            collector=run.collector.state(),
            held_out=None if run.held_out is None else run.held_out.fingerprint,
        )

        def save(target: Path) -> None:
            run.learner.save_pretrained(target)
            write_card(target, run.directory.path, self._step)
            if self._config.optimizer.ema_decay is not None:
                write_card(target / EMA, run.directory.path, self._step, "ema_evaluation")

        save_checkpoint(folder, state, save, run.tokenizer, self._config.keep_checkpoints, best, regular)
        run.directory.note_checkpoint()
        if best == self._step:
            mark_best(folder, self._step)
