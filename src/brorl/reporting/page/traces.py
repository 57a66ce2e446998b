"""Traces of the charts: lines over the course of runs, against k, and against N.

In: runs, and the names of numbers in their metrics. Out: plotly traces as plain values. The page adds colors and x
values in the browser, where the reader chooses them: `meta` of a trace names the run, the lines of its metrics, and the
role of its color. With one run the color shows the quantity; with several it shows the run, and dashes the quantity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brorl.evaluation.pass_at_k import pass_at_k_of_each
from brorl.reporting.visible_text import visible_text
from brorl.runs.run_record import Record, RunRecord, number

LAST_STEPS = 25
_DASHES = ("solid", "dot", "dash", "dashdot")
_CURVES = 5  # pass@k curves of a single run

Trace = dict[str, Any]
Quantity = str | tuple[str, str]  # dotted name of a number in the metrics, or the numerator and denominator of a ratio


def lines(runs: Sequence[RunRecord], quantities: Mapping[str, Quantity]) -> tuple[Trace, ...]:
    """Return a line for each run and each quantity that its metrics hold; the keys are labels for the legend."""
    traces = []
    for i, run in enumerate(runs):
        for j, (label, quantity) in enumerate(quantities.items()):
            points = [(at, value) for at, r in enumerate(run.records) if (value := _value(r, quantity)) is not None]
            if points:
                traces.append(line(runs, i, label if len(quantities) > 1 or len(runs) == 1 else "", j, points))
    return tuple(traces)


def _value(record: Record, quantity: Quantity) -> float | None:
    if isinstance(quantity, str):
        return number(record, *quantity.split("."))
    above, below = (number(record, *name.split(".")) for name in quantity)
    return above / below if above is not None and below else None


def line(runs: Sequence[RunRecord], i: int, label: str, j: int, points: Sequence[tuple[int, float]]) -> Trace:
    """Return a line over the course of a run.

    Args:
        runs: All runs of the page.
        i: Index of the run.
        label: Label of the quantity for the legend.
        j: Index of the quantity.
        points: Index of the line of the metrics, and the value there.
    """
    several = len(runs) > 1
    name = " · ".join(part for part in (runs[i].name if several or not label else "", label) if part)
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        "name": plotly_text(name),
        "y": [value for _, value in points],
        "line": {"width": 2, "dash": _DASHES[j % len(_DASHES)] if several else "solid"},
        "meta": {"run": i, "at": [at for at, _ in points], "color": f"run:{i}" if several else f"quantity:{j}"},
    }


def smoothed(runs: Sequence[RunRecord], traces: Sequence[Trace]) -> tuple[Trace, ...]:
    """Return each line thin and pale, with its moving mean in bold; lines of few points stay unchanged."""
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


def _with_bars(trace: Trace, low: Sequence[float], high: Sequence[float]) -> Trace:
    """Add an interval to each point of a trace."""
    error_y = {
        "type": "data",
        "symmetric": False,
        "array": [h - y for h, y in zip(high, trace["y"], strict=True)],
        "arrayminus": [y - v for v, y in zip(low, trace["y"], strict=True)],
        "thickness": 1.2,
        "width": 3,
    }
    return {**trace, "mode": "lines+markers", "error_y": error_y}


def interval_lines(runs: Sequence[RunRecord], label: str, keys: Sequence[Sequence[str]]) -> tuple[Trace, ...]:
    """Return a line with intervals for each run.

    Args:
        runs: All runs of the page.
        label: Label for the legend of a single run.
        keys: Where a line of the metrics holds the value, the low end and the high end.
    """
    shown = "" if len(runs) > 1 else label
    return tuple(trace for i in range(len(runs)) for trace in _interval_line(runs, i, shown, 0, keys))


def estimate_keys(*path: str) -> list[Sequence[str]]:
    """Return where the value and the ends of an estimate stand in a line of the metrics."""
    return [(*path, end) for end in ("value", "low", "high")]


def _interval_line(runs: Sequence[RunRecord], i: int, label: str, j: int, keys: Sequence[Sequence[str]]) -> list[Trace]:
    rows = [(at, [number(r, *key) for key in keys]) for at, r in enumerate(runs[i].records)]
    known = [(at, [v for v in values if v is not None]) for at, values in rows if None not in values]
    if not known:
        return []
    trace = line(runs, i, label, j, [(at, values[0]) for at, values in known])
    return [_with_bars(trace, [v[1] for _, v in known], [v[2] for _, v in known])]


def pass_at_by_source(runs: Sequence[RunRecord]) -> tuple[Trace, ...]:
    """Return pass@1 for each source of prompts; nothing if there is one source."""
    traces = []
    for i, run in enumerate(runs):
        sources = sorted({s for r in run.evaluations for s in r["evaluation"].get("by_source") or {}})
        for j, source in enumerate(sources):
            traces += _interval_line(runs, i, source, j, estimate_keys("evaluation", "by_source", source, "1"))
    return tuple(traces)


def pass_at_curves(runs: Sequence[RunRecord]) -> tuple[Trace, ...]:
    """Return pass@k curves: evenly spaced evaluations of one run, the first and the last of several."""
    traces = []
    for i, run in enumerate(runs):
        evaluations = run.evaluations
        number_of = min(len(evaluations), _CURVES if len(runs) == 1 else 2)
        places = sorted({round(c * (len(evaluations) - 1) / max(number_of - 1, 1)) for c in range(number_of)})
        for c, place in enumerate(places):
            age = (c + 1) / len(places)
            color = f"sequence:{age:.3f}" if len(runs) == 1 else f"run:{i}"
            name = f"step {evaluations[place]['step']}"
            name = name if len(runs) == 1 else f"{run.name} · {name}"
            dash = "solid" if len(runs) == 1 or place == places[-1] else "dot"
            traces += _pass_at_curve(evaluations[place]["evaluation"], plotly_text(name), color, dash)
    return tuple(traces)


def _pass_at_curve(evaluation: Record, name: str, color: str, dash: str) -> list[Trace]:
    """Return one curve: points with intervals at the reported k, and a line through more k if counts are stored."""
    rows = sorted((int(k), v["value"], v["low"], v["high"]) for k, v in evaluation["pass_at"].items())
    line = {"width": 2, "dash": dash}
    points = {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": [r[0] for r in rows], "y": [r[1] for r in rows],
        "line": line, "legendgroup": name, "meta": {"color": color},
    }  # fmt: skip
    points = _with_bars(points, [r[2] for r in rows], [r[3] for r in rows])
    correct = (evaluation.get("prompts") or {}).get("num_correct")
    if not correct:
        return [points]
    verified = _verified(evaluation)
    ks = sorted({k for k, *_ in rows} | {2**e for e in range(int(verified.max()).bit_length())})
    smooth = {
        "type": "scatter", "mode": "lines", "name": name, "x": ks,
        "y": [float(pass_at_k_of_each(np.array(correct), verified, k).mean()) for k in ks], "line": line,
        "legendgroup": name, "meta": {"color": color},
    }  # fmt: skip
    return [{**points, "mode": "markers", "showlegend": False}, smooth]


def _verified(evaluation: Record) -> NDArray[np.int64]:
    """Return the number of verified responses to each held-out prompt, shape [P]."""
    prompts = evaluation["prompts"]
    lost = prompts.get("num_unverified") or [0] * len(prompts["num_correct"])
    return np.asarray(evaluation["num_samples"] - np.array(lost, np.int64))


def held_out_points(runs: Sequence[RunRecord]) -> tuple[Trace, ...]:
    """Return the fraction of correct responses to each held-out prompt, at the first and the last evaluation."""
    traces = []
    for i, run in enumerate(runs):
        ends = [r["evaluation"] for r in (*run.evaluations[:1], *run.evaluations[-1:])]
        correct = [(e.get("prompts") or {}).get("num_correct") or [] for e in ends]
        if len(run.evaluations) < 2 or not all(correct) or len(correct[0]) != len(correct[1]):
            continue
        x, y = ((np.array(c) / np.maximum(_verified(e), 1)).tolist() for c, e in zip(correct, ends, strict=True))
        known = len(run.held_out) == len(x)
        texts = [plotly_text(visible_text(t.strip()[-80:], one_line=True)) for t in run.held_out] if known else []
        name = plotly_text(run.name) if len(runs) > 1 else "a held-out prompt"
        traces.append({
            "type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "opacity": 0.6,
            "text": texts, "hovertemplate": "%{text}<br>%{x:.1%} before, %{y:.1%} after<extra></extra>",
            "meta": {"color": f"run:{i}"},
        })  # fmt: skip
    return tuple(traces)


def mixed_lines(runs: Sequence[RunRecord]) -> tuple[Trace, ...]:
    """Return the fraction of mixed groups by step, and the fractions that smaller N would have found."""
    traces = list(lines(runs, {"": ("sampling.groups_mixed", "sampling.groups")}))
    several = len(runs) > 1
    for i, run in enumerate(runs):
        smaller = sorted({n for r in run.steps for n in _by_number(r)})[:-1]
        for n in smaller:
            if n not in ((16,) if several else (16, 64, 256)):
                continue
            points = [(at, fractions[n]) for at, r in enumerate(run.records) if n in (fractions := _by_number(r))]
            trace = line(runs, i, f"N = {n}", 1, points)
            trace["meta"]["color"] = f"run:{i}" if several else f"sequence:{0.2 + 0.25 * smaller.index(n) / 3:.3f}"
            traces.append(trace)
    if not several and traces:
        traces[0]["name"] = "all rollouts"
    return tuple(traces)


def _by_number(record: Record, name: str = "informative_fraction_at") -> dict[int, float]:
    """Return a pooled number of the coverage by N; empty if there is none."""
    by_number = (record.get("coverage") or {}).get("pooled", {}).get(name) or {}
    return {int(n): float(value) for n, value in by_number.items()}


def against_n(runs: Sequence[RunRecord], name: str, label: str) -> tuple[Trace, ...]:
    """Return means over the groups of the last steps, by N.

    Args:
        runs: All runs of the page.
        name: Name of a pooled number of the coverage that the metrics hold for several N.
        label: Label for the legend of a single run.
    """
    traces = []
    for i, run in enumerate(runs):
        last = [r for r in run.steps if _by_number(r, name)][-LAST_STEPS:]
        if not last:
            continue
        groups = [r["sampling"]["groups"] for r in last]
        numbers = sorted(set.intersection(*(set(_by_number(r, name)) for r in last)))
        weight = sum(groups)
        y = [sum(g * _by_number(r, name)[n] for g, r in zip(groups, last, strict=True)) / weight for n in numbers]
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": plotly_text(run.name if len(runs) > 1 else label),
            "x": numbers, "y": y,
            "line": {"width": 2}, "meta": {"color": f"run:{i}"},
        })  # fmt: skip
    return tuple(traces)


def plotly_text(text: str) -> str:
    """Return text with HTML escaped: plotly interprets some HTML in its texts."""
    return escape(text, quote=False)
