"""The charts of the page; their titles and explanations are in `charts.toml`.

In: runs. Out: charts of plotly traces. A chart without numbers gives the reason.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

from brorl.format import counted
from brorl.reporting import reasons
from brorl.reporting.page import traces
from brorl.reporting.page.embedding import resource
from brorl.reporting.page.traces import LAST_STEPS, Quantity, Trace, lines
from brorl.reporting.reasons import Why, reason
from brorl.runs.run_record import RunRecord, number

_PHASES = ("generation", "verification", "training", "diagnostics", "storing")


@dataclass(frozen=True)
class Chart:
    """A chart of the page, or the reason why it is empty."""

    name: str  # its id on the page
    title: str
    explanation: str
    traces: tuple[Trace, ...]
    empty: str
    layout: dict[str, Any]  # of plotly, without colors
    by_progress: bool  # whether x is the course of the run, in a unit that the reader chooses
    marks: bool  # whether resets of the reference, and where a phase begins, are marked
    histogram: dict[str, Any] | None = None  # counts of each step, which the reader chooses with a slider


def learning_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of rewards and held-out scores."""
    chart = partial(_chart, runs)
    evaluations = [r["evaluation"] for run in runs for r in run.evaluations]
    largest_k = max((int(k) for e in evaluations for k in e["pass_at"]), default=1)
    sources = sorted({source for e in evaluations for source in e.get("by_source") or {}})
    by_source = {source: _estimate("by_source", source, "1") for source in sources}
    pass_1, coverage = ({f"pass@{k} with 95% interval": _estimate("pass_at", str(k))} for k in (1, largest_k))
    reward = traces.smoothed(runs, lines(runs, {"mean reward": "sampling.reward"}))
    return [
        chart("reward", reward, reasons.why_no_step),
        chart("pass1", lines(runs, pass_1), reasons.why_no_evaluation),
        *([chart("coverage", lines(runs, coverage), reasons.why_no_evaluation, k=largest_k)] if largest_k > 1 else []),
        chart("passk", traces.pass_at_curves(runs), reasons.why_no_evaluation),
        chart("held-out", traces.held_out_points(runs), reasons.why_no_change),
        *([chart("sources", lines(runs, by_source), reasons.why_no_evaluation)] if sources else []),
        replace(chart("success", (), reasons.why_no_coverage), histogram=traces.success_histogram(runs)),
    ]


def coverage_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the responses that N rollouts per prompt found and missed."""
    chart = partial(_chart, runs)
    mixed_by_n = traces.against_n(runs, "informative_fraction_at", "mixed groups")
    unsampled_by_n = traces.against_n(runs, "unsampled_correct_at", "new correct response")
    unsampled: dict[str, Quantity] = {
        "new response": "coverage.pooled.unsampled",
        "new correct response": "coverage.pooled.unsampled_correct",
    }
    change, improved = (
        lines(runs, {label: [("held_out_check", f"{name}{end}") for end in ("", "_low", "_high")]})
        for label, name in (
            ("change with 95% interval", "change"),
            ("fraction with 95% interval", "fraction_improved"),
        )
    )
    why_no_improved = partial(reasons.why_no_held_out_check, name="fraction_improved")
    return [
        chart("informative", traces.mixed_lines(runs), reasons.why_no_step),
        chart("informative-n", mixed_by_n, reasons.why_no_smaller_n),
        chart("unsampled", lines(runs, unsampled), reasons.why_no_coverage),
        chart("unsampled-n", unsampled_by_n, reasons.why_no_estimate),
        chart("held_out_check", change, reasons.why_no_held_out_check),
        chart("improved", improved, why_no_improved),
    ]


def cost_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the cost: sharing, time, dropped rollouts, lengths, failed verifications."""
    sharing: dict[str, Quantity] = {
        "tokens computed / sampled": ("sampling.unique_tokens", "sampling.sampled_tokens"),
        "responses verified / rollouts": ("sampling.distinct_responses", "sampling.samples"),
    }
    dropped: dict[str, Quantity] = {
        "rollouts": ("sampling.samples_dropped", "sampling.samples"),
        "tokens computed": ("sampling.unique_tokens_dropped", "sampling.unique_tokens"),
    }
    failures: dict[str, Quantity] = {"timed out": "sampling.verifier_timeouts", "failed": "sampling.verifier_failures"}
    lost, steps = lines(runs, failures), sum(len(run.steps) for run in runs)
    chart = partial(_chart, runs, why=reasons.why_no_step)
    lost_chart = chart("lost", lost if any(value for trace in lost for value in trace["y"]) else ())
    if steps:
        lost_chart = replace(lost_chart, empty=f"No verification timed out or failed in {counted(steps, 'step')}.")
    dropped_chart = chart("dropped", lines(runs, dropped))
    return [
        chart("sharing", lines(runs, sharing)),
        _seconds_chart(runs),
        *([dropped_chart] if dropped_chart.traces else []),  # older metrics do not count dropped rollouts
        chart("length", lines(runs, {"mean length": "sampling.mean_length"})),
        chart("truncated", lines(runs, {"cut rollouts": "sampling.truncation_rate"})),
        lost_chart,
    ]


def optimization_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the policy's changes: entropy, KL, clipping, gradients."""
    quantities: dict[str, dict[str, Quantity]] = {
        "entropy": {"entropy": "update.entropy"},
        "kl": {"from the reference": "update.reference_kl", "within the step": "update.old_policy_kl"},
        "clip": {"upper bound": "update.clip_high_fraction", "lower bound": "update.clip_low_fraction"},
        "gradient": {"norm": "update.grad_norm"},
    }
    return [_chart(runs, name, lines(runs, some), reasons.why_no_update) for name, some in quantities.items()]


@cache
def _texts() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resource("charts.toml"))


def _chart(runs: Sequence[RunRecord], name: str, drawn: tuple[Trace, ...], why: Why, k: int = 1) -> Chart:
    """Return a chart with its texts, over the course of the runs unless the texts name another x axis."""
    texts = _texts()[name]
    title, explanation, y = (texts[key].format(k=k, last=LAST_STEPS) for key in ("title", "explanation", "y"))
    percent = {"tickformat": ".3~%"} if texts.get("percent") else {}
    layout: dict[str, Any] = {"yaxis": {"title": {"text": y}, "rangemode": "tozero"} | percent}
    if "x" in texts:
        layout["xaxis"] = {"title": {"text": texts["x"]}, "type": "log", "dtick": 0.30103}
    if place := texts.get("no_change"):
        layout["shapes"] = [{"type": "line", "line": {"width": 1}, "name": "no change", "showlegend": True, **place}]
    layout |= texts.get("layout", {})
    marks = texts.get("marks", False)
    return Chart(name, title, explanation, drawn, reason(runs, why), layout, "x" not in texts, marks)


def _seconds_chart(runs: Sequence[RunRecord]) -> Chart:
    """Return the seconds of each phase: stacked over the steps of one run, or as means of several runs."""
    drawn: list[Trace] = []
    timed = [run for run in runs if run.steps]
    for j, phase in enumerate(_PHASES):
        meta = {"color": f"phase:{j}"}
        if len(runs) == 1:
            records = enumerate(runs[0].records)
            points = [(at, number(r, "seconds", phase) or 0.0) for at, r in records if "sampling" in r]
            if any(value for _, value in points):
                trace = traces.line(runs, 0, phase, 0, points)
                drawn.append({**trace, "stackgroup": "seconds", "line": {"width": 0.5}, "meta": trace["meta"] | meta})
        elif timed:
            names = [traces.plotly_text(run.name) for run in timed]
            means = [fmean([number(r, "seconds", phase) or 0.0 for r in run.steps]) for run in timed]
            drawn.append({"type": "bar", "name": phase, "x": names, "y": means, "meta": meta})
    chart = _chart(runs, "seconds", tuple(drawn), reasons.why_no_step)
    if len(runs) == 1:
        return chart
    layout = chart.layout | {"barmode": "stack", "xaxis": {"type": "category"}}
    return replace(chart, explanation=f"Mean s{chart.explanation[1:]}", layout=layout, by_progress=False)


def _estimate(*path: str) -> Quantity:
    """Return where the value and the ends of an estimate of an evaluation stand in a line of the metrics."""
    return [("evaluation", *path, end) for end in ("value", "low", "high")]
