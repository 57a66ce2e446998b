"""The verifier that the built-in one of every domain stands behind: it passes on answers, and no thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from brorl.prompts.prompt import Prompt
from brorl.verification.thoughts import ThoughtTags
from brorl.verification.verifier import UNFINISHED, TrialResponses, Verdict, Verifier


@dataclass(frozen=True)
class AnswerVerifier:
    """The verifier of a domain, which sees answers without thoughts; an open thought is no answer."""

    verifier: Verifier  # judges answers
    tags: ThoughtTags  # of thoughts

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify the answers of responses; see `Verifier`. The reason of an open thought is `unfinished thought`."""
        answers: list[tuple[Prompt, str]] = []
        verdicts: list[Verdict | None] = []
        own_s: list[float] = []
        for prompt, response in items:
            start = perf_counter()
            answer = self.tags.answer(prompt.text, response)
            own_s.append(perf_counter() - start)
            verdicts.append(Verdict(False, 0.0, None, UNFINISHED, 0.0) if answer is None else None)
            answers += [] if answer is None else [(prompt, answer)]
        judged = iter(self.verifier.verify_all(answers))
        found = (next(judged) if verdict is None else verdict for verdict in verdicts)
        return [replace(verdict, seconds=verdict.seconds + own) for verdict, own in zip(found, own_s, strict=True)]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that no response can match; see `Verifier`."""
        return self.verifier.check_references(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Make responses for a trial, without a thought; see `Verifier`."""
        return self.verifier.trial_responses(reference, others)
