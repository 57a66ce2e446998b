"""Stored rollouts as text: the prompts of a step with their pass rates, and the responses to one of them.

Control characters in prompts and responses are escaped so they cannot affect a terminal. If tools were called, a margin
shows whether each line comes from the model or from a tool result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.text import Text

from brorl.algorithms.groups import Group
from brorl.arrays import IntArray
from brorl.errors import option
from brorl.format import counted, shortened, visible_text
from brorl.reporting.tokens import tokenizer_of_run
from brorl.runs.stored_rollouts import Folder, read_groups, stored_steps
from brorl.table import Result, Table
from brorl.verdict import NO_ANSWER, NO_CODE, Verdict

Kind = Literal["all", "wrong", "right"]
MAX_PROMPTS = 20  # list at most this many prompts; --prompt shows any other
_PROMPT, _RESPONSE, _ANSWER = 240, 480, 480  # show at most this many characters
_Parts = Sequence[tuple[Sequence[int], bool]]  # turns and results: (token ids, whether they are given)
_KIND_NAMES = {"all": "responses", "wrong": "incorrect responses", "right": "correct responses"}


class PromptRow(NamedTuple):
    """A row in the list of a step's prompts, with counts of the prompt's rollouts."""

    number: int  # starting at 1
    prompt_id: str
    question: str
    num_correct: int
    num_rollouts: int
    num_verified: int
    num_responses: int  # distinct responses
    num_truncated: int
    num_turns: int  # turns over all rollouts

    @classmethod
    def of(cls, number: int, group: Group) -> PromptRow:
        """Return the row for a group."""
        tree = group.tree
        counts = tree.num_rollouts, group.num_verified, tree.num_responses, tree.num_truncated, tree.num_turns
        return cls(number, group.prompt.id, group.prompt.question, group.num_correct, *counts)

    @property
    def pass_rate(self) -> float:
        """Fraction of verified rollouts that are correct, 0 to 1; 0 if none is verified."""
        return self.num_correct / max(self.num_verified, 1)


@dataclass(frozen=True, eq=False, repr=False)
class Samples(Result):
    """The prompts of one step of a run, and the most frequent responses to one of them."""

    run: Path
    step: int
    rows: tuple[PromptRow, ...]
    number: int | None  # the prompt whose responses are shown; None if no prompt has responses of this kind
    group: Group | None  # rollouts of that prompt
    chosen: bool  # whether the caller chose the prompt; if so, the list of prompts is omitted
    folder: Folder
    kind: Kind
    limit: int  # show at most this many responses

    def __repr__(self) -> str:
        return f"Samples({str(self.run)!r}: {len(self.rows)} prompts at step {self.step})"

    def parts(self) -> Iterator[str | Text | Table]:
        """Yield the prompts, unless the caller chose one, and the responses."""
        names = ("num_rollouts", "num_verified", "num_correct")
        rollouts, verified, correct = (sum(getattr(row, name) for row in self.rows) for name in names)
        lost = "" if verified == rollouts else f" of {verified:,} verified rollouts"
        yield (
            f"{'step' if self.folder == 'rollouts' else 'held-out prompts at step'} {self.step} of {self.run}: "
            f"{len(self.rows)} prompts, {rollouts:,} rollouts, {correct / max(verified, 1):.1%} correct{lost}"
        )
        if not self.chosen:
            yield self.prompts()
        if self.group is None or self.number is None:
            yield f"\nno prompt of this step has {_KIND_NAMES[self.kind]}"
        else:
            tokenizer = tokenizer_of_run(self.run) if self.group.tree.given.any() else None
            yield from _responses(self.group, self.number, self.kind, self.limit, tokenizer)

    def prompts(self) -> Table:
        """Return the prompts ordered by pass rate, or an evenly spaced selection if there are many."""
        order = sorted(self.rows, key=lambda row: -row.pass_rate)
        indices = np.linspace(0, len(order) - 1, min(len(order), MAX_PROMPTS)).round().astype(int).tolist()
        several = any(row.num_turns > row.num_rollouts for row in order)
        rows = tuple(
            (
                str(row.number),
                f"{row.num_correct}/{row.num_verified}",
                f"{row.pass_rate:.0%}",
                str(row.num_responses),
                str(row.num_truncated or ""),
                *([f"{row.num_turns / row.num_rollouts:.2f}"] if several else []),
                shortened(row.question.strip()),
            )
            for row in (order[i] for i in indices)
        )
        shown = f"{MAX_PROMPTS} of {len(order)} prompts, evenly spaced by pass rate; {option('prompt', 'NUMBER')} shows"
        notes = (f"{shown} any",) if len(order) > MAX_PROMPTS else ()
        columns = ("#", "correct", "pass rate", "distinct", "cut", *["turns"] * several, "question")
        return Table("", columns, rows, notes, words=frozenset({len(columns) - 1}))


def of_kind(group: Group, kind: Kind) -> IntArray:
    """Return the indices of the distinct responses of the given kind."""
    if kind == "all":
        return np.arange(group.correct_L.size)
    return np.flatnonzero(group.correct_L if kind == "right" else ~(group.correct_L | group.unverified_L))


def unsolved_examples(run: Path, step: int, number: int = 2) -> list[str]:
    """Return lines with the most frequent response to each of the first prompts of a step.

    The list is empty if any rollout of the step was correct, or if the step is not stored.
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
                f"\nexample {index}, prompt: {_end(group.prompt.text, _PROMPT)}",
                f"response ({group.tree.leaf_count[i]} of {group.tree.num_rollouts} rollouts): "
                f"{_end(group.texts[i], _RESPONSE)}",
                f"{answer}reference answer: {_beginning(group.prompt.reference)}; verdict: {group.verdicts[i].reason}",
            ]
    return [*lines, f"\nmore of them: brorl samples {run} --step {step}"] if lines else []


def _responses(group: Group, number: int, kind: Kind, limit: int, tokenizer: Any) -> Iterator[str | Text]:
    """Yield a prompt and its most frequent responses; with a tokenizer, those that called tools include all turns."""
    tree = group.tree
    kind_name = _KIND_NAMES[kind]
    chosen = of_kind(group, kind)
    order = chosen[np.argsort(-tree.leaf_count[chosen], kind="stable")]
    head = f"prompt {number}, {one_line(group.prompt.id)} ({one_line(group.prompt.domain)})"
    lost = tree.num_rollouts - group.num_verified
    verified = f"{group.num_verified} verified" if lost else f"{tree.num_rollouts}"
    facts = f": {group.num_correct} of {verified} rollouts correct, {tree.num_responses} distinct responses"
    facts += f", {lost} rollouts could not be verified" if lost else ""
    if tree.given.any():
        facts += f", {tree.num_turns - tree.num_rollouts} turns with calls, {tree.first_given.size} of them distinct"
    yield Text.assemble("\n", (head, "bold"), facts)
    yield Text(visible_text(group.prompt.text), style="cyan")
    yield Text(f"reference {_beginning(group.prompt.reference)}", style="cyan")
    parts_L = tree.parts() if tree.given.any() else None
    for i in order[:limit].tolist():
        yield from _response(group, i, parts_L[i] if parts_L else None, tokenizer)
    if not order.size:
        yield f"\nno {kind_name}"
    elif order.size > limit:
        left = int(tree.leaf_count[order[limit:]].sum())
        yield f"\n{order.size - limit} more {kind_name} ({left} rollouts); {option('limit', order.size)} shows all"


def _response(group: Group, i: int, parts: _Parts | None, tokenizer: Any) -> Iterator[str | Text]:
    """Yield a line about a response, then its text, or its turns and tool results if its group has any."""
    verdict = group.verdicts[i]
    tree = group.tree
    logprob = float(tree.prefix_logprob[tree.leaf[i]] / tree.length[i])
    style = "green" if verdict.correct else "red" if tree.finished[i] and not verdict.unverified else "yellow"
    answer = f"{answer}  " if (answer := _answer(verdict)) else ""
    reward = "none" if verdict.unverified else f"{group.reward_L[i]:g}"
    mean = f"mean log-prob {logprob:.3f}" if isfinite(logprob) else "log-probs unknown"
    length = counted(int(tree.length[i]), "token")
    if parts:
        length = f"{counted(len(parts) // 2 + 1, 'turn')}  {length}, {tree.total_length[i] - tree.length[i]} given"
    facts = f"  {answer}reward {reward}  {length}  {mean}"
    yield Text.assemble("\n", (f"{tree.leaf_count[i]}x ", "bold"), (one_line(verdict.reason), style), (facts, "dim"))
    if parts and tokenizer is not None:
        yield from _transcript(parts, "answer" if tree.finished[i] else "cut", tokenizer)
        return
    yield visible_text(group.texts[i])
    if parts:
        yield Text("(this is what the verifier saw; the tokenizer that shows all turns is missing)", style="dim")


def _transcript(parts: _Parts, last: str, tokenizer: Any) -> Iterator[Text]:
    """Yield the lines of a response's turns and tool results with margins; `last` is the margin of the last turn."""
    for index, (token_ids, is_given) in enumerate(parts, 1):
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        margin = "result" if is_given else "call" if index < len(parts) else last
        # line ends around a tool result belong to the chat template
        for line in visible_text(text.strip("\n") if is_given else text).split("\n"):
            yield Text(f"{margin:>6} │ {line}", style="cyan" if is_given else "")
            margin = ""


def _answer(verdict: Verdict) -> str:
    """Return the extracted answer, or an empty string if the verifier extracts none."""
    if verdict.extracted is not None:
        return f"extracted answer: {_beginning(verdict.extracted)}"
    return "no answer found" if verdict.reason in (NO_ANSWER, NO_CODE) else ""


def one_line(text: str) -> str:
    """Return text on one line, with control characters escaped."""
    return visible_text(text.strip(), one_line=True)


def _beginning(text: str) -> str:
    """Return the beginning of an answer on one line, because programs and their tests are long."""
    text = text.strip()
    return one_line(text if len(text) <= _ANSWER else f"{text[:_ANSWER]}... ({len(text):,} characters)")


def _end(text: str, size: int) -> str:
    """Return the end of the text, which usually contains the answer."""
    text = text.strip()
    return visible_text(text if len(text) <= size else f"... {text[-size:]}")
