"""What is tried before a run: whether responses can match the references, and what a verifier says of a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from brorl.errors import UserError, of_source
from brorl.format import counted
from brorl.prompts.instructions import INSTRUCTIONS_DOMAIN
from brorl.prompts.prompt import Prompt, Question
from brorl.verdict import Verdict
from brorl.verification.domains.table import CODE_DOMAIN, MATH_DOMAIN
from brorl.verification.gym.task import GYM_DOMAIN
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


_ONLY_JSON = (CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN)


def unreadable_references(
    verifiers: Mapping[str, Verifier], questions: Sequence[Question]
) -> list[tuple[Question, str]]:
    """Return the questions whose reference answer no response can match, each with the problem, domain by domain."""
    problems_of: list[tuple[Question, str]] = []
    for domain, verifier in verifiers.items():
        own = [question for question in questions if question.domain == domain]
        problems = verifier.check_references(sorted({question.reference for question in own}))
        problems_of += [(question, problems[question.reference]) for question in own if question.reference in problems]
    return problems_of


def check_references(verifiers: Mapping[str, Verifier], questions: Sequence[Question]) -> None:
    """Raise a UserError on the first question whose reference answer no response can match."""
    unreadable = unreadable_references(verifiers, questions)
    if unreadable:
        question, problem = unreadable[0]
        number = len({other.reference for other, _ in unreadable})
        raise UserError(
            f"question {question.name} has the reference answer {question.reference[:80]!r}, which {problem} "
            f"({counted(number, 'such answer')}); {_advice(question)}"
        )


def _advice(question: Question) -> str:
    """Return the fixes of a reference that no response can match."""
    is_object = question.domain != MATH_DOMAIN and question.reference.lstrip().startswith("{")  # in math, a set
    if is_object or question.domain in _ONLY_JSON:  # the whole answer is JSON text, never its last part
        return (
            f"fix or delete the row, set {of_source('layout')} if it is a row of a public dataset, or set another "
            "domain or your own verifier in verification.functions"
        )
    return (
        f"fix or delete the row, set {of_source('answer_after')} to the text before the answer, or set another domain "
        "or your own verifier in verification.functions"
    )
