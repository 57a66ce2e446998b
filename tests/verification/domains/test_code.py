"""Programs against their tests, in real sandboxed processes: answers by hand, and attacks that must not pass."""

from collections.abc import Iterator

import numpy as np
import pytest
from code_answers import FUNCTIONS, KINDS, SUMS, fenced, question_of, verify
from evalplus_sources import IS_FLOATS, PLAIN

from brorl.prompts.code_tests import CallCases, StdinCases, TestCode
from brorl.prompts.layouts import code as layouts
from brorl.prompts.prompt import Prompt
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.values import MAX_DEPTH, decode
from case_tables import table

pytestmark = pytest.mark.linux


@pytest.fixture(scope="module")
def pool() -> Iterator[ProgramPool]:
    with ProgramPool(2) as pool:
        yield pool


@pytest.fixture
def verifier(pool: ProgramPool) -> CodeVerifier:
    return CodeVerifier(pool, timeout_s=10.0)


def patient(pool: ProgramPool, reason: str) -> CodeVerifier:
    """A verifier that waits long on a busy machine, unless the program is to reach the limit."""
    return CodeVerifier(pool, timeout_s=0.1 if reason == "timeout" else 10.0)


IDIOMS = [
    "a, b = map(int, input().split())\nprint(a + b + int(input()))",
    "import sys\ninput = sys.stdin.readline\na, b = map(int, input().split())\nprint(a + b + int(input()))\nexit()",
    "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))\nsys.exit()",
    "print(sum(map(int, open(0).read().split())))\nquit()",
    "import os\nprint(sum(map(int, os.read(0, 10**6).split())))",
    "import sys\nprint(sum(int(x) for line in sys.stdin for x in line.split()))",
    "from sys import stdin, stdout\nstdout.write(str(sum(map(int, stdin.read().split()))) + '\\n')",
    "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.read().split())))",
    "import os, sys\nos.write(1, str(sum(map(int, sys.stdin.read().split()))).encode())",
    "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\ndef main():\n"
    "    def add(xs, i):\n        return xs[i] + add(xs, i + 1) if i < len(xs) else 0\n"
    "    print(add([int(x) for x in sys.stdin.read().split()] + [0] * 20000, 0))\n"
    "thread = threading.Thread(target=main)\nthread.start()\nthread.join()",
    "import io, os, sys\nsys.stdin = io.BytesIO(os.read(0, max(os.fstat(0).st_size, 1 << 16)))\n"
    "print(sum(map(int, sys.stdin.read().split())))",
    "import sys, io\nsys.stdout = io.StringIO()\nprint(sum(map(int, sys.stdin.read().split())))\n"
    "sys.__stdout__.write(sys.stdout.getvalue())",
    "import atexit, sys\natexit.register(lambda: print(sum(map(int, sys.stdin.read().split()))))",
    "import fileinput\nprint(sum(int(x) for line in fileinput.input() for x in line.split()))",
    "from collections import *\nfrom functools import *\nfrom heapq import *\nfrom itertools import *\n"
    "from math import *\nimport bisect, decimal, fractions, operator, random, re, string\n"
    "import sys\nprint(reduce(operator.add, map(int, sys.stdin.read().split())))",
    "class Solution:\n    def main(self):\n        import sys\n        print(sum(map(int, sys.stdin.read().split())))\n"
    "if __name__ == '__main__':\n    Solution().main()",
]  # fmt: skip


class TestAnswers:
    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("print(sum(map(int, input().split())))", "correct"),
            ("import sys\nprint(sum(map(int, sys.stdin.read().split())), end='  \\n\\n')", "correct"),
            ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", "correct"),
            ("a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit", "correct"),
            ("print(3)", "wrong answer"),
            ("pass", "wrong answer"),
            ("print(", "syntax error"),
            ("if 1:\nprint(3)", "syntax error"),
            ("print(1 / 0)", "raised ZeroDivisionError"),
            ("input()\ninput()", "raised EOFError"),
            ("class MyError(Exception): pass\nraise MyError('a: b')", "raised MyError"),
            ("a, b = map(int, input().split())\nprint(a + b)\nexit(3)", "exited"),
            ("import os\na, b = map(int, input().split())\nprint(a + b, flush=True)\nos._exit(1)", "exited"),
            ("while True: pass", "timeout"),
            ("x = bytearray(1 << 40)", "out of memory"),
            ("while True: print('3' * 1000)", "too much output"),
            ("x = '\0'", "syntax error"),
            ("x = '\ud800'", "syntax error"),
            ("x = 1\n" * 50_000, "answer too long"),
        ],
    )
    def test_programs(self, pool: ProgramPool, code: str, reason: str) -> None:
        verdict = verify(patient(pool, reason), question_of(SUMS), code)
        assert verdict.reason == reason
        assert verdict.correct is (reason == "correct")
        assert verdict.score == float(verdict.correct)
        assert verdict.extracted == (None if reason == "answer too long" else code)

    def test_the_usual_ways_to_read_and_write(self, verifier: CodeVerifier) -> None:
        """Idioms of contests: all of them print the sum of the numbers of both lines."""
        question = question_of(StdinCases(("1 2\n3\n", "10 20\n30"), ("6\n", "60\n")))
        verdicts = verifier.verify_all([(question, fenced(code)) for code in IDIOMS])
        for code, verdict in zip(IDIOMS, verdicts, strict=True):
            assert verdict.correct, (code, verdict)

    @pytest.mark.parametrize("kind", FUNCTIONS)
    @pytest.mark.parametrize(*table(__file__, "functions"))
    def test_functions(self, pool: ProgramPool, kind: str, code: str, reason: str) -> None:
        verdict = verify(patient(pool, reason), question_of(FUNCTIONS[kind]), code)
        assert verdict.reason == reason
        assert verdict.correct is (reason == "correct")

    def test_options_of_calls(self, verifier: CodeVerifier) -> None:
        code = "def f(x):\n    return [3, 1.0000001, 2]"
        assert not verify(verifier, question_of(CallCases("f", ((1,),), ([1, 2, 3],))), code).correct
        ordered = code.replace(".0000001", "")
        assert verify(verifier, question_of(CallCases("f", ((1,),), ([1, 2, 3],), any_order=True)), ordered).correct
        close = CallCases("f", ((1,),), ([3, 1.0, 2],), tolerance=1e-6)
        assert verify(verifier, question_of(close), code).correct
        wrapped = CallCases("f", ((1,),), ([5],), unwrap=True)
        for value, correct in (("5", True), ("[5]", True), ("[[5]]", False), ("6", False)):
            assert verify(verifier, question_of(wrapped), f"def f(x):\n    return {value}").correct is correct
        keys = CallCases("f", (({"1": 2},),), ({"2": 1},), int_keys=True)
        assert verify(verifier, question_of(keys), "def f(d):\n    return {v: k for k, v in d.items()}").correct

    def test_each_call_gets_its_own_arguments(self, verifier: CodeVerifier) -> None:
        question = question_of(CallCases("f", (([3, 1],), ([3, 1],)), ([1, 3], [1, 3])))
        assert verify(verifier, question, "def f(x):\n    x.sort()\n    return x").correct

    def test_the_prelude_comes_before_the_answer_and_after_the_future(self, verifier: CodeVerifier) -> None:
        question = question_of(CallCases("f", ((9,),), (3.0,)), prelude="from math import *")
        assert verify(verifier, question, "def f(x):\n    return sqrt(x)").correct
        future = "from __future__ import annotations\ndef f(x: No) -> Such:\n    return sqrt(x)"
        assert verify(verifier, question, future).correct
        several = "from __future__ import (\n    annotations,\n)\ndef f(x: No):\n    return sqrt(x)"
        assert verify(verifier, question, several).correct

    def test_the_prelude_of_public_data_sets_loads_everywhere(self, verifier: CodeVerifier) -> None:
        """Its modules are importable in the sandbox, and its star imports hide no builtin name."""
        code = "def f(x: List[int]) -> Optional[int]:\n    return pow(Counter(x)[1], len(x), 5) + int(sqrt(1))"
        question = question_of(CallCases("f", (([1, 1],),), (5,)), prelude=layouts.PRELUDE)
        assert verify(verifier, question, code).reason == "correct"
        hidden = (
            "import builtins\nown = globals()\n"
            "print([n for n, v in vars(builtins).items() if n[0] != '_' and own.get(n, v) is not v])"
        )
        program = question_of(StdinCases(("",), ("[]",)), prelude=layouts.PRELUDE)
        assert verify(verifier, program, hidden).reason == "correct"

    @pytest.mark.parametrize("memory", ["1e9", "268435456.0", "1e-3"])
    def test_a_limit_of_memory_can_be_written_as_a_float(self, verifier: CodeVerifier, memory: str) -> None:
        text = f'{{"stdin":{{"inputs":["1"],"outputs":["1"]}},"memory_bytes":{memory}}}'
        assert verify(verifier, Prompt("q", "?", (1,), text, "code"), "print(1)").reason == "correct"

    def test_computed_results_need_no_numpy(self, verifier: CodeVerifier) -> None:
        """A reference function gives the results."""
        question = question_of(
            TestCode("f", EVALPLUS.replace("ASSERTION", "assertion(candidate(*inp), ref_func(*inp), 0)"))
        )
        assert verify(verifier, question, "def f(x):\n    return x / 3").correct
        assert not verify(verifier, question, "def f(x):\n    return x / 3.001").correct

    @pytest.mark.parametrize(
        ("code", "right", "wrong"),
        [
            ("assert abs(f(3) - 10) <= 1", "11", "12"), ("assert abs(f(3) - 10) < 1", "10.5", "11"),
            ("assert math.isclose(f(3), 1000, rel_tol=0.01)", "1001", "1020"),
            ("assert abs(f(1) - (1+2j)) < 1e-6", "1.0000000001 + 2j", "1.1 + 2j"),
        ],
    )  # fmt: skip
    def test_a_tolerance_of_test_code_holds_for_all_numbers(
        self, verifier: CodeVerifier, code: str, right: str, wrong: str
    ) -> None:
        question = question_of(TestCode("f", code))
        assert verify(verifier, question, f"def f(x): return {right}").reason == "correct"
        assert verify(verifier, question, f"def f(x): return {wrong}").reason == "wrong answer"

    @pytest.mark.parametrize("name", ["install", "allclose", "types"])
    def test_a_function_can_have_a_name_of_the_stand_in(self, verifier: CodeVerifier, name: str) -> None:
        question = question_of(TestCode(name, f"import numpy as np\nassert np.allclose([{name}(1, 2)], [3.0])"))
        assert verify(verifier, question, f"def {name}(a, b):\n    return a + b").reason == "correct"
        assert verify(verifier, question, f"def {name}(a, b):\n    return a").reason == "wrong answer"


EVALPLUS = (
    f"import numpy as np\n{IS_FLOATS}\n{PLAIN}"
    """
def ref_func(x):
    return x / 3

def check(candidate):
    inputs = [[1], [2.5], [-6]]
    results = [0.3333333333, 0.83333333333, -2.0]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        ASSERTION

check(candidate)
"""
)

# Long values: returned, and written by a program that ignores its limit, from a call or while it is loaded.
LONG_VALUES = {
    "returned": "def f(x): return [0] * 1_500_000",
    "forged": (
        "import sys\np = sys.modules['brorl.verification.sandbox.inside.program']\n"
        "p._Loaded._call = lambda *_: p.Frame(p.VALUE, 0, b'[' + b'1,' * 1_500_000 + b'1]')\ndef f(x): return 7"
    ),
    "loaded": (
        "import sys\np = sys.modules['brorl.verification.sandbox.inside.program']\n"
        "p._Loaded._reply = lambda self, _: p.write_frame("
        "self._replies, p.Frame(p.VALUE, self._token, b'[' + b'1,' * 1_500_000 + b'1]'))\ndef f(x): return 7"
    ),
}


class TestAttacks:
    @pytest.mark.parametrize("code", LONG_VALUES.values(), ids=[*LONG_VALUES])
    def test_a_long_value_is_wrong_without_being_read(
        self, verifier: CodeVerifier, code: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reading a value of 3 MB takes seconds; no value of this length equals 7."""
        read: list[int] = []

        def counting(text: str) -> object:
            read.append(len(text))
            return decode(text)

        monkeypatch.setattr("brorl.verification.sandbox.process.decode", counting)
        verdict = verify(verifier, question_of(CallCases("f", ((1,),), (7,))), code)
        assert verdict.reason == "too much output"
        assert sum(read) < 10_000
        assert verify(verifier, question_of(CallCases("f", ((1,),), (7,))), "def f(x): return 7.0").correct

    def test_later_inputs_are_not_in_reach(self, pool: ProgramPool) -> None:
        """Neither the expected values nor the arguments of later calls are in the process of the answer."""
        secret = "a" * 20 + "Zq"
        question = question_of(CallCases("f", ((1,), (f"{secret}_argument",)), (None, f"{secret}_expected")))
        code = """
import gc

def texts():
    for o in gc.get_objects():
        for v in o.values() if isinstance(o, dict) else o if isinstance(o, (list, tuple, set)) else ():
            if isinstance(v, (str, bytes)):
                yield v if isinstance(v, str) else v.decode("latin1")

def f(x):
    needle = "".join(reversed("qZ" + "a" * 20))
    return next((t for t in texts() if needle in t and (x == 1 or "exp" in t)), None)
"""
        verdict = verify(CodeVerifier(pool, partial_credit=True), question, code)
        assert verdict.score == 0.5  # the first call found nothing, the second no expected value
        assert verdict.reason == "wrong answer"


class TestScores:
    def test_the_first_case_that_fails_is_the_last(self, pool: ProgramPool) -> None:
        """Later cases do not run: the second would reach its limit."""
        code = "n = int(input())\nwhile n == 2: pass\nprint(0)"
        question = question_of(StdinCases(("1", "2", "2"), ("1", "2", "2")))
        assert verify(CodeVerifier(pool, timeout_s=10.0), question, code).reason == "wrong answer"

    @pytest.mark.parametrize("kind", ["stdin", "calls", "parsed"])
    def test_the_share_of_cases_is_an_option(self, pool: ProgramPool, rng: np.random.Generator, kind: str) -> None:
        verifier = CodeVerifier(pool, timeout_s=10.0, partial_credit=True)
        number = 8
        how = rng.integers(0, 5, size=number)  # of each case: 0 and 1 pass, 2 is wrong, 3 raises, 4 exits
        if kind == "stdin":
            tests = StdinCases(tuple(map(str, range(number))), tuple(map(str, range(number))))
            code = (
                f"how = {how.tolist()}\nn = int(input())\nk = how[n]\nif k == 3: raise ValueError\nif k == 4: exit(1)\n"
            )
            code += "print(n if k < 2 else -1)"
        else:
            calls = CallCases("f", tuple((n,) for n in range(number)), tuple(range(number)))
            asserts = "\n".join(f"assert f({n}) == {n}" for n in range(number))
            tests = calls if kind == "calls" else TestCode("f", asserts)  # type: ignore[assignment]
            code = f"how = {how.tolist()}\ndef f(n):\n    k = how[n]\n    if k == 3: raise ValueError\n"
            code += "    if k == 4: exit()\n    return n if k < 2 else -1"
        verdict = verify(verifier, question_of(tests), code)
        assert verdict.score == np.mean(how < 2)
        assert verdict.correct is bool((how < 2).all())
        first = next((k for k in how if k > 1), 0)
        reasons = ["correct", "correct", "wrong answer", "raised ValueError", "exited"]
        assert verdict.reason == reasons[first]

    @pytest.mark.slow
    def test_the_limit_of_the_data_counts_three_times(self, pool: ProgramPool) -> None:
        code = "import time\ntime.sleep(1.3)\nprint(input())"
        tests = StdinCases(("1",), ("1",))
        verifier = CodeVerifier(pool, timeout_s=20.0)
        assert verify(verifier, question_of(tests, time_limit_s=0.1), code).reason == "timeout"  # at least a second
        assert verify(verifier, question_of(tests, time_limit_s=4.0), code).reason == "correct"
        assert verify(CodeVerifier(pool, timeout_s=1.0), question_of(tests, time_limit_s=5.0), code).reason == "timeout"


class TestReferences:
    def test_broken_tests_are_found(self, verifier: CodeVerifier) -> None:
        good = [question_of(tests).reference for tests in KINDS.values()]
        broken = {
            "42": "has malformed tests (has 42 (input should be an object)",
            '{"stdin": {"inputs": [], "outputs": []}}': "has malformed tests (there are no test cases; inputs",
            question_of(TestCode("f", "assert f( ==")).reference: "has malformed tests (invalid syntax",
            question_of(TestCode("f", "f = 3")).reference: "(the test code ended without a call)",
            question_of(
                TestCode("f", "import pandas\nassert f(1) == 1 + 1")
            ).reference: "(ModuleNotFoundError: No module",
            question_of(TestCode("f", "assert f(object()) == 1 + 1")).reference: "does not call the answer",
        }
        problems = verifier.check_references([*good, *broken, *broken])
        assert list(problems) == list(broken)
        for reference, problem in broken.items():
            assert problem in problems[reference]
        with pytest.raises(ValueError, match="has 42"):
            verifier.verify_all([(Prompt("q", "?", (1,), "42", "code"), "x")])

    def test_cases_that_cannot_pass_the_sandbox_are_found(self, verifier: CodeVerifier) -> None:
        """A value is nested at most as deep as the messages between the processes allow."""

        def nested(depth: int) -> str:
            return "[" * depth + "]" * depth

        calls = '{{"calls": {{"function": "f", "arguments": [[1], [{}]], "expected": [1, {}], "int_keys": {}}}}}'
        for keys in ("true", "false"):
            good = calls.format(nested(MAX_DEPTH), nested(MAX_DEPTH), keys)
            assert verifier.check_references([good]) == {}
            for arguments, expected, named in (
                (MAX_DEPTH + 1, 1, "the arguments of case 1 are"),
                (1, MAX_DEPTH + 1, "the expected value of case 1 is"),
                (150, 1, "the arguments of case 1 are"),
            ):
                bad = calls.format(nested(arguments), nested(expected), keys)
                problem = f"has malformed tests ({named} nested deeper than {MAX_DEPTH} lists and dicts)"
                assert verifier.check_references([good, bad]) == {bad: problem}
            deep = calls.format(nested(20_000), 1, keys)
            assert "recursion limit exceeded" in verifier.check_references([deep])[deep]
        asserts = question_of(TestCode("f", f"assert f(1) == 1\nassert f({nested(MAX_DEPTH + 1)}) == 1")).reference
        assert "the arguments of case 1 are nested deeper" in verifier.check_references([asserts])[asserts]
        code = f"def f(x):\n    return {nested(MAX_DEPTH)} if x else 1"
        question = Prompt("q", "?", (1,), calls.format(nested(MAX_DEPTH), nested(MAX_DEPTH), "true"), "code")
        assert not verify(verifier, question, code).unverified

    def test_test_code_that_fails_before_a_call_is_a_failure_of_the_tests(self, verifier: CodeVerifier) -> None:
        question = question_of(TestCode("f", "import pandas\nassert f(1) == 1 + 1"))
        verdict = verify(verifier, question, "def f(x):\n    return 2")
        assert verdict.reason.startswith("verifier raised ModuleNotFoundError")

    def test_an_argument_that_is_no_plain_value_is_a_failure_of_the_tests(self, verifier: CodeVerifier) -> None:
        """Also after other calls; no answer can cause it, since it returns plain values alone."""
        question = question_of(TestCode("f", "assert f(1) == 1 + 1\nassert f(object()) == 1 + 1"))
        verdict = verify(verifier, question, "def f(x):\n    return 2")
        assert verdict.reason == "verifier raised an argument in the test code is not a plain value"
        assert not verdict.correct

    @pytest.mark.slow
    def test_a_trial_is_certain_with_a_solution(self, verifier: CodeVerifier) -> None:
        solution = "def add(a, b):\n    return a + b"
        solved = [question_of(tests, solution=solution) for tests in FUNCTIONS.values()]
        for question in solved:
            trial = verifier.trial_responses(question.reference, [question_of(SUMS).reference])
            assert trial.certain
            right, *wrong = verifier.verify_all([(question, text) for text in (trial.right, *trial.wrong)])
            assert right.correct
            assert not any(verdict.correct for verdict in wrong)
        assert not verifier.trial_responses(question_of(SUMS).reference, []).certain
