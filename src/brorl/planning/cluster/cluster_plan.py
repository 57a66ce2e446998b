"""The plan of a job on a cluster: every way to use the GPUs, the saving of the tree, the memory, the scaling.

In: a job and a cluster. Out: a `ClusterPlan`. A job that does not fit has no ways, and lines that name the fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from brorl.format import counted, memory_size
from brorl.planning.cluster.capacity import WAYS, Capacity, Job, Mode, Placement, capacities, capacity
from brorl.planning.cluster.gpus import Cluster
from brorl.planning.cluster.rollout_worker import RolloutWorker
from brorl.planning.cluster.scaling import SIZES, ScalingSettings, SimulatedStep, last_paying, scale
from brorl.planning.cluster.sharded_learner import ShardedLearner
from brorl.planning.cluster.step_work import StepWork
from brorl.planning.cluster.unit_costs import ENGINES, UnitCosts

_FRACTIONS = (0.5, 0.1)  # hypothetical fractions of distinct tokens
_SMALL_N = 16
MODES: tuple[Mode, ...] = ("sync", "async")


@dataclass(frozen=True)
class TreeSaving:
    """The cost of a step with a part of the sharing.

    Attributes:
        name: What is shared.
        rollouts: N.
        distinct_fraction: Distinct tokens over sampled tokens of the responses.
        native: GPU-hours of sampling with an engine that shares rows; None if it does not fit.
        vllm: GPU-hours of sampling with an engine that decodes every rollout; None if it does not fit.
        training: GPU-hours of learning.
    """

    name: str
    rollouts: int
    distinct_fraction: float
    native: float | None
    vllm: float | None
    training: float | None


@dataclass(frozen=True)
class ClusterPlan:
    """A plan.

    Attributes:
        name: Name of the model.
        cluster: The GPUs.
        job: The model, the work of a step, and the unit costs.
        ways: Placements and modes that fit, the fastest first.
        scaling: Simulated steps of the fastest synchronous and of the asynchronous way, by mode.
        savings: The saving of the tree.
        settings: Settings of the simulated runs.
        problems: Reasons and fixes where the job does not fit.
    """

    name: str
    cluster: Cluster
    job: Job
    ways: Sequence[Capacity]
    scaling: Mapping[Mode, Sequence[SimulatedStep]]
    savings: Sequence[TreeSaving]
    settings: ScalingSettings
    problems: Sequence[str]

    @property
    def simulated(self) -> dict[Mode, SimulatedStep]:
        """The simulated steps on this cluster, by mode."""
        found = {mode: [r for r in rows if r.num_gpus == self.cluster.num_gpus] for mode, rows in self.scaling.items()}
        return {mode: rows[0] for mode, rows in found.items() if rows}

    @property
    def last_paying(self) -> dict[Mode, int | None]:
        """The largest number of GPUs up to which every doubling pays, by mode."""
        return {mode: last_paying(rows) for mode, rows in self.scaling.items()}


def make_cluster_plan(
    name: str, job: Job, cluster: Cluster, settings: ScalingSettings, sizes: Sequence[int] = SIZES
) -> ClusterPlan:
    """Make a plan.

    Args:
        name: Name of the model.
        job: The job.
        cluster: The GPUs.
        settings: Settings of the simulated runs.
        sizes: Numbers of GPUs to simulate; the cluster's own is added unless there are none.
    """
    ways = capacities(job, cluster)
    simulated = sorted({*sizes, cluster.num_gpus}) if sizes else []
    scaling = {mode: scale(job, cluster.gpu, _fastest(ways, mode), simulated, settings) for mode in MODES}
    return ClusterPlan(
        name=name,
        cluster=cluster,
        job=job,
        ways=ways,
        scaling=scaling,
        savings=list(savings(job, cluster)),
        settings=settings,
        problems=[] if ways else list(problems(job, cluster)),
    )


def _fastest(ways: Sequence[Capacity], mode: Mode) -> tuple[Placement, Mode]:
    """Return the fastest way of a mode; the first of the mode if none fits."""
    fitting = ((way.placement, way.mode) for way in ways if way.mode == mode)
    return next(fitting, next(way for way in WAYS if way[1] == mode))


def savings(job: Job, cluster: Cluster) -> Iterator[TreeSaving]:
    """Yield the cost of a step with nothing shared, with shared prompts, and with shared prefixes; also at N = 16.

    The steps at N = 16 have as many rollouts, of more prompts.
    """
    work = job.work
    alone = replace(work, distinct_fraction=1.0, response_fraction=1.0)
    yield _saving(job, cluster, "nothing", replace(alone, shares_prompts=False))
    yield _saving(job, cluster, "prompts", alone)
    yield _saving(job, cluster, "prompts, prefixes (the plan)", work)
    for fraction in _FRACTIONS:
        if fraction < work.distinct_fraction:
            more = replace(work, distinct_fraction=fraction)
            yield _saving(job, cluster, "prompts, more prefixes (hypothetical)", more)
    if work.rollouts > _SMALL_N:
        small = replace(alone, rollouts=_SMALL_N, prompts=work.prompts * work.rollouts // _SMALL_N)
        yield _saving(job, cluster, "prompts", small)


def _saving(job: Job, cluster: Cluster, name: str, work: StepWork) -> TreeSaving:
    hours: dict[str, float] = {}
    for engine in ENGINES:
        changed = replace(job, engine=engine, work=work, costs=UnitCosts.of(cluster.gpu, engine, {}))
        found = capacity(changed, cluster, "colocated", "sync")
        if found is not None:
            hours[engine] = found.cases["middle"].generation * cluster.num_gpus / 3600
            hours["training"] = found.cases["middle"].training * cluster.num_gpus / 3600
    return TreeSaving(
        name=name,
        rollouts=work.rollouts,
        distinct_fraction=work.distinct_fraction,
        native=hours.get("native"),
        vllm=hours.get("vllm"),
        training=hours.get("training"),
    )


def problems(job: Job, cluster: Cluster) -> Iterator[str]:
    """Yield the reasons why a job does not fit on a cluster, each with settings that change it."""
    gpu = cluster.gpu
    usable = job.costs.memory.best * job.costs.memory_fraction.best
    learner = ShardedLearner(job.model, job.work, job.costs, job.learner, cluster.num_gpus, gpu.per_machine)
    if learner.state_bytes + learner.pass_bytes > usable:
        fixes = ["more GPUs (the state is sharded)", "lora.rank", "reference.offload: true", "sampling.max_new_tokens"]
        if not job.learner.gradient_checkpointing:
            fixes.insert(0, "engine.gradient_checkpointing: true")
        yield (
            f"the learner needs {memory_size(learner.state_bytes)} of state and {memory_size(learner.pass_bytes)} for "
            f"a pass on each of {counted(cluster.num_gpus, 'GPU')}, and {memory_size(usable)} of a {gpu.name} "
            f"are usable; change {', '.join(fixes)}, or take GPUs with more memory"
        )
    gpus = min(cluster.num_gpus, gpu.per_machine)
    held = learner.state_bytes
    worker = RolloutWorker(job.model, job.work, job.costs, job.engine, gpus, held)
    if worker.free_bytes < worker.row_bytes:
        yield (
            f"a rollout worker of {counted(gpus, 'GPU')} needs {memory_size(job.model.weight_bytes)} of weights and "
            f"{memory_size(worker.row_bytes)} for each row, next to {memory_size(held)} of the learner on each GPU, "
            f"and {memory_size(gpus * usable)} are usable; take more GPUs, GPUs with more memory, or lower "
            "sampling.max_new_tokens"
        )
