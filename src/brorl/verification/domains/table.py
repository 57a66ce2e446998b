"""The verifier of each domain. A new domain needs a new file beside this one and a line in `DOMAINS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from brorl.errors import UserError
from brorl.prompts.countdown import COUNTDOWN_DOMAIN
from brorl.prompts.instructions import INSTRUCTIONS_DOMAIN
from brorl.prompts.question import Question
from brorl.verification.domains.code import CODE_DOMAIN, CodeVerifier
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.domains.domain_verifier import DomainVerifier
from brorl.verification.domains.ifeval import InstructionsVerifier
from brorl.verification.domains.math import MATH_DOMAIN, MathVerifier
from brorl.verification.domains.science import SCIENCE_DOMAIN, ScienceVerifier
from brorl.verification.domains.user_function import FunctionVerifier
from brorl.verification.gym.task import GYM_DOMAIN
from brorl.verification.gym.verifier import GymVerifier
from brorl.verification.sandbox.pool import Workers
from brorl.verification.thoughts import THINK, ThoughtTags
from brorl.verification.verifier import Verifier

DOMAINS: dict[str, Callable[..., Verifier]] = {
    CODE_DOMAIN: lambda workers, partial_credit=False: CodeVerifier(
        workers.programs, workers.pool.timeout_s, workers.pool.memory_bytes, partial_credit
    ),
    COUNTDOWN_DOMAIN: lambda _workers: CountdownVerifier(),
    GYM_DOMAIN: lambda workers, partial_credit=False: GymVerifier(
        workers.programs, workers.pool.timeout_s, partial_credit
    ),
    INSTRUCTIONS_DOMAIN: lambda _workers, partial_credit=False: InstructionsVerifier(partial_credit),
    MATH_DOMAIN: lambda workers: MathVerifier(workers.pool),
    SCIENCE_DOMAIN: lambda workers: ScienceVerifier(workers.pool),
}
"""What makes the built-in verifier of each domain from the workers."""
UNTRUSTED = (CODE_DOMAIN, GYM_DOMAIN)
"""Domains whose built-in verifier runs the code of responses, in the sandbox."""
WITH_FRACTIONS = (CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN)
"""Domains whose built-in verifier can score an incorrect response between 0 and 1; programs run all tests for it."""


def make_verifiers(
    domains: Iterable[str],
    functions: Mapping[str, str],
    workers: Workers,
    with_fractions: bool = False,
    as_messages: bool = False,
    thought_tags: ThoughtTags | None = THINK,
    terms: Mapping[str, str] | None = None,
) -> dict[str, Verifier]:
    """Make the verifier of each domain, sorted by domain.

    Args:
        domains: The domains.
        functions: Import path of the user's function by domain; it replaces a built-in verifier.
        workers: Processes for the verifiers that need them.
        with_fractions: Score incorrect responses where the domain is in `WITH_FRACTIONS`.
        as_messages: Give completions to reward functions with TRL's signature as lists of messages.
        thought_tags: Tags of thoughts, which built-in verifiers do not see; None if they see all of a response. A
            user's function always does.
        terms: Import path of the function of each further term of the reward, by name.

    Raises:
        UserError: If a domain has no verifier, or a function cannot be loaded.
    """
    term_functions = {
        name: FunctionVerifier(workers.pool, path, name, as_messages, section="rewards.terms")
        for name, path in (terms or {}).items()
    }
    verifiers: dict[str, Verifier] = {}
    for domain in sorted({*domains}):
        if domain in functions:
            own = FunctionVerifier(workers.pool, functions[domain], domain, as_messages)
            verifiers[domain] = DomainVerifier(own, None, term_functions)
        elif domain in DOMAINS:
            options = {"partial_credit": True} if with_fractions and domain in WITH_FRACTIONS else {}
            verifiers[domain] = DomainVerifier(DOMAINS[domain](workers, **options), thought_tags, term_functions)
        else:
            raise UserError(
                f"the data has questions of the domain {domain!r}, which has no verifier (domains with one: "
                f"{', '.join(sorted({*DOMAINS, *functions}))}); set data.sources[].domain, or add your own: "
                f"verification.functions: {{{domain}: package.module:function}}"
            )
    return verifiers


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
