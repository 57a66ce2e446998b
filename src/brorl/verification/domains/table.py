"""The verifier of each domain. A new domain needs a new file beside this one and a line in `DOMAINS`.

Only the verifiers that are made are imported. Each judges answers without thoughts, and adds further terms of the
reward. Where the function of a term fails, the response gets the verdict of that failure: a term is never silently 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import isfinite
from time import perf_counter
from typing import Any

from brorl.algorithms.settings import RewardShaping
from brorl.errors import UserError, of_source
from brorl.format import listed
from brorl.prompts.countdown import COUNTDOWN_DOMAIN
from brorl.prompts.instructions import INSTRUCTIONS_DOMAIN
from brorl.prompts.prompt import Prompt
from brorl.verdict import RAISED, RETURNED, UNFINISHED, Verdict, verdict_of
from brorl.verification.domains.user_function import FunctionVerifier
from brorl.verification.gym.task import GYM_DOMAIN
from brorl.verification.sandbox.inside.confinement import UNSAFE
from brorl.verification.sandbox.level import choose_level
from brorl.verification.sandbox.pool import Workers
from brorl.verification.sandbox.replies import Reply
from brorl.verification.settings import VerificationSettings
from brorl.verification.thoughts import ThoughtTags
from brorl.verification.verifier import TrialResponses, Verifier

CODE_DOMAIN, MATH_DOMAIN, SCIENCE_DOMAIN = "code", "math", "science"


@dataclass(frozen=True)
class BuiltIn:
    """What makes the built-in verifier of a domain from the workers; its module is imported by the first call."""

    module: str  # in the package verification
    name: str  # of its class
    arguments: Callable[[Workers], tuple[Any, ...]] = lambda _workers: ()  # of the class

    def __call__(self, workers: Workers, **options: bool) -> Verifier:
        """Import the verifier and make it."""
        module = import_module(f"brorl.verification.{self.module}")
        verifier: Verifier = getattr(module, self.name)(*self.arguments(workers), **options)
        return verifier


DOMAINS: dict[str, Callable[..., Verifier]] = {
    CODE_DOMAIN: BuiltIn(
        "domains.code",
        "CodeVerifier",
        lambda workers: (workers.programs, workers.pool.timeout_s, workers.pool.memory_bytes),
    ),
    COUNTDOWN_DOMAIN: BuiltIn("domains.countdown", "CountdownVerifier"),
    GYM_DOMAIN: BuiltIn("gym.verifier", "GymVerifier", lambda workers: (workers.programs, workers.pool.timeout_s)),
    INSTRUCTIONS_DOMAIN: BuiltIn("domains.ifeval", "InstructionsVerifier"),
    MATH_DOMAIN: BuiltIn("domains.math", "MathVerifier", lambda workers: (workers.pool,)),
    SCIENCE_DOMAIN: BuiltIn("domains.science", "ScienceVerifier", lambda workers: (workers.pool,)),
}
"""What makes the built-in verifier of each domain from the workers."""
UNTRUSTED = (CODE_DOMAIN, GYM_DOMAIN)
"""Domains whose built-in verifier runs the code of responses, in the sandbox."""
WITH_FRACTIONS = (CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN)
"""Domains whose built-in verifier can score an incorrect response between 0 and 1; programs run all tests for it."""


def make_verifiers(
    domains: Iterable[str], settings: VerificationSettings, rewards: RewardShaping, workers: Workers
) -> dict[str, Verifier]:
    """Make the verifier of each domain, sorted by domain; a user's function replaces a built-in verifier.

    Incorrect responses are scored too where the domain is in `WITH_FRACTIONS`. A UserError says that a domain has no
    verifier, or that a function cannot be loaded.
    """
    functions, as_messages = settings.functions, settings.completions == "messages"
    term_functions = {
        name: FunctionVerifier(workers.pool, term.function, name, as_messages, section="rewards.terms")
        for name, term in rewards.terms.items()
    }
    verifiers: dict[str, Verifier] = {}
    for domain in sorted({*domains}):
        if domain in functions:
            own = FunctionVerifier(workers.pool, functions[domain], domain, as_messages)
            verifiers[domain] = DomainVerifier(own, None, term_functions)
        elif domain in DOMAINS:
            options = {"partial_credit": True} if rewards.partial_credit and domain in WITH_FRACTIONS else {}
            verifiers[domain] = DomainVerifier(DOMAINS[domain](workers, **options), settings.thoughts, term_functions)
        else:
            raise UserError(
                f"the data has questions of the domain {domain!r}, which has no verifier (domains with one: "
                f"{', '.join(sorted({*DOMAINS, *functions}))}); set {of_source('domain')}, or add your own: "
                f"verification.functions: {{{domain}: package.module:function}}"
            )
    return verifiers


def untrusted_domains(settings: VerificationSettings, domains: Iterable[str]) -> list[str]:
    """Return the domains whose verifier runs the code of responses."""
    remaining = {*domains} - {*settings.functions}
    return [domain for domain in UNTRUSTED if domain in remaining]


def sandbox_lines(settings: VerificationSettings, domains: Iterable[str]) -> list[str]:
    """Return a line with the level of the sandbox, which must hold here, if a domain runs the code of responses."""
    untrusted = untrusted_domains(settings, domains)
    if not untrusted:
        return []
    level = choose_level(settings.sandbox).name
    if level == UNSAFE:
        return [
            f"warning: no sandbox: verification.sandbox = {UNSAFE} runs the code of responses ({listed(untrusted)}) "
            "with your files, your processes and your network; set verification.sandbox: auto to confine it"
        ]
    return [f"sandbox of untrusted code ({listed(untrusted)}): {level}"]


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
