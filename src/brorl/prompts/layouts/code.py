"""Layouts of public data sets of programming questions.

In: rows as their authors published them. Out: a question and its `CodeTests`. Expected outputs are compared exactly, up
to white space and the notation of numbers. A row with several valid outputs, without tests, or with an interactive or
file-based program is dropped. Text is added to a question only where a model could not know the form of the answer.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from brorl.prompts.code_tests import CodeTests, TestCode
from brorl.prompts.layouts import math
from brorl.prompts.layouts.code_cases import UnreadableError, call_cases, problem_of, read_json, stdin_cases
from brorl.prompts.layouts.layout import Dropped, Fields, Layout

_DOMAIN = "code"
_MAX_PRIVATE_BYTES = 1 << 28

NO_TESTS = Dropped("no tests")
CHECKER = Dropped("the tests need a checker")
INTERACTIVE = Dropped("the program is interactive")
UNREADABLE = Dropped("the tests cannot be read")
USES_FILES = Dropped("the program reads or writes files")

_IMPORTS = ("import ", "from ")
_ANSWER = "Put the whole {} into one code block that starts with ```python."
_STDIN = "Write a Python program that reads from standard input and writes to standard output. " + _ANSWER.format(
    "program"
)
_NUMPY_CLOSE = 1e-5  # of the judges of APPS, TACO and CodeContests
# The judges of these data sets import the usual names before the answer, and raise the recursion limit. The import of
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


def _apps(row: Mapping[str, Any]) -> Fields | Dropped:
    """APPS and TACO: `input_output` is JSON text of inputs, outputs and perhaps `fn_name`."""
    return _input_output(
        _text(row, "question"), row["input_output"], row.get("starter_code") or "", row.get("time_limit")
    )


def _input_output(question: str, column: Any, starter: str, time_limit: Any) -> Fields | Dropped:
    cases = read_json(column, "input_output") if column else None
    if not cases or not cases.get("inputs"):
        return NO_TESTS
    problem = problem_of(question, is_call=bool(cases.get("fn_name")))
    if problem:
        return problem
    limit = re.match(r"\s*(\d+(?:\.\d+)?)", str(time_limit)) if time_limit else None
    seconds = float(limit[1]) if limit and float(limit[1]) else None
    if cases.get("fn_name"):
        return _call_fields(question, cases, starter, seconds)
    tests = stdin_cases(question, cases["inputs"], cases["outputs"], _NUMPY_CLOSE)
    return _fields(_with_starter(question, starter, _STDIN), CodeTests(tests, seconds, prelude=PRELUDE))


def _call_fields(question: str, cases: Mapping[str, Any], starter: str, seconds: float | None) -> Fields:
    """Return the fields of a question about one function."""
    tests = call_cases(question, cases)
    return _fields(
        _with_starter(question, starter, _call_sentence(tests.function)), CodeTests(tests, seconds, prelude=PRELUDE)
    )


def _code_contests(row: Mapping[str, Any]) -> Fields | Dropped:
    question = _text(row, "description")
    inputs, outputs = [], []
    for column in ("public_tests", "private_tests", "generated_tests"):
        tests = row[column] or {"input": [], "output": []}
        inputs += list(tests["input"])
        outputs += list(tests["output"])
    if not inputs:
        return NO_TESTS
    if row["input_file"] or row["output_file"]:
        return USES_FILES
    problem = problem_of(question, is_call=False)
    if problem:
        return problem
    limit = row["time_limit"]
    seconds = (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9 if limit else 0
    tests = CodeTests(
        stdin_cases(question, inputs, outputs, _NUMPY_CLOSE),
        seconds or None,
        row["memory_limit_bytes"] or None,
        solution=_first_python3(row.get("solutions")),
    )
    return _fields(f"{question.rstrip()}\n\n{_STDIN}", tests)


def _first_python3(solutions: Any) -> str | None:
    """Return the first solution of CodeContests in Python 3, whose number is 3."""
    pairs = zip(solutions["language"], solutions["solution"], strict=True) if solutions else ()
    return next((code for language, code in pairs if language == 3), None)


def _codeforces(row: Mapping[str, Any]) -> Fields | Dropped:
    if row["interaction_format"]:
        return INTERACTIVE
    if row["input_mode"] not in (None, "stdio"):
        return USES_FILES
    if row["generated_checker"]:
        return CHECKER
    cases = {case["input"]: case["output"] for case in (*(row["examples"] or ()), *(row["official_tests"] or ()))}
    if not cases:
        return NO_TESTS
    parts = [f"# {row['title']}", row["description"]]
    for title, column in (("Input", "input_format"), ("Output", "output_format"), ("Note", "note")):
        if row[column]:
            parts.append(f"## {title}\n{row[column]}")
    if row["examples"]:
        shown = "\n".join(f"Input:\n{case['input']}\nOutput:\n{case['output']}" for case in row["examples"])
        parts.append(f"## Examples\n{shown}")
    question = "\n\n".join(part.strip() for part in parts if part)
    problem = problem_of(question, is_call=False)
    if problem:
        return problem
    memory = row["memory_limit"]
    tests = CodeTests(
        stdin_cases(question, list(cases), list(cases.values()), 1e-6),
        row["time_limit"] or None,
        int(memory * 2**20) if memory else None,
    )
    return _fields(f"{question}\n\n{_STDIN}", tests)


def _live_code_bench(row: Mapping[str, Any]) -> Fields | Dropped:
    question, starter = _text(row, "question_content"), row["starter_code"] or ""
    cases = [*read_json(row["public_test_cases"], "public_test_cases"), *_private_cases(row["private_test_cases"])]
    if not cases:
        return NO_TESTS
    problem = problem_of(question, is_call=bool(starter.strip()))
    if problem:
        return problem
    inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
    if cases[0]["testtype"] == "functional":
        function = read_json(row["metadata"], "metadata")["func_name"]
        return _call_fields(question, {"fn_name": function, "inputs": inputs, "outputs": outputs}, starter, None)
    tests = stdin_cases(question, inputs, outputs, 0.0, "lines")
    return _fields(_with_starter(question, starter, _STDIN), CodeTests(tests, prelude=PRELUDE))


class _TextUnpickler(pickle.Unpickler):
    """Reads text alone: a pickle that names any class or function is an error."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _private_cases(column: Any) -> list[dict[str, str]]:
    """Return the private cases of LiveCodeBench: JSON text, or the same text pickled, compressed and in base64."""
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
    cases: list[dict[str, str]] = read_json(text, "private_test_cases")
    return cases


def _eurus(row: Mapping[str, Any]) -> Fields | Dropped:
    """Eurus-2-RL: rows of mathematics and code by `ability`, without the system message."""
    if row["ability"] == "math":
        return math.EURUS2_MATH.read(row, 0)
    if row["ability"] != "code":
        return Dropped(f"the ability is {row['ability']}")
    question, answer = math.last_turn(row["prompt"]), math.ground_truth(row)
    cases = read_json(answer, "reward_model.ground_truth") if answer else None
    if not cases or not cases.get("inputs"):
        return NO_TESTS
    problem = problem_of(question, is_call=bool(cases.get("fn_name")))
    if problem:
        return problem
    if cases.get("fn_name"):
        fields = _call_fields(question, cases, "", None)
        return fields if cases["fn_name"] not in question else Fields(question, fields.reference, _DOMAIN)
    tests = stdin_cases(question, cases["inputs"], cases["outputs"], _NUMPY_CLOSE)
    return _fields(question, CodeTests(tests, prelude=PRELUDE))


def _eurus_code(row: Mapping[str, Any]) -> Fields | Dropped:
    return Dropped(f"the ability is {row['ability']}, not code") if row["ability"] != "code" else _eurus(row)


def _human_eval(row: Mapping[str, Any]) -> Fields | Dropped:
    prompt, function = _text(row, "prompt"), _text(row, "entry_point")
    # A few prompts define other functions first, which the completed function and the test code call.
    before, definition, _ = prompt.rpartition(f"\ndef {function}(")
    prelude = before.strip() if definition else ""
    shared = "" if all(line.startswith(_IMPORTS) for line in prelude.splitlines() if line) else f"{prelude}\n\n\n"
    tests = CodeTests(
        TestCode(function, f"{shared}{row['test']}\n\ncheck(candidate)\n"),
        prelude=prelude,
        solution=prompt + row["canonical_solution"],
    )
    question = f"Complete this function:\n\n```python\n{prompt.strip()}\n```\n\n{_ANSWER.format('function')}"
    return _fields(question, tests)


def _mbpp(row: Mapping[str, Any]) -> Fields | Dropped:
    question, shown = _text(row, "prompt"), list(row["test_list"] or ())
    named = re.search(r"\bassertion\((?:set\()?(\w+)\(\*inp\)", row["test"]) or re.search(
        r"\bassert\s+(?:\(|not\s+|set\(|math\.isclose\(|abs\()*(\w+)\(", "\n".join(shown)
    )
    if not named:
        return NO_TESTS
    imports = "\n".join(row["test_imports"] or ())
    tests = CodeTests(TestCode(named[1], row["test"]), prelude=imports, solution=row["code"])
    cases = "\n".join(shown)
    text = f"{question.strip()}\n\nYour function must pass these tests:\n\n```python\n{cases}\n```\n\n"
    return _fields(text + _ANSWER.format("function"), tests)


def _with_starter(question: str, starter: str, sentence: str) -> str:
    code = f"Start from this code:\n\n```python\n{starter.strip()}\n```\n\n" if starter.strip() else ""
    return f"{question.rstrip()}\n\n{code}{sentence}"


def _call_sentence(function: str) -> str:
    return f"Write the Python function `{function}`. {_ANSWER.format('code')}"


def _fields(question: str, tests: CodeTests) -> Fields:
    return Fields(question, tests.to_text(), _DOMAIN)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{column} must be text, got {value!r:.40}")
    return value


def _readable(
    read: Callable[[Mapping[str, Any]], Fields | Dropped],
) -> Callable[[Mapping[str, Any], int], Fields | Dropped]:
    """Return the reader of a layout: without a seed, and with a reason for a row whose tests cannot be read."""

    def read_row(row: Mapping[str, Any], _seed: int) -> Fields | Dropped:
        try:
            return read(row)
        except UnreadableError:
            return UNREADABLE

    return read_row


APPS = Layout(
    "apps",
    ("question", "input_output", "starter_code"),
    _readable(_apps),
    ("codeparrot/apps",),
    "programs and functions with cases",
)
TACO = Layout(
    "taco",
    ("question", "input_output", "starter_code", "time_limit"),
    _readable(_apps),
    ("BAAI/TACO",),
    "programs and functions with cases, and some time limits",
)
CODE_CONTESTS = Layout(
    "code_contests",
    (
        "description",
        "public_tests",
        "private_tests",
        "generated_tests",
        "solutions",
        "time_limit",
        "memory_limit_bytes",
        "input_file",
        "output_file",
    ),
    _readable(_code_contests),
    ("deepmind/code_contests",),
    "programs of contests with public, private and generated cases",
)
CODEFORCES = Layout(
    "codeforces",
    (
        "title",
        "description",
        "input_format",
        "output_format",
        "interaction_format",
        "note",
        "examples",
        "official_tests",
        "time_limit",
        "memory_limit",
        "input_mode",
        "generated_checker",
    ),
    _readable(_codeforces),
    ("open-r1/codeforces",),
    "programs of Codeforces with official cases; rows with a checker are dropped",
)
LIVE_CODE_BENCH = Layout(
    "livecodebench",
    ("question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata"),
    _readable(_live_code_bench),
    ("livecodebench/code_generation_lite", "livecodebench/code_generation"),
    "programs and functions of recent contests with public and private cases",
)
EURUS2 = Layout(
    "eurus2",
    ("prompt", "ability", "reward_model"),
    _readable(_eurus),
    ("PRIME-RL/Eurus-2-RL-Data",),
    "mathematics and code of PRIME, by the column `ability`",
)
EURUS2_CODE = Layout(
    "eurus2_code",
    ("prompt", "ability", "reward_model"),
    _readable(_eurus_code),
    ("PRIME-RL/Eurus-2-RL-Data",),
    "the code of PRIME; mathematics is dropped",
)
HUMAN_EVAL = Layout(
    "humaneval",
    ("prompt", "canonical_solution", "entry_point", "test"),
    _readable(_human_eval),
    ("evalplus/humanevalplus", "openai/openai_humaneval"),
    "functions to complete, with test code",
)
MBPP = Layout(
    "mbpp",
    ("code", "prompt", "test_imports", "test_list", "test"),
    _readable(_mbpp),
    ("evalplus/mbppplus",),
    "short functions, with test code",
)
CODE_LAYOUTS = (APPS, TACO, CODE_CONTESTS, CODEFORCES, LIVE_CODE_BENCH, EURUS2, EURUS2_CODE, HUMAN_EVAL, MBPP)
