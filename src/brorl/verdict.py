"""A verdict is the result of verifying one response. The metrics count its reasons."""

from dataclasses import dataclass
from math import isfinite

# The metrics count these reasons; every verifier uses exactly these texts.
CORRECT = "correct"
WRONG = "wrong answer"
NO_ANSWER = "no answer"
TOO_LONG = "answer too long"
NO_CODE = "no code block"
UNFINISHED = "unfinished thought"  # the response has no answer after its thought
TRUNCATED = "truncated"
TIMEOUT = "timeout"
CUT_OFF = "timeout of all programs"  # the response had used its share of the batch's time
OUT_OF_MEMORY = "out of memory"
CRASHED = "verifier crashed"
RAISED = "verifier raised"  # followed by the exception: `verifier raised ValueError: ...`
RETURNED = "verifier returned"  # followed by the value: `verifier returned list, not a bool, ...`
UNVERIFIED = "unverified"  # followed by the cause: `unverified: a worker was lost`
_SEPARATOR = ": "


def is_timeout(reason: str) -> bool:
    """Return whether a verdict's reason is that verification took too long."""
    return reason in (TIMEOUT, CUT_OFF)


def is_failure(reason: str) -> bool:
    """Return whether the verifier failed, not the response; timeouts are counted separately."""
    return reason in (OUT_OF_MEMORY, CRASHED) or reason.startswith((f"{RAISED} ", f"{RETURNED} "))


def is_unverified(reason: str) -> bool:
    """Return whether an infrastructure failure, not the response, prevented a verdict."""
    return reason == UNVERIFIED or reason.startswith(UNVERIFIED + _SEPARATOR)


@dataclass(frozen=True)
class Verdict:
    """The result of verifying one response.

    Args:
        correct: The raw outcome, used by dynamic sampling and pass@k.
        score: A finite number, used by the reward; 1.0 or 0.0 without partial credit.
        extracted: The answer found in the response, or None.
        reason: `correct`, or the problem in a few words. `unverified: ...` names the infrastructure failure that
            prevented a verdict; such a response is neither correct nor incorrect.
        seconds: Wall time, 0 or more: finding the answer in this process, running the worker or the programs, and
            comparing. If an earlier verdict was reused, only finding the answer counts.
        terms: Values of the additional reward terms, in the order of the settings; None if a term does not apply. Empty
            if the response was not verified.

    Raises:
        ValueError: If the score is not finite, the time is negative, or an unverified response has an outcome.
    """

    correct: bool
    score: float
    extracted: str | None
    reason: str
    seconds: float
    terms: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if not isfinite(self.score):
            raise ValueError(f"a verdict's score must be finite, got {self.score}")
        if not self.seconds >= 0:
            raise ValueError(f"a verdict's seconds must be 0 or more, got {self.seconds}")
        if self.unverified and (self.correct or self.score):
            raise ValueError(
                f"a verdict with the reason {self.reason!r} must not be correct and must have score 0, "
                f"got correct={self.correct}, score={self.score}"
            )

    @property
    def unverified(self) -> bool:
        """Whether an infrastructure failure prevented a verdict: the response must not be scored."""
        return is_unverified(self.reason)


def verdict_of(reason: str, extracted: str | None = None, seconds: float = 0.0) -> Verdict:
    """Return a verdict without partial credit: it is correct if and only if the reason is `correct`."""
    return Verdict(reason == CORRECT, float(reason == CORRECT), extracted, reason, seconds)


def unverified_verdict(cause: str, seconds: float = 0.0) -> Verdict:
    """Return the verdict on a response that could not be verified, with a cause such as `a worker was lost`."""
    return verdict_of(f"{UNVERIFIED}{_SEPARATOR}{cause}", seconds=seconds)
