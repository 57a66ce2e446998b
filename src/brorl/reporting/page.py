"""The report on one or more runs as a single HTML file: charts, rollouts, settings.

The file includes plotly's script, the data and the styles. Its content security policy blocks all requests, and model
output is inserted only as text. It may overwrite an earlier report, but no other file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from brorl.errors import UserError, option
from brorl.format import visible_text
from brorl.reporting.charts import Chart, charts_of, plotly_text
from brorl.reporting.frame import PageSection, fill, framed_page, page_json, resource
from brorl.reporting.page_rollouts import StepRollouts, choose_evaluations, choose_rollouts
from brorl.reporting.summary import (
    COSTS,
    SCORES,
    TOOLS,
    best_evaluation,
    cost_row,
    missing_reason,
    run_notes,
    score_rows,
    tools_rows,
    why_missing,
)
from brorl.reporting.tokens import token_text, tokenizer_of_run
from brorl.runs import RUNS
from brorl.runs.run_directory import REPORT_FILE, StoredRun, differing_settings, read_runs
from brorl.runs.stored_rollouts import step_list, stored_steps
from brorl.storage import replace_file, storage_errors

ROLLOUT_BYTES = 4_000_000  # with plotly's 4.8 MB the page stays below 10 MB
_EVALUATION_FRACTION = 4  # evaluation responses may take a quarter of these bytes
_MAX_STEPS = 40  # show the rollouts of at most this many steps, over all runs
_SCORES_NOTE = "Intervals (95%) are over prompts. A score rose or fell if the interval of its change excludes 0."
_COSTS_NOTE = (
    "Dropped: rollouts of groups that dynamic sampling did not keep. Verified: distinct responses. Time: step time, "
    "without evaluations and checkpoints."
)
_TOOLS_NOTE = (
    "Calls: over all rollouts. Distinct: different calls within a step; equal calls run once. Given: tokens of "
    "results, which the model read but did not write, once per distinct transcript."
)
_GROUP_NOTE = (
    "A group is all N rollouts of one prompt in one step. A mixed group has correct and incorrect rollouts. Only mixed "
    "groups give a gradient."
)
_NEEDS_SCRIPTS = '<noscript><p class="empty">The charts and rollouts on this page need JavaScript.</p></noscript>'
_SLIDER = (
    '<div class="slider"><label for="histogram-step">step</label><input type="range" id="histogram-step" min="0" '
    'value="0" step="1"><output id="histogram-output" for="histogram-step"></output></div>'
)
_MARK = "<!-- brorl report -->"  # near the start of every report; other files are not overwritten


@dataclass(frozen=True)
class Report:
    """A report on disk."""

    path: Path  # the file
    num_bytes: int  # its size

    def __str__(self) -> str:
        return f"{self.path} ({self.num_bytes / 1e6:.1f} MB): open it in a browser"

    def _repr_html_(self) -> str:
        return f'<a href="{escape(self.path.as_posix())}" target="_blank">{escape(str(self))}</a>'


def write_report(runs: Sequence[Path], output: Path | None = None) -> Report:
    """Write the report on the given run directories; see `brorl.report`."""
    target = output or (runs[0] / REPORT_FILE if len(runs) == 1 else RUNS / REPORT_FILE)
    if target.is_dir():
        raise UserError(
            f"{option('output', target)} is a folder; give the name of a file in it, such as {target / REPORT_FILE}"
        )
    if target.exists():
        with target.open("rb") as file:
            if _MARK.encode() not in file.read(200):
                raise UserError(
                    f"{target} exists and is not a report; give a different {option('output')}, or move it away"
                )
    content = make_page(read_runs(runs)).encode()
    with storage_errors(target, f"rerun the command, or give a different {option('output')}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, content)
    return Report(target, len(content))


@dataclass(frozen=True)
class _RunPart:
    """A run with its rollouts and evaluation responses on the page."""

    run: StoredRun
    rollouts: tuple[StepRollouts, ...]
    evaluations: tuple[StepRollouts, ...]
    tokens_known: bool


def make_page(runs: Sequence[StoredRun], rollout_bytes: int = ROLLOUT_BYTES) -> str:
    """Make the report on one or more runs, with at most `rollout_bytes` of compressed rollouts over all runs."""
    parts = [_run_part(run, rollout_bytes // len(runs), max(_MAX_STEPS // len(runs), 2)) for run in runs]
    charts = charts_of(runs)
    cards = {section: "\n".join(map(_card, some)) for section, some in charts.items()}
    everything = [chart for some in charts.values() for chart in some]
    data = {
        "runs": [_run_data(part) for part in parts],
        "charts": [
            {"name": c.name, "traces": c.traces, "layout": c.layout, "marks": c.marks, "byProgress": c.by_progress}
            for c in everything
            if c.traces
        ],
        "histogram": next((chart.histogram for chart in everything if chart.histogram), None),
    }
    omitted = _items(
        runs, [(evaluations_shown(part.run, part.evaluations), left_out(part.run, part.rollouts)) for part in parts]
    )
    sections = [
        PageSection("learning", "Learning", f'<div class="cards">{cards["learning"]}</div>'),
        PageSection(
            "coverage", "Coverage of N rollouts", f'{_note(_GROUP_NOTE)}<div class="cards">{cards["coverage"]}</div>'
        ),
        PageSection("cost", "Cost", f'<div class="cards">{cards["cost"]}</div>'),
        PageSection("optimization", "Optimization", f'<div class="cards">{cards["optimization"]}</div>'),
        PageSection("rollouts", "Rollouts", fill(resource("browser.html"), {"LEFT_OUT": omitted})),
        PageSection("settings", "Settings and machine", f"{_settings(runs)}\n<h3>Machine</h3>\n{_machine(runs)}"),
    ]
    return framed_page(
        "brorl report",
        ", ".join(run.name for run in runs),
        f"{_summary(runs)}\n{_notes(runs)}\n{_NEEDS_SCRIPTS}",
        sections,
        mark=f"\n{_MARK}",
        controls=resource("controls.html"),
        credit=" Charts are drawn by plotly.js (MIT license).",
        scripts=_scripts(parts, data),
    )


def _scripts(parts: Sequence[_RunPart], data: Mapping[str, Any]) -> str:
    """Return the chart data, the rollouts, and the scripts that draw them."""
    rollouts = "\n".join(
        f'<script type="application/gzip" id="{folder}-{i}-{step.step}">{step.data}</script>'
        for folder in ("rollouts", "evaluations")
        for i, part in enumerate(parts)
        for step in getattr(part, folder)
    )
    plotly = (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8").replace("</script", "<\\/script")
    themes = f"const THEMES = {resource('colors.json')};"
    own = "\n".join([themes, *map(resource, ("charts.js", "rollouts.js", "tree.js", "responses.js", "page.js"))])
    return (
        f'<script type="application/json" id="data">{page_json(data)}</script>\n{rollouts}\n'
        f'<script>\n{plotly}\n</script>\n<script>\n"use strict";\n(() => {{\n{own}\n}})();\n</script>'
    )


def _run_part(run: StoredRun, max_bytes: int, max_steps: int) -> _RunPart:
    tokenizer = tokenizer_of_run(run.path)
    text_of = token_text(tokenizer)
    evaluations = choose_evaluations(run, text_of, max_bytes // _EVALUATION_FRACTION)
    left = max_bytes - sum(len(step.data) for step in evaluations)
    return _RunPart(run, choose_rollouts(run.path, text_of, left, max_steps), evaluations, tokenizer is not None)


def _card(chart: Chart) -> str:
    if not chart.traces and not chart.histogram:
        return (
            f'<article class="card nothing" id="card-{chart.name}"><h3>{escape(chart.title)}</h3>'
            f'<p class="empty">{escape(visible_text(chart.empty))}</p></article>'
        )
    return (
        f'<article class="card" id="card-{chart.name}"><h3>{escape(chart.title)}</h3>'
        f'<p class="explanation">{escape(chart.explanation)}</p>{_SLIDER if chart.histogram else ""}'
        f'<div class="chart" id="chart-{chart.name}" role="img" aria-label="{escape(chart.title)}"></div>'
        f'<details class="numbers" data-chart="{chart.name}"><summary>Numbers</summary></details></article>'
    )


def _summary(runs: Sequence[StoredRun]) -> str:
    """Return the tables of held-out scores, costs, and tool calls (if there are tools)."""
    scores = [score_rows(run) for run in runs]
    learned = f'<p class="empty">{escape(missing_reason(runs, "evaluation"))}</p>'
    if any(scores):
        learned = _by_run(runs, SCORES, scores) + _note(_SCORES_NOTE)
    costs = _by_run(runs, COSTS, [[cost_row(run)] for run in runs]) + _note(_COSTS_NOTE)
    called = [tools_rows(run) for run in runs]
    return learned + costs + (_by_run(runs, TOOLS, called) + _note(_TOOLS_NOTE) if any(called) else "")


def _by_run(runs: Sequence[StoredRun], headings: Sequence[str], rows: Sequence[Sequence[Sequence[str]]]) -> str:
    """Return a table with each run's rows; with several runs, the first column shows the run's name and color."""
    if len(runs) == 1:
        return _table(headings, [list(map(escape, row)) for row in rows[0]])
    names = [f'<span class="swatch" data-run="{i}"></span>{escape(run.name)}' for i, run in enumerate(runs)]
    cells = [[name, *map(escape, row)] for name, run_rows in zip(names, rows, strict=True) for row in run_rows]
    return _table(("run", *headings), cells)


def _note(text: str) -> str:
    return f'<p class="explanation">{escape(text)}</p>'


def _notes(runs: Sequence[StoredRun]) -> str:
    items = _items(runs, [list(map(visible_text, run_notes(run))) for run in runs])
    return f'<div class="notes" role="note"><h2>Notes</h2><ul>{items}</ul></div>' if items else ""


def _items(runs: Sequence[StoredRun], texts: Sequence[Sequence[str]]) -> str:
    """Return list items with each run's texts; with several runs, each item begins with the run's name."""
    return "".join(
        f"<li>{f'<b>{escape(run.name)}</b>: ' if len(runs) > 1 else ''}{escape(text)}</li>"
        for run, some in zip(runs, texts, strict=True)
        for text in some
    )


def evaluations_shown(run: StoredRun, chosen: Sequence[StepRollouts]) -> str:
    """Describe which evaluations and how many prompts are on the page, or why there are none."""
    if not chosen:
        return f"Held-out prompts: {why_missing(run, 'evaluations')}"
    last = run.evaluations[-1].evaluation if run.evaluations else None
    total_note = f" of {last.num_prompts:,}" if last and last.num_prompts else ""
    return (
        f"Held-out prompts: the responses to {max(step.all_prompts for step in chosen)}{total_note} prompts, chosen by "
        f"their position in the list, at {step_list([step.step for step in chosen])}. In the terminal: "
        f"{_samples_command(run)} --held-out"
    )


def left_out(run: StoredRun, chosen: Sequence[StepRollouts]) -> str:
    """Describe which of a run's rollouts are on the page and which are omitted, with the command that shows them."""
    stored = stored_steps(run.path)
    if not stored:
        return f"Training: {why_missing(run, 'rollouts')}"
    shown = [step.step for step in chosen]
    prompts, all_prompts, responses, all_responses = (
        sum(getattr(step, name) for step in chosen) for name in ("prompts", "all_prompts", "responses", "all_responses")
    )
    shown_count = "all" if len(shown) == len(stored) else f"{len(shown)} of {len(stored)}"
    text = f"Training: the rollouts of {shown_count} stored steps are on this page ({step_list(shown)})"
    if all_prompts > prompts:
        text += f"; from these steps, {prompts:,} of {all_prompts:,} prompts"
    if all_responses > responses:
        text += f"; {responses:,} of {all_responses:,} distinct responses, the most frequent of each prompt"
    return f"{text}. Everything in the terminal: {_samples_command(run)} --step {(shown or stored)[-1]}"


def _samples_command(run: StoredRun) -> str:
    return f"brorl samples {shlex.quote(str(run.path))}"


def _settings(runs: Sequence[StoredRun]) -> str:
    """Return the table of settings that differ between runs, and the collapsed table of all settings."""
    rows = {
        name: [f"<code>{escape(cell)}</code>" for cell in (name, *(_shown(run.settings.get(name)) for run in runs))]
        for run in runs
        for name in run.settings
    }
    if not rows:
        return '<p class="empty">No settings: config.yaml is missing.</p>'
    differing = differing_settings(runs)
    headings = ["setting", *(run.name for run in runs)]
    differences = ""
    if len(runs) > 1:
        table = _table(headings, [rows[name] for name in differing]) if differing else "<p>None.</p>"
        differences = f"<h3>Settings in which the runs differ</h3>{table}"
    table = _table(headings, list(rows.values()), {i for i, name in enumerate(rows) if name in differing})
    return f"{differences}<details><summary>All {len(rows)} settings</summary>{table}</details>"


def _machine(runs: Sequence[StoredRun]) -> str:
    """Return a table with each run's machine, versions and command."""
    rows = []
    for run in runs:
        env = run.environment
        packages = env.get("packages")
        versions = {"model": env.get("model_commit"), "Python": env.get("python")}
        versions |= dict(packages) if isinstance(packages, Mapping) else {}
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
        rows.append([escape(_shown(cell or None)) for cell in cells])
    return _table(("run", "device", "threads", "system", "versions", "command", "directory"), rows)


def _shown(value: object) -> str:
    """Return a value as visible text, or a dash for None."""
    return "–" if value is None else visible_text(str(value))  # noqa: RUF001


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], marked: Iterable[int] = ()) -> str:
    """Return a table of HTML cells whose rows become blocks on narrow screens; the `marked` rows are highlighted."""
    chosen = set(marked)
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr{" class=differs" if i in chosen else ""}><th scope="row" data-label="{escape(headings[0])}">{row[0]}</th>'
        + "".join(
            f'<td data-label="{escape(heading)}">{cell}</td>'
            for heading, cell in zip(headings[1:], row[1:], strict=True)
        )
        + "</tr>"
        for i, row in enumerate(rows)
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table"><table class="stacking">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _run_data(part: _RunPart) -> dict[str, Any]:
    run = part.run
    costs = list(accumulate(record.cost for record in run.records))  # evaluations cost nothing
    best = best_evaluation(run)
    progress: dict[str, list[float]] = {
        "step": [record.step for record in run.records],
        "seconds": [c.seconds for c in costs],
        "samples": [c.samples for c in costs],
        "unique_tokens": [c.unique_tokens for c in costs],
    }
    return {
        "name": run.name,
        "plotlyName": plotly_text(run.name),
        "x": progress,
        "marks": event_marks(run),
        "rollouts": [{"step": step.step, "label": f"step {step.step}"} for step in part.rollouts],
        "evaluations": [
            {
                "step": step.step,
                "label": (f"after step {step.step}" if step.step else "before training")
                + (" (best)" if best and best.step == step.step else ""),
            }
            for step in part.evaluations
        ],
        "tokensKnown": part.tokens_known,
        "samples": _samples_command(run),
    }


def event_marks(run: StoredRun) -> list[dict[str, Any]]:
    """Return the indices of records at which the reference was reset or a phase began, with labels."""
    marks = [(at, "reference reset") for at, r in enumerate(run.records) if r.reference_reset]
    begins = [(at, r.objective.name) for at, r in enumerate(run.records) if r.objective and r.objective.begins]
    marks += [(at, plotly_text(f"{name} begins")) for at, name in begins[1:]]
    return [{"at": at, "label": label} for at, label in marks]
