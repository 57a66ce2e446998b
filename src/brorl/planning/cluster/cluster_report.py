"""A cluster plan as tables, sentences and JSON.

In: a plan. Out: tables, lines of text, a dictionary. Nothing is computed here except ratios and units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from brorl.format import counted, memory_size, plain, short
from brorl.planning.cluster.capacity import Capacity
from brorl.planning.cluster.cluster_plan import MODES, ClusterPlan
from brorl.planning.cluster.scaling import PAYING, SimulatedStep
from brorl.planning.cluster.unit_costs import CASES, UnitCost
from brorl.storage import json_ready
from brorl.table import Table

NOT_MEASURED = (
    "No figure of a GPU was measured by this project. Fractions of the hardware's figures are assumed ranges."
)


def tables(plan: ClusterPlan) -> list[Table]:
    """Return all tables of a plan."""
    return [phase_table(plan), scaling_table(plan), saving_table(plan), memory_table(plan), cost_table(plan)]


def work_line(plan: ClusterPlan) -> str:
    """Return the work of a step on one line."""
    work = plan.job.work
    return (
        f"a step: {work.prompts} prompts x {work.rollouts} rollouts, {plain(work.prompt_tokens)} prompt tokens, "
        f"{plain(work.lengths.mean)} response tokens on average and at most {plain(work.lengths.limit)}; "
        f"{plain(work.sampled_groups, 3)} groups sampled ({work.kept_fraction:.0%} kept), "
        f"{short(work.sampled_tokens)} tokens, {work.distinct_fraction:.3g} of them distinct"
    )


def phase_table(plan: ClusterPlan) -> Table:
    """Return the seconds of a step by phase, for every way to use the GPUs."""
    rows = []
    for way in plan.ways:
        phases = [_range(*(getattr(way.cases[c], p) for c in ("best", "worst"))) for p in _PHASES]
        rows.append((_way(way), *phases, _range(way.total("best"), way.total("worst"))))
    return Table(
        f"Seconds of a step on {plan.cluster.name}, without waiting",
        ("", "sample", "verify", "train", "transfer", "step"),
        tuple(rows) or (("does not fit", *[""] * 5),),
        notes=("Ranges: the best and the worst end of all assumed unit costs.",),
        strong=frozenset({0} if rows else ()),
    )


def scaling_table(plan: ClusterPlan) -> Table:
    """Return the simulated seconds per step, the useful fraction and the gain of each doubling, by number of GPUs."""
    by_size: dict[int, dict[str, SimulatedStep]] = {}
    for mode, rows in plan.scaling.items():
        for row in rows:
            by_size.setdefault(row.num_gpus, {})[mode] = row
    cells = []
    for size in sorted(by_size):
        line = [f"{size:,}"]
        for mode in MODES:
            found = by_size[size].get(mode)
            line += ["-", "", ""] if found is None else [
                _rounded(found.result.seconds),
                f"{found.useful_fraction:.0%}",
                "" if found.gain is None else f"{found.gain:.2f}",
            ]  # fmt: skip
        cells.append(tuple(line))
    return Table(
        f"Simulated steps on {plan.cluster.gpu.name}s, with waiting",
        ("GPUs", "sync: s", "useful", "gain", "async: s", "useful", "gain"),
        tuple(cells) or (("none fits", *[""] * 6),),
        notes=(
            "In the middle of the assumed ranges. Useful: fraction of the GPUs' time in operations of the learner "
            "and in decoding with full batches. Gain: times faster than half as many GPUs.",
        ),
        strong=frozenset(i for i, size in enumerate(sorted(by_size)) if size == plan.cluster.num_gpus),
    )


def saving_table(plan: ClusterPlan) -> Table:
    """Return the GPU-hours of a step with a part of the sharing."""
    rows = (
        (
            f"N = {s.rollouts}: {s.name}",
            f"{s.distinct_fraction:.3g}",
            *("-" if v is None else plain(v) for v in (s.native, s.vllm, s.training)),
        )
        for s in plan.savings
    )
    return Table(
        f"GPU-hours of a step on {plan.cluster.name} by what rollouts share",
        ("shared", "distinct", "sample: native", "sample: vllm", "train"),
        tuple(rows),
    )


def memory_table(plan: ClusterPlan) -> Table:
    """Return the memory of a learner rank and of a rollout worker, for the fastest way of each placement."""
    rows = []
    seen = set()
    for way in plan.ways:
        if way.placement in seen:
            continue
        seen.add(way.placement)
        worker = way.worker
        rows.append(
            (
                way.placement,
                f"{memory_size(way.learner.state_bytes)} + {memory_size(way.learner.pass_bytes)}",
                memory_size(plan.job.model.weight_bytes / worker.gpus),
                memory_size(worker.free_bytes / worker.gpus),
                f"{worker.slots:,}",
            )
        )
    usable = plan.job.costs.memory.best * plan.job.costs.memory_fraction.best
    return Table(
        f"Memory of each GPU ({memory_size(usable)} usable)",
        ("", "learner: state + pass", "engine: weights", "K/V", "rows of a worker"),
        tuple(rows) or (("does not fit", *[""] * 4),),
    )


def cost_table(plan: ClusterPlan) -> Table:
    """Return the unit costs with their origins."""
    rows = tuple((cost.name, cost_text(cost), cost.origin) for cost in plan.job.costs.all)
    given = tuple((name.replace("_", " "), _quantity(plan, name), origin) for name, origin in _origins(plan))
    return Table("Unit costs", ("", "best to worst", "origin"), rows + given, words=frozenset({0, 2}))


def advice(plan: ClusterPlan) -> list[str]:
    """Return the recommendation, its limits, and the fixes where the job does not fit."""
    if not plan.ways:
        return [f"The step does not fit on {plan.cluster.name}.", *plan.problems]
    return [*_recommendation(plan), *_limit_of_scaling(plan), NOT_MEASURED]


def _recommendation(plan: ClusterPlan) -> Iterator[str]:
    simulated = plan.simulated
    if not simulated:
        return
    best = min(simulated.values(), key=lambda row: row.result.seconds)
    way = best.capacity
    waiting = best.result.seconds / way.seconds
    yield (
        f"On {plan.cluster.name} a step takes about {_rounded(best.result.seconds)} s "
        f"({_range(waiting * way.total('best'), waiting * way.total('worst'))} over the assumed ranges) {_way(way)}, "
        f"with {counted(way.num_workers, 'rollout worker')} of {counted(way.worker.gpus, 'GPU')} and "
        f"{counted(way.learner.ranks, 'learner rank')}. The useful fraction of the GPUs is {best.useful_fraction:.0%}."
    )
    for mode, row in simulated.items():
        if row is not best:
            yield f"{mode.capitalize()}, it takes about {_rounded(row.result.seconds)} s: {_way(row.capacity)}."


def _limit_of_scaling(plan: ClusterPlan) -> Iterator[str]:
    for mode in MODES:
        rows, last = plan.scaling[mode], plan.last_paying[mode]
        if last is None:
            continue
        next_row = next((row for row in rows if row.gain is not None and row.num_gpus > last), None)
        if next_row is None:
            yield f"{mode}: every doubling up to {last:,} GPUs makes a step at least {PAYING} times faster."
        else:
            yield (
                f"{mode}: doublings pay up to {last:,} GPUs (at least {PAYING} times faster); from there to "
                f"{next_row.num_gpus:,} a step gets {next_row.gain:.2f} times faster."
            )


def cluster_record(plan: ClusterPlan) -> dict[str, Any]:
    """Return the content of `plan.json`."""
    work, job = plan.job.work, plan.job
    quantities = {name: value for name, value in vars(work).items() if name not in ("lengths", "origins")}
    record = {
        "model": plan.name,
        "shape": {**asdict(job.model), "kv_bytes": job.model.kv_bytes},
        "cluster": {"num_gpus": plan.cluster.num_gpus, "gpu": asdict(plan.cluster.gpu)},
        "engine": job.engine,
        "work": {
            **quantities,
            "mean_length": work.lengths.mean,
            "max_length": work.lengths.limit,
            "length_spread": work.lengths.spread,
            "truncation_rate": work.lengths.truncation_rate,
            "sampled_groups": work.sampled_groups,
            "sampled_tokens": work.sampled_tokens,
            "trained_tokens": work.trained_tokens,
            "origins": work.origins,
        },
        "unit_costs": [asdict(cost) for cost in job.costs.all],
        "ways": [_way_record(way) for way in plan.ways],
        "scaling": {mode: [_step_record(row) for row in rows] for mode, rows in plan.scaling.items()},
        "last_paying": dict(plan.last_paying),
        "simulation": asdict(plan.settings),
        "savings": [asdict(saving) for saving in plan.savings],
        "lines": advice(plan),
    }
    found: dict[str, Any] = json_ready(record)
    return found


def _way_record(way: Capacity) -> dict[str, Any]:
    return {
        "placement": way.placement,
        "mode": way.mode,
        "rollout_workers": way.num_workers,
        "gpus_per_rollout_worker": way.worker.gpus,
        "learner_ranks": way.learner.ranks,
        "rows_of_a_worker": way.worker.slots,
        "learner_state_bytes": way.learner.state_bytes,
        "learner_pass_bytes": way.learner.pass_bytes,
        "seconds": {case: {**asdict(way.cases[case]), "total": way.total(case)} for case in CASES},
    }


def _step_record(row: SimulatedStep) -> dict[str, Any]:
    return {
        "num_gpus": row.num_gpus,
        "placement": row.capacity.placement,
        "rollout_workers": row.capacity.num_workers,
        "learner_ranks": row.capacity.learner.ranks,
        "seconds_without_waiting": row.capacity.seconds,
        "useful_fraction": row.useful_fraction,
        "gain": row.gain,
        **asdict(row.result),
    }


_PHASES = ("generation", "verification", "training", "transfer")
_SHOWN = ("prompt_tokens", "mean_length", "distinct_fraction", "response_fraction", "kept_fraction")


def _origins(plan: ClusterPlan) -> Iterator[tuple[str, str]]:
    return ((name, plan.job.work.origins[name]) for name in _SHOWN if name in plan.job.work.origins)


def _quantity(plan: ClusterPlan, name: str) -> str:
    work = plan.job.work
    return plain(work.lengths.mean if name == "mean_length" else getattr(work, name))


def _way(way: Capacity) -> str:
    split = "" if way.placement == "colocated" else f" {way.num_workers * way.worker.gpus}+{way.learner.ranks}"
    return f"{way.placement}{split}, {way.mode}"


def _range(best: float, worst: float) -> str:
    """Return a range with two significant digits, which is all that assumed shares allow."""
    low, high = plain(best, 2), plain(worst, 2)
    return low if low == high else f"{_rounded(best)}-{_rounded(worst)}"


def _rounded(value: float) -> str:
    """Return a number with two significant digits."""
    return plain(float(f"{value:.2g}"))


def cost_text(cost: UnitCost) -> str:
    """Return a unit cost with its range and its unit."""
    largest = max(cost.best, cost.worst)
    size, prefix = next(((s, name) for s, name in ((1e12, "T"), (1e9, "G")) if largest >= s), (1.0, ""))
    texts = [plain(value / size) for value in dict.fromkeys((cost.best, cost.worst))]
    return f"{' to '.join(texts)} {prefix}{cost.unit}".strip()
