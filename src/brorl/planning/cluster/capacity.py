"""What a step costs on G GPUs if no GPU waits: seconds of each phase, for each placement and mode.

In: a cluster, a model, the work of a step, unit costs. Out: one `Capacity` for each way to use the GPUs. Colocated,
all GPUs sample, then learn: the phases add up. Apart, some GPUs sample and the others learn; synchronous phases add
up, and asynchronous ones overlap, so that a step takes the longest of them plus the transfer. The split is the one
with the least seconds. Waiting for the longest response is not in these seconds; the simulation has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from brorl.planning.cluster.gpus import Cluster
from brorl.planning.cluster.model_shape import ModelShape
from brorl.planning.cluster.rollout_worker import RolloutWorker, smallest_worker
from brorl.planning.cluster.sharded_learner import LearnerSettings, ShardedLearner
from brorl.planning.cluster.step_work import StepWork
from brorl.planning.cluster.unit_costs import CASES, Case, Engine, UnitCosts

Placement = Literal["colocated", "apart"]
Mode = Literal["sync", "async"]
WAYS: tuple[tuple[Placement, Mode], ...] = (("colocated", "sync"), ("apart", "sync"), ("apart", "async"))


@dataclass(frozen=True)
class Job:
    """The part of a plan that does not depend on the number of GPUs.

    Attributes:
        model: The model.
        work: The work of a step.
        costs: The unit costs.
        engine: The engine that samples.
        learner: Settings of the learner.
    """

    model: ModelShape
    work: StepWork
    costs: UnitCosts
    engine: Engine
    learner: LearnerSettings


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of the phases of a step.

    Attributes:
        generation: Sampling.
        verification: Verifying.
        training: Learning, with all its passes.
        transfer: Trees to the learner, and weights to the engines.
    """

    generation: float
    verification: float
    training: float
    transfer: float

    def total(self, mode: Mode) -> float:
        """Return the seconds of a step."""
        if mode == "sync":
            return self.generation + self.verification + self.training + self.transfer
        return max(self.generation, self.verification, self.training) + self.transfer


@dataclass(frozen=True)
class Capacity:
    """One way to use the GPUs, and its seconds.

    Attributes:
        cluster: The GPUs.
        placement: Where sampling and learning run.
        mode: Whether they wait for each other.
        worker: One rollout worker.
        num_workers: Rollout workers.
        learner: The learner.
        cases: Seconds at the best, middle and worst end of the assumed ranges.
    """

    cluster: Cluster
    placement: Placement
    mode: Mode
    worker: RolloutWorker
    num_workers: int
    learner: ShardedLearner
    cases: dict[Case, PhaseSeconds]

    @property
    def seconds(self) -> float:
        """Seconds of a step in the middle of the ranges."""
        return self.total("middle")

    def total(self, case: Case) -> float:
        """Return the seconds of a step in a case."""
        return self.cases[case].total(self.mode)


def capacity(job: Job, cluster: Cluster, placement: Placement, mode: Mode) -> Capacity | None:
    """Return the seconds of a step with the best split of the GPUs; None if the job does not fit.

    Args:
        job: The job.
        cluster: The GPUs.
        placement: Where sampling and learning run; `colocated` needs `sync`.
        mode: Whether they wait for each other.
    """
    found = (_at(job, cluster, placement, mode, ranks) for ranks in _learner_ranks(cluster, placement))
    return min((c for c in found if c is not None), key=lambda c: c.seconds, default=None)


def capacities(job: Job, cluster: Cluster) -> list[Capacity]:
    """Return all ways to use the GPUs that fit, the fastest first."""
    found = (capacity(job, cluster, placement, mode) for placement, mode in WAYS)
    return sorted((c for c in found if c is not None), key=lambda c: c.seconds)


def _learner_ranks(cluster: Cluster, placement: Placement) -> Iterator[int]:
    """Yield the numbers of learner ranks to try: every number on few machines, whole machines on many."""
    if placement == "colocated":
        yield cluster.num_gpus
        return
    machine = cluster.gpu.per_machine
    step = 1 if cluster.num_gpus <= 8 * machine else machine
    yield from range(step, cluster.num_gpus, step)


def _at(job: Job, cluster: Cluster, placement: Placement, mode: Mode, ranks: int) -> Capacity | None:
    """Return the seconds with a number of learner ranks; None if it does not fit."""
    machine = cluster.gpu.per_machine
    learner = ShardedLearner(job.model, job.work, job.costs, job.learner, ranks, machine)
    colocated = placement == "colocated"
    sampling_gpus = cluster.num_gpus if colocated else cluster.num_gpus - ranks
    held = learner.state_bytes if colocated else 0.0
    worker = smallest_worker(job.model, job.work, job.costs, job.engine, min(sampling_gpus, machine), held)
    if not learner.fits or worker is None:
        return None
    num_workers = sampling_gpus // worker.gpus
    cases = {case: _phases(job, cluster, worker, num_workers, learner, case) for case in CASES}
    return Capacity(cluster, placement, mode, worker, num_workers, learner, cases)


def _phases(
    job: Job, cluster: Cluster, worker: RolloutWorker, num_workers: int, learner: ShardedLearner, case: Case
) -> PhaseSeconds:
    responses = job.work.sampled_rows * job.work.response_fraction
    cores = cluster.num_gpus * job.costs.verify_cores.at(case)
    return PhaseSeconds(
        generation=worker.seconds(job.work.sampled_groups / num_workers, case),
        verification=responses * job.costs.verify.at(case) / cores,
        training=learner.seconds(case),
        transfer=publish_seconds(job, cluster, case) + learner.tree_seconds(case),
    )


def publish_seconds(job: Job, cluster: Cluster, case: Case) -> float:
    """Return the seconds to give new weights to all rollout workers.

    Every worker receives all weights in bfloat16. A broadcast in a ring takes the time of one copy, whatever the number
    of workers.
    """
    wire = job.costs.link if cluster.num_gpus <= cluster.gpu.per_machine else job.costs.network
    moved = job.model.weight_bytes / (wire.best * job.costs.link_fraction.at(case)) if cluster.num_gpus > 1 else 0.0
    return job.costs.publish.at(case) + moved
