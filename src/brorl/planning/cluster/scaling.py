"""A step on 1, 2, 4, ... GPUs, with the waiting: where more GPUs stop paying.

In: a job and a GPU. Out: for each number of GPUs the seconds of a simulated step, the useful fraction of the GPUs, and
the gain over half as many GPUs. The simulation uses the middle of the assumed ranges and the placement and split of
the capacity model. A simulated row stands for several real ones where there are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from brorl.planning.cluster.capacity import Capacity, Job, Mode, Placement, capacity, publish_seconds
from brorl.planning.cluster.gpus import Cluster, Gpu
from brorl.planning.cluster.queue_simulation import Queue, QueueResult, simulate

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PAYING = 1.5
"""A doubling of the GPUs pays if it makes a step at least this many times faster: halfway between 1 and 2."""
_ROWS_PER_STEP = 1536  # most simulated rows of a step
_LEAST_SLOTS = 8  # simulated slots of a worker, where it has that many


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step at one number of GPUs.

    Attributes:
        capacity: The way to use the GPUs, and its seconds without waiting.
        result: The simulation.
        useful_fraction: GPU-seconds of decoding with full batches and of the learner's operations, over all
            GPU-seconds.
        gain: How many times faster the step is than with half as many GPUs; None for the first number.
    """

    capacity: Capacity
    result: QueueResult
    useful_fraction: float
    gain: float | None = None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return self.capacity.cluster.num_gpus


@dataclass(frozen=True)
class ScalingSettings:
    """Settings of the simulated run.

    Attributes:
        parts: Tasks of a group, which may run on different workers.
        max_staleness: Bound of an asynchronous run.
        steps: Simulated steps after the warm-up.
        seed: Seed of the draws.
    """

    parts: int = 1
    max_staleness: int = 1
    steps: int = 6
    seed: int = 0


def scale(
    job: Job, gpu: Gpu, way: tuple[Placement, Mode], sizes: Sequence[int], settings: ScalingSettings
) -> list[SimulatedStep]:
    """Simulate a step on several numbers of GPUs; numbers on which the job does not fit are left out.

    Args:
        job: The job.
        gpu: The figures of the GPU.
        way: Placement and mode.
        sizes: Numbers of GPUs, ascending.
        settings: Settings of the simulated run.
    """
    rows: list[SimulatedStep] = []
    for size in sizes:
        found = capacity(job, Cluster(size, gpu), *way)
        if found is None:
            continue
        row = simulated_step(job, found, settings)
        if rows and rows[-1].num_gpus * 2 == size:
            row = replace(row, gain=rows[-1].result.seconds / row.result.seconds)
        rows.append(row)
    return rows


def simulated_step(job: Job, found: Capacity, settings: ScalingSettings) -> SimulatedStep:
    """Simulate a step with the split of the capacity model.

    Args:
        job: The job.
        found: The way to use the GPUs.
        settings: Settings of the simulated run.
    """
    queue = build_queue(job, found, settings)
    result = simulate(queue, lambda n, g: job.work.lengths.draw(n, g), settings.seed, settings.steps)
    rows = result.sampled_groups * found.worker.rows_per_group
    learning = found.learner.computing_seconds("middle") * found.learner.ranks
    useful = rows * found.worker.gpu_seconds_per_row("middle") + learning
    fraction = useful / (result.seconds * found.cluster.num_gpus)
    return SimulatedStep(found, result, fraction)


def build_queue(job: Job, found: Capacity, settings: ScalingSettings) -> Queue:
    """Return the stations of a run, with rows bundled so that a step has few thousand of them.

    Args:
        job: The job.
        found: The way to use the GPUs.
        settings: Settings of the simulated run.
    """
    worker, phases = found.worker, found.cases["middle"]
    rows = job.work.sampled_groups * worker.rows_per_group
    bundle = max(1, min(ceil(rows / _ROWS_PER_STEP), worker.slots // _LEAST_SLOTS))
    group_rows = max(1, round(worker.rows_per_group / bundle))
    parts = min(settings.parts, group_rows)
    slots = min(max(1, worker.slots // bundle), ceil(job.work.sampled_groups + 1) * group_rows)
    return Queue(
        workers=found.num_workers,
        step_seconds_B=worker.step_seconds(np.arange(slots + 1) * worker.rows_per_group / group_rows, "middle"),
        group_rows=group_rows,
        parts=parts,
        prefill_seconds=worker.group_prefill_seconds("middle"),
        groups=job.work.prompts,
        kept_fraction=job.work.kept_fraction,
        verify_seconds=phases.verification / job.work.sampled_groups,
        learn_seconds=phases.training + found.learner.tree_seconds("middle"),
        publish_seconds=publish_seconds(job, found.cluster, "middle"),
        mode=found.mode,
        max_staleness=settings.max_staleness,
    )


def last_paying(rows: Sequence[SimulatedStep]) -> int | None:
    """Return the largest number of GPUs up to which every doubling pays; None without rows."""
    last = rows[0].num_gpus if rows else None
    for row in rows[1:]:
        if row.gain is None or row.gain < PAYING:
            break
        last = row.num_gpus
    return last
