"""Reference answers that no response can match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from brorl.errors import UserError
from brorl.format import counted
from brorl.prompts.instructions import INSTRUCTIONS_DOMAIN
from brorl.prompts.prompt import Question
from brorl.verification.domains.table import CODE_DOMAIN, MATH_DOMAIN
from brorl.verification.gym.task import GYM_DOMAIN
from brorl.verification.verifier import Verifier
from brorl.wording import of_source

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
    """Reject questions whose reference answer no response can match.

    Raises:
        UserError: On the first one.
    """
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
