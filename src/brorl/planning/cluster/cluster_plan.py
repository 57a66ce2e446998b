"""The plan of a job on a cluster: every way to use the GPUs, simulated steps on 1, 2, 4, ... GPUs, the tree's saving.

Colocated, all GPUs sample, then learn: the phases add up. Apart, some GPUs sample and the others learn; synchronous
phases add up, and asynchronous ones overlap, so that a step takes the longest of them plus the transfer. The split is
the one with the least seconds. Waiting for the longest response is not in the seconds of a `GpuAllocation`; the
simulation has it, in the middle of the assumed ranges. A job that does not fit has no ways, and lines that name the
fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, get_args

import numpy as np

from brorl.format import counted, memory_size
from brorl.planning.cluster.hardware import CASES, ENGINES, Case, Cluster, UnitCosts
from brorl.planning.cluster.phases import WORTHWHILE_ROWS, Job, RolloutWorker, ShardedLearner, smallest_worker
from brorl.planning.cluster.queue_simulation import Queue, QueueResult, simulate_queue
from brorl.planning.cluster.step_work import StepWork

Placement = Literal["colocated", "apart"]
Mode = Literal["sync", "async"]
MODES: tuple[Mode, ...] = get_args(Mode)
WAYS: tuple[tuple[Placement, Mode], ...] = (("colocated", "sync"), ("apart", "sync"), ("apart", "async"))
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PAYING = 1.5
"""A doubling of the GPUs pays if it makes a step at least this many times faster: halfway between 1 and 2."""
_ROWS_PER_STEP = 1536  # most simulated rows of a step
_MIN_SLOTS = 8  # simulated slots of a worker, where it has that many
_FRACTIONS = (0.5, 0.1)  # hypothetical fractions of distinct tokens
_SMALL_N = 16


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of the phases of a step: the transfer is trees to the learner, and weights to the engines."""

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
class GpuAllocation:
    """One allocation of the GPUs to sampling and learning, and its seconds without waiting."""

    num_gpus: int  # number of GPUs
    placement: Placement  # where sampling and learning run
    mode: Mode  # whether they wait for each other
    worker: RolloutWorker  # one rollout worker
    num_workers: int  # rollout workers
    learner: ShardedLearner  # the learner
    cases: dict[Case, PhaseSeconds]  # seconds at the best, middle and worst end of the assumed ranges

    @property
    def seconds(self) -> float:
        """Seconds of a step in the middle of the ranges."""
        return self.total("middle")

    def total(self, case: Case) -> float:
        """Return the seconds of a step in a case."""
        return self.cases[case].total(self.mode)


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step."""

    way: GpuAllocation  # the way to use the GPUs, and its seconds without waiting
    result: QueueResult  # the simulation
    # GPU-seconds of decoding with full batches and of the learner's operations, over all GPU-seconds
    useful_fraction: float
    # how many times faster the step is than with half as many GPUs; None for the first number
    gain: float | None = None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return self.way.num_gpus


@dataclass(frozen=True)
class QueueSettings:
    """Settings of the simulated run."""

    parts: int = 1  # tasks of a group, which may run on different workers
    max_staleness: int = 1  # bound of an asynchronous run
    steps: int = 6  # simulated steps after the warm-up
    seed: int = 0  # seed of the draws


@dataclass(frozen=True)
class TreeSaving:
    """The cost of a step with a part of the sharing."""

    name: str  # what is shared
    rollouts: int
    distinct_fraction: float  # distinct tokens over sampled tokens of the responses
    native: float | None = None  # GPU-hours of sampling with an engine that shares rows; None if it does not fit
    # GPU-hours of sampling with an engine that decodes every rollout; None if it does not fit
    vllm: float | None = None
    training: float | None = None  # GPU-hours of learning


@dataclass(frozen=True)
class ClusterPlan:
    """The plan of a job on a cluster."""

    name: str  # name of the model
    cluster: Cluster  # the GPUs
    job: Job  # the model, the work of a step, and the unit costs
    ways: Sequence[GpuAllocation]  # placements and modes that fit, the fastest first
    # simulated steps of the fastest synchronous and of the asynchronous way, by mode
    scaling: Mapping[Mode, Sequence[SimulatedStep]]
    savings: Sequence[TreeSaving]  # the saving of the tree
    settings: QueueSettings  # settings of the simulated runs
    problems: Sequence[str]  # reasons and fixes where the job does not fit

    @property
    def simulated(self) -> dict[Mode, SimulatedStep]:
        """The simulated steps on this cluster, by mode."""
        steps = ((mode, row) for mode, rows in self.scaling.items() for row in rows)
        return {mode: row for mode, row in steps if row.num_gpus == self.cluster.num_gpus}

    @property
    def last_paying(self) -> dict[Mode, int | None]:
        """The largest number of GPUs up to which every doubling pays, by mode."""
        return {mode: last_paying(rows) for mode, rows in self.scaling.items()}


def make_cluster_plan(
    name: str, job: Job, cluster: Cluster, settings: QueueSettings, sizes: Sequence[int] = SIZES
) -> ClusterPlan:
    """Make a plan.

    Args:
        name: Name of the model.
        job: The job.
        cluster: The GPUs.
        settings: Settings of the simulated runs.
        sizes: Numbers of GPUs to simulate; the cluster's own is added unless there are none.
    """
    ways = ways_that_fit(job, cluster.num_gpus)
    simulated = sorted({*sizes, cluster.num_gpus}) if sizes else []
    first = {mode: next(way for way in WAYS if way[1] == mode) for mode in MODES}
    fastest = first | {way.mode: (way.placement, way.mode) for way in reversed(ways)}
    return ClusterPlan(
        name=name,
        cluster=cluster,
        job=job,
        ways=ways,
        scaling={mode: scale(job, fastest[mode], simulated, settings) for mode in MODES},
        savings=list(savings(job, cluster.num_gpus)),
        settings=settings,
        problems=[] if ways else list(problems(job, cluster.num_gpus)),
    )


def ways_that_fit(job: Job, num_gpus: int) -> list[GpuAllocation]:
    """Return all allocations of the GPUs that fit, the fastest first."""
    ways = (fastest_split(job, num_gpus, placement, mode) for placement, mode in WAYS)
    return sorted((way for way in ways if way is not None), key=lambda way: way.seconds)


def fastest_split(job: Job, num_gpus: int, placement: Placement, mode: Mode) -> GpuAllocation | None:
    """Return the allocation with the fastest split of the GPUs; None if the job does not fit.

    On many machines the learner has whole machines.
    """
    ranks: Sequence[int] = [num_gpus]
    if placement == "apart":
        step = 1 if num_gpus <= 8 * job.gpu.per_machine else job.gpu.per_machine
        ranks = range(step, num_gpus, step)
    ways = (_split(job, num_gpus, placement, mode, number) for number in ranks)
    return min((way for way in ways if way is not None), key=lambda way: way.seconds, default=None)


def _split(job: Job, num_gpus: int, placement: Placement, mode: Mode, ranks: int) -> GpuAllocation | None:
    """Return the allocation with a number of learner ranks; None if it does not fit."""
    learner = ShardedLearner(job, ranks)
    colocated = placement == "colocated"
    sampling_gpus = num_gpus if colocated else num_gpus - ranks
    held = learner.state_bytes if colocated else 0.0
    worker = smallest_worker(job, min(sampling_gpus, job.gpu.per_machine), held)
    if not learner.fits or worker is None:
        return None
    num_workers = sampling_gpus // worker.gpus
    verified = job.work.sampled_rows * job.work.response_fraction
    cases = {
        case: PhaseSeconds(
            generation=worker.seconds(job.work.sampled_groups / num_workers, case),
            verification=verified * job.costs.verify.at(case) / (num_gpus * job.costs.verify_cores.at(case)),
            training=learner.seconds(case),
            transfer=publish_seconds(job, num_gpus, case) + learner.tree_seconds(case),
        )
        for case in CASES
    }
    return GpuAllocation(num_gpus, placement, mode, worker, num_workers, learner, cases)


def publish_seconds(job: Job, num_gpus: int, case: Case) -> float:
    """Return the seconds to give new weights to all rollout workers.

    Every worker receives all weights in bfloat16. A broadcast in a ring takes the time of one copy, whatever the number
    of workers.
    """
    moved = job.model.weight_bytes / job.bandwidth(num_gpus, case) if num_gpus > 1 else 0.0
    return job.costs.publish.at(case) + moved


def scale(job: Job, way: tuple[Placement, Mode], sizes: Sequence[int], settings: QueueSettings) -> list[SimulatedStep]:
    """Simulate a step on several numbers of GPUs, ascending; those on which the job does not fit are left out."""
    rows: list[SimulatedStep] = []
    for size in sizes:
        split = fastest_split(job, size, *way)
        if split is None:
            continue
        row = simulated_step(job, split, settings)
        half = next((smaller for smaller in rows if smaller.num_gpus * 2 == size), None)
        if half is not None:
            row = replace(row, gain=half.result.seconds / row.result.seconds)
        rows.append(row)
    return rows


def simulated_step(job: Job, way: GpuAllocation, settings: QueueSettings) -> SimulatedStep:
    """Simulate a step, with rows bundled so that it has few thousand of them."""
    worker, phases, work = way.worker, way.cases["middle"], job.work
    rows = work.sampled_groups * worker.rows_per_group
    bundle = max(1, min(ceil(rows / _ROWS_PER_STEP), worker.slots // _MIN_SLOTS))
    group_rows = max(1, round(worker.rows_per_group / bundle))
    slots = min(max(1, worker.slots // bundle), ceil(work.sampled_groups + 1) * group_rows)
    queue = Queue(
        workers=way.num_workers,
        step_seconds_B=worker.step_seconds(np.arange(slots + 1) * worker.rows_per_group / group_rows, "middle"),
        group_rows=group_rows,
        parts=min(settings.parts, group_rows),
        prefill_seconds=worker.prefill_seconds("middle"),
        groups=work.prompts,
        kept_fraction=work.kept_fraction,
        verify_seconds=phases.verification / work.sampled_groups,
        learn_seconds=phases.training + way.learner.tree_seconds("middle"),
        publish_seconds=publish_seconds(job, way.num_gpus, "middle"),
        mode=way.mode,
        max_staleness=settings.max_staleness,
    )
    result = simulate_queue(queue, work.lengths.draw, settings.seed, settings.steps)
    learning = way.learner.computing_seconds("middle") * way.learner.ranks
    sampling = result.sampled_groups * worker.rows_per_group * worker.gpu_seconds_per_row("middle")
    return SimulatedStep(way, result, (sampling + learning) / (result.seconds * way.num_gpus))


def last_paying(rows: Sequence[SimulatedStep]) -> int | None:
    """Return the largest number of GPUs up to which every doubling pays; None without rows."""
    if not rows:
        return None
    last = rows[0].num_gpus
    for row in rows:
        if row.num_gpus == 2 * last and row.gain is not None and row.gain >= PAYING:
            last = row.num_gpus
    return last


def savings(job: Job, num_gpus: int) -> Iterator[TreeSaving]:
    """Yield the cost of a step with nothing shared, with shared prompts, and with shared prefixes; also at N = 16.

    The steps at N = 16 have as many rollouts, of more prompts.
    """
    work = job.work
    alone = replace(work, distinct_fraction=1.0, response_fraction=1.0)
    steps = [
        ("nothing", replace(alone, shares_prompts=False)),
        ("prompts", alone),
        ("prompts, prefixes (the plan)", work),
    ]
    more = (replace(work, distinct_fraction=fraction) for fraction in _FRACTIONS if fraction < work.distinct_fraction)
    steps += [("prompts, more prefixes (hypothetical)", step) for step in more]
    if work.rollouts > _SMALL_N:
        prompts = work.prompts * work.rollouts // _SMALL_N
        steps.append(("prompts", replace(alone, rollouts=_SMALL_N, prompts=prompts)))
    return (_saving(job, num_gpus, name, step) for name, step in steps)


def _saving(job: Job, num_gpus: int, name: str, work: StepWork) -> TreeSaving:
    hours: dict[str, float] = {}
    for engine in ENGINES:
        changed = replace(job, engine=engine, work=work, costs=UnitCosts.of(job.gpu, engine, {}))
        way = fastest_split(changed, num_gpus, "colocated", "sync")
        if way is not None:
            hours[engine] = way.cases["middle"].generation * num_gpus / 3600
            hours["training"] = way.cases["middle"].training * num_gpus / 3600
    return TreeSaving(name, work.rollouts, work.distinct_fraction, **hours)


def problems(job: Job, num_gpus: int) -> Iterator[str]:
    """Yield the reasons why a job does not fit on a cluster, each with settings that change it."""
    usable = job.costs.usable_bytes
    learner = ShardedLearner(job, num_gpus)
    if not learner.fits:
        fixes = ["more GPUs (the state is sharded)", "lora.rank", "reference.offload: true", "sampling.max_new_tokens"]
        if not job.gradient_checkpointing:
            fixes.insert(0, "engine.gradient_checkpointing: true")
        yield (
            f"the learner needs {memory_size(learner.state_bytes)} of state and {memory_size(learner.pass_bytes)} for "
            f"a pass on each of {counted(num_gpus, 'GPU')}, and {memory_size(usable)} of a {job.gpu.name} "
            f"are usable; change {', '.join(fixes)}, or take GPUs with more memory"
        )
    most = min(num_gpus, job.gpu.per_machine)
    if smallest_worker(job, most, learner.state_bytes) is None:
        gpus = 1 << most.bit_length() - 1  # of the largest worker
        worker = RolloutWorker(job, gpus, learner.state_bytes)
        yield (
            f"a rollout worker of {counted(gpus, 'GPU')} needs {memory_size(job.model.weight_bytes)} of weights and "
            f"{memory_size(worker.row_bytes)} for each of at least {WORTHWHILE_ROWS} rows, next to "
            f"{memory_size(learner.state_bytes)} of the learner on each GPU, and {memory_size(gpus * usable)} are "
            "usable; take more GPUs, GPUs with more memory, or lower sampling.max_new_tokens"
        )
