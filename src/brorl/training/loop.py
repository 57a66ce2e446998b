"""The training loop: sample the tree, verify the tree, learn from the tree.

There is one loop, for local and remote engines and learners.
"""

from __future__ import annotations

from brorl.runs.checkpoint import TrainerState
from brorl.seeds import derived_seed
from brorl.training.recorder import Ending, Recorder
from brorl.training.run import TrainingRun
from brorl.training.source import NoGroupsError
from brorl.training.stop_request import StopNow, StopRequest


def train(run: TrainingRun, state: TrainerState, stop: StopRequest | None = None) -> tuple[Ending, str]:
    """Train until the schedule, a collapse, or a stop request ends the run.

    A stop request loses no learning. Before the update of a step it discards the samples of the step; a resumed run
    draws the same samples again. After the update has begun, the step is finished first.

    Args:
        run: The parts of the run; they hold `state`.
        state: Where to start.
        stop: A stop request that the parts check while they work; a new one if None.

    Returns:
        Why the run ended, and one line about it.
    """
    source, objective, learner, reference = run.source, run.objective, run.learner, run.schedule.reference
    with stop or StopRequest() as stop:
        recorder = Recorder(run, state.step, stop)
        try:
            recorder.begin()
            for step in recorder.steps():
                with stop.discarding():
                    batch = source.next_batch(step)
                    held_out = run.diagnostics.hold_out(step, batch.groups)

                with run.clock("training"):
                    seed = derived_seed(run.config.seed, step)
                    metrics = learner.learn(batch.groups, objective.estimate_advantages, seed, objective.lr_scale)
                source.publish(learner.weights(), version=step)

                record = recorder.record(step, batch, held_out, metrics)
                if recorder.evaluates(step):
                    record |= recorder.evaluate(step)
                if why := reference.after_step(step, metrics.reference_kl, run.monitor.regular_score(record)):
                    learner.reset_reference(run.config.reference.reset_optimizer)
                    record["reference_reset"] = why
                recorder.write(record)
                recorder.save_if_due(record)
        except (NoGroupsError, StopNow) as reason:
            return recorder.end_early(reason)
    return recorder.end()
