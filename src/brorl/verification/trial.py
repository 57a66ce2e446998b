"""A trial of a verifier: one response that should be correct, and one that should not.

In: a verifier and prompts of its domain. Out: the two responses with their verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from brorl.prompts.prompt import Prompt
from brorl.verification.verifier import Verdict, Verifier

_OTHERS = 4  # references of other prompts that are tried as wrong answers
_NO_ANSWER = "I do not know."


class Verified(NamedTuple):
    """A response and its verdict."""

    response: str
    verdict: Verdict


class Trial(NamedTuple):
    """The verdicts on two responses to a prompt.

    Attributes:
        prompt: The prompt.
        right: A response with the reference answer.
        wrong: A response with another answer; an incorrect one if there was any.
        certain: Whether the verifier must accept `right`.
    """

    prompt: Prompt
    right: Verified
    wrong: Verified
    certain: bool


def try_verifier(verifier: Verifier, prompts: Sequence[Prompt]) -> Trial:
    """Verify a right and a wrong response to the first prompt.

    Args:
        verifier: The verifier of the prompts' domain.
        prompts: At least one prompt; the reference answers of the others are wrong answers to the first.
    """
    prompt = prompts[0]
    others = dict.fromkeys(p.reference for p in prompts[1:] if p.reference != prompt.reference)
    made = verifier.trial_responses(prompt.reference, list(others)[:_OTHERS])
    responses = [made.right, *dict.fromkeys(r for r in (*made.wrong, _NO_ANSWER) if r != made.right)]
    verdicts = verifier.verify_all([(prompt, response) for response in responses])
    right, *wrong = (Verified(*pair) for pair in zip(responses, verdicts, strict=True))
    incorrect = next((one for one in wrong if not one.verdict.correct), wrong[0])
    return Trial(prompt, right, incorrect, made.certain)
