"""Verifier of Python programs: finds the program in a response, and runs it in the sandbox.

The program is one of the fenced blocks of Python, chosen by its syntax. Expected values stay in this process.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

from brorl.errors import first_line
from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, CUT_OFF, NO_CODE, TOO_LONG, Verdict, unverified_verdict, verdict_of
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
)
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import JudgeTimeout, Undecided
from brorl.verification.sandbox.values import MAX_DEPTH, NotPlainError, encode
from brorl.verification.sandbox.worker import Worker
from brorl.verification.verifier import KEEP_TIMEOUT_S, Pair, TrialResponses, VerdictCache

MAX_CODE = 100_000
"""Characters of the longest program that is run."""

_OPENING = re.compile(r"(?P<before>.*?)(?P<fence>(?<!`)`{3,}+|(?<!~)~{3,}+)[ \t]*+(?P<info>[^`\n]{0,200}+)")
_INFO = re.compile(r"\{?\.?(?P<language>[\w+#-]*)\}?(?:[ \t{:].*)?")
_WORD = re.compile(r"[^\W\d]\w*+")
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "pypy", "pypy3", "cpython"})
_READING = frozenset({"input", "raw_input", "stdin", "open", "fileinput"})
_PRINTING = frozenset({"print", "pprint", "stdout", "write", "writelines"})
_BUILT_IN = frozenset({*dir(builtins), "__file__"})
_NO_PROGRAM = re.compile(r"\s*(?:>>>|\$)|[ \t]")  # begins a session (`>>> f(2)`), or an indented excerpt of a program


def extract_code(response: str, tests: CodeTests | None = None) -> str | None:
    """Return the code of the last block that has what the tests need, otherwise of the last block; None without blocks.

    Blocks marked as Python count; if there are none, blocks without a language. Blank blocks and blocks of other
    languages never count. Tests of a function need a block that defines it, or a `Solution` with such a method. Other
    tests need a program that prints. If there is input and any program reads, it must read too. A block that uses names
    of an earlier block, or leaves out parts with `...`, is no program.

    A block without a closing fence ends with the response, or with the next fence that has an info string. Shorter
    fences, and fences of the other character, are part of the code.
    """
    marked: list[str] = []
    unmarked: list[str] = []
    for language, code in _blocks(response):
        if code.strip() and language in _PYTHON:
            marked.append(code)
        elif code.strip() and not language:
            unmarked.append(code)
    codes = [code.lstrip("\ufeff") for code in marked or unmarked]
    if tests is None or len(codes) < 2:
        return codes[-1] if codes else None
    return _choose([_Block.of(code) for code in codes], tests).code


class _Block(NamedTuple):
    """A block of Python."""

    code: str
    body: Sequence[ast.stmt] | None  # None if the code is not valid Python
    bound: frozenset[str] = frozenset()  # all names that the block binds, in any scope
    missing: frozenset[str] = frozenset()  # the names that the block uses without binding or importing them
    words: frozenset[str] = frozenset()  # all names, attributes and modules of the block; all words if it is not valid

    @classmethod
    def of(cls, code: str) -> _Block:
        """Parse a block."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an invalid escape sequence warns
                if len(code) > MAX_CODE:
                    raise ValueError("too long")
                scopes, tree = [symtable.symtable(code, "answer.py", "exec")], ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return cls(code, None, words=frozenset(_WORD.findall(code)))
        for scope in scopes:
            scopes += scope.get_children()
        symbols = [symbol for scope in scopes for symbol in scope.get_symbols()]
        bound = frozenset(s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_parameter())
        used = frozenset(symbol.get_name() for symbol in symbols if symbol.is_referenced())
        texts = (getattr(node, name, None) for node in ast.walk(tree) for name in ("id", "attr"))
        words = {*filter(None, texts), *(node.name for node in ast.walk(tree) if isinstance(node, ast.alias))}
        return cls(code, tree.body, bound, used - bound - imports().keys() - _BUILT_IN, frozenset(words))

    @property
    def acts(self) -> bool:
        """Whether the block can be a program: it does more than define names, and leaves nothing out."""
        if self.body is None:
            return not _NO_PROGRAM.match(self.code)
        defining = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        acting = [s for s in self.body if not isinstance(s, defining) and not _is_constant(s)]
        return bool(acting) and not _leaves_out(self.body)

    def defines(self, function: str) -> bool:
        """Whether the block defines a function, or a class `Solution` with such a method."""
        if self.body is None:
            text = rf"^(?:async[ \t]+)?def[ \t]+{re.escape(function)}\b|^class[ \t]+Solution\b"
            return re.search(text, self.code, re.MULTILINE) is not None
        return any(_makes(statement, function) for statement in _statements(self.body))


def _choose(blocks: Sequence[_Block], tests: CodeTests) -> _Block:
    if not isinstance(tests.tests, StdinCases):
        function = tests.tests.function
        return next((block for block in reversed(blocks) if block.defines(function)), blocks[-1])
    earlier: set[str] = set()
    whole: list[_Block] = []
    for block in blocks:
        if block.acts and block.missing.isdisjoint(earlier) and block.words & _PRINTING:
            whole.append(block)
        earlier |= block.bound
    reading = [block for block in whole if block.words & _READING]
    needs_input = any(text.strip() for text in tests.tests.inputs)
    return (reading if needs_input and reading else whole or blocks)[-1]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, also those within `if`, `try` and the like."""
    left: list[Any] = list(body)
    while left:  # no recursion: a chain of `elif` is nested
        statement = left.pop()
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                left += getattr(statement, name, ())


def _makes(statement: ast.stmt, name: str) -> bool:
    """Whether a statement binds a name to a function, a class or a method of `Solution` with a body."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            empty = all(isinstance(part, ast.Pass) or _is_constant(part) for part in statement.body)
            return statement.name == name and not empty and not _leaves_out(statement.body)
        case ast.ImportFrom(module=module, names=aliases):  # `from solution import f` is an example
            own = any(name == (alias.asname or alias.name) for alias in aliases)
            return own and str(module).partition(".")[0] in sys.stdlib_module_names
        case ast.ClassDef(name=kind, body=body):
            return kind == name or (kind == "Solution" and any(_makes(method, name) for method in _statements(body)))
        case ast.Assign() | ast.AnnAssign():
            stores = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name)
            return any(isinstance(node.ctx, ast.Store) for node in stores)
        case _:
            return False


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _leaves_out(body: Sequence[ast.stmt]) -> bool:
    """Whether a statement of a body is `...`."""
    return any(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and s.value.value is ... for s in body)


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Yield (language, code) of each block, in one pass over the lines."""
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
    """Return (fence, language, indentation) of the block that a line opens; None if the line opens none."""
    if "```" not in line and "~~~" not in line:
        return None
    opening = _OPENING.fullmatch(line)
    info = _INFO.fullmatch(opening["info"].strip()) if opening else None
    if opening is None or info is None:
        return None
    before = opening["before"]
    return opening["fence"], info["language"].lower(), 0 if before.strip() else len(before)


_ALL_CASES = 10  # the limit for all cases, in multiples of the limit for one
_SLOWER = 3.0  # datasets' time limits are multiplied by this: they are made for compiled languages
_MIN_CASE_S = 1.0
_MIN_MEMORY = 1 << 30  # programs for contests give a thread a stack of 512 MiB
_NO_SOURCE = re.compile("[\0\ud800-\udfff]")  # Python reads no null character and no lone surrogate


@dataclass(frozen=True)
class _Plan:
    """The tests of one reference, read once."""

    tests: CodeTests
    calls: tuple[ExpectedCall, ...] | None  # None if a whole program or test code has to run


class CodeVerifier:
    """Accepts programs that pass all tests. Raises a UserError if no sandbox holds on this machine.

    One case may take `timeout_s`, all cases together ten times as long. With `partial_credit` all cases run, and the
    score is the fraction of cases that pass.
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
        are kept. If a case ran into a limit of time, its verdict is kept for only an hour, because the machine may be
        faster later.
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
        """Return the tests' own solutions, or an empty program if they have none."""
        solutions = [CodeTests.from_text(text).solution for text in (reference, *others)]
        right, *wrong = (f"```python\n{solution or 'pass'}\n```" for solution in solutions)
        return TrialResponses(right, [*wrong, "```python\npass\n```"], certain=solutions[0] is not None)

    def _judge(self, plan: _Plan, code: str, worker: Worker) -> Outcome:
        tests, clock = plan.tests.tests, self._clock(plan.tests)
        with clock.own_time():
            source = module(plan.tests, code)
        if isinstance(tests, StdinCases):
            return judge_stdin(source, tests, clock, self._partial_credit, worker)
        if plan.calls is not None:
            return judge_calls(source, tests.function, plan.calls, clock, self._partial_credit, worker)
        assert isinstance(tests, TestCode)
        return judge_test_code(source, tests, clock, worker)

    def _clock(self, tests: CodeTests | None) -> Clock:
        """Return an answer's limits: three times the dataset's time, at least 1 s; its memory, at least 1 GiB."""
        case_s, memory = self._timeout_s, self._memory_bytes
        if tests is not None and tests.time_limit_s is not None:
            case_s = min(case_s, max(_MIN_CASE_S, _SLOWER * tests.time_limit_s))
        if tests is not None and tests.memory_bytes is not None:
            memory = min(memory, max(_MIN_MEMORY, int(tests.memory_bytes)))  # JSON may say 1e9, a float
        return Clock(case_s, _ALL_CASES * case_s, memory)

    def _verdict(self, code: str, outcome: Outcome | Undecided) -> tuple[Verdict, float]:
        """Return the verdict, and for how many seconds to keep it."""
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
            return _Plan(
                tests, tuple(ExpectedCall(arguments, expected, rule, cases.unwrap) for arguments, expected in pairs)
            )
        case TestCode() as code:
            return _Plan(tests, parse_calls(code))


def _require_shallow(calls: Sequence[ExpectedCall]) -> None:
    """Raise a ValueError for values nested too deeply for the messages between the processes."""
    for number, call in enumerate(calls):
        for named, value, depth in (
            ("the arguments of case {} are", call.arguments, MAX_DEPTH + 1),  # one level is the tuple of arguments
            ("the expected value of case {} is", call.expected, MAX_DEPTH),
        ):
            try:
                encode(value, depth)
            except NotPlainError:
                raise ValueError(f"{named.format(number)} nested deeper than {MAX_DEPTH} lists and dicts") from None


def _find_code(response: str, tests: CodeTests) -> Verdict | str:
    """Return the code of a response, or the verdict if it has no code that can run."""
    code = extract_code(response, tests)
    if code is None:
        return verdict_of(NO_CODE)
    if len(code) > MAX_CODE:
        return verdict_of(TOO_LONG)
    return verdict_of(SYNTAX_ERROR, code) if _NO_SOURCE.search(code) else code
