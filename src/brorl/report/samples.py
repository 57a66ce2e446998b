"""Stored rollouts in the terminal: a step's prompts with their success, and the responses of one prompt by count.

The responses to held-out prompts, which evaluations store, are shown in the same way.

In: a run directory and what to look at. Out: text for a rich console, with every character that would act on a terminal
written out. It refuses steps and prompts that are not stored, and says which are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from brorl.errors import UserError
from brorl.report.reasons import why_no_held_out_responses, why_no_rollouts
from brorl.report.visible_text import visible_text
from brorl.runs.run_record import check_run, read_run
from brorl.runs.stored_rollouts import Folder, StoredGroup, read_groups, stored_steps

Kind = Literal["all", "wrong", "right"]
MOST_PROMPTS = 20  # in the list; any can be asked for by its number
_BAR = 16


@dataclass(frozen=True)
class PromptRow:
    """A prompt of a step, in the list of prompts.

    Attributes:
        number: Its place in the step, from 1.
        prompt_id: Its name.
        question: What it asks.
        domain: Its domain.
        num_correct: Correct rollouts.
        num_rollouts: Rollouts.
        num_responses: Distinct responses.
        num_truncated: Rollouts that were cut.
    """

    number: int
    prompt_id: str
    question: str
    domain: str
    num_correct: int
    num_rollouts: int
    num_responses: int
    num_truncated: int


@dataclass(frozen=True, eq=False)
class Samples:
    """What is shown of a step.

    Attributes:
        run: The run directory.
        step: The step.
        rows: All its prompts.
        number: Number of the prompt whose responses are shown; None if none has responses of the kind asked for.
        group: Its rollouts.
        asked: Whether this prompt was asked for, and the list of prompts is left out.
        folder: Where they are stored.
    """

    run: Path
    step: int
    rows: tuple[PromptRow, ...]
    number: int | None
    group: StoredGroup | None
    asked: bool
    folder: Folder


def find_samples(run: Path, step: int | None, prompt: str | None, kind: Kind, folder: Folder = "rollouts") -> Samples:
    """Read a step's prompts and the rollouts of one of them.

    Args:
        run: The run directory.
        step: The step; the last stored one if None.
        prompt: Number of the prompt in the step, from 1, or its name; if None, the prompt whose share of correct
            rollouts is nearest to a half, among those with responses of the kind.
        kind: Which responses will be shown.
        folder: `evaluations` for the responses to held-out prompts; a step is then that of the evaluation.

    Raises:
        UserError: If there is no run, step or prompt like this; it says which there are.
    """
    check_run(run)
    steps = stored_steps(run, folder)
    if not steps:
        why = why_no_rollouts if folder == "rollouts" else why_no_held_out_responses
        raise UserError(f"{run} holds no {folder}: {why(read_run(run))}")
    step = steps[-1] if step is None else step
    rows: list[PromptRow] = []
    best: tuple[float, StoredGroup, int] | None = None
    for number, group in enumerate(read_groups(run, step, folder), 1):
        rows.append(_row(number, group))
        distance = _distance(group, rows[-1], prompt, kind)
        if distance is not None and (best is None or distance < best[0]):
            best = (distance, group, number)
    if prompt is not None and best is None:
        raise UserError(
            f"step {step} of {run} has no prompt {visible_text(prompt, one_line=True)}; give a number from 1 to "
            f"{len(rows)}, or a name such as {visible_text(rows[0].prompt_id, one_line=True)}"
            if rows
            else f"step {step} of {run} sampled no prompts"
        )
    found = best[1:] if best else (None, None)
    return Samples(run, step, tuple(rows), found[1], found[0], prompt is not None, folder)


def show_samples(samples: Samples, kind: Kind, limit: int, console: Console) -> None:
    """Print a step's prompts and the most frequent responses of one.

    Args:
        samples: What was found.
        kind: Which responses to show.
        limit: How many at most.
        console: Where to.
    """
    rollouts = sum(row.num_rollouts for row in samples.rows)
    correct = sum(row.num_correct for row in samples.rows)
    console.print(
        Text(
            f"{_PLACES[samples.folder]} {samples.step} of {samples.run}: {len(samples.rows)} prompts, "
            f"{rollouts:,} rollouts, {correct / max(rollouts, 1):.1%} correct"
        ),
        soft_wrap=True,
    )
    if not samples.asked:
        for part in _prompt_list(samples.rows, console.width):
            console.print(part)
    if samples.group is None or samples.number is None:
        console.print(Text(f"\nno prompt of this step has {_KIND_NAMES[kind]}"))
        return
    for part in _responses(samples.group, samples.number, kind, limit):
        console.print(part, soft_wrap=not isinstance(part, Table))


_PLACES: dict[Folder, str] = {"rollouts": "step", "evaluations": "held-out prompts at step"}
_KIND_NAMES = {"all": "responses", "wrong": "incorrect responses", "right": "correct responses"}


def _row(number: int, group: StoredGroup) -> PromptRow:
    tree = group.tree
    return PromptRow(
        number, group.prompt_id, group.question, group.domain, group.num_correct, tree.num_rollouts, tree.num_responses,
        group.num_truncated,
    )  # fmt: skip


def _distance(group: StoredGroup, row: PromptRow, prompt: str | None, kind: Kind) -> float | None:
    """Return how far a prompt is from what was asked for; None if it is not it."""
    if prompt is not None:
        # A number wins over a name that looks like one, so that every prompt can be reached by its number.
        return 0.0 if prompt == str(row.number) else 1.0 if prompt == group.prompt_id else None
    return abs(row.num_correct / row.num_rollouts - 0.5) if _of_kind(group, kind).size else None


def _of_kind(group: StoredGroup, kind: Kind) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    chosen_L = np.ones(len(group.texts), np.bool_) if kind == "all" else group.correct_L == (kind == "right")
    return np.flatnonzero(chosen_L)


def _prompt_list(rows: Sequence[PromptRow], width: int) -> list[RenderableType]:
    order = sorted(rows, key=lambda row: -row.num_correct / row.num_rollouts)
    last = len(order) - 1
    places = range(len(order)) if len(order) <= MOST_PROMPTS else np.linspace(0, last, MOST_PROMPTS).round().astype(int)
    cells = [
        (
            str(row.number),
            f"{row.num_correct}/{row.num_rollouts}",
            _bar(row.num_correct / row.num_rollouts),
            str(row.num_responses),
            str(row.num_truncated or ""),
            Text(_one_line(row.question)),
        )
        for row in (order[i] for i in places)
    ]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    left = width - 4
    for i, name in enumerate(("#", "correct", "", "distinct", "cut")):
        widest = max(len(name), *(len(row[i]) for row in cells)) if cells else len(name)
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
        left -= widest + 3
    table.add_column("question", no_wrap=True)
    for row in cells:
        row[-1].truncate(max(left, 10), overflow="ellipsis")  # only the question gives way where it is narrow
        table.add_row(*row)
    parts: list[RenderableType] = [table]
    if len(order) > MOST_PROMPTS:
        shown = f"{MOST_PROMPTS} of {len(order)} prompts, evenly spaced by success"
        parts.append(Text(f"{shown}; --prompt NUMBER shows any"))
    return parts


def _responses(group: StoredGroup, number: int, kind: Kind, limit: int) -> list[RenderableType]:
    """Return a prompt and its most frequent responses."""
    tree = group.tree
    chosen = _of_kind(group, kind)
    order = chosen[np.argsort(-tree.leaf_count[chosen], kind="stable")]
    head = f"prompt {number}, {_one_line(group.prompt_id)} ({_one_line(group.domain)})"
    facts = f": {group.num_correct} of {tree.num_rollouts} rollouts correct, {tree.num_responses} distinct responses"
    parts: list[RenderableType] = [
        Text.assemble("\n", (head, "bold"), facts),
        Text(visible_text(group.prompt), style="cyan"),
    ]
    if group.reference is not None:
        parts.append(Text(f"reference {_one_line(group.reference)}", style="cyan"))
    parts += [_response(group, int(i)) for i in order[:limit]]
    what = "" if kind == "all" else f"{'in' * (kind == 'wrong')}correct "
    if not order.size:
        parts.append(Text(f"\nno {what}responses"))
    elif order.size > limit:
        left = int(tree.leaf_count[order[limit:]].sum())
        parts.append(
            Text(f"\n{order.size - limit} more {what}responses ({left} rollouts); --limit {order.size} shows all")
        )
    return parts


def _response(group: StoredGroup, i: int) -> Group:
    verdict, tree = group.verdicts[i], group.tree
    style = "green" if verdict.correct else "red" if tree.finished[i] else "yellow"
    answer = "no answer found" if verdict.extracted is None else f"answer {_one_line(verdict.extracted)}"
    tokens = "token" if tree.length[i] == 1 else "tokens"
    logprob = float(group.mean_logprob_L[i])
    mean = f"mean log-prob {logprob:.3f}" if isfinite(logprob) else "log-probs unknown"
    line = Text.assemble(
        "\n",
        (f"{tree.leaf_count[i]}x ", "bold"),
        (_one_line(verdict.reason), style),
        (f"  {answer}  reward {group.reward_L[i]:g}  {tree.length[i]} {tokens}  {mean}", "dim"),
    )
    return Group(line, Text(visible_text(group.texts[i])))


def _one_line(text: str) -> str:
    return visible_text(text.strip(), one_line=True)


def _bar(share: float) -> Text:
    filled = round(share * _BAR)
    return Text.assemble(("#" * filled, "green"), ("." * (_BAR - filled), "dim"))
