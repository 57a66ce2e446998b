"""Layouts of public mathematics, science and instruction datasets; a row that cannot be verified is dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from brorl.format import short_repr
from brorl.prompts.answer_forms import last_box
from brorl.prompts.instructions import KINDS, Instructions
from brorl.prompts.options import choice_question, read_options, right_option
from brorl.prompts.question import INSTRUCTIONS_DOMAIN, MATH_DOMAIN, SCIENCE_DOMAIN, Question
from brorl.prompts.row import Cells, DroppedRow, cell_of, decoded, row_question
from brorl.prompts.science import MeasuredAnswer

MARKER = "####"  # precedes the answer in GSM8K's format
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")
_AROUND = re.compile(  # text that DAPO and PRIME put around a problem
    r"\ASolve the following math problem step by step\..*?\n\n"
    r'|Remember to put your answer on its own line after "Answer:"\.\Z'
    r"|Present the answer in LaTex format: \\boxed\{Your answer\}\Z",
    re.DOTALL,
)
# Benchmark columns, ignoring case; the first one present in a row is used.
QUESTIONS = ("problem", "question", "prompt", "query", "input")
ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "gt", "target")
SOLUTIONS = ("solution", "original_solution", "response", "output")
CONTEXT = "context"  # column with text before the question
SPELLINGS = {
    spelling
    for name in (*QUESTIONS, *ANSWERS, *SOLUTIONS, CONTEXT)
    for spelling in (name, name.capitalize(), name.title(), name.upper())
}

Find = Callable[[Any], str | None]  # finds the answer in a cell; None if there is no answer


def reference_answer(value: Any) -> str | None:
    """Return an answer as text: whole numbers without decimals, lists joined by commas; None if there is none."""
    if isinstance(value, str):
        listed = decoded(value)
        is_list = isinstance(listed, list) and bool(listed) and all(isinstance(item, str) for item in listed)
        return reference_answer(listed) if is_list else value.strip() or None
    if isinstance(value, list | tuple):
        answers = [reference_answer(item) for item in value]
        return ", ".join(answer for answer in answers if answer) if answers and None not in answers else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return str(int(value)) if value == int(value) else str(value)


def after_marker(value: Any) -> str | None:
    """Return the number after `####`, without thousands separators."""
    _, marker, answer = str(value).rpartition(MARKER)
    if not marker:
        raise DroppedRow(f"no {MARKER} before the answer")
    return _THOUSANDS.sub("", answer)


def boxed(value: Any) -> str | None:
    """Return the content of the last box in a solution."""
    answer = last_box(str(value))
    if answer is None:
        raise DroppedRow("no \\boxed{} in the solution")
    return answer


def the_only(value: Any) -> str | None:
    """Return the answer in a list with a single accepted answer."""
    answers = decoded(value)
    if not isinstance(answers, list):
        raise ValueError(f"the answer must be a list of answers, got {str(value)[:60]!r}")
    if len({str(answer).strip() for answer in answers}) > 1:
        raise DroppedRow("several accepted answers")
    return reference_answer(answers[:1])


def answered(question: str, answer: str, find: Find = reference_answer) -> Callable[[Cells, int], Question]:
    """Return a reader for a column with a problem, and a column (or `column.key`) with its answer."""

    def read(row: Cells, _seed: int) -> Question:
        problem = _AROUND.sub("", asked_text(row[question]).strip()).strip()
        if not problem:
            raise DroppedRow("no question")
        return row_question(problem, (find(cell_of(row, answer)) or "").strip(), MATH_DOMAIN)

    return read


def asked_text(value: Any) -> str:
    """Return a question's text: the string, or the last message of a conversation; empty if there is none."""
    last = value[-1] if isinstance(value, list) and value else None
    if isinstance(last, Mapping) and isinstance(last.get("content"), str) and last.get("role") == "user":
        return str(last["content"])
    if value != [] and not isinstance(value, str | None):
        kind = "" if isinstance(value, list) else f", got {type(value).__name__}"
        raise ValueError(f"the problem must be a string{kind or ' or a list of messages, the last one by the user'}")
    return str(value or "")


def benchmark_row(row: Cells, _seed: int) -> Question:
    r"""Read a benchmark's columns by their common names. The answer may follow `####`, or be in a `\boxed{...}`."""
    asked, context = (_texts(row, names) for names in (QUESTIONS, [CONTEXT]))
    candidates: list[str] = []
    for answer in filter(None, map(reference_answer, _cells(row, ANSWERS))):
        marked = _THOUSANDS.sub("", answer.rpartition(MARKER)[2]) if MARKER in answer else answer
        candidates.append(last_box(marked) or marked)
    candidates += [last_box(text) or "" for text in _texts(row, SOLUTIONS)]
    reference = next((answer.strip() for answer in candidates if answer.strip()), "")
    return row_question("\n\n".join([*context, *asked[:1]] if asked else []), reference, MATH_DOMAIN)


def _texts(row: Cells, names: Sequence[str]) -> list[str]:
    return [value.strip() for value in _cells(row, names) if isinstance(value, str) and value.strip()]


def _cells(row: Cells, names: Sequence[str]) -> list[Any]:
    """Return a row's values in the named columns, in the order of `names`. Ignore case, and skip missing columns."""
    spelled = {name.lower(): name for name in reversed(list(row))}
    return [row[spelled[name]] for name in names if name in spelled]


_MAX_ANSWER = 100
_SCIBENCH_TOLERANCE = 0.05
_ANSWER = re.compile(r"\b(?:final )?answer\b[*_\s]*(?:is\b|[:=])[*_:=\s]*([^\n]{1,200})", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.;](?=\s|$)")
_CHECKABLE = re.compile(r"[0-9\\^=]")  # occurs in a number or a formula; an answer in words can be phrased in many ways


def _text(row: Cells, column: str) -> str:
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise ValueError(f"{column} must be a string, got {type(value).__name__}")
    return "" if value is None else str(value).strip()


def choices(
    question: str, options: Sequence[str], *answers: str, first: int | None = None
) -> Callable[[Cells, int], Question]:
    """Return a reader for a question whose options are in one column, or in one column each, the right one first.

    With a single column, all `answers` columns must name the same option; the last is an index if `first` is given.
    """

    def read(row: Cells, seed: int) -> Question:
        values = [row[options[0]]] if answers else [_text(row, column) for column in options]
        row_options = read_options(values)
        if row_options is None:
            raise DroppedRow("no 2 to 26 options")
        try:
            places = {
                right_option(row_options, row[column], first if column == answers[-1] else None) for column in answers
            } or {0}
        except ValueError:
            raise DroppedRow("no answer") from None
        if len(places) > 1:
            raise DroppedRow(f"{' and '.join(answers)} name different options")
        texts = [text.strip() for text in row_options.texts]
        return choice_question(_text(row, question), texts, places.pop(), seed)

    return read


def scp(row: Cells, _seed: int) -> Question:
    """Read a problem whose solution gives a short answer in a box, after `answer`, or as its only line."""
    solution = _text(row, "matched_solution" if "matched_solution" in row else "solution")
    answer = last_box(solution)
    if answer is None:
        stated = [match[1] for match in _ANSWER.finditer(solution)]
        answer = _SENTENCE_END.split(stated[-1])[0] if stated else "" if "\n" in solution else solution
    answer = answer.strip(" $*").removesuffix(".").strip(" $*")
    is_short = _CHECKABLE.search(answer) and len(answer) <= _MAX_ANSWER
    problem = _text(row, "problem")
    if problem and not is_short:
        raise DroppedRow("no short answer in the solution")
    return row_question(problem, answer, SCIENCE_DOMAIN)


def scibench(row: Cells, _seed: int) -> Question:
    """Read a number with its unit, accepted within 5%."""
    problem, number, unit = (_text(row, column) for column in ("problem_text", "answer_number", "unit"))
    value = f"{number} {unit.replace('$', '').strip()}".strip()
    return row_question(problem, MeasuredAnswer(value, _SCIBENCH_TOLERANCE).to_text() if number else "", SCIENCE_DOMAIN)


_UNKNOWN_KIND = "an instruction that is not one of the 25 kinds of IFEval"
_UNUSABLE = "an instruction with missing or unusable arguments"

# RLVR-IFeval: each function's kind, our names for its arguments, and the arguments that its prompts imply.
_FUNCTIONS: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, str]]] = {
    name: (
        kind,
        {theirs: ours for theirs, colon, ours in (pair.partition(":") for pair in arguments.split(", ")) if colon},
        {ours: text for ours, equals, text in (pair.partition("=") for pair in arguments.split(", ")) if equals},
    )
    for name, kind, arguments in (
        ("verify_keywords", "keywords:existence", "keyword_list:keywords"),
        ("verify_keyword_frequency", "keywords:frequency", "word:keyword, N:frequency, relation=exactly"),
        ("validate_forbidden_words", "keywords:forbidden_words", "forbidden_words:forbidden_words"),
        ("verify_letter_frequency", "keywords:letter_frequency",
         "letter:letter, N:let_frequency, let_relation=exactly"),
        ("validate_response_language", "language:response_language", "language:language"),
        ("verify_paragraph_count", "length_constraints:number_paragraphs", "N:num_paragraphs, divider=* * *"),
        ("validate_word_constraint", "length_constraints:number_words", "N:num_words, quantifier:relation"),
        ("verify_sentence_constraint", "length_constraints:number_sentences", "N:num_sentences, quantifier:relation"),
        ("validate_paragraphs", "length_constraints:nth_paragraph_first_word",
         "N:num_paragraphs, first_word:first_word, i:nth_paragraph"),
        ("verify_postscript", "detectable_content:postscript", "postscript_marker:postscript_marker"),
        ("validate_placeholders", "detectable_content:number_placeholders", "N:num_placeholders"),
        ("verify_bullet_points", "detectable_format:number_bullet_lists", "N:num_bullets"),
        ("validate_title", "detectable_format:title", ""),
        ("validate_choice", "detectable_format:constrained_response", "options:options"),
        ("validate_highlighted_sections", "detectable_format:number_highlighted_sections", "N:num_highlights"),
        ("validate_sections", "detectable_format:multiple_sections",
         "N:num_sections, section_splitter:section_spliter"),
        ("validate_json_format", "detectable_format:json_format", ""),
        ("validate_repeat_prompt", "combination:repeat_prompt", "original_prompt:prompt_to_repeat"),
        ("validate_two_responses", "combination:two_responses", ""),
        ("validate_uppercase", "change_case:english_capital", ""),
        ("validate_lowercase", "change_case:english_lowercase", ""),
        ("validate_frequency_capital_words", "change_case:capital_word_frequency",
         "N:capital_frequency, quantifier:capital_relation"),
        ("validate_end", "startend:end_checker", "end_phrase:end_phrase"),
        ("validate_quotation", "startend:quotation", ""),
        ("validate_no_commas", "punctuation:no_comma", ""),
    )
}  # fmt: skip


def _instructed(prompt: Any, kinds: Any, arguments: Any, loose: bool = False) -> Question:
    """Return the question of a row with a list of kinds and a list of arguments."""
    if not isinstance(kinds, list | tuple) or not isinstance(arguments, list | tuple):
        types = f"{type(kinds).__name__} and {type(arguments).__name__}"
        raise ValueError(f"the kinds of instructions and their arguments must be two lists, got {types}")
    if isinstance(prompt, list) and len(prompt) > 1:
        raise DroppedRow("more than one message")
    text = asked_text(prompt)
    if any(kind not in KINDS for kind in kinds):
        raise DroppedRow(_UNKNOWN_KIND)
    try:
        return row_question(text, Instructions.from_lists(kinds, arguments, loose).to_text(), INSTRUCTIONS_DOMAIN)
    except ValueError:
        raise DroppedRow(_UNUSABLE) from None


def ifeval(row: Cells, _seed: int, loose: bool = False) -> Question:
    """Read IFEval's lists."""
    return _instructed(row["prompt"], row["instruction_id_list"], row["kwargs"], loose)


def nemotron(row: Cells, _seed: int) -> Question:
    """Read IFEval's lists inside `args`."""
    arguments = _mapping(row["args"], "args", "instruction_id_list", "instruction_kwargs")
    return _instructed(row["input"], arguments["instruction_id_list"], arguments["instruction_kwargs"])


def multi_constraints(row: Cells, _seed: int) -> Question:
    """Read IFEval's lists inside `ground_truth`, which may be a list with one mapping."""
    truth = decoded(row["ground_truth"])
    truth = truth[0] if isinstance(truth, list) and len(truth) == 1 else truth
    truth = _mapping(truth, "ground_truth", "instruction_id", "kwargs")
    return _instructed(row["messages"], truth["instruction_id"], truth["kwargs"])


def rlvr(row: Cells, _seed: int) -> Question:
    """Read a function with its arguments."""
    truth = _mapping(row["ground_truth"], "ground_truth", "func_name")
    if truth["func_name"] not in _FUNCTIONS:
        raise DroppedRow(_UNKNOWN_KIND)
    kind, names, fixed = _FUNCTIONS[truth["func_name"]]
    arguments = {**fixed, **{ours: truth.get(theirs) for theirs, ours in names.items()}}
    return _instructed(row["messages"], [kind], [arguments])


def _mapping(value: Any, column: str, *keys: str) -> Mapping[str, Any]:
    """Return a mapping with the given keys. The column may store it as JSON or as a Python literal."""
    mapping = decoded(value)
    if not isinstance(mapping, Mapping) or not {*keys} <= {*mapping}:
        raise ValueError(f"{column} must be a mapping with {' and '.join(keys)}, got {short_repr(value)}")
    return mapping
