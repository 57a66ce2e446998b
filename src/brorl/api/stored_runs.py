"""`brorl.report` shows stored runs as an HTML file; `brorl.samples` shows their rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from brorl.errors import UserError, option
from brorl.format import visible_text
from brorl.runs.run_directory import check_run, read_run
from brorl.runs.stored_rollouts import Folder, StoredGroup, read_groups, stored_steps
from brorl.verdict import NO_ANSWER, NO_CODE, Verdict

if TYPE_CHECKING:
    from brorl.reporting.page import Report


def report(*runs: str | Path, output: str | Path | None = None) -> Report:
    """Write the report of runs as one HTML file that needs no network.

    Args:
        runs: At least one run directory; charts show several together.
        output: The file (default: RUN/report.html; for several runs: runs/report.html).

    Returns:
        The file and its size. In a notebook it is a link.

    Raises:
        UserError: If a run has nothing to show, or the file exists and is not a report.
    """
    if not runs:
        raise UserError("RUN is missing; give at least one run directory")

    from brorl.reporting.page import write_report

    paths = [Path(run).expanduser() for run in runs]
    return write_report(paths, None if output is None else Path(output).expanduser())


def samples(
    run: str | Path,
    *,
    step: int | None = None,
    prompt: int | str | None = None,
    kind: Literal["all", "wrong", "right"] = "all",
    limit: int = 5,
    held_out: bool = False,
) -> Samples:
    """Read the prompts of a step with their pass rates, and the rollouts of one of them.

    Args:
        run: The run directory.
        step: The step (default: the last stored one).
        prompt: Number of the prompt in the step, from 1, or its name (default: the one with the pass rate nearest to
            one half, among those with responses of the kind).
        kind: Show all responses, only the incorrect ones (wrong), or only the correct ones (right).
        limit: Most responses to show, at least 1.
        held_out: Read the responses to held-out prompts at an evaluation, not the rollouts of training.

    Returns:
        The prompts and the responses, which show as text in terminals and notebooks.

    Raises:
        UserError: If the run, the step or the prompt does not exist, with the existing ones.
    """
    if limit < 1:
        raise UserError(f"{option('limit')}: expected a number of at least 1, not {limit}")

    name = None if prompt is None else str(prompt)
    path = Path(run).expanduser()
    return find_samples(path, step=step, prompt=name, kind=kind, limit=limit, held_out=held_out)


Kind = Literal["all", "wrong", "right"]
MAX_PROMPTS = 20  # list at most this many prompts; --prompt shows any of the others
_BAR = 16  # width in characters
_PROMPT, _RESPONSE = 240, 480  # an example shows at most this many characters
_ANSWER = 480
_PLACES: dict[Folder, str] = {"rollouts": "step", "evaluations": "held-out prompts at step"}
_KIND_NAMES = {"all": "responses", "wrong": "incorrect responses", "right": "correct responses"}


@dataclass(frozen=True)
class PromptRow:
    """A prompt in the list of a step's prompts, with the counts of its rollouts."""

    number: int  # counts from 1
    prompt_id: str
    question: str
    num_correct: int
    num_rollouts: int
    num_verified: int
    num_responses: int  # distinct responses
    num_truncated: int

    @property
    def pass_rate(self) -> float:
        """Correct rollouts as a fraction of the verified rollouts, 0 to 1; 0 if none is verified."""
        return self.num_correct / max(self.num_verified, 1)


@dataclass(frozen=True, eq=False)
class Samples:
    """The prompts of a step of a run, and the most frequent responses to one of them."""

    run: Path
    step: int
    rows: tuple[PromptRow, ...]
    number: int | None  # the prompt whose responses are shown; None if no prompt has responses of the kind
    group: StoredGroup | None  # rollouts of that prompt
    chosen: bool  # whether the caller chose the prompt; then the list of prompts is left out
    folder: Folder
    kind: Kind
    limit: int  # show at most this many responses

    def __repr__(self) -> str:
        return f"Samples({str(self.run)!r}: {len(self.rows)} prompts at step {self.step})"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        names = ("num_rollouts", "num_verified", "num_correct")
        rollouts, verified, correct = (sum(getattr(row, name) for row in self.rows) for name in names)
        lost = "" if verified == rollouts else f" of {verified:,} verified rollouts"
        yield Text(
            f"{_PLACES[self.folder]} {self.step} of {self.run}: {len(self.rows)} prompts, "
            f"{rollouts:,} rollouts, {correct / max(verified, 1):.1%} correct{lost}"
        )
        if not self.chosen:
            yield from _prompt_list(self.rows, options.max_width)
            if len(self.rows) > MAX_PROMPTS:
                shown = f"{MAX_PROMPTS} of {len(self.rows)} prompts, evenly spaced by pass rate"
                yield Text(f"{shown}; {option('prompt', 'NUMBER')} shows any")
        if self.group is None or self.number is None:
            yield Text(f"\nno prompt of this step has {_KIND_NAMES[self.kind]}")
        else:
            yield from _responses(self.group, self.number, self.kind, self.limit)

    def _repr_html_(self) -> str:
        console = Console(record=True, width=120, file=StringIO(), highlight=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format='<pre style="white-space:pre-wrap">{code}</pre>')


def find_samples(
    run: Path,
    *,
    step: int | None = None,
    prompt: str | None = None,
    kind: Kind = "all",
    limit: int = 5,
    held_out: bool = False,
) -> Samples:
    """Read a step's prompts and the rollouts of one of them; see `brorl.samples`."""
    check_run(run)
    folder: Folder = "evaluations" if held_out else "rollouts"
    steps = stored_steps(run, folder)
    if not steps:
        from brorl.reporting.summary import why_no_held_out_responses, why_no_rollouts  # imports scipy

        why = why_no_held_out_responses if held_out else why_no_rollouts
        raise UserError(f"{run} contains no {folder}: {why(read_run(run))}")
    step = steps[-1] if step is None else step
    rows: list[PromptRow] = []
    nearest: tuple[float, int, StoredGroup] | None = None  # (distance to the choice, number, group)
    for index, group in enumerate(read_groups(run, step, folder), 1):
        tree = group.tree
        counts = (group.num_correct, tree.num_rollouts, group.num_verified, tree.num_responses, tree.num_truncated)
        rows.append(PromptRow(index, group.prompt_id, group.question, *counts))
        if prompt is None:
            distance = abs(rows[-1].pass_rate - 0.5) if _of_kind(group, kind).size else inf
        else:
            # A number takes precedence over a name that looks like a number, so every prompt can be reached.
            distance = 0.0 if prompt == str(index) else 1.0 if prompt == group.prompt_id else inf
        if distance < (nearest[0] if nearest else inf):
            nearest = (distance, index, group)
    if not rows:
        raise UserError(f"step {step} of {run} sampled no prompts")
    if prompt is not None and nearest is None:
        raise UserError(
            f"step {step} of {run} has no prompt {_one_line(prompt)}; give a number from 1 to {len(rows)}, or a name "
            f"such as {_one_line(rows[0].prompt_id)}"
        )
    _, number, chosen = nearest or (inf, None, None)
    return Samples(run, step, tuple(rows), number, chosen, prompt is not None, folder, kind, limit)


def unsolved_examples(run: Path, step: int, number: int = 2) -> list[str]:
    """Return lines with the most frequent response to the first prompts of a step.

    The list is empty if a rollout of the step was correct, or if the step is not stored.
    """
    if step not in stored_steps(run):
        return []
    lines = []
    for index, group in enumerate(read_groups(run, step), 1):
        if group.num_correct:
            return []
        if index <= number:
            i = int(np.argmax(group.tree.leaf_count))
            answer = f"{answer}; " if (answer := _answer(group.verdicts[i])) else ""
            lines += [
                f"\nexample {index}, prompt: {_end(group.prompt, _PROMPT)}",
                f"response ({group.tree.leaf_count[i]} of {group.tree.num_rollouts} rollouts): "
                f"{_end(group.texts[i], _RESPONSE)}",
                f"{answer}reference answer: {_beginning(group.reference)}; verdict: {group.verdicts[i].reason}",
            ]
    return [*lines, f"\nmore of them: brorl samples {run} --step {step}"] if lines else []


def _of_kind(group: StoredGroup, kind: Kind) -> NDArray[np.int64]:
    """Return the indices of the distinct responses of a kind."""
    if kind == "all":
        return np.arange(group.correct_L.size)
    return np.flatnonzero(group.correct_L if kind == "right" else ~(group.correct_L | group.unverified_L))


def _prompt_list(rows: tuple[PromptRow, ...], width: int) -> Iterator[RenderableType]:
    """Yield the table of the prompts by pass rate."""
    order = sorted(rows, key=lambda row: -row.pass_rate)
    indices = np.linspace(0, len(order) - 1, min(len(order), MAX_PROMPTS)).round().astype(int)
    headings, cells = ("#", "correct", "", "distinct", "cut"), []
    for prompt in (order[i] for i in indices):
        filled = round(prompt.pass_rate * _BAR)
        bar = Text.assemble(("#" * filled, "green"), ("." * (_BAR - filled), "dim"))
        counts = f"{prompt.num_correct}/{prompt.num_verified}", bar, str(prompt.num_responses)
        cells.append((str(prompt.number), *counts, str(prompt.num_truncated or ""), Text(_one_line(prompt.question))))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    left = width - 4
    for i, name in enumerate(headings):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
        left -= max(len(name), *(len(row[i]) for row in cells)) + 3
    table.add_column("question", no_wrap=True)
    for row in cells:
        row[-1].truncate(max(left, 10), overflow="ellipsis")  # on a narrow terminal the question is cut
        table.add_row(*row)
    yield table


def _responses(group: StoredGroup, number: int, kind: Kind, limit: int) -> Iterator[RenderableType]:
    """Yield a prompt and its most frequent responses."""
    tree, kind_name, chosen = group.tree, _KIND_NAMES[kind], _of_kind(group, kind)
    order = chosen[np.argsort(-tree.leaf_count[chosen], kind="stable")]
    head = f"prompt {number}, {_one_line(group.prompt_id)} ({_one_line(group.domain)})"
    lost = tree.num_rollouts - group.num_verified
    verified = f"{group.num_verified} verified" if lost else f"{tree.num_rollouts}"
    facts = f": {group.num_correct} of {verified} rollouts correct, {tree.num_responses} distinct responses"
    facts += f", {lost} rollouts could not be verified" if lost else ""
    yield Text.assemble("\n", (head, "bold"), facts)
    yield Text(visible_text(group.prompt), style="cyan")
    if group.reference is not None:
        yield Text(f"reference {_beginning(group.reference)}", style="cyan")
    for i in order[:limit].tolist():
        yield from _response(group, i)
    if not order.size:
        yield Text(f"\nno {kind_name}")
    elif order.size > limit:
        left = int(tree.leaf_count[order[limit:]].sum())
        yield Text(
            f"\n{order.size - limit} more {kind_name} ({left} rollouts); {option('limit', order.size)} shows all"
        )


def _response(group: StoredGroup, i: int) -> Iterator[RenderableType]:
    verdict, tree = group.verdicts[i], group.tree
    style = "green" if verdict.correct else "red" if tree.finished[i] and not verdict.unverified else "yellow"
    reward = "none" if verdict.unverified else f"{group.reward_L[i]:g}"
    answer = f"{answer}  " if (answer := _answer(verdict)) else ""
    tokens = "token" if tree.length[i] == 1 else "tokens"
    logprob = float(group.mean_logprob_L[i])
    mean = f"mean log-prob {logprob:.3f}" if isfinite(logprob) else "log-probs unknown"
    yield Text.assemble(
        "\n",
        (f"{tree.leaf_count[i]}x ", "bold"),
        (_one_line(verdict.reason), style),
        (f"  {answer}reward {reward}  {tree.length[i]} {tokens}  {mean}", "dim"),
    )
    yield Text(visible_text(group.texts[i]))


def _answer(verdict: Verdict) -> str:
    """Return the extracted answer, or an empty text if the verifier extracts none."""
    if verdict.extracted is not None:
        return f"extracted answer: {_beginning(verdict.extracted)}"
    return "no answer found" if verdict.reason in (NO_ANSWER, NO_CODE) else ""


def _one_line(text: str) -> str:
    return visible_text(text.strip(), one_line=True)


def _beginning(text: str) -> str:
    """Return the beginning of an answer on one line; programs and their tests are long."""
    text = text.strip()
    return _one_line(text if len(text) <= _ANSWER else f"{text[:_ANSWER]}... ({len(text):,} characters)")


def _end(text: str, size: int) -> str:
    """Return the end of a text, which usually contains the answer."""
    text = text.strip()
    return visible_text(text if len(text) <= size else f"... {text[-size:]}")
