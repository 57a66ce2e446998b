"""Tools in workers: what a call returns, how often it runs, and how it fails."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils import get_json_schema

from brorl.errors import ToolError, UserError
from brorl.tools.calls import Call, Failure, ToolResult, Turn
from brorl.tools.functions import ToolRunner
from brorl.tools.settings import ToolSettings
from brorl.verification.sandbox.pool import Workers

FUNCTIONS = '''
import asyncio, json, os, random, time
from enum import Enum
from typing import Any, Literal, Optional

LOG = os.path.join(os.path.dirname(__file__), "log")
BEFORE = []

def log(*values):
    with open(LOG, "a") as file:
        file.write(json.dumps(values) + "\\n")

def add(a: int, b: int = 3) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    log("add", a, b)
    print("this must not reach the pipe of the worker", flush=True)
    return a + b

async def later(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"

def draw(number: int, kind: Literal["a", "b"] = "a") -> int:
    """Draw a number.

    Args:
        number: One more than the largest.
        kind: Of no effect.
    """
    log("draw", number)
    return random.randrange(number)
draw.deterministic = False

def same(number: int) -> float:
    """Draw a number, although nothing says so.

    Args:
        number: Of no effect.
    """
    BEFORE.append(number)
    return random.random()

def odd(how: str) -> object:
    """Do something odd.

    Args:
        how: What.
    """
    if how == "deep":
        return odd("deep") + 1
    values = {"none": None, "true": True, "text": "a \\u00e9\\n b", "float": 0.5, "list": [1, {"a": None}],
              "bytes": b"1", "object": object(), "set": {1}, "surrogate": "a\\ud800b", "keys": {(1, 2): 3},
              "long": "x" * 10_000_000, "generator": (i for i in range(3)), "digits": 10**5000}
    if how in values:
        return values[how]
    if how == "loop":
        while True:
            pass
    if how == "sleep":
        time.sleep(1000)
    if how == "exit":
        os._exit(0)
    if how == "leave":
        raise SystemExit(3)
    if how == "memory":
        return len(bytearray(1 << 31))
    if how == "nested":
        value = []
        for _ in range(100_000):
            value = [value]
        return value
    if how == "fork" and not os.fork():
        return "the child"
    if how == "message":
        class OddError(Exception):
            def __str__(self):
                raise ValueError
        raise OddError
    return 1 / 0 if how.startswith("zero") else how

def broken(number: int) -> int:
    """Fail.

    Args:
        number: Any.
    """
    return number + undefined

def unlucky(number: int) -> int:
    """Fail.

    Args:
        number: Any.
    """
    raise ValueError(random.random())
unlucky.deterministic = False

def kill(number: int) -> None:
    """End the server of the worker.

    Args:
        number: Any.
    """
    os.kill(os.getppid(), 9)
    time.sleep(60)
'''

NAMES = ("add", "later", "draw", "same", "odd", "broken", "unlucky", "kill")
SETTINGS = ToolSettings(calculator=True, python=True, timeout_s=0.5, max_result_tokens=100)


def call(name: str, /, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments, sort_keys=True, separators=(",", ":")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools")
    (path / "mine.py").write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path, workers: Workers) -> ToolRunner:
    functions = {name: f"{folder / 'mine.py'}:{name}" for name in NAMES}
    return ToolRunner.from_settings(SETTINGS.model_copy(update={"functions": functions}), workers)


@pytest.fixture
def tools(folder: Path, loaded: ToolRunner, workers: Workers) -> ToolRunner:
    """Tools that have run no call."""
    (folder / "log").write_text("")
    return ToolRunner(loaded.tools, SETTINGS, workers)


def results(tools: ToolRunner, *calls: Call) -> list[ToolResult]:
    """Run each call as a turn of its own."""
    outcomes = tools.run([Turn((made,)) for made in calls])
    assert [[count for _, count in outcome] for outcome in outcomes] == [[1]] * len(calls)
    return [outcome[0][0][0] for outcome in outcomes]


def logged(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def add(a: int, b: int = 3) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def python(code: str) -> str:
    """Run a Python program, and return what it prints.

    Args:
        code: The program. It prints its results.
    """
    return code


def test_schemas_are_those_of_transformers(tools: ToolRunner, folder: Path, workers: Workers) -> None:
    assert [schema["function"]["name"] for schema in tools.schemas] == [*NAMES, "calculator", "python"]
    assert tools.schemas[0] == get_json_schema(add)
    assert tools.schemas[-1] == get_json_schema(python)
    renamed = ToolRunner.from_settings(ToolSettings(functions={"plus": f"{folder / 'mine.py'}:add"}), workers)
    expected = get_json_schema(add)
    expected["function"]["name"] = "plus"
    assert renamed.schemas == (expected,)
    assert results(renamed, call("plus", a=1), call("add", a=1)) == [
        ToolResult("4"), ToolResult("error: there is no tool 'add'; tools: plus", Failure.UNKNOWN_TOOL)
    ]  # fmt: skip


def test_names_are_checked(folder: Path, workers: Workers) -> None:
    path = f"{folder / 'mine.py'}:add"
    for settings, said in (
        (ToolSettings(functions={"calculator": path}, calculator=True), "two tools have the name 'calculator'"),
        (ToolSettings(functions={"python": path}, python=True), "two tools have the name 'python'; rename yours"),
        (ToolSettings(functions={"a b": path}), "tools.functions.a b: a tool's name may contain only letters"),
    ):
        with pytest.raises(UserError, match=said):
            ToolRunner.from_settings(settings, workers)


WRONG = '''
def silent(a: int):
    return a
def untyped(a):
    """Say.

    Args:
        a: A number.
    """
def undescribed(a: int):
    """Say."""
def starred(*a: int):
    """Say.

    Args:
        a: Numbers.
    """
def alone(a: int, /):
    """Say.

    Args:
        a: A number.
    """
class Thing:
    pass
def custom(a: Thing):
    """Say.

    Args:
        a: A thing.
    """
NUMBER = 1
'''


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong.py:silent", " has no docstring.*; give every parameter a type"),
        ("wrong.py:untyped", "Argument a is missing a type hint"),
        ("wrong.py:undescribed", "no description for the argument 'a'"),
        ("wrong.py:starred", "'.a: int' cannot be passed by name"),
        ("wrong.py:alone", "'a: int' cannot be passed by name"),
        ("wrong.py:custom", "Couldn't convert the type hint"),
        ("wrong.py:NUMBER", "NUMBER has type int"),
        ("wrong.py:absent", "has no attribute 'absent'"),
        ("raising.py:f", "No module named 'not_there'; install the package"),
        ("syntax.py:f", "SyntaxError"),
        ("ending.py:f", "3 new workers ended while loading it"),
        ("nowhere.py:f", "no such file"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(folder: Path, workers: Workers, name: str, said: str) -> None:
    for file, text in (
        ("wrong", WRONG), ("raising", "import not_there"), ("syntax", "def f(:"), ("ending", "import os; os._exit(0)")
    ):  # fmt: skip
        (folder / f"{file}.py").write_text(text)
    with pytest.raises(UserError, match=rf"^tools\.functions\.mine: .*{said}"):
        ToolRunner.from_settings(ToolSettings(functions={"mine": str(folder / name)}), workers)


def test_distinct_calls_run_once_and_counts_add_up(tools: ToolRunner, folder: Path, rng: np.random.Generator) -> None:
    turns = [
        Turn(tuple(call("add", a=int(a), b=int(b)) for a, b in rng.integers(3, size=(rng.integers(1, 4), 2))), int(n))
        for n in rng.integers(1, 1000, 40)
    ]
    outcomes = tools.run(turns)
    for turn, outcome in zip(turns, outcomes, strict=True):
        sums = [sum(json.loads(made.arguments).values()) for made in turn.calls]
        assert outcome == [(tuple(ToolResult(str(value)) for value in sums), turn.count)]
    distinct = {tuple(json.loads(made.arguments).values()) for turn in turns for made in turn.calls}
    ran = sorted((a, b) for _, a, b in logged(folder))
    assert ran == sorted(distinct)
    assert tools.num_run == len(distinct)


def test_a_tool_that_draws_runs_for_each_rollout_and_equal_results_merge(tools: ToolRunner, folder: Path) -> None:
    turns = [Turn((call("draw", number=2), call("add", a=1)), 40), Turn((call("draw", number=2),) * 2, 30)]
    (first, second) = tools.run(turns)
    assert {outcome for outcome, _ in first} == {(ToolResult(text), ToolResult("4")) for text in "01"}
    assert sum(count for _, count in first) == 40
    assert len(second) == len({outcome for outcome, _ in second}) == 4
    assert sum(count for _, count in second) == 30
    ran = logged(folder)
    assert (ran.count(["draw", 2]), ran.count(["add", 1, 3])) == (40 + 2 * 30, 1)
    assert tools.num_run == 101


def test_a_call_gives_the_same_in_any_process(tools: ToolRunner) -> None:
    """Otherwise a resumed run would differ, and equal calls of two steps too."""
    calls = [call("same", number=number) for number in range(8)]
    first = results(tools, *calls)
    results(tools, call("odd", how="exit"))  # ends a process
    assert results(tools, *calls[::-1])[::-1] == first
    assert len({*first}) == len(calls)
    program = call("python", code="import random\nprint(random.random(), {*'abc'})")
    assert results(tools, program) == results(tools, program)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (call("odd", how="none"), "null"), (call("odd", how="true"), "true"), (call("odd", how="text"), "a é\n b"),
        (call("odd", how="float"), "0.5"), (call("odd", how="list"), '[1, {"a": null}]'),
        (call("odd", how="surrogate"), "a?b"), (call("odd", how="long"), "x" * 6400), (call("odd", how="fork"), "fork"),
        (call("later", seconds=0.01), "waited 0.01"), (call("later", seconds=0), "waited 0"),
        (call("calculator", expression="2**70 - 1"), str(2**70 - 1)),
        (call("python", code="print('a')\nprint(6 * 7)"), "a\n42"), (call("python", code="6 * 7"), ""),
        (call("python", code="print('\\ud800')") , "error"), (call("python", code="print('x' * 9999)"), "x" * 6400),
    ],
)  # fmt: skip
def test_results_become_text(tools: ToolRunner, made: Call, text: str) -> None:
    (result,) = results(tools, made)
    if text == "error":  # UTF-8 has no lone surrogate
        assert result.failure is Failure.RAISED
    else:
        assert result == ToolResult(text)


def test_each_failure_is_told_and_ends_nothing(tools: ToolRunner) -> None:
    expected = {
        call("odd", how="zero"): (Failure.RAISED, "error: ZeroDivisionError: division by zero"),
        call("odd", how="leave"): (Failure.RAISED, "error: SystemExit: 3"),
        call("odd", how="message"): (Failure.RAISED, "error: OddError: (its message cannot be shown)"),
        call("odd", how="deep"): (Failure.RAISED, "error: RecursionError: maximum recursion depth exceeded"),
        call("odd", how="exit"): (Failure.CRASHED, "error: the process of the tool ended"),
        call("odd", how="memory"): (Failure.CRASHED, "error: out of memory"),
        call("odd", how="loop"): (Failure.TIMEOUT, "error: timeout after 0.5 s"),
        call("odd", how="sleep"): (Failure.TIMEOUT, "error: timeout after 0.5 s"),
        call("later", seconds=1000): (Failure.TIMEOUT, "error: timeout after 0.5 s"),
        call("calculator", expression="1/0"): (Failure.RAISED, "error: ZeroDivisionError: division by zero"),
        call("python", code="print(1)\n1/0"): (Failure.RAISED, "error: ZeroDivisionError: division by zero"),
        call("python", code="if"): (Failure.RAISED, "error: SyntaxError: invalid syntax"),
        call("python", code="while True: pass"): (Failure.TIMEOUT, "error: timeout after 0.5 s"),
        call("python", code="import os; os._exit(3)"): (Failure.CRASHED, "error: exited with code 3"),
        call("python", code="open('/etc/passwd')"): (Failure.RAISED, "error: PermissionError"),
        Call("", "", "no JSON"): (Failure.UNREADABLE, "error: no JSON"),
        call("nothing"): (Failure.UNKNOWN_TOOL, "error: there is no tool 'nothing'; tools: add, later, draw"),
        **{
            call("odd", how=how): (Failure.NOT_TEXT, "error: the result cannot be written as text: ")
            for how in ("bytes", "object", "set", "keys", "nested", "generator", "digits")
        },
    }  # fmt: skip
    results(tools, call("odd", how="none"))  # a tool that only fails would end the run
    start = time.monotonic()
    found = results(tools, *expected)
    for made, result, (failure, text) in zip(expected, found, expected.values(), strict=True):
        assert result.failure is failure, (made, result)
        assert result.text.startswith(text), (made, result)
        assert "\n" not in result.text
    assert time.monotonic() - start < 60
    assert results(tools, call("add", a=1)) == [ToolResult("4")]
    assert tools.num_run == 1 + len(expected) - 2 + 1  # neither the unreadable call nor the unknown tool


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{}", "the argument 'number' is missing"),
        ('{"number":"1"}', "the argument 'number' must be an integer, not \"1\""),
        ('{"number":true}', "the argument 'number' must be an integer, not true"),
        ('{"number":1.5}', "the argument 'number' must be an integer, not 1.5"),
        ('{"number":null}', "the argument 'number' must be an integer, not null"),
        ('{"number":[1]}', "the argument 'number' must be an integer, not a list"),
        ('{"kind":"c","number":1}', 'the argument \'kind\' must be one of ["a", "b"], not "c"'),
        ('{"n\\nx":1,"number":1}', 'there is no argument "n\\nx"; arguments: number, kind'),
        ("[1]", "the arguments are not a JSON object"),
        ("{", "the arguments are not JSON that can be read"),
        ('{"number":' + "[" * 100_000 + "]" * 100_000 + "}", "the arguments are not JSON that can be read"),
        ('{"number":' + "9" * 10_000 + "}", "the arguments are not JSON that can be read"),
    ],
)
def test_wrong_arguments_are_named(tools: ToolRunner, arguments: str, said: str) -> None:
    assert results(tools, Call("draw", arguments)) == [ToolResult(f"error: {said}", Failure.WRONG_ARGUMENTS)]
    assert tools.num_run == 0


def test_a_tool_that_only_fails_ends_the_run(tools: ToolRunner) -> None:
    results(tools, *(call("broken", number=number) for number in range(7)), call("broken", number="x"))
    results(tools, call("broken", number=0), call("add", a=1))  # a call that has failed before, and another tool
    with pytest.raises(ToolError, match=r"tools\.functions\.broken: .* first 8 distinct calls: NameError: name 'undef"):
        results(tools, call("broken", number=9))


def test_a_call_that_fails_for_each_rollout_counts_once(tools: ToolRunner) -> None:
    (outcome,) = tools.run([Turn((call("unlucky", number=1),), 20)])
    assert [count for _, count in outcome] == [1] * 20
    with pytest.raises(ToolError, match="first 8 distinct calls: ValueError: 0"):
        results(tools, *(call("unlucky", number=number) for number in range(8)))


def test_a_tool_with_a_result_may_fail(tools: ToolRunner) -> None:
    results(tools, call("odd", how="none"))
    failed = results(tools, *(call("odd", how=f"zero {number}") for number in range(9)))
    assert {result.failure for result in failed} == {Failure.RAISED}
    failed = results(tools, *(call("calculator", expression=f"x{n}") for n in range(20)))  # built in: never broken
    assert {result.failure for result in failed} == {Failure.RAISED}


def test_a_lost_call_ends_the_run_with_the_fix(tools: ToolRunner) -> None:
    with pytest.raises(ToolError, match=r"a call to the tool 'kill' was lost twice \(a worker was lost\); free memory"):
        results(tools, call("kill", number=1))
    assert results(tools, call("add", a=1)) == [ToolResult("4")]
