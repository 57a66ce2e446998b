"""Judges for programs: each runs one answer against its tests and stops at the first failing case.

Expected values stay in this process, or in a separate process that runs test code.
"""

from __future__ import annotations

import builtins
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache, partial
from hashlib import blake2b

from brorl.prompts.code_tests import CodeTests, StdinCases, TestCode
from brorl.verdict import CORRECT, RAISED, TIMEOUT, WRONG
from brorl.verification.domains.code_calls import ExpectedCall
from brorl.verification.sandbox.inside.program import NO_PLAIN_VALUE
from brorl.verification.sandbox.request import REPLY_BYTES, Fault, Limits, Reply, fault_of
from brorl.verification.sandbox.worker import OutsideError, Worker

SYNTAX_ERROR = "syntax error"
RAISED_BY_ANSWER = "raised"  # the exception follows: `raised ValueError`
DENIED = f"{RAISED_BY_ANSWER} PermissionError (no files, network or processes)"  # the sandbox refused a system call
NO_CALL = "the test code ended without a call"
NO_PLAIN_ARGUMENT = "an argument in the test code is not a plain value"

_VALUE_BYTES = 1 << 22  # limit for any value, and for the arguments of one call by test code
_PASSED_BYTES = 1 << 18  # limit for a value passed on to test code; its expected value is unknown here
_MIN_OUTPUT_BYTES = 1 << 16
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]{0,59})(?::.*)?", re.ASCII | re.DOTALL)
_SYNTAX_ERRORS = frozenset({"SyntaxError", "IndentationError", "TabError"})
# The only exceptions from an answer that test code can catch, because a question can ask for them. StopIteration would
# end a loop over `map` in the test code, and ImportError would skip tests that guard an import. A function that is
# missing or recurses infinitely fails even if the test code catches every Exception.
_PASSED_ON = frozenset(
    (
        *("ArithmeticError", "AssertionError", "AttributeError", "Exception", "FloatingPointError", "IndexError"),
        *("KeyError", "LookupError", "NotImplementedError", "OverflowError", "RuntimeError", "TypeError"),
        *("ValueError", "ZeroDivisionError"),
    )
)
_NAME = re.compile(r"[^\W\d]\w*+")
_NUMBER = re.compile(r"[-+]?(?:\d{1,4000}(?:\.\d{0,4000})?|\.\d{1,4000})(?:[eE][-+]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d+", re.ASCII)
_TESTS = "tests"
# MBPP+ compares optional values, such as regular-expression matches, without asserting the outcome.
_OPTIONAL = "        exact_match = exp == (out is not None)\n"


# LiveCodeBench's judge imports these modules and all their names before it runs an answer. APPS's judge imports fewer;
# EvalPlus's imports none. Later modules override names from earlier ones.
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_LIMITS = "import sys\nsys.setrecursionlimit(50_000)\nsys.set_int_max_str_digits(50_000)"  # as in LiveCodeBench
# `++` is possessive: without it, backtracking over a run of blanks would take quadratic time.
_FUTURE = re.compile(r"^from[ \t]++__future__[ \t]++import[ \t]++(?:\([^()]{0,500}+\)|[^\n(]*+)$", re.MULTILINE)


def module(tests: CodeTests, code: str) -> str:
    """Return the code with imports added for the names it uses. Its imports from `__future__` stay first.

    The function that the tests call is never imported. With test code, nothing is imported, as in its dataset's judge.
    """
    function = "" if isinstance(tests.tests, StdinCases) else tests.tests.function
    before: list[str] = []
    if not isinstance(tests.tests, TestCode):  # import only what the code names: importing everything takes too long
        import_of = imports()
        before = sorted(import_of[word] for word in {*_NAME.findall(code)} - {function} if word in import_of)
        before.append(_LIMITS)
    if tests.prelude:
        before += [tests.prelude, f"globals().pop({function!r}, None)"]
    if not before:
        return code
    future = "\n".join(_FUTURE.findall(code))
    return "\n".join([future, *before, _FUTURE.sub("", code) if future else code])


@lru_cache(maxsize=1)
def imports() -> Mapping[str, str]:
    """Return the names besides builtins that a program may use without importing them: name -> import statement."""
    import_of: dict[str, str] = {}
    for name in (*_MODULES, "typing"):
        module = importlib.import_module(name)
        public = (text for text in vars(module) if not text.startswith("_"))
        names = getattr(module, "__all__", public)
        import_of |= {text: f"from {name} import {text}" for text in names if not hasattr(builtins, text)}
    return import_of | {name: f"import {name}" for name in _MODULES}


# Stands in for the few parts of numpy that test code in public datasets uses; shapes are not broadcast.
_NUMPY = """
import math, sys, types
def allclose(actual, desired, rtol=1e-05, atol=1e-08, equal_nan=False):
    if isinstance(desired, (list, tuple)):
        return (
            isinstance(actual, (list, tuple))
            and len(actual) == len(desired)
            and all(allclose(a, d, rtol, atol, equal_nan) for a, d in zip(actual, desired))
        )
    if not isinstance(actual, (int, float, complex)) or not isinstance(desired, (int, float, complex)):
        raise TypeError(f"not numbers: {type(actual).__name__} and {type(desired).__name__}")
    if actual == desired:
        return True
    if actual != actual and desired != desired:
        return equal_nan
    return bool(abs(actual - desired) <= atol + rtol * abs(desired) < math.inf)
def assert_allclose(actual, desired, rtol=1e-07, atol=0.0, equal_nan=True):
    if not allclose(actual, desired, rtol, atol, equal_nan):
        raise AssertionError(f"not close: {actual} and {desired}")
numpy, testing = types.ModuleType("numpy"), types.ModuleType("numpy.testing")
numpy.__dict__.update(allclose=allclose, testing=testing, inf=math.inf, nan=math.nan)
numpy.__dict__.update({name: type(name, (), {}) for name in ("ndarray", "float64", "float32")})
testing.__dict__.update(assert_allclose=assert_allclose)
sys.modules.update({"numpy": numpy, "numpy.testing": testing})
"""


@dataclass(frozen=True)
class Outcome:
    """The judge's decision on one answer."""

    num_passed: int
    num_cases: int
    reason: str  # `correct`, or the problem in the first failing case
    seconds: float  # wall time of programs and comparisons
    timed_out: bool  # whether a time limit ended a case; if so, a second run may end differently


@dataclass
class Clock:
    """One answer's limits and the time it has used."""

    case_s: float  # wall-time limit per case
    total_s: float  # wall-time limit for all cases
    memory_bytes: int  # memory limit per program
    spent_s: float = field(default=0.0, init=False)  # time spent by the answer's programs so far
    # Time that this process has spent on comparisons; it does not count toward any limit.
    own_s: float = field(default=0.0, init=False)
    # Whether a time limit has ended a request, or `total_s` was used up before the last case.
    timed_out: bool = field(default=False, init=False)

    @contextmanager
    def own_time(self) -> Iterator[None]:
        """Count the time that this process spends in the `with` block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.own_s += time.perf_counter() - start

    def is_over(self) -> bool:
        """Return whether the time for all cases is used up. Call this before a case: if true, the case cannot run."""
        over = self.spent_s >= self.total_s
        self.timed_out |= over
        return over

    def limits(self, output_bytes: int = REPLY_BYTES, output_parts: int | None = None) -> Limits:
        """Return the limits for the next request. By default, the reply has no room for a value."""
        seconds = max(0.01, min(self.case_s, self.total_s - self.spent_s))
        return Limits(seconds, self.memory_bytes, output_bytes, output_parts)

    def spent(self, reply: Reply) -> Reply:
        """Add a reply's time to the total and return the reply."""
        self.spent_s += reply.seconds
        self.timed_out |= reply.failure == Fault.TIMEOUT
        return reply

    def outcome(self, num_passed: int, num_cases: int, reason: str) -> Outcome:
        """Return the decision on the answer, with the time spent."""
        seconds = self.spent_s + self.own_s
        return Outcome(num_passed, num_cases, reason, seconds, self.timed_out or reason == TIMEOUT)


class _DecidedError(Exception):
    """A call to the answer has decided the verdict. The message is the reason."""


def _judge_cases(cases: Sequence[Callable[[], str]], clock: Clock, all_cases: bool) -> Outcome:
    """Run cases until the first failure, or all with `all_cases`. A case returns its problem, or "" if it passes."""
    num_passed = 0
    first_problem = ""
    for run in cases:
        if clock.is_over():
            first_problem = first_problem or TIMEOUT
            break
        try:
            problem = run()
        except _DecidedError as decided:
            first_problem = first_problem or str(decided)
            break
        num_passed += not problem
        first_problem = first_problem or problem
        if first_problem and not all_cases:
            break
    return clock.outcome(num_passed, len(cases), first_problem or CORRECT)


def judge_stdin(source: str, cases: StdinCases, clock: Clock, all_cases: bool, worker: Worker) -> Outcome:
    """Run a program on each input and compare its output, stopping at the first failure unless `all_cases` is set."""

    def run(stdin: str, expected: str) -> str:
        limits = clock.limits(4 * len(expected.encode("utf-8", "replace")) + _MIN_OUTPUT_BYTES)
        reply = clock.spent(worker.run(source, stdin, limits))
        with clock.own_time():
            passes = reply.failure is None and same_output(expected, str(reply.value), cases)
        return "" if passes else reason_of(reply.failure)

    pairs = zip(cases.inputs, cases.outputs, strict=True)
    return _judge_cases([partial(run, *pair) for pair in pairs], clock, all_cases)


def judge_calls(
    source: str, function: str, calls: Sequence[ExpectedCall], clock: Clock, all_cases: bool, worker: Worker
) -> Outcome:
    """Make each call and compare its value, stopping at the first failure unless `all_cases` is set."""
    function_name = _callable_name(source, function)
    is_loaded = False

    def run(expected: ExpectedCall) -> str:
        nonlocal is_loaded
        if not is_loaded:
            loaded = clock.spent(worker.load(source, clock.limits()))
            if loaded.failure is not None:
                raise _DecidedError(reason_of(loaded.failure))
        size = expected.max_size
        limits = clock.limits(min(REPLY_BYTES + size.num_bytes, _VALUE_BYTES), REPLY_BYTES + size.num_parts)
        reply = clock.spent(worker.call(function_name, expected.arguments, limits))
        with clock.own_time():
            passes = reply.failure is None and expected.accepts(reply.value)
        is_loaded = fault_of(reply.failure or "") is None
        return "" if passes else reason_of(reply.failure)

    return _judge_cases([partial(run, call) for call in calls], clock, all_cases)


def judge_test_code(source: str, test: TestCode, clock: Clock, worker: Worker) -> Outcome:
    """Run test code in one process and the answer it calls in another. The outcome counts as one case.

    Only plain values, and the names and messages of exceptions that a question can ask for, pass between the two
    processes.
    """
    function_name = _callable_name(source, test.function)
    loaded = clock.spent(worker.load(source, clock.limits()))
    if loaded.failure is not None:
        return clock.outcome(0, 1, reason_of(loaded.failure))
    num_calls = 0
    raised = ""  # the last failure passed on to the test code

    def answer(*arguments: object) -> object:
        nonlocal num_calls, raised
        num_calls += 1
        if clock.is_over():
            raise _DecidedError(TIMEOUT)
        returned = clock.spent(worker.call(function_name, arguments, clock.limits(_PASSED_BYTES + len(test.code))))
        failure = returned.failure or ""
        if failure.startswith(NO_PLAIN_VALUE) and _OPTIONAL in test.code:
            return True
        # A program can forge this string, so the exception's name must be a known one. The message is only text.
        passed_on = failure.partition(":")[0] in _PASSED_ON
        raised = reason_of(failure) if failure else ""
        if passed_on:
            raise OutsideError(failure)
        if returned.failure is not None:
            raise _DecidedError(reason_of(failure))
        return returned.value

    try:
        failure = _run_tests(test, answer, clock, worker).failure or ""
    except _DecidedError as decided:
        return clock.outcome(0, 1, str(decided))
    if failure.startswith(NO_PLAIN_VALUE):
        return clock.outcome(0, 1, f"{RAISED} {NO_PLAIN_ARGUMENT}")
    if not num_calls:
        return clock.outcome(0, 1, f"{RAISED} {failure or NO_CALL}")
    if not failure:
        return clock.outcome(1, 1, CORRECT)
    if failure == TIMEOUT or reason_of(failure) == raised:  # the test code did not catch the exception
        return clock.outcome(0, 1, reason_of(failure))
    return clock.outcome(0, 1, WRONG)


def judge_first_call(test: TestCode, clock: Clock, worker: Worker) -> str | None:
    """Run test code up to its first call, and return the problem if it never makes a call."""

    def answer(*_arguments: object) -> object:
        raise _DecidedError

    try:
        return _run_tests(test, answer, clock, worker).failure or NO_CALL
    except _DecidedError:
        return None


def _run_tests(test: TestCode, answer: Callable[..., object], clock: Clock, worker: Worker) -> Reply:
    """Run test code in a process without the answer and with a different random state."""
    seed = blake2b(test.code.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    # The stand-in for numpy does not bind any name here. Test code may use `math` without importing it.
    numpy = f"exec({_NUMPY!r}, {{}})" if "numpy" in test.code else ""
    code = test.code.replace(_OPTIONAL, f"{_OPTIONAL}    assert exact_match\n")
    source = f"__import__('random').seed({seed!r})\nimport math\n{numpy}\n{code}"
    limits = Limits(clock.total_s, clock.memory_bytes, _VALUE_BYTES)
    return worker.load(source, limits, _TESTS, {test.function: answer, "candidate": answer})


def _callable_name(source: str, function: str) -> str:
    """Return `f`, or `Solution.f` if the source defines that class but not a function `f`."""
    has_function = re.search(
        rf"^(?:async[ \t]+)?def[ \t]+{re.escape(function)}\b|^{re.escape(function)}[ \t]*=", source, re.M
    )
    has_class = re.search(r"^class[ \t]+Solution\b", source, re.M)
    return f"Solution.{function}" if has_class and not has_function else function


def reason_of(failure: str | None) -> str:
    """Return the verdict's reason for a program's failure; None means that the program returned a wrong value."""
    if failure is None:
        return WRONG
    fault = fault_of(failure)
    if fault is not None:
        return str(fault) if fault is Fault.EXITED else failure
    if failure.startswith(NO_PLAIN_VALUE):
        return NO_PLAIN_VALUE
    exception = _EXCEPTION.fullmatch(failure)
    if exception is None:
        return f"{RAISED_BY_ANSWER} an exception"
    name = exception[1].rpartition(".")[2]
    if name == PermissionError.__name__:
        return DENIED
    return SYNTAX_ERROR if name in _SYNTAX_ERRORS else f"{RAISED_BY_ANSWER} {name}"


def same_output(expected: str, output: str, cases: StdinCases) -> bool:
    """Return whether a program's output matches the expected output under the cases' rule."""
    if cases.ignore_case:
        expected, output = expected.casefold(), output.casefold()
    if cases.compare == "exact":
        return expected.replace("\r\n", "\n").removesuffix("\n") == output.replace("\r\n", "\n").removesuffix("\n")
    if cases.compare == "tokens":
        return _same_tokens(expected.split(), output.split(), cases.tolerance)
    expected_lines, lines = ([line.split() for line in text.strip().split("\n")] for text in (expected, output))
    if cases.tolerance is None:  # whitespace within a line matters
        return [s.strip() for s in expected.strip().split("\n")] == [s.strip() for s in output.strip().split("\n")]
    return len(expected_lines) == len(lines) and all(
        _same_tokens(right, line, cases.tolerance) for right, line in zip(expected_lines, lines, strict=True)
    )


def _same_tokens(expected: list[str], tokens: list[str], tolerance: float | None) -> bool:
    return len(expected) == len(tokens) and all(
        right == token or (tolerance is not None and _same_number(right, token, tolerance))
        for right, token in zip(expected, tokens, strict=True)
    )


def _same_number(expected: str, token: str, tolerance: float) -> bool:
    """Return whether numbers agree within an absolute tolerance, or a relative one unless an integer is expected."""
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(token)):
        return False
    right, number = Decimal(expected), Decimal(token)
    if right == number:
        return True
    scale = 1 if _INTEGER.fullmatch(expected) else max(Decimal(1), abs(right))
    return abs(number - right) <= Decimal(tolerance) * scale
