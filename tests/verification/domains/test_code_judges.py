"""Judges of programs whose replies follow a script: no process runs, and no test depends on the load of the machine."""

import time
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from code_answers import OUTSIDE, SUMS, Tests, fenced, question_of, verify

from brorl.prompts.code_tests import CallCases, StdinCases, TestCode
from brorl.verdict import Verdict
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.domains.code_judges import Clock, judge_test_code
from brorl.verification.sandbox.request import Fault, JudgeTimeout, Limits, Reply, Undecided
from brorl.verification.sandbox.worker import Judge, T
from each_row import each_row
from scripted_programs import Request, ScriptedPool, ScriptedWorker

ANSWER = "def f(x): return x"


def judged(pool: ScriptedPool, tests: Tests, timeout_s: float, all_cases: bool = False) -> Verdict:
    """Return the verdict on some answer."""
    return verify(CodeVerifier(pool, timeout_s, partial_credit=all_cases), tests, ANSWER)


class TestTimeOfAllCases:
    @pytest.mark.parametrize("kind", ["stdin", "calls"])
    @pytest.mark.usefixtures("no_own_time")
    def test_all_cases_together_have_ten_times_the_limit_of_one(self, kind: str, rng: np.random.Generator) -> None:
        """Each case stays below its limit; all of them exceed ten times it."""
        timeout_s = float(rng.uniform(0.5, 20))
        times = [float(time) for time in rng.uniform(0.2, 0.99, size=60) * timeout_s]
        seconds = iter(times)

        def script(request: Request) -> Reply:
            if request.kind == "load":
                return Reply(None, None, 0.0)
            return Reply("1", None, next(seconds)) if kind == "stdin" else Reply(1, None, next(seconds))

        number = len(times)
        cases = StdinCases(("1",) * number, ("1",) * number)
        calls = CallCases("f", ((1,),) * number, (1,) * number)
        pool = ScriptedPool(script)
        verdict = judged(pool, cases if kind == "stdin" else calls, timeout_s, all_cases=bool(rng.integers(2)))
        ran, spent, left = 0, 0.0, list[float]()
        while spent < 10 * timeout_s:
            left.append(10 * timeout_s - spent)
            spent += times[ran]
            ran += 1
        assert verdict.reason == "timeout"
        assert not verdict.correct
        assert verdict.seconds == pytest.approx(spent)
        requests = [request for request in pool.requests if request.kind != "load"]
        assert len(requests) == ran < number
        limits = [request.limits.seconds for request in requests]
        assert limits == pytest.approx([max(0.01, min(timeout_s, rest)) for rest in left])


class TestFaults:
    """Every way in which the sandbox can end a program; a new one fails here until the judges handle it."""

    @pytest.mark.parametrize("fault", Fault)
    def test_the_cases_after_a_fault_run_in_a_new_process(self, fault: Fault, rng: np.random.Generator) -> None:
        number = 9
        bad = int(rng.integers(number))
        ended = False

        def script(request: Request) -> Reply:
            nonlocal ended
            if request.kind == "load":
                ended = False
                return Reply(None, None, 0.1)
            assert request.arguments
            (case,) = request.arguments
            ended |= case == bad
            return Reply(None if ended else case, f"{fault}{FOLLOWED.get(fault, '')}" if ended else None, 0.1)

        cases = CallCases("f", tuple((k,) for k in range(number)), tuple(range(number)))
        verdict = judged(ScriptedPool(script), cases, timeout_s=4.0, all_cases=True)
        assert verdict.score == (number - 1) / number
        assert verdict.reason == REASONS[fault]

    def test_an_exception_of_the_name_of_a_fault_is_an_exception(self) -> None:
        """The class `timeout` of a program, for instance: no judge starts a new process for it."""
        for fault in Fault:
            name = fault.replace(" ", "_")
            pool = ScriptedPool(lambda _, name=name: Reply(None, f"{name}: 1", 0.0))  # type: ignore[misc]
            assert judged(pool, CallCases("f", ((1,),), (1,)), timeout_s=1.0).reason == f"raised {name}"


FOLLOWED = {Fault.EXITED: " with code 3", Fault.KILLED: " 11"}
REASONS = {
    Fault.TIMEOUT: "timeout",
    Fault.OUT_OF_MEMORY: "out of memory",
    Fault.TOO_MUCH_OUTPUT: "too much output",
    Fault.TOO_MANY_THREADS: "too many threads",
    Fault.BROKE_PROTOCOL: "broke the sandbox protocol",
    Fault.EXITED: "exited",
    Fault.KILLED: "killed by signal 11",
}


class TestCache:
    @pytest.mark.usefixtures("no_own_time")
    def test_each_pair_of_tests_and_code_runs_once(self) -> None:
        pool = ScriptedPool(lambda _: Reply("3", None, 0.5))
        verifier = CodeVerifier(pool, cache_size=2)
        question, other = question_of(StdinCases(("1",), ("3",))), question_of(StdinCases(("1",), ("4",)))
        texts = [fenced("print(3)"), f"Again.\n{fenced('print(3)')}", fenced("print(3) "), fenced("print(3)")]
        items = list(zip([question, question, question, other], texts, strict=True))
        verdicts = verifier.verify_all(items)
        assert [(verdict.correct, verdict.seconds) for verdict in verdicts] == [
            *((True, 0.5), (True, 0.0), (True, 0.5), (False, 0.5))
        ]
        assert pool.num_judges == 3
        again = verifier.verify_all(items[2:])  # the first pair has been pushed out
        assert again == [replace(verdict, seconds=0.0) for verdict in verdicts[2:]]
        assert pool.num_judges == 3
        verifier.verify_all(items[:1])
        assert pool.num_judges == 4

    @pytest.mark.parametrize("first", ["wrong", "timeout", "time of all cases"])
    def test_a_share_with_a_timeout_of_any_case_is_kept_for_an_hour(
        self, first: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The reason is that of the first case that failed; a later case may end in time in another run."""
        wrong, late = Reply("0", None, 0.9), Reply("1", "timeout", 0.1)
        replies = {"wrong": [wrong, late], "timeout": [late, wrong], "time of all cases": [wrong] * 30}[first]
        left = cycle(replies)
        pool = ScriptedPool(lambda _: next(left))
        verifier = CodeVerifier(pool, timeout_s=1.0, partial_credit=True)
        tests = StdinCases(("1",) * len(replies), ("1",) * len(replies))
        for number in (1, 2):
            assert verify(verifier, tests, ANSWER).reason == ("timeout" if first == "timeout" else "wrong answer")
            assert pool.num_judges == number
            monkeypatch.setattr("brorl.verification.verifier.monotonic", lambda: time.monotonic() + 3601)

    @pytest.mark.parametrize(
        ("outcome", "reason"),
        [
            (JudgeTimeout("over"), "batch timeout"),
            (Undecided("a worker was lost"), "unverified: a worker was lost"),
        ],
    )
    def test_an_answer_without_a_decision_runs_again(self, outcome: Undecided, reason: str) -> None:
        class UndecidedPool(ScriptedPool):
            def _decision(self, judge: Judge[T]) -> T | Undecided:  # noqa: ARG002
                return outcome

        pool = UndecidedPool(lambda _: Reply(None, None, 0.0))
        verifier = CodeVerifier(pool)
        for number in (1, 2):
            assert verify(verifier, SUMS, "print(3)").reason == reason
            assert pool.num_judges == number
        assert verifier.check_references([question_of(OUTSIDE).reference]) == {}

    def test_a_response_without_code_does_not_run(self) -> None:
        pool = ScriptedPool(lambda _: Reply(None, None, 0.0))
        items = [(question_of(SUMS), text) for text in ("print(3)", "", "```text\n3\n```")]
        verdicts = [(verdict.reason, verdict.extracted) for verdict in CodeVerifier(pool).verify_all(items)]
        assert verdicts == [("no code block", None)] * 3
        assert pool.num_judges == 0


class TestExceptionsOfTheAnswer:
    def given(self, failure: str) -> tuple[list[str | None], str]:
        """Return what a failed call raises in the test code, and the reason of the outcome."""

        def script(request: Request) -> Reply:
            return Reply(None, failure if request.kind == "call" else None, 0.0)

        test = TestCode("f", "try:\n    f(1)\nexcept ValueError:\n    pass")
        worker = ScriptedWorker(script)
        outcome = judge_test_code("def f(x): pass", test, Clock(1.0, 10.0, 1 << 29), worker)
        return worker.errors, outcome.reason

    def test_an_exception_is_passed_on_by_its_name_with_its_message(self) -> None:
        for name in ("ValueError", "TypeError", "KeyError", "ZeroDivisionError", "Exception", "NotImplementedError"):
            assert self.given(f"{name}: no: {name}") == ([f"{name}: no: {name}"], "correct")

    @each_row(
        ("failure", "reason"),
        [
            *((f"{name}: 1", f"raised {name}") for name in (
                "StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt",
                "BaseException", "ImportError", "ModuleNotFoundError", "NameError", "RecursionError", "MemoryError",
                "Warning", "UserWarning", "OSError", "TimeoutError", "BaseExceptionGroup", "SkipTest", "MyError")),
            ("PermissionError: forged", "raised PermissionError (no files, network or processes)"),
            ("unittest.case.SkipTest: x", "raised SkipTest"),
            ("answer.ValueError: x", "raised ValueError"),
            ("ValueError\u2028: x", "raised an exception"),
            (" ValueError: x", "raised an exception"),
            ("object: x", "raised object"),
            ("print: x", "raised print"),
            ("", "raised an exception"),
            *(((fault + FOLLOWED.get(fault, "")), REASONS[fault]) for fault in Fault),
            ("did not return a plain value: of type object", "did not return a plain value"),
        ],
    )  # fmt: skip
    def test_anything_else_ends_the_tests_as_failed(self, failure: str, reason: str) -> None:
        assert self.given(failure) == ([], reason)


class TestSizeOfReplies:
    """This process reads no longer reply than an accepted value can be."""

    def requests(self, tests: Tests) -> list[Limits]:
        """Return the limits of the requests to the answer."""
        pool = ScriptedPool(lambda request: Reply("" if request.kind == "run" else None, None, 0.0))
        verify(CodeVerifier(pool), tests, ANSWER)
        return [request.limits for request in pool.requests if request.name != "tests"]

    def limits(self, tests: Tests) -> list[int]:
        return [limits.output_bytes for limits in self.requests(tests)]

    @pytest.mark.slow
    def test_it_grows_with_the_expected_value(self, rng: np.random.Generator) -> None:
        assert max(self.limits(CallCases("f", ((1,),), (7,)))) < 5_000
        text = "a" * int(rng.integers(10_000, 100_000))
        loaded, called = self.limits(CallCases("f", ((1,),), (text,)))
        assert len(text) < called < len(text) + 5_000
        assert loaded < 5_000
        assert max(self.limits(CallCases("f", ((1,),), ([1] * 100_000,)))) == 1 << 22
        assert len(text) < max(self.limits(StdinCases(("",), (text,)))) < 5 * len(text) + 70_000

    def test_a_dense_text_of_a_short_value_is_not_read(self) -> None:
        """Numbers are short where a complex one would be long: 4 MiB of them have a hundred times the parts."""
        (_, called) = self.requests(CallCases("f", ((1,),), ([7] * 50_000,)))
        assert called.output_bytes > 1 << 21
        assert called.output_parts is not None
        assert 50_000 < called.output_parts < 200_000

    def test_it_is_small_where_test_code_decides(self) -> None:
        loaded, called = self.limits(TestCode("f", "x = f(1)\nassert x == 1"))
        assert loaded < 5_000
        assert called <= 1 << 19
