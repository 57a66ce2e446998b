"""A trial of a verifier: one response that should be correct, and one that should not.

It also verifies the reference answers or stored solutions of more prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from brorl.prompts.prompt import Prompt
from brorl.verdict import Verdict
from brorl.verification.verifier import Verifier

_OTHERS = 4  # references of other prompts that are tried as wrong answers
_MOST = 32  # prompts whose right response is tried
_NO_ANSWER = "I do not know."


class VerifiedResponse(NamedTuple):
    """A response and its verdict."""

    response: str
    verdict: Verdict


class Trial(NamedTuple):
    """The verdicts on two responses to a prompt."""

    prompt: Prompt  # the prompt
    right: VerifiedResponse  # A response with the reference answer
    wrong: VerifiedResponse  # A response with another answer; an incorrect one if there was any
    certain: bool  # whether the verifier must accept `right`
    # for prompts at even distances, the first among them: the verdict on a response that it must accept. Prompts
    # without such a response are left out.
    answers: Sequence[tuple[Prompt, Verdict]]


def try_verifier(verifier: Verifier, prompts: Sequence[Prompt]) -> Trial:
    """Verify a right and a wrong response to the first prompt, and right responses to others.

    The responses contain no thought, so they answer the questions, not prompts that end with the tag of one.
    """
    prompts = [replace(prompt, text=prompt.question or prompt.text) for prompt in prompts]
    prompt = prompts[0]
    others = dict.fromkeys(p.reference for p in prompts[1:] if p.reference != prompt.reference)
    made = verifier.trial_responses(prompt.reference, list(others)[:_OTHERS])
    responses = [made.right, *dict.fromkeys(r for r in (*made.wrong, _NO_ANSWER) if r != made.right)]
    verdicts = verifier.verify_all([(prompt, response) for response in responses])
    right, *wrong = (VerifiedResponse(*pair) for pair in zip(responses, verdicts, strict=True))
    incorrect = next((response for response in wrong if not response.verdict.correct), wrong[0])
    spread = [prompts[index * len(prompts) // _MOST] for index in range(_MOST)]
    tried = [(other, verifier.trial_responses(other.reference, ())) for other in dict.fromkeys(spread)]
    answers = [(other, made.right) for other, made in tried if made.certain]
    accepted = verifier.verify_all(answers)
    of_answers = [(other, verdict) for (other, _), verdict in zip(answers, accepted, strict=True)]
    return Trial(prompt, right, incorrect, made.certain, of_answers)
