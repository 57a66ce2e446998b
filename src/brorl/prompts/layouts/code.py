"""Layouts of public programming datasets.

Expected outputs are compared exactly, up to white space and number notation. Rows with several valid outputs, without
tests, or with an interactive or file-based program are dropped. Text is added to a question only if a model could not
otherwise infer the answer's form.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.layouts import text as texts
from brorl.prompts.question import CODE_DOMAIN, Question
from brorl.prompts.row import Cells, DroppedRow, cell_of, decoded, row_question

_MAX_PRIVATE_BYTES = 1 << 28
_MAX_CASES = 100
_MAX_TESTS_CHARACTERS = 1_000_000
_NO_TESTS = "no tests"
_UNREADABLE = "the tests cannot be read"
_USES_FILES = "the program reads or writes files"

_IMPORTS = ("import ", "from ")
_ANSWER = "Put the whole {} into one code block that starts with ```python."
_STDIN = "Write a Python program that reads from standard input and writes to standard output. " + _ANSWER.format(
    "program"
)
_NUMPY_CLOSE = 1e-5  # tolerance of the judges of APPS, TACO and CodeContests
# These datasets' judges import the usual names before the answer and raise the recursion limit. Importing
# `builtins` restores names such as `pow`.
PRELUDE = "\n".join(
    [
        "import bisect, collections, copy, datetime, fractions, functools, heapq, io, itertools, json, math, operator",
        "import random, re, string, sys, time",
        *(
            f"from {module} import *"
            for module in ("typing", "string", "re", "collections", "heapq", "bisect", "copy", "math", "itertools")
        ),
        "from functools import *",
        "from operator import *",
        "from builtins import *",
        "sys.setrecursionlimit(50_000)",
    ]
)

_IMAGE = re.compile(r"<image>|\[image\]|!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>", re.IGNORECASE)
_SEVERAL = re.compile(
    r"\b(?:print|output|return|report|display|write)\b[^.\n]{0,60}\bany\b(?!\s+(?:case|register|order))"
    r"|\b(?:multiple|several|many|more than one)\s+(?:\w+\s+){0,2}(?:answers|solutions|outputs)\b"
    r"|\bany (?:valid|correct|optimal|possible|suitable) (?:answer|solution|output)",
    re.IGNORECASE,
)
# Refers to the output, not the input: follows one of these words in the same sentence.
_OUTPUT = r"\b(?:print|output|return|report|display|write|answer)(?:s|ed)?\b[^.\n]{0,80}"
_ANY_ORDER = re.compile(rf"{_OUTPUT}\b(?:in any order|order (?:does not|doesn't) matter)\b", re.IGNORECASE)
_ANY_CASE = re.compile(
    rf"{_OUTPUT}(?:\b(?:in any|any|either) (?:case|register)\b|\bcase[- ]insensitive\b)", re.IGNORECASE
)


def apps(row: Cells, _seed: int) -> Question:
    """Read APPS and TACO: `input_output` is JSON text with inputs, outputs and sometimes `fn_name`."""
    question = _text(row, "question")
    column = row["input_output"]
    cases = _read_json(column, "input_output") if column else None
    limit = re.match(r"\s*(\d+(?:\.\d+)?)", str(row.get("time_limit") or ""))
    tests = _tests(question, cases, float(limit[1]) if limit else 0)
    solutions = decoded(row.get("solutions"))  # a list, or its JSON text
    programs = solutions if isinstance(solutions, list) else []
    solution = next((program for program in programs if isinstance(program, str)), None)
    return _question(question, replace(tests, solution=solution), row.get("starter_code") or "")


def code_contests(row: Cells, _seed: int) -> Question:
    """Read CodeContests, whose cases are in three columns."""
    question = _text(row, "description")
    columns = [
        row[name] or {"input": [], "output": []} for name in ("public_tests", "private_tests", "generated_tests")
    ]
    inputs, outputs = ([text for tests in columns for text in tests[name]] for name in ("input", "output"))
    if not inputs:
        raise DroppedRow(_NO_TESTS)
    if row["input_file"] or row["output_file"]:
        raise DroppedRow(_USES_FILES)
    limit = row["time_limit"] or {}
    solutions = row.get("solutions")
    pairs = zip(solutions["language"], solutions["solution"], strict=True) if solutions else ()
    tests = CodeTests(
        _stdin_cases(question, inputs, outputs, _NUMPY_CLOSE),
        (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9 or None,
        row["memory_limit_bytes"] or None,
        solution=next((code for language, code in pairs if language == 3), None),  # 3 is Python 3
    )
    return _question(question, tests, "")


def codeforces(row: Cells, _seed: int) -> Question:
    """Read Codeforces, whose problem statement spans several columns."""
    if row["interaction_format"]:
        raise DroppedRow("the program is interactive")
    if row["input_mode"] not in (None, "stdio"):
        raise DroppedRow(_USES_FILES)
    if row["generated_checker"]:
        raise DroppedRow("the tests need a checker")
    cases = {case["input"]: case["output"] for case in (*(row["examples"] or ()), *(row["official_tests"] or ()))}
    if not cases:
        raise DroppedRow(_NO_TESTS)
    sections = [f"# {row['title']}", row["description"]]
    for title, column in (("Input", "input_format"), ("Output", "output_format"), ("Note", "note")):
        if row[column]:
            sections.append(f"## {title}\n{row[column]}")
    if row["examples"]:
        shown = "\n".join(f"Input:\n{case['input']}\nOutput:\n{case['output']}" for case in row["examples"])
        sections.append(f"## Examples\n{shown}")
    question = "\n\n".join(section.strip() for section in sections if section)
    memory = row["memory_limit"]
    tests = CodeTests(
        _stdin_cases(question, list(cases), list(cases.values()), 1e-6),
        row["time_limit"] or None,
        int(memory * 2**20) if memory else None,
    )
    return _question(question, tests, "")


def live_code_bench(row: Cells, _seed: int) -> Question:
    """Read LiveCodeBench, whose private cases are compressed."""
    question = _text(row, "question_content")
    starter = row["starter_code"] or ""
    cases = [*_read_json(row["public_test_cases"], "public_test_cases"), *_private_cases(row["private_test_cases"])]
    if not cases:
        raise DroppedRow(_NO_TESTS)
    inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
    if cases[0]["testtype"] == "functional":
        function = _read_json(row["metadata"], "metadata")["func_name"]
        tests = CodeTests(_call_cases(question, function, inputs, outputs), prelude=PRELUDE)
    else:
        tests = CodeTests(_stdin_cases(question, inputs, outputs, 0.0, "lines"), prelude=PRELUDE)
    return _question(question, tests, starter)


class _TextUnpickler(pickle.Unpickler):
    """Loads only strings: a pickle that names any class or function is an error."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _private_cases(column: Any) -> list[dict[str, str]]:
    """Return LiveCodeBench's private cases, stored as JSON, or as JSON pickled, compressed and in base64."""
    text = str(column or "[]")
    if not text.lstrip().startswith("["):
        try:
            packed = zlib.decompressobj()
            raw = packed.decompress(base64.b64decode(text), _MAX_PRIVATE_BYTES)
            if packed.unconsumed_tail:
                raise ValueError(f"it has more than {_MAX_PRIVATE_BYTES} bytes")
            text = _TextUnpickler(io.BytesIO(raw)).load()
        except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise ValueError(f"private_test_cases cannot be unpacked: {error}") from None
    cases: list[dict[str, str]] = _read_json(text, "private_test_cases")
    return cases


_EURUS_MATH = texts.answered("prompt", "reward_model.ground_truth")


def eurus2(row: Cells, seed: int) -> Question:
    """Read math and code rows, depending on `ability`, without the system message."""
    if row["ability"] == "math":
        return _EURUS_MATH(row, seed)
    if row["ability"] != "code":
        raise DroppedRow(f"the ability is {row['ability']}")
    question = texts.asked_text(row["prompt"])
    answer = cell_of(row, "reward_model.ground_truth")
    tests = _tests(question, _read_json(answer, "reward_model.ground_truth") if answer else None)
    names_form = not isinstance(tests.tests, CallCases) or tests.tests.function in question
    return _question(question, tests, None if names_form else "")


def human_eval(row: Cells, _seed: int) -> Question:
    """Read a function to complete, with test code."""
    prompt, function = _text(row, "prompt"), _text(row, "entry_point")
    # A few prompts first define helper functions, which the completed function and the test code call.
    before, definition, _ = prompt.rpartition(f"\ndef {function}(")
    prelude = before.strip() if definition else ""
    shared = "" if all(line.startswith(_IMPORTS) for line in prelude.splitlines() if line) else f"{prelude}\n\n\n"
    tests = CodeTests(
        TestCode(function, f"{shared}{row['test']}\n\ncheck(candidate)\n"),
        prelude=prelude,
        solution=prompt + row["canonical_solution"],
    )
    question = f"Complete this function:\n\n```python\n{prompt.strip()}\n```\n\n{_ANSWER.format('function')}"
    return _question(question, tests)


def mbpp_plus(row: Cells, _seed: int) -> Question:
    """Read a short function with test code."""
    return _mbpp(_text(row, "prompt"), list(row["test_list"] or ()), row["test"], row["test_imports"], row["code"])


def mbpp(row: Cells, _seed: int) -> Question:
    """Read a short function with assertions. Show only the first, since showing all would give the answer away."""
    tests = [*(row["test_list"] or ()), *(row.get("challenge_test_list") or ())]
    before = row.get("test_imports") or [row.get("test_setup_code") or ""]
    text = _text(row, "text" if "text" in row else "prompt")
    return _mbpp(text, tests[:1], "\n".join(tests), before, row["code"])


def _mbpp(question: str, shown: Sequence[str], test: str, before: Sequence[str] | None, solution: str) -> Question:
    """Return a question that shows the given tests, with the code of all tests as its reference."""
    named = re.search(r"\bassertion\((?:set\()?(\w+)\(\*inp\)", test) or re.search(
        r"\bassert\s+(?:\(|not\s+|(?:set|sorted|tuple|list|str|round|math\.isclose|abs)\()*(\w+)\(", "\n".join(shown)
    )
    if not named:
        raise DroppedRow(_NO_TESTS)
    tests = CodeTests(TestCode(named[1], test), prelude="\n".join(before or ()), solution=solution)
    cases = "\n".join(shown)
    text = f"{question.strip()}\n\nYour function must pass these tests:\n\n```python\n{cases}\n```\n\n"
    return _question(text + _ANSWER.format("function"), tests)


def _tests(question: str, cases: Any, seconds: float = 0.0) -> CodeTests:
    """Return a question's tests from cases in the APPS format."""
    if not cases or not cases.get("inputs"):
        raise DroppedRow(_NO_TESTS)
    function, inputs, outputs = cases.get("fn_name"), cases["inputs"], cases["outputs"]
    if function:
        return CodeTests(_call_cases(question, function, inputs, outputs), seconds or None, prelude=PRELUDE)
    return CodeTests(_stdin_cases(question, inputs, outputs, _NUMPY_CLOSE), seconds or None, prelude=PRELUDE)


def _question(text: str, tests: CodeTests, starter: str | None = None) -> Question:
    """Return a question. Unless `starter` is None, append the starter code (if not empty) and the answer's form."""
    if starter is not None:
        code = f"Start from this code:\n\n```python\n{starter.strip()}\n```\n\n" if starter.strip() else ""
        form = _STDIN
        if isinstance(tests.tests, CallCases):
            form = f"Write the Python function `{tests.tests.function}`. {_ANSWER.format('code')}"
        text = f"{text.rstrip()}\n\n{code}{form}"
    return row_question(text, tests.to_text(), CODE_DOMAIN)


def _text(row: Cells, column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{column} must be a string, got {value!r:.40}")
    return value


def _check_outputs(question: str, is_call: bool) -> None:
    """Drop a question that expected outputs cannot verify."""
    if len(_IMAGE.sub("", question).strip()) < 20:
        raise DroppedRow("the question is an image")
    if _SEVERAL.search(question) or (not is_call and _ANY_ORDER.search(question)):
        raise DroppedRow("several outputs are valid")


def _stdin_cases(
    question: str, inputs: Sequence[Any], outputs: Sequence[Any], tolerance: float, compare: Any = "tokens"
) -> StdinCases:
    """Return a program's cases. A list of lines is joined, as in the datasets' judges."""
    _check_outputs(question, is_call=False)
    inputs, outputs = (
        ["\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in texts]
        for texts in (inputs, outputs)
    )
    kept = _chosen(inputs, outputs)
    return StdinCases(
        tuple(inputs[index] for index in kept),
        tuple(outputs[index] for index in kept),
        compare,
        tolerance,
        ignore_case=bool(_ANY_CASE.search(question)),
    )


def _call_cases(question: str, function: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> CallCases:
    """Return a function's cases, as the APPS, TACO and PRIME judges read them. The question may allow any order."""
    _check_outputs(question, is_call=True)
    arguments, expected = inputs, outputs
    if all(isinstance(text, str) for text in (*inputs, *outputs)):
        arguments = [[_read_json(line, "inputs") for line in text.split("\n")] for text in inputs]
        expected = [_read_json(text, "outputs") for text in outputs]
    kept = _chosen(arguments, expected)
    if not str(function).isidentifier() or not all(isinstance(values, list) for values in arguments):
        raise DroppedRow(_UNREADABLE)
    return CallCases(
        function,
        tuple(tuple(arguments[index]) for index in kept),
        tuple(expected[index] for index in kept),
        any_order=bool(_ANY_ORDER.search(question)),
        unwrap=all(isinstance(value, list) and len(value) == 1 for value in expected),
        int_keys=True,
    )


def _chosen(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[int]:
    """Return the indices of the cases to keep: at most 100, evenly spaced. Large cases are kept only while they fit."""
    if len(inputs) != len(outputs):
        raise DroppedRow(_UNREADABLE)
    indices = list(range(len(inputs)))
    if len(inputs) > _MAX_CASES:
        indices = sorted({round(k * (len(inputs) - 1) / (_MAX_CASES - 1)) for k in range(_MAX_CASES)})
    room = _MAX_TESTS_CHARACTERS
    kept: list[int] = []
    for index in indices:
        size = len(str(inputs[index])) + len(str(outputs[index]))
        if size <= room or not kept:
            kept.append(index)
            room -= size
    return kept


def _read_json(text: Any, column: str) -> Any:
    """Parse a JSON value. A few rows in large datasets contain invalid JSON, or integers too long to parse."""
    if not isinstance(text, str):
        raise ValueError(f"{column} must be JSON text, got {text!r:.40}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise DroppedRow(_UNREADABLE) from None
