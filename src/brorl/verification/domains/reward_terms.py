"""Further terms of the reward: functions whose values stand beside the verdict of a response.

A function is called as a verifier is (`user_function`), and returns a number, a bool, or None where the term does not
apply. Where it fails, the response gets the verdict of that failure: a term is never silently 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

from brorl.prompts.prompt import Prompt
from brorl.verification.domains.user_function import FunctionVerifier
from brorl.verification.sandbox.requests import Reply
from brorl.verification.verifier import RAISED, RETURNED, TrialResponses, Verdict, Verifier


class VerifierWithTerms:
    """A verifier whose verdicts have the values of further terms of the reward.

    Args:
        verifier: Decides whether a response is correct.
        functions: The function of each term by its name.
    """

    def __init__(self, verifier: Verifier, functions: Mapping[str, FunctionVerifier]) -> None:
        self._verifier, self._functions = verifier, functions

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses, and compute the terms of each."""
        verdicts = self._verifier.verify_all(items)
        for name, function in self._functions.items():
            replies = function.replies(items)
            verdicts = [_with_term(*pair, name) for pair in zip(verdicts, replies, strict=True)]
        whole = len(self._functions)  # fewer are those beside a failure
        return [verdict if len(verdict.terms) == whole else replace(verdict, terms=()) for verdict in verdicts]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Return the problem of each reference that no response can match."""
        return self._verifier.check_references(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Make responses for a trial."""
        return self._verifier.trial_responses(reference, others)


def _with_term(verdict: Verdict, reply: Reply, name: str) -> Verdict:
    """Return a verdict with one more term, or that of its failure."""
    failure, value = reply.failure, reply.value
    seconds = verdict.seconds + reply.seconds
    if not failure and not _is_value(value):
        shown = f"{value:g}" if isinstance(value, float) else type(value).__name__
        failure = f"{RETURNED} {shown}, not a number, a bool or None"
    if not failure:
        assert isinstance(value, bool | int | float | None)
        return replace(verdict, terms=(*verdict.terms, None if value is None else float(value)), seconds=seconds)
    if failure.startswith((RAISED, RETURNED)):
        failure = f"{failure} (rewards.terms.{name})"
    return Verdict(False, 0.0, verdict.extracted, failure, seconds)


def _is_value(value: object) -> bool:
    return value is None or (isinstance(value, bool | int | float) and isfinite(value))
