"""Traces of the charts: lines over the course of runs, against k, against N; their numbers are those of the metrics.

In: runs, and which numbers. Out: plain plotly traces. Colours and the x values of lines over the course of a run are
put in by the page, which lets its reader choose them: `meta` of a trace says which run, which lines of its metrics, and
which role its colour has.

A trace of one run is coloured by what it shows, one of several runs by its run; dashes then tell quantities apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import Any

from brorl.evaluation.pass_at_k import pass_at_k
from brorl.report.visible_text import visible_text
from brorl.runs.run_record import Record, RunRecord, number

LAST_STEPS = 25
_DASHES = ("solid", "dot", "dash", "dashdot")
_CURVES = 5  # pass@k curves of a single run

Trace = dict[str, Any]
Getter = Callable[[Record], float | None]


def value_of(*keys: str) -> Getter:
    """Return what reads a number of a line of the metrics."""
    return lambda record: number(record, *keys)


def ratio_of(part: str, whole: str) -> Getter:
    """Return what reads the ratio of two numbers of the sampling."""

    def ratio(record: Record) -> float | None:
        above, below = number(record, "sampling", part), number(record, "sampling", whole)
        return above / below if above is not None and below else None

    return ratio


def lines(runs: Sequence[RunRecord], quantities: Sequence[tuple[str, Getter]]) -> tuple[Trace, ...]:
    """Return a line for each run and quantity that was measured, with a name for the legend."""
    traces = []
    for i, run in enumerate(runs):
        for j, (label, get) in enumerate(quantities):
            points = [(at, value) for at, r in enumerate(run.records) if (value := get(r)) is not None]
            if points:
                traces.append(line(runs, i, label if len(quantities) > 1 or len(runs) == 1 else "", j, points))
    return tuple(traces)


def line(runs: Sequence[RunRecord], i: int, label: str, j: int, points: Sequence[tuple[int, float]]) -> Trace:
    """Return a line over the course of run `i`, of its quantity number `j`."""
    several = len(runs) > 1
    name = " · ".join(part for part in (runs[i].name if several or not label else "", label) if part)
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        "name": plotly_text(name),
        "y": [value for _, value in points],
        "line": {"width": 2, "dash": _DASHES[j % len(_DASHES)] if several else "solid"},
        "meta": {"run": i, "at": [at for at, _ in points], "colour": f"run:{i}" if several else f"quantity:{j}"},
    }


def smoothed(runs: Sequence[RunRecord], traces: Sequence[Trace]) -> tuple[Trace, ...]:
    """Return lines thin and pale, each with its moving mean in bold; lines of few points stay as they are."""
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


def interval_lines(runs: Sequence[RunRecord], section: str, name: str, label: str) -> tuple[Trace, ...]:
    """Return a line with intervals for each run that has the number, its `_low` and its `_high`."""
    keys = (name, f"{name}_low", f"{name}_high")
    traces = []
    for i, run in enumerate(runs):
        rows = [(at, [number(r, section, key) for key in keys]) for at, r in enumerate(run.records)]
        traces += _interval_line(runs, i, "" if len(runs) > 1 else label, 0, rows)
    return tuple(traces)


def _interval_line(
    runs: Sequence[RunRecord], i: int, label: str, j: int, rows: Sequence[tuple[int, Sequence[float | None]]]
) -> list[Trace]:
    known = [(at, [v for v in values if v is not None]) for at, values in rows if None not in values]
    if not known:
        return []
    trace = line(runs, i, label, j, [(at, values[0]) for at, values in known])
    return [_with_bars(trace, [v[1] for _, v in known], [v[2] for _, v in known])]


def pass_at_lines(runs: Sequence[RunRecord], k: int) -> tuple[Trace, ...]:
    """Return pass@k with its interval over the course of each run."""
    traces = []
    for i, run in enumerate(runs):
        rows = [
            (at, [number(r, "evaluation", "pass_at", str(k), key) for key in ("value", "low", "high")])
            for at, r in enumerate(run.records)
        ]
        traces += _interval_line(runs, i, "" if len(runs) > 1 else f"pass@{k} with 95% interval", 0, rows)
    return tuple(traces)


def pass_at_by_source(runs: Sequence[RunRecord]) -> tuple[Trace, ...]:
    """Return pass@1 of the prompts of each source; nothing where there is one."""
    traces = []
    for i, run in enumerate(runs):
        sources = sorted({s for r in run.evaluations for s in r["evaluation"].get("by_source") or {}})
        for j, source in enumerate(sources):
            rows = [
                (at, [number(r, "evaluation", "by_source", source, "1", key) for key in ("value", "low", "high")])
                for at, r in enumerate(run.records)
            ]
            traces += _interval_line(runs, i, source, j, rows)
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
            colour = f"sequence:{age:.3f}" if len(runs) == 1 else f"run:{i}"
            name = f"step {evaluations[place]['step']}"
            name = name if len(runs) == 1 else f"{run.name} · {name}"
            dash = "solid" if len(runs) == 1 or place == places[-1] else "dot"
            traces += _pass_at_curve(evaluations[place]["evaluation"], plotly_text(name), colour, dash)
    return tuple(traces)


def _pass_at_curve(evaluation: Record, name: str, colour: str, dash: str) -> list[Trace]:
    """Return one curve: points with intervals at the k reported, and a line through all k where counts are stored."""
    rows = sorted((int(k), v["value"], v["low"], v["high"]) for k, v in evaluation["pass_at"].items())
    line = {"width": 2, "dash": dash}
    points = {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": [r[0] for r in rows], "y": [r[1] for r in rows],
        "line": line, "legendgroup": name, "meta": {"colour": colour},
    }  # fmt: skip
    points = _with_bars(points, [r[2] for r in rows], [r[3] for r in rows])
    correct = (evaluation.get("prompts") or {}).get("num_correct")
    if not correct:
        return [points]
    n = evaluation["num_samples"]
    ks = sorted({k for k, *_ in rows} | {2**e for e in range(n.bit_length()) if 2**e <= n})
    smooth = {
        "type": "scatter", "mode": "lines", "name": name, "x": ks,
        "y": [float(pass_at_k(correct, n, k).mean()) for k in ks], "line": line, "legendgroup": name,
        "meta": {"colour": colour},
    }  # fmt: skip
    return [{**points, "mode": "markers", "showlegend": False}, smooth]


def held_out_points(runs: Sequence[RunRecord]) -> tuple[Trace, ...]:
    """Return the share of correct responses to each held-out prompt, first against last evaluation of each run."""
    traces = []
    for i, run in enumerate(runs):
        ends = [r["evaluation"] for r in (*run.evaluations[:1], *run.evaluations[-1:])]
        correct = [(e.get("prompts") or {}).get("num_correct") or [] for e in ends]
        if len(run.evaluations) < 2 or not all(correct) or len(correct[0]) != len(correct[1]):
            continue
        x, y = ([c / e["num_samples"] for c in cs] for cs, e in zip(correct, ends, strict=True))
        known = len(run.held_out) == len(x)
        texts = [plotly_text(visible_text(t.strip()[-80:], one_line=True)) for t in run.held_out] if known else []
        name = plotly_text(run.name) if len(runs) > 1 else "a held-out prompt"
        traces.append({
            "type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "opacity": 0.6,
            "text": texts, "hovertemplate": "%{text}<br>%{x:.1%} before, %{y:.1%} after<extra></extra>",
            "meta": {"colour": f"run:{i}"},
        })  # fmt: skip
    return tuple(traces)


def informative_lines(runs: Sequence[RunRecord]) -> tuple[Trace, ...]:
    """Return the share of mixed groups by step, and beside it what smaller N would have found."""
    traces = list(lines(runs, [("", ratio_of("groups_mixed", "groups"))]))
    several = len(runs) > 1
    for i, run in enumerate(runs):
        smaller = sorted({n for r in run.steps for n in _by_number(r)})[:-1]
        for n in smaller:
            if n not in ((16,) if several else (16, 64, 256)):
                continue
            points = [(at, shares[n]) for at, r in enumerate(run.records) if n in (shares := _by_number(r))]
            trace = line(runs, i, f"N = {n}", 1, points)
            trace["meta"]["colour"] = f"run:{i}" if several else f"sequence:{0.2 + 0.25 * smaller.index(n) / 3:.3f}"
            traces.append(trace)
    if not several and traces:
        traces[0]["name"] = "all rollouts"
    return tuple(traces)


def _by_number(record: Record, name: str = "informative_share_at") -> dict[int, float]:
    """Return a pooled number of the coverage by N; empty if there is none."""
    by_number = (record.get("coverage") or {}).get("pooled", {}).get(name) or {}
    return {int(n): float(value) for n, value in by_number.items()}


def against_n(runs: Sequence[RunRecord], name: str, label: str) -> tuple[Trace, ...]:
    """Return means over the last steps by N, in which each group counts the same."""
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
            "line": {"width": 2}, "meta": {"colour": f"run:{i}"},
        })  # fmt: skip
    return tuple(traces)


def plotly_text(text: str) -> str:
    """Return text such that plotly shows it as it is: it reads a small part of HTML."""
    return escape(text, quote=False)
