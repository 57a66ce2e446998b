"""The report of some runs as one HTML file: charts, rollouts, settings; offline, and safe whatever a model wrote.

In: runs. Out: the text of the page, and what of their rollouts it holds. Everything is inside: plotly's script, data,
styles. The page's own policy forbids it every request, and model output is only ever put in as text.
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
from brorl.report.page.embedding import fill, to_json
from brorl.report.page.figures import (
    Chart,
    cost_charts,
    coverage_charts,
    learning_charts,
    optimisation_charts,
)
from brorl.report.page.histogram import success_histogram
from brorl.report.page.rollouts import RunRollouts, choose_evaluations, choose_rollouts
from brorl.report.page.summary import HEADINGS, notes, summary_row
from brorl.report.page.tiles import Tile, tiles
from brorl.report.page.traces import plotly_text
from brorl.report.reasons import reason, why_no_coverage, why_no_held_out_responses, why_no_rollouts
from brorl.report.score_change import best_evaluation
from brorl.report.visible_text import visible_text
from brorl.runs.run_record import RunRecord, differing_settings, number
from brorl.runs.stored_rollouts import Folder, steps_in_words

ROLLOUT_BYTES = 4_000_000  # with plotly's 4.8 MB the page stays below 10 MB
_EVALUATION_SHARE = 4  # the responses of evaluations may take one part in so many of it
_MOST_STEPS = 40  # whose rollouts are on the page, of all runs together
_INTRODUCTIONS = {
    "coverage": "A group is all N rollouts of one prompt in one step. It teaches something only if some of them are "
    "correct and some are not.",
}
_TABLE_NOTE = (
    "Held-out scores: at the first evaluation → at the last one, with 95% intervals over prompts. Time: that of the "
    "steps, without evaluations and checkpoints. Dropped: rollouts of groups with one outcome."
)
MARK = "<!-- brorl report -->"  # in the first lines of every page, so that no other file is ever replaced by one


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        html: The file's text.
        rollouts: For each run what of its rollouts is on it.
        evaluations: For each run the evaluations whose responses are on it.
    """

    html: str
    rollouts: tuple[RunRollouts, ...]
    evaluations: tuple[RunRollouts, ...]


def make_page(runs: Sequence[RunRecord], rollout_bytes: int = ROLLOUT_BYTES) -> Page:
    """Make the report of some runs.

    Args:
        runs: At least one run; several are laid over each other.
        rollout_bytes: How many bytes the runs' rollouts may take together.
    """
    share, most_steps = rollout_bytes // len(runs), max(_MOST_STEPS // len(runs), 2)
    evaluations = tuple(choose_evaluations(run, share // _EVALUATION_SHARE) for run in runs)
    rollouts = tuple(
        choose_rollouts(run.path, share - sum(len(step.data) for step in evaluated.steps), most_steps)
        for run, evaluated in zip(runs, evaluations, strict=True)
    )
    sections = _sections(runs)
    charts = [chart for _, _, charts in sections for chart in charts]
    html = fill(_text("template.html"), {
        "MARK": MARK,
        "TITLE": escape(", ".join(run.name for run in runs)),
        "STYLE": _text("page.css"),
        "VERSION": escape(brorl.__version__),
        "SUMMARY": _summary(runs),
        "NOTES": _notes(runs),
        "SECTIONS": "\n".join(
            _section(*section, more=_histogram_card(runs) if section[0] == "learning" else "") for section in sections
        ),
        "LEFT_OUT": _left_out(runs, rollouts, evaluations),
        "SETTINGS": _settings(runs),
        "MACHINE": _machine(runs),
        "DATA": to_json(_data(runs, charts, rollouts, evaluations)),
        "ROLLOUTS": "\n".join([*_payloads("rollouts", rollouts), *_payloads("evaluations", evaluations)]),
        "PLOTLY": plotly_script(),
        "SCRIPT": "\n".join(_text(name) for name in ("charts.js", "rollouts.js", "tree.js", "responses.js", "page.js")),
    })  # fmt: skip
    return Page(html, rollouts, evaluations)


def plotly_script() -> str:
    """Return plotly's script, as its Python package ships it."""
    script = (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")
    return script.replace("</script", "<\\/script")


def _sections(runs: Sequence[RunRecord]) -> list[tuple[str, str, list[Chart]]]:
    """Return the sections of charts: id, title, charts."""
    return [
        ("learning", "Learning", learning_charts(runs)),
        ("coverage", "What N rollouts see", coverage_charts(runs)),
        ("cost", "Cost", cost_charts(runs)),
        ("optimisation", "Optimization", optimisation_charts(runs)),
    ]


def _section(name: str, title: str, charts: Iterable[Chart], more: str = "") -> str:
    cards = "\n".join(_card(chart) for chart in charts)
    introduction = f'<p class="explanation">{_INTRODUCTIONS[name]}</p>' if name in _INTRODUCTIONS else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>'
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


def _histogram_card(runs: Sequence[RunRecord]) -> str:
    if success_histogram(runs):
        return _text("histogram.html")
    return _empty_card("success", "Success of training prompts", reason(runs, why_no_coverage))


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
    items = [(run, note) for run in runs for note in notes(run)]
    if not items:
        return ""
    several = len(runs) > 1
    names = [f"<b>{escape(run.name)}</b>: " if several else "" for run, _ in items]
    lines = "".join(
        f"<li>{name}{escape(visible_text(note))}</li>" for name, (_, note) in zip(names, items, strict=True)
    )
    return f'<div class="notes" role="note"><h2>Notes</h2><ul>{lines}</ul></div>'


def _left_out(runs: Sequence[RunRecord], rollouts: Sequence[RunRollouts], evaluations: Sequence[RunRollouts]) -> str:
    """Return, for each run, which rollouts are on the page and how to see the others."""
    items = []
    for run, chosen, evaluated in zip(runs, rollouts, evaluations, strict=True):
        name = f"<b>{escape(run.name)}</b>: " if len(runs) > 1 else ""
        items += [
            f"<li>{name}{escape(text)}</li>" for text in (evaluations_shown(run, evaluated), left_out(run, chosen))
        ]
    return f'<ul class="left-out">{"".join(items)}</ul>'


def evaluations_shown(run: RunRecord, chosen: RunRollouts) -> str:
    """Return of which evaluations the page holds responses, and to how many prompts, or why of none."""
    if not chosen.steps:
        return f"Held-out prompts: {why_no_held_out_responses(run)}"
    prompts = max(step.all_prompts for step in chosen.steps)
    of_all = f" of {int(n):,}" if (n := number(run.evaluations[-1], "evaluation", "num_prompts")) else ""
    command = f"brorl samples {shlex.quote(str(run.path))} --held-out"
    return (
        f"Held-out prompts: the responses to {prompts}{of_all} prompts, chosen by their place in the list, at "
        f"{steps_in_words([step.step for step in chosen.steps])}. In the terminal: {command}"
    )


def left_out(run: RunRecord, chosen: RunRollouts) -> str:
    """Return which of a run's rollouts are on the page, what was left out, and how to see it."""
    if not chosen.stored:
        return f"Training: {why_no_rollouts(run)}"
    shown = [step.step for step in chosen.steps]
    prompts, all_prompts, responses, all_responses = (
        sum(getattr(step, name) for step in chosen.steps)
        for name in ("prompts", "all_prompts", "responses", "all_responses")
    )
    all_of_it = "all" if len(shown) == len(chosen.stored) else f"{len(shown)} of {len(chosen.stored)}"
    said = f"Training: the rollouts of {all_of_it} stored steps are on this page ({steps_in_words(shown)})"
    if all_prompts > prompts:
        said += f"; of these steps {prompts:,} of {all_prompts:,} prompts"
    if all_responses > responses:
        said += f"; {responses:,} of {all_responses:,} distinct responses, the most frequent of each prompt"
    command = f"brorl samples {shlex.quote(str(run.path))} --step {(shown or chosen.stored)[-1]}"
    return f"{said}. In the terminal, complete: {command}"


def _settings(runs: Sequence[RunRecord]) -> str:
    """Return the differences between runs, and all settings to unfold."""
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
    """Return where each run was made and with what."""
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
    """Return a table whose rows become blocks where it is narrow; the cells are HTML, the headings text."""
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


def _data(
    runs: Sequence[RunRecord],
    charts: Sequence[Chart],
    rollouts: Sequence[RunRollouts],
    evaluations: Sequence[RunRollouts],
) -> dict[str, Any]:
    return {
        "runs": [
            {
                "name": run.name,
                "plotlyName": plotly_text(run.name),
                "x": _progress(run),
                "resets": [at for at, r in enumerate(run.records) if "reference_reset" in r],
                "rollouts": [{"step": step.step, "label": f"step {step.step}"} for step in chosen.steps],
                "evaluations": _evaluation_labels(run, evaluated),
                "tokensKnown": chosen.tokens_known,
                "samples": f"brorl samples {shlex.quote(str(run.path))}",
            }
            for run, chosen, evaluated in zip(runs, rollouts, evaluations, strict=True)
        ],
        "charts": [
            {
                "name": chart.name,
                "traces": list(chart.traces),
                "layout": chart.layout,
                "byProgress": chart.by_progress,
                "resets": chart.resets,
            }
            for chart in charts
            if chart.traces
        ],
        "histogram": success_histogram(runs),
    }


def _progress(run: RunRecord) -> dict[str, list[float]]:
    """Return how far the run was at each line of its metrics, in each unit; evaluations cost nothing."""
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
