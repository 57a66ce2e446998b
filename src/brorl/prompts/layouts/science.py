"""Layouts of science: questions with options, with a short answer, or with a number.

Options are permuted by the row and the seed. A row whose options are equal, or whose solution has no short answer, is
dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from brorl.prompts.boxed import last_box
from brorl.prompts.layouts.layout import Cells, DroppedRow, question_of
from brorl.prompts.options import CHOICE_DOMAIN, choice_question, read_options, right_option
from brorl.prompts.question import Question
from brorl.prompts.science import MeasuredAnswer

_MAX_ANSWER = 100
_SCIBENCH_TOLERANCE = 0.05
_ANSWER = re.compile(r"\b(?:final )?answer\b[*_\s]*(?:is\b|[:=])[*_:=\s]*([^\n]{1,200})", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.;](?=\s|$)")
_CHECKABLE = re.compile(r"[0-9\\^=]")  # of a number or a formula; words alone have many forms


def _text(row: Cells, column: str) -> str:
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise ValueError(f"{column} must be a string, got {type(value).__name__}")
    return "" if value is None else str(value).strip()


def choices(
    question: str, options: Sequence[str], *answers: str, first: int | None = None
) -> Callable[[Cells, int], Question]:
    """Return the reading of a question with options.

    Args:
        question: The column of the question.
        options: The column of the options, or one column per option, the right one first.
        answers: Columns that name the right one of a column of options; all must name the same.
        first: The index of the first option, if the last of `answers` is an index.
    """

    def read(row: Cells, seed: int) -> Question:
        values = [row[options[0]]] if answers else [_text(row, column) for column in options]
        found = read_options(values)
        if found is None:
            raise DroppedRow("no 2 to 26 options")
        try:
            places = {
                right_option(found, row[column], first if column == answers[-1] else None) for column in answers
            } or {0}
        except ValueError:
            raise DroppedRow("no answer") from None
        if len(places) > 1:
            raise DroppedRow(f"{' and '.join(answers)} name different options")
        texts = [text.strip() for text in found.texts]
        return choice_question(_text(row, question), texts, places.pop(), seed)

    return read


def scp(row: Cells, _seed: int) -> Question:
    """Read a problem whose solution states a short answer: in a box, after `answer`, or as its only line."""
    solution = _text(row, "matched_solution" if "matched_solution" in row else "solution")
    answer = last_box(solution)
    if answer is None:
        stated = [match[1] for match in _ANSWER.finditer(solution)]
        answer = _SENTENCE_END.split(stated[-1])[0] if stated else "" if "\n" in solution else solution
    answer = answer.strip(" $*").removesuffix(".").strip(" $*")
    is_short = _CHECKABLE.search(answer) and len(answer) <= _MAX_ANSWER
    return question_of(
        _text(row, "problem"), answer if is_short else "", CHOICE_DOMAIN, "no short answer in the solution"
    )


def scibench(row: Cells, _seed: int) -> Question:
    """Read a number with its unit, which is accepted within 5%."""
    problem, number, unit = (_text(row, column) for column in ("problem_text", "answer_number", "unit"))
    value = f"{number} {unit.replace('$', '').strip()}".strip()
    return question_of(problem, MeasuredAnswer(value, _SCIBENCH_TOLERANCE).to_text() if number else "", CHOICE_DOMAIN)
