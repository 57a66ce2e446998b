"""Verifier for Python programs: finds the program in a response and runs it in the sandbox.

The program is one of the fenced Python blocks. If there are several, it is chosen by syntax, inside the sandbox: this
process never parses a response's code. Expected values stay in this process.
"""

from __future__ import annotations

import ast
import inspect
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from typing import NamedTuple

from brorl.errors import first_line
from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.prompt import Prompt
from brorl.verdict import BATCH_TIMEOUT, CORRECT, NO_CODE, TOO_LONG, Verdict, unverified_verdict, verdict_of
from brorl.verification.domains import code_choice
from brorl.verification.domains.code_calls import ExpectedCall, ValueRule, parse_calls
from brorl.verification.domains.code_judges import (
    SYNTAX_ERROR,
    Clock,
    Outcome,
    imports,
    judge_calls,
    judge_first_call,
    judge_stdin,
    judge_test_code,
    module,
    reason_of,
)
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Fault, JudgeTimeout, Limits, Reply, Undecided
from brorl.verification.sandbox.values import MAX_DEPTH, NotPlainError, encode
from brorl.verification.sandbox.worker import Worker
from brorl.verification.verifier import KEEP_TIMEOUT_S, Pair, TrialResponses, VerdictCache

MAX_CODE = 100_000
"""Maximum length of a program, in characters; longer ones are not run."""

_OPENING = re.compile(r"(?P<before>.*?)(?P<fence>(?<!`)`{3,}+|(?<!~)~{3,}+)[ \t]*+(?P<info>[^`\n]{0,200}+)")
_INFO = re.compile(r"\{?\.?(?P<language>[\w+#-]*)\}?(?:[ \t{:].*)?")
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "pypy", "pypy3", "cpython"})


def python_blocks(response: str) -> list[str]:
    """Return the blocks that can contain the program, in order.

    These are the blocks marked as Python, or, if there are none, the blocks without a language. Blank blocks and blocks
    in other languages are never returned. A block without a closing fence ends at the end of the response, or at the
    next fence with an info string. Shorter fences and fences made of the other character are part of the code.
    """
    marked: list[str] = []
    unmarked: list[str] = []
    for language, code in _blocks(response):
        if code.strip() and language in _PYTHON:
            marked.append(code)
        elif code.strip() and not language:
            unmarked.append(code)
    return [code.lstrip("\ufeff") for code in marked or unmarked]


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Yield (language, code) for each block, in one pass over the lines."""
    opening: tuple[str, str, int] | None = None
    code: list[str] = []
    for raw in response.split("\n"):
        line = raw.removesuffix("\r")
        if opening is None:
            opening, code = _opening(line), []
            continue
        fence, language, indentation = opening
        text = line.strip()
        if text.startswith(fence):
            yield language, "\n".join(code)
            reopens = text.lstrip(fence[0]).strip().lower() in _PYTHON
            opening, code = _opening(line.lstrip()) if reopens else None, []
            continue
        closes = text.endswith(fence)
        content = line.rstrip().rstrip(fence[0]) if closes else line
        space = len(content) - len(content.lstrip(" \t"))
        code.append(content[min(space, indentation) :])
        if closes:
            yield language, "\n".join(code)
            opening = None
    if opening is not None:
        yield opening[1], "\n".join(code)


def _opening(line: str) -> tuple[str, str, int] | None:
    """Return (fence, language, indentation) of the block that a line opens; None if it does not open a block."""
    if "```" not in line and "~~~" not in line:
        return None
    opening = _OPENING.fullmatch(line)
    info = _INFO.fullmatch(opening["info"].strip()) if opening else None
    if opening is None or info is None:
        return None
    before = opening["before"]
    return opening["fence"], info["language"].lower(), 0 if before.strip() else len(before)


_ALL_CASES = 10  # time limit for all cases, as a multiple of the limit for one case
_SLOWER = 3.0  # multiplies datasets' time limits, which assume compiled languages
_MIN_CASE_S = 1.0
_MIN_MEMORY = 1 << 30  # contest programs start threads with a 512 MiB stack
_NO_SOURCE = re.compile("[\0\ud800-\udfff]")  # Python rejects null characters and lone surrogates


_CHOICE_BYTES = 256 << 20  # memory limit for parsing blocks; 100,000 characters of ordinary code use a tenth


@dataclass(frozen=True)
class _Plan:
    """The tests in one reference, parsed once."""

    tests: CodeTests
    calls: tuple[ExpectedCall, ...] | None  # None if a whole program or test code must run


class _Chosen(NamedTuple):
    """The code in a response, and the seconds spent finding it."""

    code: Verdict | str | None  # None if there is no block; a verdict if the blocks could not be read
    seconds: float = 0.0


class CodeVerifier:
    """Accepts programs that pass all tests. Raises a UserError if no sandbox level works on this machine.

    Each case may take `timeout_s`, and all cases together ten times that. With `partial_credit`, all cases run and the
    score is the fraction that pass.
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
        """Verify responses. Each distinct pair of tests and code runs once.

        The reasons are `correct`, `no code block`, `answer too long`, `syntax error`, `wrong answer`,
        `raised ...`, `exited`, `timeout`, `batch timeout`, `out of memory`, `too much output`, `too many
        threads`, `broke the sandbox protocol`, `killed by signal ...` and `did not return a plain value`. Verdicts
        are cached, but only for an hour if a case hit a time limit, because the machine may be faster later.
        """
        plans = {reference: _plan(reference) for reference in dict.fromkeys(prompt.reference for prompt, _ in items)}
        chosen = self._choose(items, plans)
        remaining = iter(chosen)

        def decide(pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
            judges = [partial(self._judge, plans[reference], code) for reference, code in pairs]
            outcomes = self._programs.run(judges)
            return [self._verdict(code, outcome) for (_, code), outcome in zip(pairs, outcomes, strict=True)]

        verdicts = self._cache.verify_all(items, lambda _prompt, _response: _runnable(next(remaining).code), decide)
        return [replace(v, seconds=v.seconds + choice.seconds) for v, choice in zip(verdicts, chosen, strict=True)]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find malformed tests and test code that fails before calling the answer."""
        problems: dict[str, str] = {}
        probed: dict[str, TestCode] = {}
        for reference in dict.fromkeys(references):
            try:
                plan = _plan(reference)
                _require_shallow(plan.calls or ())
                if isinstance(plan.tests.tests, TestCode):
                    ast.parse(plan.tests.tests.code)
            except (ValueError, SyntaxError) as error:
                problems[reference] = f"has malformed tests ({first_line(error)})"
                continue
            if isinstance(plan.tests.tests, TestCode) and plan.calls is None:
                probed[reference] = plan.tests.tests
        judges = [partial(judge_first_call, test, self._clock(None)) for test in probed.values()]
        for reference, problem in zip(probed, self._programs.run(judges), strict=True):
            if isinstance(problem, str):
                problems[reference] = f"has test code that does not call the answer ({problem})"
        return {reference: problems[reference] for reference in dict.fromkeys(references) if reference in problems}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the solutions that come with the tests, or an empty program if there are none."""
        solutions = [CodeTests.from_text(text).solution for text in (reference, *others)]
        right, *wrong = (f"```python\n{solution or 'pass'}\n```" for solution in solutions)
        return TrialResponses(right, [*wrong, "```python\npass\n```"], certain=solutions[0] is not None)

    def _choose(self, items: Sequence[tuple[Prompt, str]], plans: Mapping[str, _Plan]) -> list[_Chosen]:
        """Return the code in each response. The sandbox chooses among several blocks, once per distinct pair."""
        pairs: list[tuple[str, tuple[str, ...]]] = []
        own_s: list[float] = []
        for prompt, response in items:
            start = time.perf_counter()
            pairs.append((prompt.reference, tuple(python_blocks(response))))
            own_s.append(time.perf_counter() - start)
        several = [(reference, codes) for reference, codes in dict.fromkeys(pairs) if len(codes) > 1]
        limits = Limits(self._timeout_s, min(_CHOICE_BYTES, self._memory_bytes))
        judges = [partial(_read_blocks, plans[reference].tests, codes, limits) for reference, codes in several]
        replies = self._programs.run(judges) if judges else []
        chosen = {pair: _chosen(pair[1], reply) for pair, reply in zip(several, replies, strict=True)}
        choices = (chosen.get(pair) or _Chosen(pair[1][0] if pair[1] else None) for pair in pairs)
        return [choice._replace(seconds=choice.seconds + s) for choice, s in zip(choices, own_s, strict=True)]

    def _judge(self, plan: _Plan, code: str, worker: Worker) -> Outcome:
        tests = plan.tests.tests
        clock = self._clock(plan.tests)
        with clock.own_time():
            source = module(plan.tests, code)
        if isinstance(tests, StdinCases):
            return judge_stdin(source, tests, clock, self._partial_credit, worker)
        if plan.calls is not None:
            return judge_calls(source, tests.function, plan.calls, clock, self._partial_credit, worker)
        assert isinstance(tests, TestCode)
        return judge_test_code(source, tests, clock, worker)

    def _clock(self, tests: CodeTests | None) -> Clock:
        """Return an answer's limits: three times the dataset's time (at least 1 s), and its memory (at least 1 GiB)."""
        case_s = self._timeout_s
        memory = self._memory_bytes
        if tests is not None and tests.time_limit_s is not None:
            case_s = min(case_s, max(_MIN_CASE_S, _SLOWER * tests.time_limit_s))
        if tests is not None and tests.memory_bytes is not None:
            memory = min(memory, max(_MIN_MEMORY, int(tests.memory_bytes)))  # JSON may contain 1e9, a float
        return Clock(case_s, _ALL_CASES * case_s, memory)

    def _verdict(self, code: str, outcome: Outcome | Undecided) -> tuple[Verdict, float]:
        """Return the verdict and how many seconds to cache it."""
        if isinstance(outcome, JudgeTimeout):
            return verdict_of(BATCH_TIMEOUT, code), 0.0
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
            return _Plan(
                tests, tuple(ExpectedCall(arguments, expected, rule, cases.unwrap) for arguments, expected in pairs)
            )
        case TestCode() as code:
            return _Plan(tests, parse_calls(code))


def _require_shallow(calls: Sequence[ExpectedCall]) -> None:
    """Raise a ValueError if a value is nested too deeply to pass between processes."""
    for index, call in enumerate(calls):
        for named, value, depth in (
            ("the arguments of case {} are", call.arguments, MAX_DEPTH + 1),  # the argument tuple adds one
            ("the expected value of case {} is", call.expected, MAX_DEPTH),
        ):
            try:
                encode(value, depth)
            except NotPlainError:
                raise ValueError(f"{named.format(index)} nested deeper than {MAX_DEPTH} lists and dicts") from None


@lru_cache(maxsize=1)
def _choice_source() -> str:
    return inspect.getsource(code_choice)


def _read_blocks(tests: CodeTests, codes: tuple[str, ...], limits: Limits, worker: Worker) -> Reply:
    """Choose a block in a confined process. The reply's value is the block's index."""
    loaded = worker.load(_choice_source(), limits)
    if loaded.failure is not None:
        return loaded
    cases = tests.tests
    function = None if isinstance(cases, StdinCases) else cases.function
    has_input = isinstance(cases, StdinCases) and any(text.strip() for text in cases.inputs)
    return worker.call("choose_block", ([*codes], function, has_input, frozenset(imports())), limits)


def _chosen(codes: Sequence[str], reply: Reply | Undecided) -> _Chosen:
    """Return the code that a confined process chose. Its reply is not trusted."""
    if isinstance(reply, JudgeTimeout):
        return _Chosen(verdict_of(BATCH_TIMEOUT))
    if isinstance(reply, Undecided):
        return _Chosen(unverified_verdict(reply.reason))
    if reply.failure is not None:
        return _Chosen(verdict_of(reason_of(reply.failure)), reply.seconds)
    if type(reply.value) is not int or not 0 <= reply.value < len(codes):
        return _Chosen(verdict_of(Fault.BROKE_PROTOCOL), reply.seconds)
    return _Chosen(codes[reply.value], reply.seconds)


def _runnable(code: Verdict | str | None) -> Verdict | str:
    """Return a response's code, or the verdict if there is no code to run."""
    if code is None:
        return verdict_of(NO_CODE)
    if isinstance(code, Verdict):
        return code
    if len(code) > MAX_CODE:
        return verdict_of(TOO_LONG)
    return verdict_of(SYNTAX_ERROR, code) if _NO_SOURCE.search(code) else code
