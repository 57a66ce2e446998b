"""`ToolRunner`: runs the functions that responses can call. Turns go in, results come out.

Calls run in worker processes with time and memory limits, never in this process. Equal calls run once.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from brorl.errors import ToolError, UserError, source_setting
from brorl.format import shortened
from brorl.prompts.question import ENVIRONMENT_DOMAIN
from brorl.tools.arguments import argument_problem
from brorl.tools.calls import Call, Failure, ToolResult, Turn
from brorl.tools.inside import readable
from brorl.tools.settings import ToolSettings
from brorl.verdict import OUT_OF_MEMORY, RAISED, TIMEOUT, UNVERIFIED, is_unverified
from brorl.verification.domains.verifiers import load_problem
from brorl.verification.sandbox.pool import LoadError, VerifierCall, Workers
from brorl.verification.sandbox.request import Fault, JudgeTimeout, Limits, Reply, Undecided, fault_of
from brorl.verification.sandbox.worker import Worker

PYTHON = "python"
_FUNCTION = "describe_function"
_CALCULATOR = "brorl.tools.calculator:calculator"
_PYTHON_SCHEMA = {
    "type": "function",
    "function": {
        "name": PYTHON,
        "description": "Run a Python program, and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program. It prints its results."}},
            "required": ["code"],
        },
        "return": {"type": "string"},
    },
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SCHEMA_S = 60.0
_CHARACTERS_PER_TOKEN = 64  # most tokens are far shorter
_MAX_PROGRAM_BYTES = 1 << 20  # maximum program output
_ERROR = re.compile(r"error: [^\n]*")
_COMPARED = 24  # characters of an error to compare; a format may escape or truncate the rest
_BEGINNINGS = {
    Failure.TIMEOUT: re.compile("error: timeout after ").match,
    Failure.NOT_TEXT: re.compile("error: the result cannot be written").match,
    Failure.CRASHED: re.compile(f"error: ({'|'.join([*Fault, 'the process of the tool ended'])})").match,
}
_MIN_FAILED = 8  # distinct failed calls after which a tool counts as broken
_FORM = "give every parameter a type, and write a Google docstring that describes the tool and its parameters"

_GAME = "an environment needs reset(**row), and methods with type hints and Google docstrings"


class Tool(NamedTuple):
    """One tool."""

    schema: Mapping[str, Any]  # in the format of `transformers.utils.get_json_schema`
    path: str = ""  # `file.py:function`, or the method's class; empty for the tool that runs programs
    setting: str = ""  # the setting that names the user's function; empty for a built-in tool
    deterministic: bool = True
    is_method: bool = False  # whether it is a method of the environment

    @property
    def name(self) -> str:
        """The name that responses use to call it."""
        return str(self.schema["function"]["name"])


class _Work(NamedTuple):
    """A call to run. Equal work runs once."""

    call: Call
    row: str = ""  # for a method of the environment
    before: tuple[Call, ...] = ()  # earlier calls of the environment's methods
    # Indices of the turn, the rollout and the call within the turn, for a nondeterministic tool.
    place: tuple[int, int, int] | None = None


class ToolRunner:
    """The tools of a run: loads them, shows their schemas, and runs calls in worker processes.

    Attributes:
        tools: Tools by the name that responses use to call them.
        schemas: JSON schemas for the chat template, in the order of the settings.
        environment: The environment, as `file.py:class`; None if there is none.
        has_reward: Whether the environment has get_reward().
        num_run: Number of calls that ran in a process. Calls to unknown tools or with wrong arguments do not run.
    """

    def __init__(
        self, tools: Mapping[str, Tool], settings: ToolSettings, workers: Workers, has_reward: bool = False
    ) -> None:
        self.tools = tools
        self._workers = workers
        self._timeout_s = settings.timeout_s
        self._max_characters = _CHARACTERS_PER_TOKEN * settings.max_result_tokens
        self.schemas: tuple[dict[str, Any], ...] = tuple(dict(tool.schema) for tool in tools.values())
        self.environment = settings.environment
        self.has_reward = has_reward
        self.num_run = 0
        self._worked: set[str] = set()  # names of tools with at least one result
        self._failed: dict[str, set[_Work]] = {}  # distinct failed calls of the other tools

    @classmethod
    def from_settings(cls, settings: ToolSettings, workers: Workers) -> ToolRunner:
        """Load the functions in a worker and build their schemas. A UserError names the setting and the fix."""
        tools = [_own_tool(name, path, workers) for name, path in settings.functions.items()]
        if settings.calculator:
            tools.append(Tool(_described(_CALCULATOR, _FUNCTION, workers)["schema"], _CALCULATOR))
        if settings.python:
            workers.programs.require()
            tools.append(Tool(_PYTHON_SCHEMA))
        has_reward = False
        if settings.environment:
            setting = "tools.environment"
            path = settings.environment
            described = _own(setting, path, "describe_environment", _GAME, workers)
            tools += [Tool(schema, path, setting, is_method=True) for schema in described["tools"].values()]
            has_reward = described["has_reward"]
        names = Counter(tool.name for tool in tools)
        if repeated := next((name for name, count in names.items() if count > 1), None):
            raise UserError(f"tools: two tools have the name {repeated!r}; rename yours")
        return cls({tool.name: tool for tool in tools}, settings, workers, has_reward)

    def observations(self, rows: Sequence[str]) -> list[str]:
        """Return the text that the environment's reset returns for each row (a JSON object); empty if there is none.

        Raises a UserError if reset fails.
        """
        if self.environment is None:
            return [""] * len(rows)
        distinct = [*dict.fromkeys(rows)]
        through = "brorl.tools.inside:observe"
        calls = [VerifierCall(self.environment, (row,), through, self._timeout_s) for row in distinct]
        text_of: dict[str, str] = {}
        for row, reply in zip(distinct, self._workers.functions.run(calls), strict=True):
            if reply.failure:
                raise UserError(
                    f"tools.environment: reset(**row) fails for {shortened(row)}: {_without_verifier(reply.failure)}; "
                    f"fix reset or the row; {source_setting('domain', ENVIRONMENT_DOMAIN)} passes whole rows"
                )
            text_of[row] = reply.value
        return [text_of[row] for row in rows]

    def rewards(self, played: Sequence[tuple[str, Sequence[Call]]]) -> list[Reply]:
        """For each row and its calls, return the result of get_reward after a reset and the calls, or the failure."""
        assert self.environment is not None  # `EnvironmentVerifier` has checked it
        calls = []
        for row, made in played:
            steps = [(call.name, call.arguments) for call in self._steps(made)]
            limit_s = self._timeout_s * (len(steps) + 1)
            calls.append(VerifierCall(self.environment, (row, steps), "brorl.tools.inside:reward", limit_s))
        return self._workers.functions.run(calls)

    def run(self, turns: Sequence[Turn]) -> list[list[tuple[tuple[ToolResult, ...], int]]]:
        """Run the calls in turns, each distinct call of a deterministic tool once.

        Returns:
            The distinct outcomes of each turn: one result per call, and the number of rollouts with these results. A
            turn's numbers add up to its count.

        Raises:
            ToolError: If one of the user's tools has failed on every call so far, or if infrastructure failures
                stopped a call twice.
        """
        planned = [self._plan(index, turn) for index, turn in enumerate(turns)]
        distinct = dict.fromkeys(work for plan in planned for works, _ in plan for work in works)
        result_of = self._results([*distinct])
        outcomes: list[list[tuple[tuple[ToolResult, ...], int]]] = []
        for plan in planned:
            counts = Counter[tuple[ToolResult, ...]]()
            for works, count in plan:
                counts[tuple(result_of[work] for work in works)] += count
            outcomes.append([*counts.items()])
        return outcomes

    def _plan(self, turn_index: int, turn: Turn) -> list[tuple[tuple[_Work, ...], int]]:
        """Return the work for a turn, which all its rollouts share unless a tool is nondeterministic."""
        works: list[_Work] = []
        varied: list[int] = []  # indices of calls to nondeterministic tools
        for index, call in enumerate(turn.calls):
            tool = self.tools.get(call.name)
            if tool is not None and tool.is_method:
                works.append(_Work(call, turn.row, self._steps((*turn.history, *turn.calls[:index]))))
            else:
                works.append(_Work(call))
            varied += [index] if tool is not None and not tool.deterministic else []
        if not varied:
            return [(tuple(works), turn.count)]
        plan = []
        for rollout in range(turn.count):
            own = {index: works[index]._replace(place=(turn_index, rollout, index)) for index in varied}
            plan.append((tuple(own.get(index, work) for index, work in enumerate(works)), 1))
        return plan

    def _steps(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Return the calls that reach the environment."""
        return tuple(
            call for call in calls if call.name in self.tools and self.tools[call.name].is_method
            and self._refusal(call) is None
        )  # fmt: skip

    def _results(self, works: Sequence[_Work]) -> dict[_Work, ToolResult]:
        """Run work in the workers. The result of a call that cannot run is its failure."""
        result_of: dict[_Work, ToolResult] = {}
        for work in works:
            if (refusal := self._refusal(work.call)) is not None:
                result_of[work] = refusal
        remaining = [work for work in works if work not in result_of]
        programs = [work for work in remaining if not self.tools[work.call.name].path]
        calls = [work for work in remaining if self.tools[work.call.name].path]
        self.num_run += len(remaining)
        replies = self._workers.functions.run([self._worker_call(work) for work in calls])
        result_of |= {work: self._reply_result(work, reply) for work, reply in zip(calls, replies, strict=True)}
        if programs:
            limits = Limits(self._timeout_s, self._workers.functions.memory_bytes, _MAX_PROGRAM_BYTES)
            judges = [partial(_run_program, json.loads(work.call.arguments)["code"], limits) for work in programs]
            ended = self._workers.programs.run(judges)
            result_of |= {work: self._program_result(work, end) for work, end in zip(programs, ended, strict=True)}
        self._refuse_broken({work: result_of[work] for work in calls})
        return result_of

    def _refusal(self, call: Call) -> ToolResult | None:
        """Return the result of a call that cannot run; None for a call that can."""
        if call.problem:
            return self._failure(Failure.UNREADABLE, call.problem)
        if call.name not in self.tools:
            names = ", ".join(self.tools)
            return self._failure(Failure.UNKNOWN_TOOL, f"there is no tool {call.name[:80]!r}; tools: {names}")
        parameters = self.tools[call.name].schema["function"]["parameters"]
        problem = argument_problem(call.arguments, parameters)
        return self._failure(Failure.WRONG_ARGUMENTS, problem) if problem else None

    def _worker_call(self, work: _Work) -> VerifierCall:
        call = work.call
        tool = self.tools[call.name]
        limit_s = self._limit_s(work)
        if not tool.is_method:
            arguments = (call.arguments, self._max_characters, tool.deterministic)
            return VerifierCall(tool.path, arguments, "brorl.tools.inside:call", limit_s)
        *before, last = [(played.name, played.arguments) for played in (*work.before, call)]
        step = (work.row, before, last, self._max_characters)
        return VerifierCall(tool.path, step, "brorl.tools.inside:step", limit_s)

    def _limit_s(self, work: _Work) -> float:
        """Return the time limit of a call. An environment may have to replay all earlier calls."""
        return self._timeout_s * (1 + len(work.before))

    def _reply_result(self, work: _Work, reply: Reply) -> ToolResult:
        if reply.failure is None:
            text, failure = reply.value
            return ToolResult(text, None if failure is None else Failure(failure))
        if is_unverified(reply.failure):
            raise _lost(work, reply.failure.removeprefix(f"{UNVERIFIED}: "))
        if reply.failure == TIMEOUT:
            return self._failure(Failure.TIMEOUT, f"timeout after {self._limit_s(work):g} s")
        if reply.failure.startswith(RAISED):
            return self._failure(Failure.RAISED, _without_verifier(reply.failure))
        is_full = reply.failure == OUT_OF_MEMORY
        return self._failure(Failure.CRASHED, OUT_OF_MEMORY if is_full else "the process of the tool ended")

    def _program_result(self, work: _Work, end: Reply | Undecided) -> ToolResult:
        """Return a program's output without the final line break, or the failure that ended it."""
        if isinstance(end, JudgeTimeout) or (isinstance(end, Reply) and end.failure == TIMEOUT):
            return self._failure(Failure.TIMEOUT, f"timeout after {self._timeout_s:g} s")
        if isinstance(end, Undecided):
            raise _lost(work, end.reason)
        if end.failure is None:
            return ToolResult(readable(str(end.value).removesuffix("\n"), self._max_characters))
        return self._failure(Failure.CRASHED if fault_of(end.failure) else Failure.RAISED, end.failure)

    def _failure(self, failure: Failure, problem: str) -> ToolResult:
        return ToolResult(readable(f"error: {problem}", self._max_characters), failure)

    def failures(self, calls: Sequence[Call], reply: str) -> list[Failure]:
        """Return the failures of a turn's calls, given the text of the reply."""
        refusals = [refusal for call in calls if (refusal := self._refusal(call))]
        beginnings = {refusal.text[:_COMPARED] for refusal in refusals}
        errors = [error for error in _ERROR.findall(reply) if error[:_COMPARED] not in beginnings]
        return [*(refusal.failure for refusal in refusals if refusal.failure), *map(_kind_of_error, errors)]

    def _refuse_broken(self, result_of: Mapping[_Work, ToolResult]) -> None:
        """End the run if one of the user's tools has never succeeded: training would teach the model not to call it."""
        errors: dict[str, str] = {}
        self._worked |= {work.call.name for work, result in result_of.items() if result.failure is None}
        for work, result in result_of.items():
            name = work.call.name
            if self.tools[name].setting and name not in self._worked:
                self._failed.setdefault(name, set()).add(work._replace(place=None))
                errors[name] = result.text.removeprefix("error: ")
        for name, error in errors.items():
            if len(self._failed[name]) >= _MIN_FAILED:
                raise ToolError(
                    f"{self.tools[name].setting}: the tool {name!r} failed on each of its first "
                    f"{len(self._failed[name]):,} distinct calls: {error}; fix the function, or return text instead if "
                    "the model should learn that its call is wrong"
                )


def _kind_of_error(error: str) -> Failure:
    return next((kind for kind, begins in _BEGINNINGS.items() if begins(error)), Failure.RAISED)


def _own_tool(name: str, path: str, workers: Workers) -> Tool:
    """Load one of the user's functions."""
    setting = f"tools.functions.{name}"
    if not _NAME.fullmatch(name):
        raise UserError(f"{setting}: a tool's name may contain only letters, digits, _ and -; rename it")
    described = _own(setting, path, _FUNCTION, _FORM, workers)
    schema = described["schema"]
    named = {**schema, "function": {**schema["function"], "name": name}}
    return Tool(named, path, setting, described["deterministic"])


def _own(setting: str, path: str, describe: str, form: str, workers: Workers) -> dict[str, Any]:
    """Load what a setting names, and return its description from `brorl.tools.schema`. A UserError names the fix."""
    try:
        described = _described(path, describe, workers)
    except LoadError as error:
        raise UserError(f"{setting}: {load_problem(path, str(error))}") from None
    if problem := described.get("problem"):
        raise UserError(f"{setting}: {path!r} cannot be used: {problem}; {form}")
    return described


def _described(path: str, describe: str, workers: Workers) -> dict[str, Any]:
    (reply,) = workers.functions.run([VerifierCall(path, (), f"brorl.tools.schema:{describe}", _SCHEMA_S)])
    if reply.failure:
        raise LoadError(f"cannot read the types and docstring of {path!r}: {_without_verifier(reply.failure)}")
    described: dict[str, Any] = reply.value
    return described


def _without_verifier(failure: str) -> str:
    return failure.removeprefix(RAISED).strip()


def _run_program(code: str, limits: Limits, worker: Worker) -> Reply:
    return worker.run(code, "", limits)


def _lost(work: _Work, reason: str) -> ToolError:
    return ToolError(
        f"a call to the tool {work.call.name!r} was lost twice ({reason}); free memory or processes on this machine, "
        "then resume the run"
    )
