"""Verifiers of a run: one for every domain of its data, and the worker processes behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.prompts.countdown import COUNTDOWN_DOMAIN, CountdownPuzzle
from brorl.prompts.question import Question
from brorl.verify.domains.countdown import CountdownVerifier
from brorl.verify.domains.math import MATH_DOMAIN, MathVerifier
from brorl.verify.domains.user_function import FunctionVerifier
from brorl.verify.sandbox.pool import WorkerPool
from brorl.verify.verifier import Verifier


def build_pool(config: TrainConfig) -> WorkerPool:
    """Make the pool of worker processes; none is started before something has to be verified."""
    settings = config.verification
    return WorkerPool(settings.workers or None, settings.timeout_s, settings.memory_mib << 20)


def build_verifiers(config: TrainConfig, domains: Iterable[str], pool: WorkerPool) -> dict[str, Verifier]:
    """Return the verifier of each domain that occurs; the user's own take precedence.

    Raises:
        UserError: If a domain has no verifier, a function of the user's does not exist, or a weight is for a domain
            that does not occur.
    """
    needed = sorted({*domains})
    functions = config.verification.functions
    verifiers: dict[str, Verifier] = {}
    for domain in needed:
        if domain in functions:
            own = FunctionVerifier(pool, functions[domain], domain)
            own.check()
            verifiers[domain] = own
        elif domain == COUNTDOWN_DOMAIN:
            verifiers[domain] = CountdownVerifier()
        elif domain == MATH_DOMAIN:
            verifiers[domain] = MathVerifier(pool)
        else:
            raise UserError(
                f"the data has questions of the domain {domain!r}, which has no verifier (domains with one: "
                f"{', '.join(sorted({COUNTDOWN_DOMAIN, MATH_DOMAIN, *functions}))}); set data.sources[].domain, or "
                f"add your own: verification.functions: {{{domain}: package.module:function}}"
            )
    for setting, named in (
        ("rewards.domain_weights", config.rewards.domain_weights),
        ("verification.functions", functions),
    ):
        unused = next((name for name in named if name not in needed), None)
        if unused is not None:
            raise UserError(
                f"{setting} names the domain {unused!r}, but the domains of the data are {', '.join(needed)}; correct "
                "the name, or set data.sources[].domain"
            )
    return verifiers


def check_references(verifiers: Mapping[str, Verifier], questions: Sequence[Question]) -> None:
    """Refuse questions whose reference answer the verifier cannot read: no response to them could be correct.

    Raises:
        UserError: Naming the first one.
    """
    for question in questions:
        if isinstance(verifiers[question.domain], CountdownVerifier):
            try:
                CountdownPuzzle.from_reference(question.reference)
            except ValueError as error:
                raise UserError(f"question {question.id}: {error}, fix the row, or set another domain") from error
    verifier = verifiers.get(MATH_DOMAIN)
    if not isinstance(verifier, MathVerifier):
        return
    mine = [question for question in questions if question.domain == MATH_DOMAIN]
    bad = verifier.check_references(sorted({question.reference for question in mine}))
    if bad:
        first = next(question for question in mine if question.reference in bad)
        raise UserError(
            f"question {first.id} has the reference answer {first.reference[:80]!r}, which math-verify cannot read as "
            f"a mathematical expression ({len(bad)} such answers); fix or delete the row, set "
            "data.sources[].answer_after to the text before the answer, or set your own verifier in "
            "verification.functions"
        )
