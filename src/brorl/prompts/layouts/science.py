"""Layouts of public datasets of science.

Options are permuted by the row and the seed. A row whose options are equal, or whose solution has no short answer, is
dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from brorl.prompts.boxed import last_box
from brorl.prompts.layouts.layout import Cells, DroppedRow, Fields
from brorl.prompts.science import Choices, MeasuredAnswer

_MAX_ANSWER = 100
_SCIBENCH_TOLERANCE = 0.05
_ANSWER = re.compile(r"\b(?:final )?answer\b[*_\s]*(?:is\b|[:=])[*_:=\s]*([^\n]{1,200})", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.;](?=\s|$)")
_CHECKABLE = re.compile(r"[0-9\\^=]")  # of a number or a formula; words alone have many forms


def _text(row: Cells, column: str) -> str:
    value = row[column]
    if value is None:
        return ""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"{column} must be a string, got {type(value).__name__}")
    return str(value).strip()


def _fields(question: str, reference: str, missing: str = "no answer") -> Fields:
    if not question:
        raise DroppedRow("no question")
    if not reference:
        raise DroppedRow(missing)
    return Fields(question, reference, "science")


def _choice(question: str, options: Sequence[str], right: int, seed: int) -> Fields:
    """Return a question with permuted options; a row whose options are unusable is dropped."""
    if not question:
        raise DroppedRow("no question")
    try:
        choices = Choices.permuted(options, right, question, seed)
    except ValueError as error:
        raise DroppedRow(str(error).removeprefix("has ")) from None
    return _fields(choices.under(question), choices.to_text())


def gpqa(row: Cells, seed: int) -> Fields:
    """Read a question with a column for each option."""
    columns = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    return _choice(_text(row, "Question"), [_text(row, column) for column in columns], 0, seed)


def sciq(row: Cells, seed: int) -> Fields:
    """Read a question with a column for each option."""
    columns = ("correct_answer", "distractor1", "distractor2", "distractor3")
    return _choice(_text(row, "question"), [_text(row, column) for column in columns], 0, seed)


def mmlu_pro(row: Cells, seed: int) -> Fields:
    """Read a list of options with the letter and the index of the right one."""
    options, right = row["options"], row["answer_index"]
    if not isinstance(options, list | tuple) or not all(isinstance(option, str) for option in options):
        raise ValueError("options must be a list of strings")
    if isinstance(right, bool) or not isinstance(right, int):
        raise ValueError(f"answer_index must be a whole number, got {right!r}")
    if _text(row, "answer") != ascii_uppercase[right : right + 1]:
        raise DroppedRow("answer and answer_index name different options")
    return _choice(_text(row, "question"), options, right, seed)


def arc(row: Cells, seed: int) -> Fields:
    """Read options with labels, one of which is the answer."""
    choices = row["choices"]
    if not isinstance(choices, Mapping) or not {"text", "label"} <= set(choices):
        raise ValueError('choices must be of the form {"text": [...], "label": [...]}')
    texts, labels = list(choices["text"]), list(choices["label"])
    if len(texts) != len(labels) or not all(isinstance(text, str) for text in texts):
        raise ValueError("choices must have one text per label")
    key = _text(row, "answerKey")
    if key not in labels:
        raise DroppedRow("no answer")
    return _choice(_text(row, "question"), texts, labels.index(key), seed)


def scp(row: Cells, _seed: int) -> Fields:
    """Read a problem whose solution states a short answer: in a box, after `answer`, or as its only line."""
    solution = _text(row, "matched_solution" if "matched_solution" in row else "solution")
    answer = last_box(solution)
    if answer is None:
        stated = [match[1] for match in _ANSWER.finditer(solution)]
        answer = _SENTENCE_END.split(stated[-1])[0] if stated else "" if "\n" in solution else solution
    answer = answer.strip(" $*").removesuffix(".").strip(" $*")
    is_short = _CHECKABLE.search(answer) and len(answer) <= _MAX_ANSWER
    return _fields(_text(row, "problem"), answer if is_short else "", "no short answer in the solution")


def scibench(row: Cells, _seed: int) -> Fields:
    """Read a number with its unit, which is accepted within 5%."""
    problem, number, unit = (_text(row, column) for column in ("problem_text", "answer_number", "unit"))
    value = f"{number} {unit.replace('$', '').strip()}".strip()
    return _fields(problem, MeasuredAnswer(value, _SCIBENCH_TOLERANCE).to_text() if number else "")
