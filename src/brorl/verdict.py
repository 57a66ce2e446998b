"""The verdict on one response, and the reasons that the metrics count."""

from dataclasses import dataclass
from math import isfinite

# The metrics count verdicts by these exact strings.
CORRECT = "correct"
WRONG = "wrong answer"
NO_ANSWER = "no answer"
TOO_LONG = "answer too long"
NO_CODE = "no code block"
UNFINISHED = "unfinished thought"  # the response ends inside a thought
TRUNCATED = "truncated"
TIMEOUT = "timeout"
BATCH_TIMEOUT = "batch timeout"  # the response used up its share of the batch time limit
OUT_OF_MEMORY = "out of memory"
CRASHED = "verifier crashed"
RAISED = "verifier raised"  # followed by the exception: `verifier raised ValueError: ...`
RETURNED = "verifier returned"  # followed by the value: `verifier returned list, not a bool, ...`
UNVERIFIED = "unverified"  # followed by the cause: `unverified: a worker was lost`
_SEPARATOR = ": "


def is_timeout(reason: str) -> bool:
    """Return whether a verdict's reason is a timeout."""
    return reason in (TIMEOUT, BATCH_TIMEOUT)


def is_failure(reason: str) -> bool:
    """Return whether a verdict's reason blames the verifier, not the response. Timeouts are counted separately."""
    return reason in (OUT_OF_MEMORY, CRASHED) or reason.startswith((f"{RAISED} ", f"{RETURNED} "))


def is_unverified(reason: str) -> bool:
    """Return whether an infrastructure failure kept the verifier from reaching a verdict."""
    return reason == UNVERIFIED or reason.startswith(UNVERIFIED + _SEPARATOR)


@dataclass(frozen=True)
class Verdict:
    """The result of verifying one response.

    Args:
        correct: The raw outcome, used by dynamic sampling and pass@k.
        score: A finite number, used for the reward. Without partial credit, it is 1.0 or 0.0.
        extracted: The answer found in the response, or None.
        reason: `correct`, or the problem in a few words. `unverified: ...` names the infrastructure failure
            that kept the verifier from reaching a verdict; such a response is neither correct nor incorrect.
        seconds: Wall time (0 or more) for extracting the answer in this process, running the worker or the programs,
            and comparing. If an earlier verdict was reused, only extracting the answer counts.
        terms: Values of the additional reward terms, in settings order; None for a term that does not apply. Empty if
            the response was not verified.

    Raises:
        ValueError: If the score is not finite, the time is negative, or an unverified response is correct or has a
            nonzero score.

    Examples:
        >>> Verdict(correct=False, score=0.5, extracted="41", reason="wrong answer", seconds=0.01).unverified
        False
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
                f"a verdict with reason {self.reason!r} must be incorrect with score 0, "
                f"got correct={self.correct}, score={self.score}"
            )

    @property
    def unverified(self) -> bool:
        """Whether an infrastructure failure prevented a verdict. If so, the response must not be scored."""
        return is_unverified(self.reason)


def verdict_of(reason: str, extracted: str | None = None, seconds: float = 0.0) -> Verdict:
    """Return a verdict without partial credit: correct if and only if the reason is `correct`."""
    return Verdict(reason == CORRECT, float(reason == CORRECT), extracted, reason, seconds)


def unverified_verdict(cause: str, seconds: float = 0.0) -> Verdict:
    """Return the verdict on a response that could not be verified, with a cause such as `a worker was lost`."""
    return verdict_of(f"{UNVERIFIED}{_SEPARATOR}{cause}", seconds=seconds)
