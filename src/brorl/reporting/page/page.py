"""The report of some runs as one HTML file: charts, rollouts, settings.

In: runs. Out: the text of the page, and the part of their rollouts on it. The file is complete: plotly's script, data,
styles. Its content security policy blocks all requests, and model output is inserted as text only.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import accumulate
from typing import Any

import brorl
from brorl.cost import cost_of_step
from brorl.reporting.page.embedding import fill, to_json
from brorl.reporting.page.figures import Chart, cost_charts, coverage_charts, learning_charts, optimization_charts
from brorl.reporting.page.histogram import success_histogram
from brorl.reporting.page.rollouts import RunRollouts, choose_evaluations, choose_rollouts
from brorl.reporting.page.summary import HEADINGS, Tile, notes, summary_row, tiles
from brorl.reporting.page.traces import plotly_text
from brorl.reporting.reasons import reason, why_no_coverage, why_no_held_out_responses, why_no_rollouts
from brorl.reporting.score_change import best_evaluation
from brorl.reporting.visible_text import visible_text
from brorl.runs.run_record import RunRecord, differing_settings, number
from brorl.runs.stored_rollouts import Folder, step_list

ROLLOUT_BYTES = 4_000_000  # with plotly's 4.8 MB the page stays below 10 MB
_EVALUATION_FRACTION = 4  # the responses of evaluations may take a quarter of these bytes
_MOST_STEPS = 40  # most steps with rollouts on the page, over all runs
_INTRODUCTIONS = {
    "coverage": "A group is all N rollouts of one prompt in one step. A mixed group has correct and incorrect "
    "rollouts. Only mixed groups give a gradient.",
}
_TABLE_NOTE = (
    "Held-out scores: at the first evaluation → at the last one, with 95% intervals over prompts. Time: that of the "
    "steps, without evaluations and checkpoints. Dropped: rollouts of groups that were not mixed."
)
MARK = "<!-- brorl report -->"  # in the first lines of every page, so that a report replaces no other file


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        html: The file's text.
        rollouts: For each run the rollouts on the page.
        evaluations: For each run the responses of evaluations on the page.
    """

    html: str
    rollouts: tuple[RunRollouts, ...]
    evaluations: tuple[RunRollouts, ...]


def make_page(runs: Sequence[RunRecord], rollout_bytes: int = ROLLOUT_BYTES) -> Page:
    """Make the report of some runs.

    Args:
        runs: At least one run; charts show several together.
        rollout_bytes: Most bytes of compressed rollouts, over all runs.
    """
    fraction, most_steps = rollout_bytes // len(runs), max(_MOST_STEPS // len(runs), 2)
    evaluations = tuple(choose_evaluations(run, fraction // _EVALUATION_FRACTION) for run in runs)
    rollouts = tuple(
        choose_rollouts(run.path, fraction - sum(len(step.data) for step in evaluated.steps), most_steps)
        for run, evaluated in zip(runs, evaluations, strict=True)
    )
    histogram = success_histogram(runs)
    sections = (
        ("learning", "Learning", learning_charts(runs)),
        ("coverage", "Coverage of N rollouts", coverage_charts(runs)),
        ("cost", "Cost", cost_charts(runs)),
        ("optimization", "Optimization", optimization_charts(runs)),
    )
    no_histogram = _empty_card("success", "Success of training prompts", reason(runs, why_no_coverage))
    more = {"learning": _text("histogram.html") if histogram else no_histogram}
    charts = [chart for _, _, charts in sections for chart in charts]
    html = fill(_text("template.html"), {
        "MARK": MARK,
        "TITLE": escape(", ".join(run.name for run in runs)),
        "STYLE": _text("page.css"),
        "VERSION": escape(brorl.__version__),
        "SUMMARY": _summary(runs),
        "NOTES": _notes(runs),
        "SECTIONS": "\n".join(_section(*section, more.get(section[0], "")) for section in sections),
        "LEFT_OUT": _left_out(runs, rollouts, evaluations),
        "SETTINGS": _settings(runs),
        "MACHINE": _machine(runs),
        "DATA": to_json(
            {
                "runs": [_run_data(*one) for one in zip(runs, rollouts, evaluations, strict=True)],
                "charts": [_chart_data(chart) for chart in charts if chart.traces],
                "histogram": histogram,
            }
        ),
        "ROLLOUTS": "\n".join([*_payloads("rollouts", rollouts), *_payloads("evaluations", evaluations)]),
        "PLOTLY": plotly_script(),
        "SCRIPT": "\n".join(_text(name) for name in ("charts.js", "rollouts.js", "tree.js", "responses.js", "page.js")),
    })  # fmt: skip
    return Page(html, rollouts, evaluations)


def plotly_script() -> str:
    """Return plotly's script, as its Python package ships it."""
    script = (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")
    return script.replace("</script", "<\\/script")


def _section(name: str, title: str, charts: Iterable[Chart], more: str) -> str:
    cards = "\n".join(_card(chart) for chart in charts)
    introduction = f'<p class="explanation">{_INTRODUCTIONS[name]}</p>' if name in _INTRODUCTIONS else ""
    return (
        f'<section id="{name}" aria-labeledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>'
        f'{introduction}<div class="cards">{cards}{more}</div></section>'
    )


def _card(chart: Chart) -> str:
    if not chart.traces:
        return _empty_card(chart.name, chart.title, chart.empty)
    return (
        f'<article class="card" id="card-{chart.name}"><h3>{escape(chart.title)}</h3>'
        f'<p class="explanation">{escape(chart.explanation)}</p>'
        f'<div class="chart" id="chart-{chart.name}" role="img" aria-label="{escape(chart.title)}"></div>'
        f'<details class="numbers" data-chart="{chart.name}"><summary>Numbers</summary></details></article>'
    )


def _empty_card(name: str, title: str, why: str) -> str:
    return (
        f'<article class="card nothing" id="card-{name}"><h3>{escape(title)}</h3>'
        f'<p class="empty">{escape(visible_text(why))}</p></article>'
    )


def _summary(runs: Sequence[RunRecord]) -> str:
    """Return the tiles of one run, or a table of several."""
    if len(runs) == 1:
        return f'<div class="tiles">{"".join(_tile(tile) for tile in tiles(runs[0]))}</div>'
    rows = [
        [f'<span class="swatch" data-run="{i}"></span>{escape(cell)}' if c == 0 else escape(cell)
         for c, cell in enumerate(summary_row(run))]
        for i, run in enumerate(runs)
    ]  # fmt: skip
    return _table(HEADINGS, rows) + f'<p class="explanation">{_TABLE_NOTE}</p>'


def _tile(tile: Tile) -> str:
    figures = "".join(
        f"<dt>{escape(figure.label)}</dt><dd><b>{escape(figure.value)}</b>"
        + "".join(f"<span>{escape(detail)}</span>" for detail in figure.details)
        + "</dd>"
        for figure in tile.figures
    )
    numbers = f"<dl>{figures}</dl>" if figures else ""
    text = f"<p>{escape(tile.text)}</p>" if tile.text else ""
    return f'<article class="tile {tile.tone}"><h2>{escape(tile.title)}</h2>{numbers}{text}</article>'


def _notes(runs: Sequence[RunRecord]) -> str:
    items = [(run, visible_text(note)) for run in runs for note in notes(run)]
    return f'<div class="notes" role="note"><h2>Notes</h2><ul>{_items(runs, items)}</ul></div>' if items else ""


def _left_out(runs: Sequence[RunRecord], rollouts: Sequence[RunRollouts], evaluations: Sequence[RunRollouts]) -> str:
    """Return, for each run, which rollouts are on the page, and the command that shows the others."""
    chosen = zip(runs, rollouts, evaluations, strict=True)
    items = [(run, text) for run, r, e in chosen for text in (evaluations_shown(run, e), left_out(run, r))]
    return f'<ul class="left-out">{_items(runs, items)}</ul>'


def _items(runs: Sequence[RunRecord], items: Sequence[tuple[RunRecord, str]]) -> str:
    """Return the items of a list; those of several runs begin with the run's name."""
    names = [f"<b>{escape(run.name)}</b>: " if len(runs) > 1 else "" for run, _ in items]
    return "".join(f"<li>{name}{escape(text)}</li>" for name, (_, text) in zip(names, items, strict=True))


def evaluations_shown(run: RunRecord, chosen: RunRollouts) -> str:
    """Return the evaluations and the number of prompts on the page, or the reason if there are none."""
    if not chosen.steps:
        return f"Held-out prompts: {why_no_held_out_responses(run)}"
    prompts = max(step.all_prompts for step in chosen.steps)
    of_all = f" of {int(n):,}" if (n := number(run.evaluations[-1], "evaluation", "num_prompts")) else ""
    return (
        f"Held-out prompts: the responses to {prompts}{of_all} prompts, chosen by their place in the list, at "
        f"{step_list([step.step for step in chosen.steps])}. In the terminal: {_samples_command(run)} --held-out"
    )


def left_out(run: RunRecord, chosen: RunRollouts) -> str:
    """Return which of a run's rollouts are on the page, which were left out, and the command that shows them."""
    if not chosen.stored:
        return f"Training: {why_no_rollouts(run)}"
    shown = [step.step for step in chosen.steps]
    prompts, all_prompts, responses, all_responses = (
        sum(getattr(step, name) for step in chosen.steps)
        for name in ("prompts", "all_prompts", "responses", "all_responses")
    )
    stored = "all" if len(shown) == len(chosen.stored) else f"{len(shown)} of {len(chosen.stored)}"
    text = f"Training: the rollouts of {stored} stored steps are on this page ({step_list(shown)})"
    if all_prompts > prompts:
        text += f"; of these steps {prompts:,} of {all_prompts:,} prompts"
    if all_responses > responses:
        text += f"; {responses:,} of {all_responses:,} distinct responses, the most frequent of each prompt"
    return f"{text}. In the terminal, complete: {_samples_command(run)} --step {(shown or chosen.stored)[-1]}"


def _samples_command(run: RunRecord) -> str:
    return f"brorl samples {shlex.quote(str(run.path))}"


def _settings(runs: Sequence[RunRecord]) -> str:
    """Return the table of differences between runs, and the folded table of all settings."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    if not names:
        return '<p class="empty">No settings: config.yaml is missing.</p>'
    differing = differing_settings(runs)
    headings = ["setting", *(run.name for run in runs)]
    parts = []
    if len(runs) > 1:
        parts.append("<h3>Settings in which the runs differ</h3>")
        parts.append(_table(headings, [_setting(runs, name) for name in differing]) if differing else "<p>None.</p>")
    rows = [_setting(runs, name) for name in names]
    marked = {i for i, name in enumerate(names) if name in differing}
    table = _table(headings, rows, marked)
    return "".join(parts) + f"<details><summary>All {len(names)} settings</summary>{table}</details>"


def _setting(runs: Sequence[RunRecord], name: str) -> list[str]:
    values = [visible_text(run.settings[name]) if name in run.settings else "–" for run in runs]  # noqa: RUF001
    return [f"<code>{escape(name)}</code>", *(f"<code>{escape(value)}</code>" for value in values)]


def _machine(runs: Sequence[RunRecord]) -> str:
    """Return the table of each run's machine, versions and command."""
    rows = []
    for run in runs:
        env = run.environment
        packages = env.get("packages")
        versions = {"Python": env.get("python")} | (dict(packages) if isinstance(packages, Mapping) else {})
        command = env.get("command")
        cells = (
            run.name,
            env.get("cuda") or env.get("processor"),
            env.get("threads"),
            env.get("platform"),
            ", ".join(f"{name} {version}" for name, version in versions.items() if version),
            shlex.join(map(str, command)) if isinstance(command, list) else command,
            run.path,
        )
        rows.append([escape(visible_text(str(cell or "–"))) for cell in cells])  # noqa: RUF001
    return _table(("run", "device", "threads", "system", "versions", "command", "directory"), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], marked: Iterable[int] = ()) -> str:
    """Return a table whose rows become blocks on narrow screens.

    Args:
        headings: Text of the headings.
        rows: HTML of the cells.
        marked: Indices of highlighted rows.
    """
    chosen = set(marked)
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(
        f"<tr{' class=differs' if i in chosen else ''}>"
        + "".join(
            f'<th scope="row">{cell}</th>' if c == 0 else f'<td data-label="{escape(headings[c])}">{cell}</td>'
            for c, cell in enumerate(row)
        )
        + "</tr>"
        for i, row in enumerate(rows)
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table"><table class="stacking">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _run_data(run: RunRecord, chosen: RunRollouts, evaluated: RunRollouts) -> dict[str, Any]:
    return {
        "name": run.name,
        "plotlyName": plotly_text(run.name),
        "x": _progress(run),
        "marks": event_marks(run),
        "rollouts": [{"step": step.step, "label": f"step {step.step}"} for step in chosen.steps],
        "evaluations": _evaluation_labels(run, evaluated),
        "tokensKnown": chosen.tokens_known,
        "samples": _samples_command(run),
    }


def event_marks(run: RunRecord) -> list[dict[str, Any]]:
    """Return the lines of the metrics at which the reference was reset or a phase began, with a label."""
    marks = [(at, "reset of the reference") for at, r in enumerate(run.records) if "reference_reset" in r]
    begins = [(at, r["objective"]["name"]) for at, r in enumerate(run.records) if "begins" in r.get("objective", {})]
    marks += [(at, plotly_text(f"{name} begins")) for at, name in begins[1:]]
    return [{"at": at, "label": label} for at, label in marks]


def _chart_data(chart: Chart) -> dict[str, Any]:
    return {
        "name": chart.name,
        "traces": list(chart.traces),
        "layout": chart.layout,
        "byProgress": chart.by_progress,
        "marks": chart.marks,
    }


def _progress(run: RunRecord) -> dict[str, list[float]]:
    """Return the progress of the run at each line of its metrics, in each unit; evaluations cost nothing."""
    costs = list(accumulate(cost_of_step(r) for r in run.records))
    return {
        "step": [r["step"] for r in run.records],
        "seconds": [c.seconds for c in costs],
        "samples": [c.samples for c in costs],
        "unique_tokens": [c.unique_tokens for c in costs],
    }


def _evaluation_labels(run: RunRecord, chosen: RunRollouts) -> list[dict[str, Any]]:
    best = best_evaluation(run)
    labels = {step.step: f"after step {step.step}" if step.step else "before training" for step in chosen.steps}
    if best is not None and best["step"] in labels:
        labels[best["step"]] += " (best)"
    return [{"step": step, "label": label} for step, label in labels.items()]


def _payloads(folder: Folder, rollouts: Sequence[RunRollouts]) -> list[str]:
    return [
        f'<script type="application/gzip" id="{folder}-{i}-{step.step}">{step.data}</script>'
        for i, chosen in enumerate(rollouts)
        for step in chosen.steps
    ]


def _text(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")
