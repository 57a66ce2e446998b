"""The verifier of each domain. A new domain needs a new file beside this one and a line in `DOMAINS`.

Only the verifiers that are made are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from brorl.algorithms.settings import RewardShaping
from brorl.errors import UserError
from brorl.format import listed
from brorl.prompts.countdown import COUNTDOWN_DOMAIN
from brorl.prompts.instructions import INSTRUCTIONS_DOMAIN
from brorl.verification.domains.domain_verifier import DomainVerifier
from brorl.verification.domains.user_function import FunctionVerifier
from brorl.verification.gym.task import GYM_DOMAIN
from brorl.verification.sandbox.inside.confinement import UNSAFE
from brorl.verification.sandbox.level import choose_level
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings
from brorl.verification.verifier import Verifier
from brorl.wording import of_source

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

    Args:
        domains: The domains.
        settings: The functions, and which tags are around thoughts, which a user's function sees and others do not.
        rewards: Whether incorrect responses are scored too, where the domain is in `WITH_FRACTIONS`, and further terms.
        workers: Processes for the verifiers that need them.

    Raises:
        UserError: If a domain has no verifier, or a function cannot be loaded.
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
    """Return a line with the active level of the sandbox, if a domain runs the code of responses.

    Raises:
        UserError: If the level does not hold on this machine.
    """
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
