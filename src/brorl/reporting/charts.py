"""The charts on the page, with text from `charts.toml`. A chart without data states the reason.

The browser adds colors and x values: a trace's `meta` identifies the run, its records, and the role of its color.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import isfinite
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brorl.evaluation.pass_at_k import pass_at_k_of_each
from brorl.format import counted, visible_text
from brorl.reporting.frame import resource
from brorl.reporting.summary import missing_reason
from brorl.runs.run_directory import StoredRun
from brorl.runs.step_record import EvaluationRecord, PooledCoverage, StepRecord

LAST_STEPS = 25
_DASHES = ("solid", "dot", "dash", "dashdot")
_CURVES = 5  # pass@k curves for a single run
_POINT_SIZE = 6.0  # diameter in pixels of a point for one prompt
_PROMPTS_SHOWN = 3  # when the reader hovers over a point
_FEW_ROLLOUTS = 32  # up to this N, the histogram has a bar for each number of correct rollouts

Trace = dict[str, Any]
# The path to a number in a record: dotted, or a tuple if its parts contain dots or are numbers. Two paths form a ratio;
# three are a value and the ends of its interval.
MetricPath = str | tuple[str | int, ...]
Quantity = str | Sequence[MetricPath]


def metric_lines(runs: Sequence[StoredRun], quantities: Mapping[str, Quantity]) -> tuple[Trace, ...]:
    """Return a line for each run and each quantity in its metrics; the keys of `quantities` are legend labels."""
    traces = []
    for i, run in enumerate(runs):
        for j, (label, quantity) in enumerate(quantities.items()):
            rows = [(at, values) for at, r in enumerate(run.records) if (values := _values(r, quantity))]
            if rows:
                shown = label if len(quantities) > 1 or len(runs) == 1 else ""
                trace = run_line(runs, i, shown, j, [(at, values[0]) for at, values in rows])
                bars = [values[1:] for _, values in rows]
                traces.append(_with_bars(trace, bars) if bars[0] else trace)
    return tuple(traces)


def _values(record: StepRecord, quantity: Quantity) -> list[float]:
    """Return a quantity, with the ends of its interval if it has one; empty if any part is missing from the record.

    A step that used only carried groups sampled nothing, so it has no means over rollouts.
    """
    names = [quantity] if isinstance(quantity, str) else quantity
    nothing_sampled = record.sampling is not None and record.sampling.samples == 0
    if nothing_sampled and any(str(name).startswith("sampling.") for name in names):
        return []
    numbers = [_number(record, name.split(".") if isinstance(name, str) else name) for name in names]
    values = [value for value in numbers if value is not None]
    if len(values) < len(numbers):
        return []
    if len(values) == 2:
        return [values[0] / values[1]] if values[1] else []
    return values


def _number(record: StepRecord, path: Sequence[str | int]) -> float | None:
    """Return the number at a path of fields and keys; None if it is missing or not finite."""
    value: Any = record
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, str(part), None)
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def run_line(runs: Sequence[StoredRun], i: int, label: str, j: int, points: Sequence[tuple[int, float]]) -> Trace:
    """Return a line of quantity `j` over the course of run `i`; points are (index of the metrics record, value)."""
    several = len(runs) > 1
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        "name": plotly_text(" · ".join(part for part in (runs[i].name if several or not label else "", label) if part)),
        "y": [value for _, value in points],
        "line": {"width": 2, "dash": _DASHES[j % len(_DASHES)] if several else "solid"},
        "meta": {"run": i, "at": [at for at, _ in points], "color": f"run:{i}" if several else f"quantity:{j}"},
    }


def _scatter(name: str, x: Sequence[float], y: Sequence[float], color: str, mode: str = "lines+markers") -> Trace:
    """Return a trace with explicit x values."""
    return {"type": "scatter", "mode": mode, "name": plotly_text(name), "x": x, "y": y, "meta": {"color": color}}


def _with_bars(trace: Trace, ends: Sequence[Sequence[float]]) -> Trace:
    """Add an interval to each point of a trace."""
    pairs = list(zip(trace["y"], ends, strict=True))
    up, down = [high - y for y, (_, high) in pairs], [y - low for y, (low, _) in pairs]
    error_y = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}
    return {**trace, "mode": "lines+markers", "error_y": error_y}


def smoothed(runs: Sequence[StoredRun], traces: Sequence[Trace]) -> tuple[Trace, ...]:
    """Make each line thin and pale and add its moving mean in bold; lines with few points are unchanged."""
    made: list[Trace] = []
    for trace in traces:
        y = trace["y"]
        reach = max(len(y) // 40, 2)  # steps on either side
        if len(y) < 4 * reach:
            made.append(trace)
            continue
        name = f"{trace['name']}: " if len(runs) > 1 else ""
        thin, bold = ({**trace["line"], "width": width} for width in (1, 2.5))
        made.append({**trace, "line": thin, "opacity": 0.4, "name": f"{name}each step"})
        means = [fmean(y[max(at - reach, 0) : at + reach + 1]) for at in range(len(y))]
        made.append({**trace, "y": means, "line": bold, "name": f"{name}mean of {2 * reach + 1} steps"})
    return tuple(made)


def pass_at_curves(runs: Sequence[StoredRun]) -> tuple[Trace, ...]:
    """Return pass@k curves: evenly spaced evaluations of one run, the first and the last of several."""
    traces = []
    for i, run in enumerate(runs):
        maximum = min(len(run.evaluations), _CURVES if len(runs) == 1 else 2)
        indices = sorted({round(c * (len(run.evaluations) - 1) / max(maximum - 1, 1)) for c in range(maximum)})
        for c, index in enumerate(indices, 1):
            record = run.evaluations[index]
            name = ""
            color = sequence_color(c, len(indices))
            dash = "solid"
            if len(runs) > 1:
                name, color, dash = f"{run.name} · ", f"run:{i}", "solid" if index == indices[-1] else "dot"
            assert record.evaluation is not None
            traces += _pass_at_curve(record.evaluation, f"{name}step {record.step}", color, dash)
    return tuple(traces)


def _pass_at_curve(evaluation: EvaluationRecord, name: str, color: str, dash: str) -> list[Trace]:
    """Return points with intervals at the reported k and, if counts are stored, a line through more values of k."""
    rows = sorted((k, p.value, p.low, p.high) for k, p in evaluation.pass_at.items())
    shared = {"line": {"width": 2, "dash": dash}, "legendgroup": plotly_text(name)}
    points = _scatter(name, [r[0] for r in rows], [r[1] for r in rows], color) | shared
    points = _with_bars(points, [r[2:] for r in rows])
    correct = evaluation.prompts.num_correct
    if not correct:
        return [points]
    verified = _verified(evaluation)
    ks = sorted({k for k, *_ in rows} | {2**e for e in range(int(verified.max()).bit_length())})
    means = [float(pass_at_k_of_each(np.array(correct), verified, k).mean()) for k in ks]
    return [{**points, "mode": "markers", "showlegend": False}, _scatter(name, ks, means, color, "lines") | shared]


def _verified(evaluation: EvaluationRecord) -> NDArray[np.int64]:
    """Return the number of verified responses to each held-out prompt, shape [P]."""
    prompts = evaluation.prompts
    lost = prompts.num_unverified or [0] * len(prompts.num_correct)
    return np.asarray(evaluation.num_samples - np.array(lost, np.int64))


def held_out_points(runs: Sequence[StoredRun]) -> tuple[Trace, ...]:
    """Return each held-out prompt's fraction of correct responses at the first and last evaluations.

    Prompts with the same two fractions share a point, whose area is proportional to their number.
    """
    traces = []
    for i, run in enumerate(runs):
        ends = [r.evaluation for r in (*run.evaluations[:1], *run.evaluations[-1:]) if r.evaluation]
        correct = [evaluation.prompts.num_correct for evaluation in ends]
        if len(run.evaluations) < 2 or not all(correct) or len(correct[0]) != len(correct[1]):
            continue
        x, y = ((np.array(c) / np.maximum(_verified(e), 1)).tolist() for c, e in zip(correct, ends, strict=True))
        places: dict[tuple[float, float], list[int]] = {}
        for prompt, place in enumerate(zip(x, y, strict=True)):
            places.setdefault(place, []).append(prompt)
        questions = _differing(run.held_out) if len(run.held_out) == len(x) else []
        texts = [_prompts_text(questions, prompts) for prompts in places.values()]
        hover = {"text": texts, "hovertemplate": "%{text}<br>%{x:.1%} before, %{y:.1%} after<extra></extra>"}
        marker = {"marker": {"size": [_POINT_SIZE * len(prompts) ** 0.5 for prompts in places.values()]}}
        name = run.name if len(runs) > 1 else "held-out prompts"
        points = _scatter(name, [x for x, _ in places], [y for _, y in places], f"run:{i}", "markers")
        traces.append(points | hover | marker | {"opacity": 0.6, "cliponaxis": False})
    return tuple(traces)


def _differing(texts: Sequence[str]) -> list[str]:
    """Strip the prompts' common beginning and end, such as the system prompt and the template."""
    if len(texts) < 2:
        return list(texts)
    start = _common(texts)
    end = _common([text[:start:-1] for text in texts])
    return [text[start : len(text) - end] for text in texts]


def _common(texts: Sequence[str]) -> int:
    """Return the length of the longest common prefix, which the first and last text in sorted order determine."""
    low, high = min(texts), max(texts)
    return next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))


def _prompts_text(questions: Sequence[str], prompts: Sequence[int]) -> str:
    """Return the number of the given held-out prompts, and the ends of the first few if known."""
    shown = [questions[prompt].strip()[-80:] for prompt in prompts[:_PROMPTS_SHOWN]] if questions else []
    lines = [counted(len(prompts), "prompt"), *(plotly_text(visible_text(text, one_line=True)) for text in shown)]
    return "<br>".join(lines + ["..."] * (0 < len(shown) < len(prompts)))


def mixed_lines(runs: Sequence[StoredRun]) -> tuple[Trace, ...]:
    """Return the fraction of mixed groups by step, and what it would have been with smaller N."""
    several = len(runs) > 1
    traces = list(metric_lines(runs, {"" if several else "all rollouts": ("sampling.groups_mixed", "sampling.groups")}))
    for i, run in enumerate(runs):
        pooled = [record.coverage.pooled if record.coverage else PooledCoverage() for record in run.records]
        by_number = [coverage.mixed_fraction_at for coverage in pooled]
        smaller = sorted(set().union(*by_number))[:-1]
        for n in {16} if several else (16, 64, 256):
            if n in smaller:
                points = [(at, fractions[n]) for at, fractions in enumerate(by_number) if n in fractions]
                trace = run_line(runs, i, f"N = {n}", 1, points)
                trace["meta"]["color"] = f"run:{i}"
                traces.append(trace)
    if not several:  # order by N, with all rollouts last
        for place, trace in enumerate([*traces[1:], *traces[:1]], 1):
            trace["meta"]["color"] = sequence_color(place, len(traces))
    return tuple(traces)


def sequence_color(place: int, number: int) -> str:
    """Return the color role of a line by its place (from 1) among ordered lines; a single line gets the last color."""
    return f"sequence:{(place - 1) / (number - 1) if number > 1 else 1.0:.3f}"


def against_n(runs: Sequence[StoredRun], name: str, label: str) -> tuple[Trace, ...]:
    """Return a pooled coverage estimate by N, averaged over the groups of the last steps."""
    traces = []
    for i, run in enumerate(runs):
        steps = [(r.sampling.groups, getattr(r.coverage.pooled, name)) for r in run.steps if r.sampling and r.coverage]
        last = [(groups, values) for groups, values in steps if values][-LAST_STEPS:]
        if last:
            numbers = sorted(set.intersection(*(set(values) for _, values in last)))
            weight = sum(groups for groups, _ in last)
            means = [sum(groups * values[n] for groups, values in last) / weight for n in numbers]
            trace = _scatter(run.name if len(runs) > 1 else label, numbers, means, f"run:{i}")
            traces.append({**trace, "line": {"width": 2}})
    return tuple(traces)


def success_histogram(runs: Sequence[StoredRun]) -> dict[str, Any] | None:
    """Count each step's prompts by their number or fraction of correct rollouts; None if there is no data.

    `labels` names the B bars; each run has `steps`, and `counts` of shape [steps, B].
    """
    measured = [
        [
            (r.step, np.array(r.coverage.prompts.num_correct), np.array(r.coverage.prompts.num_rollouts))
            for r in run.steps
            if r.coverage and r.coverage.prompts.num_rollouts
        ]
        for run in runs
    ]
    sizes = {int(n) for steps in measured for *_, num_rollouts in steps for n in num_rollouts}
    if not sizes:
        return None
    maximum = max(sizes)
    single = len(sizes) == 1 and maximum <= _FEW_ROLLOUTS
    fractions = ["0", *(f"≤{10 * i}" for i in range(1, 10)), "<100", "100"]
    labels = [str(k) for k in range(maximum + 1)] if single else fractions

    def count(num_correct: NDArray[np.int64], num_rollouts: NDArray[np.int64]) -> list[int]:
        # Each tenth includes its upper end; the last bar counts prompts whose rollouts are all correct.
        tenth = -(-10 * num_correct // num_rollouts) + (num_correct == num_rollouts)
        counts: list[int] = np.bincount(num_correct if single else tenth, minlength=len(labels)).tolist()
        return counts

    bars = [{"steps": [step for step, *_ in steps], "counts": [count(k, n) for _, k, n in steps]} for steps in measured]
    unit = f"correct rollouts of {maximum}" if single else "fraction of correct rollouts, %"
    return {"labels": labels, "unit": unit, "runs": bars}


def plotly_text(text: str) -> str:
    """Escape HTML, because plotly interprets some of it in text."""
    return escape(text, quote=False)


_STAGES = ("generation", "verification", "training", "diagnostics", "storing")


@dataclass(frozen=True)
class Chart:
    """A chart on the page, or the reason it is empty."""

    name: str  # its id on the page
    title: str
    explanation: str
    traces: tuple[Trace, ...]
    empty: str
    layout: dict[str, Any]  # plotly layout, without colors
    by_progress: bool  # whether x is the run's progress, in a unit chosen by the reader
    marks: bool  # whether reference resets and phase starts are marked
    histogram: dict[str, Any] | None = None  # counts by step, for a slider over steps


def charts_of(runs: Sequence[StoredRun]) -> dict[str, list[Chart]]:
    """Return the runs' charts by page section, in the order of `charts.toml`."""
    sections: dict[str, list[Chart]] = {}
    for name, texts in tomllib.loads(resource("charts.toml")).items():
        chart = _chart(runs, name, texts)
        if chart.traces or not texts.get("optional"):
            sections.setdefault(texts["section"], []).append(chart)
    return sections


def _chart(runs: Sequence[StoredRun], name: str, texts: Mapping[str, Any]) -> Chart:
    """Return a chart with the lines and text from `charts.toml`, changed by its entry in `_SPECIAL`."""
    k = max((k for run in runs for r in run.evaluations if r.evaluation for k in r.evaluation.pass_at), default=1)
    special = _SPECIAL.get(name, _Special())
    title, explanation, y = (texts[key].format(k=k, last=LAST_STEPS) for key in ("title", "explanation", "y"))
    percent = {"tickformat": ".3~%"} if texts.get("percent") else {}
    layout: dict[str, Any] = {"yaxis": {"title": {"text": y}, "rangemode": "tozero"} | percent}
    if "x" in texts:
        layout["xaxis"] = {"title": {"text": texts["x"]}, "type": "log", "dtick": 0.30103}
    if shape := texts.get("no_change"):
        layout["shapes"] = [{"type": "line", "line": {"width": 1}, "name": "no change", "showlegend": True, **shape}]
    chart = Chart(
        name=name,
        title=title,
        explanation=explanation,
        traces=special.traces(runs, k) if special.traces else metric_lines(runs, texts.get("lines", {})),
        empty=missing_reason(runs, texts.get("needs", "step")),
        layout=layout | texts.get("layout", {}),
        by_progress="x" not in texts,
        marks=texts.get("marks", False),
    )
    return special.change(chart, runs) if special.change else chart


def _calls(runs: Sequence[StoredRun]) -> tuple[Trace, ...]:
    """Return each step's calls and failed calls per rollout."""
    drawn: list[Trace] = []
    for i, run in enumerate(runs):
        sizes = ((at, r.tools, r.sampling.samples if r.sampling else 0) for at, r in enumerate(run.records))
        steps = [(at, tools.calls / n, sum(tools.failures.values()) / n) for at, tools, n in sizes if tools and n]
        for j, label in enumerate(("calls", "failed calls") if steps else ()):
            drawn.append(run_line(runs, i, label, j, [(at, values[j]) for at, *values in steps]))
    return tuple(drawn)


def _seconds(runs: Sequence[StoredRun]) -> tuple[Trace, ...]:
    """Return the seconds of each stage, stacked by step for one run, or as means for several runs."""
    drawn: list[Trace] = []
    timed = [run for run in runs if run.steps]
    for j, stage in enumerate(_STAGES):
        meta = {"color": f"stage:{j}"}
        if len(runs) == 1:
            records = enumerate(runs[0].records)
            points = [(at, _number(r, ("seconds", stage)) or 0.0) for at, r in records if r.sampling]
            if any(value for _, value in points):
                trace = run_line(runs, 0, stage, 0, points)
                drawn.append({**trace, "stackgroup": "seconds", "line": {"width": 0.5}, "meta": trace["meta"] | meta})
        elif timed:
            names = [plotly_text(run.name) for run in timed]
            means = [fmean([_number(r, ("seconds", stage)) or 0.0 for r in run.steps]) for run in timed]
            drawn.append({"type": "bar", "name": stage, "x": names, "y": means, "meta": meta})
    return tuple(drawn)


def _pass_at(runs: Sequence[StoredRun], k: int) -> dict[str, Quantity]:
    """Return the record paths of pass@k for the weights, and for averaged weights if there are any."""
    quantities = {f"pass@{k} with 95% interval": _estimate("pass_at", k)}
    if any(record.ema_evaluation for run in runs for record in run.records):
        quantities["averaged weights"] = _estimate("pass_at", k, of="ema_evaluation")
    return quantities


def _estimate(*path: str | int, of: str = "evaluation") -> Quantity:
    """Return the record paths of an estimate's value and interval ends."""
    return [(of, *path, end) for end in ("value", "low", "high")]


def _terms(runs: Sequence[StoredRun]) -> tuple[Trace, ...]:
    """Return the mean of each additional reward term."""
    sampled = [record.sampling for run in runs for record in run.records if record.sampling]
    names = sorted({term for sampling in sampled for term in sampling.terms or {}})
    return metric_lines(runs, {term: f"sampling.terms.{term}" for term in names})


def _sources(runs: Sequence[StoredRun]) -> tuple[Trace, ...]:
    """Return the held-out pass@1 of each source."""
    evaluations = [record.evaluation for run in runs for record in run.evaluations if record.evaluation]
    names = sorted({source for evaluation in evaluations for source in evaluation.by_source})
    return metric_lines(runs, {source: _estimate("by_source", source, 1) for source in names})


def _needs_two_evaluations(chart: Chart, runs: Sequence[StoredRun]) -> Chart:
    why = "A change needs two evaluations with the same prompts and samples."
    return replace(chart, empty=why) if any(run.evaluations for run in runs) else chart


def _without_zeros(chart: Chart, runs: Sequence[StoredRun]) -> Chart:
    """Replace lines that are 0 at every step with a sentence."""
    steps = sum(len(run.steps) for run in runs)
    if not steps or any(value for trace in chart.traces for value in trace["y"]):
        return chart
    return replace(chart, traces=(), empty=f"No verification timed out or failed in {counted(steps, 'step')}.")


def _by_run(chart: Chart, runs: Sequence[StoredRun]) -> Chart:
    """Show several runs side by side, with means over their steps."""
    if len(runs) <= 1:
        return chart
    layout = chart.layout | {"barmode": "stack", "xaxis": {"type": "category"}}
    return replace(chart, explanation=f"Mean s{chart.explanation[1:]}", layout=layout, by_progress=False)


@dataclass(frozen=True)
class _Special:
    """How a chart differs from its entry in `charts.toml`."""

    traces: Callable[[Sequence[StoredRun], int], tuple[Trace, ...]] | None = None  # from the runs and the largest k
    change: Callable[[Chart, Sequence[StoredRun]], Chart] | None = None


_SPECIAL = {
    "reward": _Special(change=lambda chart, runs: replace(chart, traces=smoothed(runs, chart.traces))),
    "terms": _Special(lambda runs, _: _terms(runs)),
    "calls": _Special(lambda runs, _: _calls(runs)),
    "pass1": _Special(lambda runs, _: metric_lines(runs, _pass_at(runs, 1))),
    "coverage": _Special(lambda runs, k: metric_lines(runs, _pass_at(runs, k)) if k > 1 else ()),
    "passk": _Special(lambda runs, _: pass_at_curves(runs)),
    "held-out": _Special(lambda runs, _: held_out_points(runs), _needs_two_evaluations),
    "sources": _Special(lambda runs, _: _sources(runs)),
    "success": _Special(change=lambda chart, runs: replace(chart, histogram=success_histogram(runs))),
    "mixed": _Special(lambda runs, _: mixed_lines(runs)),
    "mixed-n": _Special(lambda runs, _: against_n(runs, "mixed_fraction_at", "mixed groups")),
    "unsampled-n": _Special(lambda runs, _: against_n(runs, "unsampled_correct_at", "new correct response")),
    "seconds": _Special(lambda runs, _: _seconds(runs), _by_run),
    "lost": _Special(change=_without_zeros),
}
