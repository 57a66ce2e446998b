"""Calls in responses, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Failure(StrEnum):
    """Why a call has no result. The model sees `error: ...`, and metrics count each kind."""

    UNREADABLE = "unreadable"  # the text begins like a call but cannot be parsed
    UNKNOWN_TOOL = "unknown tool"
    WRONG_ARGUMENTS = "wrong arguments"
    RAISED = "raised"
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # the process ended or ran out of memory
    NOT_TEXT = "not text"  # the result is not text, a number or JSON


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it. Calls that compare equal count as one."""

    name: str  # name of the tool; empty if the call cannot be read
    arguments: str  # a JSON object with sorted keys, without spaces
    problem: str = ""  # why the call cannot be read, as shown to the model; empty for a readable call


@dataclass(frozen=True)
class ToolResult:
    """The result of a call."""

    text: str  # text that the model sees; `error: ...` after a failure
    failure: Failure | None = None


@dataclass(frozen=True)
class Turn:
    """A turn that ends with calls, in one distinct transcript."""

    calls: tuple[Call, ...]  # at least one
    count: int = 1  # number of rollouts with this transcript
    history: tuple[Call, ...] = ()  # all calls of earlier turns, for environments
    row: str = ""  # the prompt's row as JSON, for environments
