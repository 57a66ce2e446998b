"""The cases of a programming question: an input and its expected output each.

In: a question and its cases as a data set has them. Out: the cases to keep, and the way to compare their outputs, which
follows from the question's text. A question with several valid outputs cannot be verified by cases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl.prompts.code_tests import CallCases, StdinCases
from brorl.prompts.layouts.layout import Dropped

_MAX_CASES = 100
_MAX_TESTS_CHARACTERS = 1_000_000

IMAGE_ONLY = Dropped("the question is an image")
SEVERAL_OUTPUTS = Dropped("several outputs are valid")

_IMAGE = re.compile(r"<image>|\[image\]|!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>", re.IGNORECASE)
_SEVERAL = re.compile(
    r"\b(?:print|output|return|report|display|write)\b[^.\n]{0,60}\bany\b(?!\s+(?:case|register|order))"
    r"|\b(?:multiple|several|many|more than one)\s+(?:\w+\s+){0,2}(?:answers|solutions|outputs)\b"
    r"|\bany (?:valid|correct|optimal|possible|suitable) (?:answer|solution|output)",
    re.IGNORECASE,
)
# About the output, not about the input: behind one of these words in the same sentence.
_OF_OUTPUT = r"\b(?:print|output|return|report|display|write|answer)(?:s|ed)?\b[^.\n]{0,80}"
_ANY_ORDER = re.compile(rf"{_OF_OUTPUT}\b(?:in any order|order (?:does not|doesn't) matter)\b", re.IGNORECASE)
_ANY_CASE = re.compile(
    rf"{_OF_OUTPUT}(?:\b(?:in any|any|either) (?:case|register)\b|\bcase[- ]insensitive\b)", re.IGNORECASE
)


class UnreadableError(Exception):
    """The tests of a row are broken."""


def problem_of(question: str, is_call: bool) -> Dropped | None:
    """Return why a question cannot be verified by its expected outputs; None if it can."""
    if len(_IMAGE.sub("", question).strip()) < 20:
        return IMAGE_ONLY
    if _SEVERAL.search(question) or (not is_call and _ANY_ORDER.search(question)):
        return SEVERAL_OUTPUTS
    return None


def stdin_cases(
    question: str, inputs: Sequence[Any], outputs: Sequence[Any], tolerance: float, compare: Any = "tokens"
) -> StdinCases:
    """Return cases of a program; a list of lines is joined, as the judges do."""
    inputs, outputs = ([_lines(text) for text in texts] for texts in (inputs, outputs))
    kept = _chosen(inputs, outputs)
    return StdinCases(
        tuple(inputs[place] for place in kept),
        tuple(outputs[place] for place in kept),
        compare,
        tolerance,
        ignore_case=bool(_ANY_CASE.search(question)),
    )


def call_cases(question: str, cases: Mapping[str, Any]) -> CallCases:
    """Return cases of a function, as the judges of APPS, TACO and PRIME read them.

    Args:
        question: The question, which can allow any order.
        cases: The name of the function (`fn_name`), `inputs` and `outputs`.

    Raises:
        UnreadableError: If the cases are broken.
    """
    function = cases["fn_name"]
    inputs, outputs = cases["inputs"], cases["outputs"]
    if all(isinstance(output, str) for output in outputs) and all(isinstance(one, str) for one in inputs):
        arguments = [[read_json(line, "inputs") for line in one.split("\n")] for one in inputs]
        expected = [read_json(output, "outputs") for output in outputs]
    else:
        arguments, expected = inputs, outputs
    kept = _chosen(arguments, expected)
    if not str(function).isidentifier() or not all(isinstance(one, list) for one in arguments):
        raise UnreadableError
    return CallCases(
        function,
        tuple(tuple(arguments[place]) for place in kept),
        tuple(expected[place] for place in kept),
        any_order=bool(_ANY_ORDER.search(question)),
        unwrap=all(isinstance(one, list) and len(one) == 1 for one in expected),
        int_keys=True,
    )


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _chosen(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[int]:
    """Return the cases to keep: all of up to 100, else 100 at even distances; large ones while they fit."""
    if len(inputs) != len(outputs):
        raise UnreadableError
    number = len(inputs)
    places = list(range(number))
    if number > _MAX_CASES:
        places = sorted({round(k * (number - 1) / (_MAX_CASES - 1)) for k in range(_MAX_CASES)})
    room, kept = _MAX_TESTS_CHARACTERS, list[int]()
    for place in places:
        size = len(str(inputs[place])) + len(str(outputs[place]))
        if size <= room or not kept:
            kept.append(place)
            room -= size
    return kept


def read_json(text: Any, column: str) -> Any:
    """Return a JSON value; a few rows of large data sets hold text that is none, or integers too long to read."""
    if not isinstance(text, str):
        raise ValueError(f"{column} must be JSON text, got {text!r:.40}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableError from None
