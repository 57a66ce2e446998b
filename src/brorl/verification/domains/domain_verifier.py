"""The verifier of a domain as a run uses it: it judges answers without thoughts, and adds further terms of the reward.

The function of a term is called as a verifier is (`user_function`), and returns a number, a bool, or None where the
term does not apply. Where it fails, the response gets the verdict of that failure: a term is never silently 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from time import perf_counter

from brorl.prompts.prompt import Prompt
from brorl.verdict import RAISED, RETURNED, UNFINISHED, Verdict, verdict_of
from brorl.verification.domains.user_function import FunctionVerifier
from brorl.verification.sandbox.replies import Reply
from brorl.verification.thoughts import ThoughtTags
from brorl.verification.verifier import TrialResponses, Verifier


@dataclass(frozen=True)
class DomainVerifier:
    """A verifier that sees answers without thoughts, and whose verdicts have the values of further terms."""

    verifier: Verifier  # decides whether an answer is correct
    tags: ThoughtTags | None = None  # of thoughts; None to pass on whole responses
    terms: Mapping[str, FunctionVerifier] | None = None  # the function of each further term of the reward by its name

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses, and compute the terms of each. The reason of an open thought is `unfinished thought`."""
        verdicts = self._verify_answers(items, self.tags) if self.tags else self.verifier.verify_all(items)
        terms = self.terms or {}
        for name, function in terms.items():
            verdicts = [_with_term(*pair, name) for pair in zip(verdicts, function.replies(items), strict=True)]
        # fewer values are those beside a failure
        return [verdict if len(verdict.terms) == len(terms) else replace(verdict, terms=()) for verdict in verdicts]

    def _verify_answers(self, items: Sequence[tuple[Prompt, str]], tags: ThoughtTags) -> list[Verdict]:
        answers: list[str | None] = []
        own_s: list[float] = []
        for prompt, response in items:
            start = perf_counter()
            answers.append(tags.answer(prompt.text, response))
            own_s.append(perf_counter() - start)
        given = [(prompt, answer) for (prompt, _), answer in zip(items, answers, strict=True) if answer is not None]
        judged = iter(self.verifier.verify_all(given))
        found = (verdict_of(UNFINISHED) if answer is None else next(judged) for answer in answers)
        return [replace(verdict, seconds=verdict.seconds + own) for verdict, own in zip(found, own_s, strict=True)]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that no response can match; see `Verifier`."""
        return self.verifier.check_references(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Make responses for a trial, without a thought; see `Verifier`."""
        return self.verifier.trial_responses(reference, others)


def _with_term(verdict: Verdict, reply: Reply, name: str) -> Verdict:
    """Return a verdict with one more term, or that of its failure."""
    failure, value = reply.failure, reply.value
    seconds = verdict.seconds + reply.seconds
    if not failure and not (value is None or (isinstance(value, bool | int | float) and isfinite(value))):
        shown = f"{value:g}" if isinstance(value, float) else type(value).__name__
        failure = f"{RETURNED} {shown}, not a number, a bool or None"
    if not failure:
        return replace(verdict, terms=(*verdict.terms, None if value is None else float(value)), seconds=seconds)
    if failure.startswith((RAISED, RETURNED)):
        failure = f"{failure} (rewards.terms.{name})"
    return verdict_of(failure, verdict.extracted, seconds)
