"""The charts of the page; `charts.toml` has their words, and the numbers that simple ones draw.

A chart without numbers gives the reason.
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
    by_source = lines(runs, {source: _estimate("by_source", source, "1") for source in sources})
    terms = {name: f"sampling.terms.{name}" for name in _terms(runs)}
    pass_1, coverage = (lines(runs, _pass_at(runs, str(k))) for k in (1, largest_k))
    reward = chart("reward", reasons.why_no_step)
    return [
        replace(reward, traces=traces.smoothed(runs, reward.traces)),
        *([chart("terms", reasons.why_no_step, lines(runs, terms))] if terms else []),
        chart("pass1", reasons.why_no_evaluation, pass_1),
        *([chart("coverage", reasons.why_no_evaluation, coverage, k=largest_k)] if largest_k > 1 else []),
        chart("passk", reasons.why_no_evaluation, traces.pass_at_curves(runs)),
        chart("held-out", reasons.why_no_change, traces.held_out_points(runs)),
        *([chart("sources", reasons.why_no_evaluation, by_source)] if sources else []),
        replace(chart("success", reasons.why_no_coverage, ()), histogram=traces.success_histogram(runs)),
    ]


def coverage_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the responses that N rollouts per prompt found and missed."""
    chart = partial(_chart, runs)
    mixed_by_n = traces.against_n(runs, "informative_fraction_at", "mixed groups")
    unsampled_by_n = traces.against_n(runs, "unsampled_correct_at", "new correct response")
    return [
        chart("informative", reasons.why_no_step, traces.mixed_lines(runs)),
        chart("informative-n", reasons.why_no_smaller_n, mixed_by_n),
        chart("unsampled", reasons.why_no_coverage),
        chart("unsampled-n", reasons.why_no_estimate, unsampled_by_n),
        chart("held_out_check", reasons.why_no_held_out_check),
        chart("improved", partial(reasons.why_no_held_out_check, name="fraction_improved")),
    ]


def cost_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the cost: sharing, time, dropped rollouts, lengths, failed verifications."""
    chart = partial(_chart, runs, why=reasons.why_no_step)
    lost, dropped, steps = chart("lost"), chart("dropped"), sum(len(run.steps) for run in runs)
    if steps and not any(value for trace in lost.traces for value in trace["y"]):
        lost = replace(lost, traces=(), empty=f"No verification timed out or failed in {counted(steps, 'step')}.")
    return [
        chart("sharing"),
        _seconds_chart(runs),
        *([dropped] if dropped.traces else []),  # older metrics do not count dropped rollouts
        chart("length"),
        chart("truncated"),
        lost,
    ]


def optimization_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the policy's changes: entropy, KL, clipping, gradients."""
    return [_chart(runs, name, reasons.why_no_update) for name in ("entropy", "kl", "clip", "gradient")]


@cache
def _texts() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resource("charts.toml"))


def _chart(runs: Sequence[RunRecord], name: str, why: Why, drawn: tuple[Trace, ...] | None = None, k: int = 1) -> Chart:
    """Return a chart as `charts.toml` describes it, with its lines there if nothing else is `drawn`."""
    texts = _texts()[name]
    drawn = lines(runs, texts["lines"]) if drawn is None else drawn
    title, explanation, y = (texts[key].format(k=k, last=LAST_STEPS) for key in ("title", "explanation", "y"))
    percent = {"tickformat": ".3~%"} if texts.get("percent") else {}
    layout: dict[str, Any] = {"yaxis": {"title": {"text": y}, "rangemode": "tozero"} | percent}
    if "x" in texts:
        layout["xaxis"] = {"title": {"text": texts["x"]}, "type": "log", "dtick": 0.30103}
    if shape := texts.get("no_change"):
        layout["shapes"] = [{"type": "line", "line": {"width": 1}, "name": "no change", "showlegend": True, **shape}]
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
    chart = _chart(runs, "seconds", reasons.why_no_step, tuple(drawn))
    if len(runs) == 1:
        return chart
    layout = chart.layout | {"barmode": "stack", "xaxis": {"type": "category"}}
    return replace(chart, explanation=f"Mean s{chart.explanation[1:]}", layout=layout, by_progress=False)


def _terms(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the further terms of the reward, sorted."""
    return sorted(
        {name for run in runs for record in run.records for name in record.get("sampling", {}).get("terms", {})}
    )


def _pass_at(runs: Sequence[RunRecord], k: str) -> dict[str, Quantity]:
    """Return where pass@k of the weights, and of averaged ones if there are any, stands in a metrics record."""
    found = {f"pass@{k} with 95% interval": _estimate("pass_at", k)}
    if any("ema_evaluation" in record for run in runs for record in run.records):
        found["averaged weights"] = _estimate("pass_at", k, of="ema_evaluation")
    return found


def _estimate(*path: str, of: str = "evaluation") -> Quantity:
    """Return where the value and the ends of an estimate of an evaluation stand in a metrics record."""
    return [(of, *path, end) for end in ("value", "low", "high")]
