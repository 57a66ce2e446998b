r"""Mathematical benchmarks by name: their data sets, and the meaning of their columns.

In: a name, and the path of the data if it is not the usual one. Out: one question per row, with its reference answer.
The data sets of a benchmark have different column names; the first known name that a row has is used, in upper or lower
case. An answer can be text, a whole number (142.0 is 142), a list of answers, the text after `####`, or the last
`\boxed{...}` of a solution. A row without question or answer is an error of one line with its columns. No row is
skipped or dropped as a repetition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from brorl.errors import UserError
from brorl.prompts.boxed import last_box
from brorl.prompts.question import Question
from brorl.prompts.rows import Row, read_rows

BOXED_TEMPLATE = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
BENCHMARK_DOMAIN = "math"

_QUESTIONS = ("problem", "question", "prompt", "query", "input")
_ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "gt", "target")
_SOLUTIONS = ("solution", "original_solution", "response", "output")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+")


@dataclass(frozen=True)
class Hub:
    """A data set of a benchmark on the Hugging Face hub.

    Attributes:
        id: Id of the data set.
        split: Split to evaluate on.
        subset: Its configuration; None for the only one.
    """

    id: str
    split: str
    subset: str | None = None


@dataclass(frozen=True)
class Layout:
    """A benchmark.

    Attributes:
        title: Its name and size.
        hubs: Its data sets; the first is the default.
        answer_after: Text before the answer in its column, at its last occurrence; None takes the whole column.
        context_column: Column of a text before the question, if a row has one.
    """

    title: str
    hubs: tuple[Hub, ...]
    answer_after: str | None = None
    context_column: str | None = None


BENCHMARKS: Mapping[str, Layout] = {
    "aime24": Layout(
        "AIME 2024, 30 problems",
        (
            Hub("HuggingFaceH4/aime_2024", "train"),
            Hub("math-ai/aime24", "test"),
            Hub("Maxwell-Jia/AIME_2024", "train"),
        ),
    ),
    "aime25": Layout("AIME 2025, 30 problems", (Hub("math-ai/aime25", "test"), Hub("yentinglin/aime_2025", "train"))),
    "amc": Layout(
        "AMC 12 of 2022 and 2023, 83 problems",
        (Hub("AI-MO/aimo-validation-amc", "train"), Hub("math-ai/amc23", "test")),
    ),
    "math": Layout("MATH-500, 500 problems", (Hub("HuggingFaceH4/MATH-500", "test"), Hub("math-ai/math500", "test"))),
    "minerva": Layout("Minerva Math, 272 problems", (Hub("math-ai/minervamath", "test"),)),
    "olympiadbench": Layout(
        "OlympiadBench, English text-only mathematics, 674 problems",
        (Hub("math-ai/olympiadbench", "test"), Hub("Hothan/OlympiadBench", "train", "OE_TO_maths_en_COMP")),
        context_column="context",
    ),
    "gsm8k": Layout("GSM8K, 1,319 test problems", (Hub("openai/gsm8k", "test", "main"),), answer_after="####"),
}


@dataclass(frozen=True)
class BenchmarkSource:
    """A benchmark and the path of its data.

    Attributes:
        benchmark: One of `BENCHMARKS`.
        path: File, folder, pattern or hub id; None for the default data set.
        name: Name in ids and tables; None for the benchmark's name.
        split: Split of a hub data set; None for its known split, else that of the default data set.
        subset: Configuration of a hub data set; None for its known subset.

    Raises:
        ValueError: If there is no such benchmark, or the name has a colon.
    """

    benchmark: str
    path: str | None = None
    name: str | None = None
    split: str | None = None
    subset: str | None = None

    def __post_init__(self) -> None:
        if self.benchmark not in BENCHMARKS:
            raise ValueError(f"there is no benchmark {self.benchmark!r} (there are: {', '.join(BENCHMARKS)})")
        if ":" in self.label:
            raise ValueError(f"name: {self.name!r} has a colon, which ends it in ids; choose another name")

    @property
    def label(self) -> str:
        """Name in ids and tables."""
        return self.name or self.benchmark

    @property
    def hub(self) -> Hub:
        """Path, split and subset of the data; a local path has no split and no subset."""
        usual, *others = BENCHMARKS[self.benchmark].hubs
        if self.path is None or self.path == usual.id:
            known = usual
        else:
            known = next((hub for hub in others if hub.id == self.path), Hub(self.path, usual.split))
        return Hub(known.id, self.split or known.split, self.subset or known.subset)


def read_benchmark(source: BenchmarkSource) -> list[Question]:
    """Read the questions of a benchmark, one per row, in the order of the rows.

    Args:
        source: The benchmark and the path of its data.

    Returns:
        Questions with the ids `label:row`, or `label:file:row` if there are several files.

    Raises:
        UserError: If nothing can be read, or a row has no question or no answer.
    """
    layout, hub = BENCHMARKS[source.benchmark], source.hub
    names = [*_QUESTIONS, *_ANSWERS, *_SOLUTIONS, *([layout.context_column] if layout.context_column else [])]
    wanted = {spelling for name in names for spelling in (name, name.capitalize(), name.title(), name.upper())}
    questions = []
    for row in read_rows(hub.id, hub.subset, hub.split, wanted):
        text, reference = _question_of(row, source.benchmark, layout), _reference_of(row, source.benchmark, layout)
        questions.append(Question(f"{source.label}:{row.key}", text, reference, BENCHMARK_DOMAIN, source.label))
    if not questions:
        raise UserError(f"{hub.id} is empty; {source.benchmark} needs at least one row")
    return questions


def reference_answer(value: Any) -> str | None:
    """Return an answer as text.

    Args:
        value: The value of an answer's column.

    Returns:
        Text without space around it; a whole number without decimals; a list of answers joined by commas, as
        math-verify reads sets; None if there is no answer.
    """
    if isinstance(value, str):
        text = value.strip()
        listed = _as_list(text)
        return reference_answer(listed) if listed is not None else text or None
    if isinstance(value, list | tuple):
        parts = [reference_answer(item) for item in value]
        return ", ".join(part for part in parts if part is not None) if parts and None not in parts else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return str(int(value)) if value == int(value) else str(value)


def _as_list(text: str) -> list[str] | None:
    """Return the texts of a list that was written as text, `['2', '3']`; None for other text, such as [0, 1]."""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return found if found and all(isinstance(item, str) for item in found) else None


def _cells(row: Row, names: Sequence[str]) -> list[Any]:
    """Return the values of the named columns that the row has, in the order of the names, ignoring case."""
    spelled = {name.lower(): name for name in reversed(list(row.values))}
    return [row.values[spelled[name]] for name in names if name in spelled]


def _question_of(row: Row, benchmark: str, layout: Layout) -> str:
    found = [value.strip() for value in _cells(row, _QUESTIONS) if isinstance(value, str) and value.strip()]
    if not found:
        raise _missing(row, benchmark, "question", ", ".join(_QUESTIONS))
    before = [layout.context_column] if layout.context_column else []
    context = [value.strip() for value in _cells(row, before) if isinstance(value, str) and value.strip()]
    return "\n\n".join([*context, found[0]])


def _reference_of(row: Row, benchmark: str, layout: Layout) -> str:
    for value in _cells(row, _ANSWERS):
        answer = reference_answer(value)
        if answer is None:
            continue
        if layout.answer_after and layout.answer_after in answer:
            answer = answer.rpartition(layout.answer_after)[2].strip()
        boxed = last_box(answer)
        answer = answer if boxed is None else boxed.strip()
        if _THOUSANDS.fullmatch(answer) and layout.answer_after:
            answer = answer.replace(",", "")
        if answer:
            return answer
    for solution in _cells(row, _SOLUTIONS):
        boxed = last_box(solution) if isinstance(solution, str) else None
        if boxed is not None and boxed.strip():
            return boxed.strip()
    expected = f"{', '.join(_ANSWERS)}, or {' or '.join(_SOLUTIONS[:2])} with a \\boxed{{}}"
    raise _missing(row, benchmark, "answer", expected)


def _missing(row: Row, benchmark: str, what: str, expected: str) -> UserError:
    return UserError(
        f"{row.place} has no {what} for {benchmark} (columns: {', '.join(row.columns) or 'none'}; expected one of "
        f"{expected}); name the columns: --data '{{path: ..., prompt_column: ..., answer_column: ...}}'"
    )
