"""A call of a verifier's function in a worker process, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brorl.errors import UserError
from brorl.verification.verifier import is_unverified


class LoadError(UserError):
    """A worker cannot load a function; nothing can be verified without it."""


@dataclass(frozen=True)
class VerifierCall:
    """One call of a function in a worker.

    Args:
        function: `package.module:function` or `path/to/file.py:function`.
        arguments: Its positional arguments, any JSON values. None loads the function without calling it; the value is
            then its least and greatest number of positional arguments, the greatest None if there is no bound.
    """

    function: str
    arguments: tuple[object, ...] | None


@dataclass(frozen=True)
class Result:
    """The outcome of a call.

    Args:
        value: The returned value, after a round trip through JSON; None if the call failed.
        failure: `timeout`, `out of memory`, `verifier crashed` or `verifier raised ...` for a fault of the call;
            `unverified: ...` for a fault of the machine, after two attempts; None if there is a value.
        seconds: Wall time of the call, without starting the worker or loading the function.
    """

    value: Any
    failure: str | None
    seconds: float

    @property
    def is_lost(self) -> bool:
        """Whether the machine kept the call from ending."""
        return self.failure is not None and is_unverified(self.failure)
