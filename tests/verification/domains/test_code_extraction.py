"""The code of a response: against blocks written by hand, and blocks assembled at random."""

import builtins
import symtable
from dataclasses import replace

import numpy as np
import pytest
from code_answers import fenced, question_of

from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases
from brorl.verdict import CORRECT, OUT_OF_MEMORY, TIMEOUT
from brorl.verification.domains.code import CodeVerifier, python_blocks
from brorl.verification.domains.code_choice import choose_block
from brorl.verification.domains.code_judges import imports
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Fault, LostError, Reply
from case_tables import table
from each_row import each_row
from scripted_programs import Request, ScriptedPool


def extract_code(response: str, tests: CodeTests | None = None) -> str | None:
    """Return the code of a response; the choice is made in this process."""
    codes = python_blocks(response)
    if tests is None or not codes:
        return codes[-1] if codes else None
    cases = tests.tests
    if isinstance(cases, StdinCases):
        return codes[choose_block(codes, None, any(map(str.strip, cases.inputs)), imports())]
    return codes[choose_block(codes, cases.function, False, imports())]


@each_row(*table(__file__, "each_rule"))
def test_each_rule(response: str, code: str | None) -> None:
    assert extract_code(response) == code


def test_the_last_block_of_python_is_taken(rng: np.random.Generator) -> None:
    """Blocks of random languages, fences and lengths, with text between them."""
    for _ in range(300):
        marked, unmarked, parts = None, None, []
        for number in range(rng.integers(0, 5)):
            language = str(rng.choice(["python", "py", "", "text", "c++"]))
            fence = str(rng.choice(["`", "~"])) * int(rng.integers(3, 6))
            lines = [f"x{number} = {line}" if rng.random() < 0.8 else "" for line in range(rng.integers(0, 4))]
            parts += [str(rng.choice(["so", "", "`a`"])), f"{fence}{language}", *lines, fence]
            if any(lines) and language in ("python", "py"):
                marked = "\n".join(lines)
            elif any(lines) and not language:
                unmarked = "\n".join(lines)
        assert extract_code("\n".join(parts)) == (unmarked if marked is None else marked), parts


ADD = CodeTests(CallCases("add", ((1, 2),), (3,)))
SUM = CodeTests(StdinCases(("1 2\n",), ("3\n",)))
HELLO = CodeTests(StdinCases(("",), ("hello\n",)))
READS = "a, b = map(int, input().split())\nprint(a + b)"
MAIN = "import sys\n\ndef main():\n    print(sum(map(int, sys.stdin.read().split())))\n\nmain()"
DEF = "def add(a, b):\n    return a + b"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"


@each_row(
    ("tests", "codes", "chosen"),
    [
        # tests of a function: the last block that defines it
        (ADD, [DEF, "print(add(1, 2))  # 3"], 0),
        (ADD, [DEF, ">>> add(1, 2)\n3"], 0),
        (ADD, [DEF, "assert add(1, 2) == 3\nprint('ok')"], 0),
        (ADD, [DEF, "from solution import add\nprint(add(1, 2))"], 0),
        (ADD, [DEF, "def test_add():\n    assert add(1, 2) == 3"], 0),
        (ADD, [DEF, DEF.replace("+", "-")], 1),
        (ADD, [DEF, "def add(a, b):\n    ..."], 0),
        (ADD, [DEF, "def add(a, b):\n    ...\n    return result"], 0),
        (ADD, [DEF, 'def add(a, b):\n    """Add."""\n    pass'], 0),
        (ADD, [DEF, "    return a + b"], 0),
        (ADD, [DEF, "add = lambda a, b: a * b"], 1),
        (ADD, [DEF, "from operator import add"], 1),
        (ADD, [DEF, "try:\n    from fast import other\nexcept ImportError:\n    add = max"], 1),
        (ADD, [DEF, "if True:\n    async def add(a, b): return 0"], 1),
        (ADD, [METHOD, "print(Solution().add(1, 2))"], 0),
        (ADD, [METHOD, "class Solution:\n    def other(self):\n        return 1"], 0),
        (ADD, [DEF, METHOD], 1),
        (ADD, [METHOD, f"{DEF}\n\nclass Solution:\n    x = 1"], 1),
        (ADD, [DEF, "def add(a, b):\n    return a +"], 1),  # the last version, with a mistake
        (ADD, [DEF, "class Solution:\n    def add(self, a b):\n        return 1"], 1),
        (ADD, ["x = 1", "y = 2"], 1),
        # tests of a program: the last whole one that reads input
        (SUM, [READS, "print(a + b)"], 0),
        (SUM, [READS, "print(sorted([2, 1]))  # [1, 2]"], 0),
        (SUM, [MAIN, "sys.stdin.read()"], 0),
        (SUM, [MAIN, "main()"], 0),
        (SUM, [MAIN, "def main():\n    print(sum(map(int, input().split())))"], 0),
        (SUM, [MAIN, "    print(a + b)"], 0),
        (SUM, [MAIN, "$ echo 1 2 | python sum.py\n3  # print"], 0),
        (SUM, [MAIN, "n = int(input())\n...\nprint(n)"], 0),
        (SUM, [MAIN, "x = 3"], 0),
        (SUM, [READS, READS.replace("+", "-")], 1),
        (SUM, [READS, "print(int(input()) + unknown)"], 1),  # a mistake, not a part of the first
        (SUM, [READS, "print(int(input())"], 1),
        (SUM, ["import math\nprint(math.sqrt(4))", "n = input()\nprint(math.isqrt(int(n)))"], 1),  # no import
        (SUM, ["print(3)", "print(4)"], 1),
        (HELLO, ["print('hello')", "name = input()\nprint('hello')", "print('bye')"], 2),
        (HELLO, ["def hello():\n    print('hello')", "x = 3"], 1),
    ],
)  # fmt: skip
def test_the_block_that_has_what_the_tests_need(tests: CodeTests, codes: list[str], chosen: int) -> None:
    for fence in ("```python", "```"):
        response = "\n".join(f"So:\n{fence}\n{code}\n```" for code in codes)
        assert extract_code(response, tests) == codes[chosen]
        assert extract_code(f"{response}\n```text\n3\n```", tests) == codes[chosen]


UNREADABLE = [
    "(" * 5_000, "-" * 90_000 + "1", "f(" * 300, "x = [" * 300, "if a:\n pass\n" + "elif a:\n pass\n" * 5_000,
    "a" + ".a" * 40_000, "'\\d'\nprint(1)", "\0", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("code", UNREADABLE)
@pytest.mark.parametrize("tests", [ADD, SUM])
def test_no_block_stops_the_choice(code: str, tests: CodeTests) -> None:
    """Reading them raises a SyntaxError, a RecursionError, a MemoryError or a ValueError, or warns."""
    whole = DEF if tests is ADD else READS
    extracted = extract_code(f"```python\n{code}\n```\n```python\n{whole}\n```", tests)
    assert extracted == whole
    assert extract_code(f"```python\n{whole}\n```\n```python\n{code}\n```", tests) in (whole, code)


def test_a_byte_order_mark_is_no_code() -> None:
    assert extract_code("\ufeff```python\n\ufeffx = 1\n```") == "x = 1"


def test_the_sandbox_chooses_as_this_process_does() -> None:
    codes = [READS, "print(a + b)"]
    responses = ["".join(map(fenced, order)) for order in (codes, codes[::-1], [READS.replace("+", "-"), *codes])]
    with ProgramPool(1) as pool:
        verdicts = CodeVerifier(pool).verify_all([(question_of(SUM), response) for response in responses])
    assert [verdict.extracted for verdict in verdicts] == [extract_code(response, SUM) for response in responses]
    assert [verdict.reason for verdict in verdicts] == [CORRECT] * 3


def test_this_process_parses_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("this process parses a text")

    verifier = CodeVerifier(ScriptedPool(lambda request: Reply(0 if request.kind == "call" else "3\n", None, 0.0)))
    items = [(question_of(SUM), fenced(READS) + fenced(f"x = {number}")) for number in range(2)]
    verifier.verify_all(items[:1])  # everything is imported
    for module, name in ((builtins, "compile"), (builtins, "exec"), (builtins, "eval"), (symtable, "symtable")):
        monkeypatch.setattr(module, name, refuse)
    (verdict,) = verifier.verify_all(items[1:])
    monkeypatch.undo()
    assert verdict.reason == CORRECT


@each_row(
    ("reply", "reason"),
    [
        (Reply(1, None, 0.5), CORRECT),
        (Reply(2, None, 0.5), Fault.BROKE_PROTOCOL),
        (Reply(-1, None, 0.5), Fault.BROKE_PROTOCOL),
        (Reply(True, None, 0.5), Fault.BROKE_PROTOCOL),
        (Reply("1", None, 0.5), Fault.BROKE_PROTOCOL),
        (Reply(None, Fault.TIMEOUT, 0.5), TIMEOUT),
        (Reply(None, Fault.OUT_OF_MEMORY, 0.5), OUT_OF_MEMORY),
        (Reply(None, "killed by signal 11", 0.5), "killed by signal 11"),
        (Reply(None, "RecursionError: deep", 0.5), "raised RecursionError"),
        (LostError("a worker was lost"), "unverified: a worker was lost"),
    ],
)
def test_the_reply_of_the_choice_is_not_trusted(reply: Reply | LostError, reason: str) -> None:
    def script(request: Request) -> Reply:
        if request.kind == "call" and isinstance(reply, LostError):
            raise reply
        return {"load": Reply(None, None, 0.0), "call": reply, "run": Reply("3\n", None, 0.0)}[request.kind]

    (verdict,) = CodeVerifier(ScriptedPool(script)).verify_all([(question_of(SUM), fenced("x = 1") + fenced(READS))])
    assert verdict.reason == reason
    assert verdict.extracted == (READS if reason == CORRECT else None)
    assert isinstance(reply, LostError) or verdict.seconds >= reply.seconds


QUADRATIC = {  # in the parser of this version of Python
    "a dotted name": "import a" + ".a" * 49_000,
    "nested f-strings": "f'" + '{f"{x!r:{x}}"}' * 3_000 + "'",
    "an f-string of many parts": "f'" + "{a}" * 33_000 + "'",
}


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.parametrize("name", QUADRATIC)
def test_blocks_that_are_parsed_in_quadratic_time_have_limits(name: str) -> None:
    tests = replace(SUM, time_limit_s=1.0)
    item = (question_of(tests), fenced(QUADRATIC[name]) + fenced(READS))
    with ProgramPool(1) as pool:
        (verdict,) = CodeVerifier(pool, timeout_s=2.0).verify_all([item])
    assert verdict.reason in (CORRECT, TIMEOUT)
    assert verdict.seconds < 10.0  # as the sandbox counts it: without waiting for a core
