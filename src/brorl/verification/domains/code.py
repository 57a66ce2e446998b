"""Verifier of Python programs, by running them in the sandbox; expected values stay in this process."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from brorl.errors import first_line
from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, CUT_OFF, NO_CODE, TOO_LONG, Verdict, unverified_verdict, verdict_of
from brorl.verification.domains.code_checks import Check, ValueRule, parse_checks
from brorl.verification.domains.code_extraction import MAX_CODE, extract_code, module
from brorl.verification.domains.code_judges import (
    SYNTAX_ERROR,
    Clock,
    Outcome,
    judge_calls,
    judge_first_call,
    judge_stdin,
    judge_test_code,
)
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.replies import JudgeTimeout, Undecided
from brorl.verification.sandbox.values import MAX_DEPTH, NotPlainError, encode
from brorl.verification.sandbox.worker import Worker
from brorl.verification.verdict_cache import KEEP_TIMEOUT_S, Pair, VerdictCache
from brorl.verification.verifier import TrialResponses

_ALL_CASES = 10  # times the limit of one case
_SLOWER = 3.0  # Python than the compiled languages that time limits are made for
_MIN_CASE_S = 1.0
_MIN_MEMORY = 1 << 30  # programs for contests give a thread a stack of 512 MiB
_NO_SOURCE = re.compile("[\0\ud800-\udfff]")  # a null character or a lone surrogate


@dataclass(frozen=True)
class _Plan:
    """The tests of one reference, read once; with their checks, unless a program or test code has to run."""

    tests: CodeTests
    checks: tuple[Check, ...] | None


class CodeVerifier:
    """Accepts programs that pass all tests; UserError if no sandbox holds on this machine.

    A case takes `timeout_s` at most, and all cases ten times as long. With `partial_credit` all cases run, and the
    score is the fraction of those that passed.
    """

    def __init__(
        self,
        programs: ProgramPool,
        timeout_s: float = 4.0,
        memory_bytes: int = 1 << 30,
        partial_credit: bool = False,
        cache_size: int = 20_000,
    ) -> None:
        self._cache = VerdictCache(cache_size)
        programs.require()
        self._programs, self._timeout_s, self._memory_bytes = programs, timeout_s, memory_bytes
        self._partial_credit = partial_credit

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses; each distinct pair of tests and code runs once.

        The reasons are `correct`, `no code block`, `answer too long`, `syntax error`, `wrong answer`,
        `raised ...`, `exited`, `timeout`, `timeout of all programs`, `out of memory`, `too much output`, `too many
        threads`, `broke the protocol of the sandbox`, `killed by signal ...` and `returned no plain value`. Verdicts
        are kept, those of a case that ran into a limit of time for an hour: the limits can depend on the speed of the
        machine.
        """
        plans = {reference: _plan(reference) for reference in dict.fromkeys(prompt.reference for prompt, _ in items)}

        def decide(pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
            judges = [partial(self._judge, plans[reference], code) for reference, code in pairs]
            outcomes = self._programs.run(judges)
            return [self._verdict(code, outcome) for (_, code), outcome in zip(pairs, outcomes, strict=True)]

        def find(prompt: Prompt, response: str) -> Verdict | str:
            return _find_code(response, plans[prompt.reference].tests)

        return self._cache.verify_all(items, find, decide)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find malformed tests, and test code that fails before it calls the answer."""
        problems: dict[str, str] = {}
        probed: dict[str, TestCode] = {}
        for reference in dict.fromkeys(references):
            try:
                plan = _plan(reference)
                _require_shallow(plan.checks or ())
                if isinstance(plan.tests.tests, TestCode):
                    ast.parse(plan.tests.tests.code)
            except (ValueError, SyntaxError) as error:
                problems[reference] = f"has malformed tests ({first_line(error)})"
                continue
            if isinstance(plan.tests.tests, TestCode) and plan.checks is None:
                probed[reference] = plan.tests.tests
        judges = [partial(judge_first_call, test, self._clock(None)) for test in probed.values()]
        for reference, problem in zip(probed, self._programs.run(judges), strict=True):
            if isinstance(problem, str):
                problems[reference] = f"has test code that does not call the answer ({problem})"
        return {reference: problems[reference] for reference in dict.fromkeys(references) if reference in problems}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the solutions of the tests; an empty program where there is none."""
        solutions = [CodeTests.from_text(text).solution for text in (reference, *others)]
        right, *wrong = (f"```python\n{solution or 'pass'}\n```" for solution in solutions)
        return TrialResponses(right, [*wrong, "```python\npass\n```"], certain=solutions[0] is not None)

    def _judge(self, plan: _Plan, code: str, worker: Worker) -> Outcome:
        tests, clock = plan.tests.tests, self._clock(plan.tests)
        with clock.own_time():
            source = module(plan.tests, code)
        if isinstance(tests, StdinCases):
            return judge_stdin(source, tests, clock, self._partial_credit, worker)
        if plan.checks is not None:
            return judge_calls(source, tests.function, plan.checks, clock, self._partial_credit, worker)
        assert isinstance(tests, TestCode)
        return judge_test_code(source, tests, clock, worker)

    def _clock(self, tests: CodeTests | None) -> Clock:
        """Return the limits of an answer: three times the dataset's, and at least 1 s and 1 GiB."""
        case_s, memory = self._timeout_s, self._memory_bytes
        if tests is not None and tests.time_limit_s is not None:
            case_s = min(case_s, max(_MIN_CASE_S, _SLOWER * tests.time_limit_s))
        if tests is not None and tests.memory_bytes is not None:
            memory = min(memory, max(_MIN_MEMORY, int(tests.memory_bytes)))  # JSON may have 1e9
        return Clock(case_s, _ALL_CASES * case_s, memory)

    def _verdict(self, code: str, outcome: Outcome | Undecided) -> tuple[Verdict, float]:
        """Return the verdict, and how long to keep it in seconds."""
        if isinstance(outcome, JudgeTimeout):
            return verdict_of(CUT_OFF, code), 0.0
        if isinstance(outcome, Undecided):
            return unverified_verdict(outcome.reason), 0.0
        correct = outcome.reason == CORRECT
        score = outcome.num_passed / outcome.num_cases if self._partial_credit else float(correct)
        keep_s = KEEP_TIMEOUT_S if outcome.timed_out else inf
        return Verdict(correct, score, code, outcome.reason, outcome.seconds), keep_s


def _plan(reference: str) -> _Plan:
    tests = CodeTests.from_text(reference)
    match tests.tests:
        case StdinCases():
            return _Plan(tests, None)
        case CallCases() as cases:
            rule = ValueRule(cases.tolerance, cases.tolerance, sequences_alike=True, any_order=cases.any_order)
            try:
                pairs = cases.cases()
            except RecursionError:
                raise ValueError("the cases are nested too deeply") from None
            return _Plan(tests, tuple(Check(arguments, expected, rule, cases.unwrap) for arguments, expected in pairs))
        case TestCode() as code:
            return _Plan(tests, parse_checks(code))


def _require_shallow(checks: Sequence[Check]) -> None:
    """Reject values that no message between the processes can hold."""
    for number, check in enumerate(checks):
        for named, value, depth in (
            ("the arguments of case {} are", check.arguments, MAX_DEPTH + 1),  # within the list of the arguments
            ("the expected value of case {} is", check.expected, MAX_DEPTH),
        ):
            try:
                encode(value, depth)
            except NotPlainError:
                raise ValueError(f"{named.format(number)} nested deeper than {MAX_DEPTH} lists and dicts") from None


def _find_code(response: str, tests: CodeTests) -> Verdict | str:
    """Return the code of a response, or the verdict if there is none, or none that can be run."""
    code = extract_code(response, tests)
    if code is None:
        return verdict_of(NO_CODE)
    if len(code) > MAX_CODE:
        return verdict_of(TOO_LONG)
    return verdict_of(SYNTAX_ERROR, code) if _NO_SOURCE.search(code) else code
