"""A trial of a verifier: one response that should be correct, and one that should not.

In: a verifier and prompts of its domain. Out: the two responses with their verdicts. The right one is made from the
reference answer, in the form that the domain's verifier reads; a user's function gets the reference as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from brorl.prompts.countdown import COUNTDOWN_DOMAIN, CountdownPuzzle
from brorl.prompts.prompt import Prompt
from brorl.verify.domains.math import MathVerifier
from brorl.verify.domains.user_function import FunctionVerifier
from brorl.verify.verifier import Verdict, Verifier

_OTHERS = 4  # references of other prompts that are tried as wrong answers
_NO_ANSWER = "I do not know."


class Judged(NamedTuple):
    """A response and its verdict."""

    response: str
    verdict: Verdict


class Trial(NamedTuple):
    """What a verifier made of two responses to a prompt.

    Attributes:
        prompt: The prompt.
        right: A response with the reference answer.
        wrong: A response with another answer; one that was judged incorrect, if any was.
        own_function: Whether the verifier is a user's function, which may want another form of response.
    """

    prompt: Prompt
    right: Judged
    wrong: Judged
    own_function: bool


def try_verifier(verifier: Verifier, prompts: Sequence[Prompt]) -> Trial:
    """Verify a right and a wrong response to the first prompt.

    Args:
        verifier: The verifier of the prompts' domain.
        prompts: At least one prompt; the reference answers of the others are wrong answers to the first.
    """
    prompt = prompts[0]
    right = _right_response(verifier, prompt)
    wrong = [response for response in _wrong_responses(verifier, prompts) if response != right]
    verdicts = verifier.verify_all([(prompt, response) for response in (right, *wrong)])
    judged = [Judged(*pair) for pair in zip(wrong, verdicts[1:], strict=True)]
    incorrect = next((one for one in judged if not one.verdict.correct), judged[0])
    return Trial(prompt, Judged(right, verdicts[0]), incorrect, isinstance(verifier, FunctionVerifier))


def _right_response(verifier: Verifier, prompt: Prompt) -> str:
    if isinstance(verifier, FunctionVerifier):
        return prompt.reference
    if isinstance(verifier, MathVerifier):
        return prompt.reference if "\\boxed" in prompt.reference else f"\\boxed{{{prompt.reference}}}"
    return CountdownPuzzle.from_reference(prompt.reference).solution or ""


def _wrong_responses(verifier: Verifier, prompts: Sequence[Prompt]) -> list[str]:
    """Return responses of which at least one should be incorrect."""
    if prompts[0].domain == COUNTDOWN_DOMAIN and not isinstance(verifier, FunctionVerifier):
        numbers = CountdownPuzzle.from_reference(prompts[0].reference).numbers
        return [*(sign.join(map(str, numbers)) for sign in "+*-"), _NO_ANSWER]
    others = dict.fromkeys(p.reference for p in prompts[1:] if p.reference != prompts[0].reference)
    made = [_right_response(verifier, prompt) for prompt in prompts[1:] if prompt.reference in others]
    return [*dict.fromkeys(made[:_OTHERS]), _NO_ANSWER]
