"""A cluster plan as tables, sentences, JSON and a figure. Nothing is computed here except ratios and units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brorl.format import counted, memory_size, plain, short
from brorl.planning.cluster.cluster_plan import MODES, PAYING, ClusterPlan, GpuAllocation, Mode, SimulatedStep
from brorl.planning.cluster.hardware import CASES, UnitCost
from brorl.storage import json_ready
from brorl.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_MEASURED = (
    "No figure of a GPU was measured by this project. Fractions of the hardware's figures are assumed ranges."
)
_PHASES = ("generation", "verification", "training", "transfer")
_SHOWN = ("prompt_tokens", "mean_length", "distinct_fraction", "response_fraction", "kept_fraction")
_COLORS: dict[Mode, str] = {"sync": "#1f5fa8", "async": "#d9822b"}
_GREY = "#8a8f98"


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
        best, worst = way.cases["best"], way.cases["worst"]
        phases = (_range(getattr(best, phase), getattr(worst, phase)) for phase in _PHASES)
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
    by_size = {mode: {row.num_gpus: row for row in plan.scaling[mode]} for mode in MODES}
    sizes = sorted({size for rows in by_size.values() for size in rows})
    cells = tuple((f"{size:,}", *(cell for mode in MODES for cell in _step(by_size[mode].get(size)))) for size in sizes)
    return Table(
        f"Simulated steps on {plan.cluster.gpu.name}s, with waiting",
        ("GPUs", "sync: s", "useful", "gain", "async: s", "useful", "gain"),
        cells or (("none fits", *[""] * 6),),
        notes=(
            "In the middle of the assumed ranges. Useful: fraction of the GPUs' time in operations of the learner "
            "and in decoding with full batches. Gain: times faster than half as many GPUs.",
        ),
        strong=frozenset(i for i, size in enumerate(sizes) if size == plan.cluster.num_gpus),
    )


def _step(row: SimulatedStep | None) -> tuple[str, str, str]:
    if row is None:
        return "-", "", ""
    return _rounded(row.result.seconds), f"{row.useful_fraction:.0%}", "" if row.gain is None else f"{row.gain:.2f}"


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
    fastest = {way.placement: way for way in reversed(plan.ways)}
    rows = tuple(
        (
            way.placement,
            f"{memory_size(way.learner.state_bytes)} + {memory_size(way.learner.pass_bytes)}",
            memory_size(plan.job.model.weight_bytes / way.worker.gpus),
            memory_size(way.worker.free_bytes / way.worker.gpus),
            f"{way.worker.slots:,}",
        )
        for way in plan.ways
        if way is fastest[way.placement]
    )
    return Table(
        f"Memory of each GPU ({memory_size(plan.job.costs.usable_bytes)} usable)",
        ("", "learner: state + pass", "engine: weights", "K/V", "rows of a worker"),
        rows or (("does not fit", *[""] * 4),),
    )


def cost_table(plan: ClusterPlan) -> Table:
    """Return the unit costs with their origins."""
    rows = [(cost.name, cost_text(cost), cost.origin) for cost in plan.job.costs.all]
    values = {**vars(plan.job.work), "mean_length": plan.job.work.lengths.mean}
    origins = plan.job.work.origins
    rows += [(name.replace("_", " "), plain(values[name]), origins[name]) for name in _SHOWN if name in origins]
    return Table("Unit costs", ("", "best to worst", "origin"), tuple(rows), words=frozenset({0, 2}))


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
    way = best.way
    waiting = best.result.seconds / way.seconds
    yield (
        f"On {plan.cluster.name} a step takes about {_rounded(best.result.seconds)} s "
        f"({_range(waiting * way.total('best'), waiting * way.total('worst'))} over the assumed ranges) {_way(way)}, "
        f"with {counted(way.num_workers, 'rollout worker')} of {counted(way.worker.gpus, 'GPU')} and "
        f"{counted(way.learner.ranks, 'learner rank')}. The useful fraction of the GPUs is {best.useful_fraction:.0%}."
    )
    for mode, row in simulated.items():
        if row is not best:
            yield f"{mode.capitalize()}, it takes about {_rounded(row.result.seconds)} s: {_way(row.way)}."


def _limit_of_scaling(plan: ClusterPlan) -> Iterator[str]:
    for mode in MODES:
        rows, last = plan.scaling[mode], plan.last_paying[mode]
        if last is None:
            continue
        next_row = next((row for row in rows if row.gain is not None and row.num_gpus == 2 * last), None)
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
    record: dict[str, Any] = json_ready(
        {
            "model": plan.name,
            "shape": {**vars(job.model), "kv_bytes": job.model.kv_bytes},
            "cluster": plan.cluster,
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
            "unit_costs": job.costs.all,
            "ways": [_way_record(way) for way in plan.ways],
            "scaling": {mode: [_step_record(row) for row in rows] for mode, rows in plan.scaling.items()},
            "last_paying": plan.last_paying,
            "simulation": plan.settings,
            "savings": plan.savings,
            "lines": advice(plan),
        }
    )
    return record


def _way_record(way: GpuAllocation) -> dict[str, Any]:
    return {
        "placement": way.placement,
        "mode": way.mode,
        "rollout_workers": way.num_workers,
        "gpus_per_rollout_worker": way.worker.gpus,
        "learner_ranks": way.learner.ranks,
        "rows_of_a_worker": way.worker.slots,
        "learner_state_bytes": way.learner.state_bytes,
        "learner_pass_bytes": way.learner.pass_bytes,
        "seconds": {case: {**vars(way.cases[case]), "total": way.total(case)} for case in CASES},
    }


def _step_record(row: SimulatedStep) -> dict[str, Any]:
    return {
        "num_gpus": row.num_gpus,
        "placement": row.way.placement,
        "rollout_workers": row.way.num_workers,
        "learner_ranks": row.way.learner.ranks,
        "seconds_without_waiting": row.way.seconds,
        "useful_fraction": row.useful_fraction,
        "gain": row.gain,
        **vars(row.result),
    }


def draw_cluster_plan(plan: ClusterPlan, path: Path) -> None:
    """Draw the plan as a PNG: seconds, useful fraction and gain of a step against the number of GPUs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, PercentFormatter

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    seconds, useful, gain = figure.subplots(1, 3)
    numbers = sorted({row.num_gpus for rows in plan.scaling.values() for row in rows})
    for axis in (seconds, useful, gain):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel(f"number of {plan.cluster.gpu.name}s")
        if numbers:
            axis.set_xscale("log", base=2)
            axis.set_xticks(numbers, [str(n) for n in numbers], fontsize=8)
            axis.set_xlim(numbers[0] / 1.3, numbers[-1] * 1.3)
        axis.xaxis.set_minor_locator(NullLocator())
    _draw(
        seconds,
        plan,
        lambda row: row.result.seconds,
        "Seconds of a step\n(simulated; bands: assumed ranges, without waiting)",
    )
    if numbers:
        seconds.set_yscale("log")
        rows = plan.scaling["sync"] or plan.scaling["async"]
        ideal = [rows[0].result.seconds * rows[0].num_gpus / row.num_gpus for row in rows]
        seconds.plot([row.num_gpus for row in rows], ideal, "--", color=_GREY, linewidth=1, label="ideal")
        for mode in MODES:
            best, worst = ([row.way.total(case) for row in plan.scaling[mode]] for case in (CASES[0], CASES[-1]))
            sizes = [row.num_gpus for row in plan.scaling[mode]]
            seconds.fill_between(sizes, best, worst, color=_COLORS[mode], alpha=0.15)
    seconds.legend(frameon=False)
    _draw(useful, plan, lambda row: row.useful_fraction, "Useful fraction of the GPUs")
    useful.set_ylim(0, 1.05)
    useful.yaxis.set_major_formatter(PercentFormatter(1.0))
    title = f"Times faster than half as many GPUs\n(dashed: a doubling pays above {PAYING})"
    _draw(gain, plan, lambda row: row.gain, title)
    gain.axhline(PAYING, color=_GREY, linewidth=1, linestyle="--")
    gain.set_ylim(0.9, 2.4)
    work = plan.job.work
    figure.suptitle(
        f"{plan.name}, {plan.job.engine} engine: {work.prompts} prompts x {work.rollouts} rollouts x "
        f"{work.lengths.mean:,.0f} tokens (computed from published and assumed unit costs; no GPU was measured)",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw(axis: Axes, plan: ClusterPlan, value: Callable[[SimulatedStep], float | None], title: str) -> None:
    """Draw a line of values for each mode; those that are None are left out."""
    for mode in MODES:
        points = {row.num_gpus: number for row in plan.scaling[mode] if (number := value(row)) is not None}
        axis.plot(list(points), list(points.values()), "-o", color=_COLORS[mode], label=mode, markersize=4)
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False)


def _way(way: GpuAllocation) -> str:
    split = "" if way.placement == "colocated" else f" {way.num_workers * way.worker.gpus}+{way.learner.ranks}"
    return f"{way.placement}{split}, {way.mode}"


def _range(best: float, worst: float) -> str:
    """Return a range with two significant digits; assumed values allow no more."""
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
