"""Layouts of mathematics: the columns of a problem and its answer, and where in its column the answer is.

The instructions that some authors put around a problem are removed. A row without one answer that can be verified is
dropped. An answer can be text, a whole number (142.0 is 142), or a list of answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from brorl.prompts.boxed import last_box
from brorl.prompts.layouts.layout import Cells, DroppedRow, question_of
from brorl.prompts.question import Question
from brorl.prompts.row_files import cell_of, decoded

MATH_DOMAIN = "math"
MARKER = "####"  # before the answer in GSM8K's form
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")
_AROUND = re.compile(  # what DAPO and PRIME put around a problem
    r"\ASolve the following math problem step by step\..*?\n\n"
    r'|Remember to put your answer on its own line after "Answer:"\.\Z'
    r"|Present the answer in LaTex format: \\boxed\{Your answer\}\Z",
    re.DOTALL,
)
# Columns of benchmarks, the first that a row has, in upper or lower case.
QUESTIONS = ("problem", "question", "prompt", "query", "input")
ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "gt", "target")
SOLUTIONS = ("solution", "original_solution", "response", "output")
CONTEXT = "context"  # column of a text before the question

Find = Callable[[Any], str | None]  # from the value of a column to the answer; None if there is none


def reference_answer(value: Any) -> str | None:
    """Return an answer as text: a whole number without decimals, a list joined by commas; None if there is none."""
    if isinstance(value, str):
        listed = decoded(value)
        is_list = isinstance(listed, list) and bool(listed) and all(isinstance(item, str) for item in listed)
        return reference_answer(listed) if is_list else value.strip() or None
    if isinstance(value, list | tuple):
        parts = [reference_answer(item) for item in value]
        return ", ".join(part for part in parts if part) if parts and None not in parts else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return str(int(value)) if value == int(value) else str(value)


def after_marker(value: Any) -> str | None:
    """Return the number after `####`, without commas between thousands."""
    _, marker, answer = str(value).rpartition(MARKER)
    if not marker:
        raise DroppedRow(f"no {MARKER} before the answer")
    return _THOUSANDS.sub("", answer)


def boxed(value: Any) -> str | None:
    """Return the last box of a solution."""
    answer = last_box(str(value))
    if answer is None:
        raise DroppedRow("no \\boxed{} in the solution")
    return answer


def the_only(value: Any) -> str | None:
    """Return the answer of a list with one accepted answer."""
    answers = decoded(value)
    if not isinstance(answers, list):
        raise ValueError(f"the answer must be a list of answers, got {str(value)[:60]!r}")
    if len({str(answer).strip() for answer in answers}) > 1:
        raise DroppedRow("several accepted answers")
    return reference_answer(answers[:1])


def answered(question: str, answer: str, find: Find = reference_answer) -> Callable[[Cells, int], Question]:
    """Return the reading of a column with a problem, and a column or a key inside one with its answer."""

    def read(row: Cells, _seed: int) -> Question:
        problem = _AROUND.sub("", asked_text(row[question]).strip()).strip()
        if not problem:
            raise DroppedRow("no question")
        return question_of(problem, (find(cell_of(row, answer)) or "").strip(), MATH_DOMAIN)

    return read


def asked_text(value: Any) -> str:
    """Return the text of a question: a string, or the last message of a conversation; empty for none.

    Raises:
        ValueError: If it is something else.
    """
    last = value[-1] if isinstance(value, list) and value else None
    if isinstance(last, Mapping) and isinstance(last.get("content"), str) and last.get("role") == "user":
        return str(last["content"])
    if not isinstance(value, str | None):
        kind = "" if isinstance(value, list) else f", got {type(value).__name__}"
        raise ValueError(f"the problem must be a string{kind or ' or a list of messages, the last one by the user'}")
    return value or ""


def benchmark_row(row: Cells) -> Question:
    r"""Read the columns of a benchmark by their usual names; the answer may be after `####`, or in a `\boxed{...}`.

    Raises:
        DroppedRow: If there is no question or no answer.
    """
    asked, context = (_texts(row, names) for names in (QUESTIONS, [CONTEXT]))
    given = [answer for answer in map(reference_answer, _cells(row, ANSWERS)) if answer]
    marked = [_THOUSANDS.sub("", answer.rpartition(MARKER)[2]) if MARKER in answer else answer for answer in given]
    found = [
        *(last_box(answer) or answer for answer in marked),
        *(last_box(text) or "" for text in _texts(row, SOLUTIONS)),
    ]
    reference = next((answer.strip() for answer in found if answer.strip()), "")
    return question_of("\n\n".join([*context, *asked[:1]] if asked else []), reference, MATH_DOMAIN)


def _texts(row: Cells, names: Sequence[str]) -> list[str]:
    return [value.strip() for value in _cells(row, names) if isinstance(value, str) and value.strip()]


def _cells(row: Cells, names: Sequence[str]) -> list[Any]:
    """Return the values of the named columns that a row has, in the order of the names, ignoring case."""
    spelled = {name.lower(): name for name in reversed(list(row))}
    return [row[spelled[name]] for name in names if name in spelled]
