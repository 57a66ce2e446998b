"""The verifiers of a run, from its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.format import counted, listed
from brorl.model.stop_strings import Decode, StopStrings
from brorl.prompts.instructions import INSTRUCTIONS_DOMAIN
from brorl.prompts.question import Question
from brorl.verification.domains.code import CODE_DOMAIN
from brorl.verification.domains.math import MATH_DOMAIN
from brorl.verification.domains.table import UNTRUSTED, make_verifiers, unreadable_references
from brorl.verification.gym.task import GYM_DOMAIN
from brorl.verification.sandbox.inside.confinement import UNSAFE
from brorl.verification.sandbox.level import choose_level
from brorl.verification.sandbox.pool import ProgramPool, WorkerPool, Workers
from brorl.verification.thoughts import make_decode
from brorl.verification.verifier import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ONLY_JSON = (CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN)


def build_workers(config: TrainConfig) -> Workers:
    """Make the pools of processes that verify; processes start with the first work, or before it by `start`."""
    settings = config.verification
    number = settings.workers or None
    pool = WorkerPool(number, settings.timeout_s, settings.memory_mib << 20)
    return Workers(pool, ProgramPool(number, settings.sandbox, batch_timeout_s=settings.batch_timeout_s))


def build_verifiers(config: TrainConfig, domains: Iterable[str], workers: Workers) -> dict[str, Verifier]:
    """Make the verifier of each domain of the data; a user's function replaces a built-in verifier.

    Raises:
        UserError: If a domain has no verifier, or a function cannot be loaded.
    """
    functions, with_fractions = config.verification.functions, config.rewards.partial_credit
    return make_verifiers(
        domains,
        functions,
        workers,
        with_fractions=with_fractions,
        as_messages=config.verification.completions == "messages",
        thought_tags=config.verification.thoughts,
        terms={name: term.function for name, term in config.rewards.terms.items()},
    )


def build_decode(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the function from the tokens of a response to what verifiers see: thoughts, and no stop string."""
    stop = StopStrings(tokenizer, config.sampling.stop)
    return partial(stop.text, decode=make_decode(tokenizer, config.verification.thoughts))


def check_domain_names(config: TrainConfig, domains: Iterable[str]) -> None:
    """Reject settings for domains that the data of the recipe does not have.

    Raises:
        UserError: On the first one.
    """
    known = sorted({*domains})
    for setting, named in (
        ("rewards.domain_weights", config.rewards.domain_weights),
        ("verification.functions", config.verification.functions),
        ("prompt.domain_templates", config.prompt.domain_templates),
    ):
        unused = next((name for name in named if name not in known), None)
        if unused is not None:
            raise UserError(
                f"{setting} names the domain {unused!r}, but the domains of the data are {', '.join(known)}; "
                "fix the name, or set data.sources[].domain"
            )


def untrusted_domains(config: TrainConfig, domains: Iterable[str]) -> list[str]:
    """Return the domains whose verifier runs the code of responses."""
    remaining = {*domains} - {*config.verification.functions}
    return [domain for domain in UNTRUSTED if domain in remaining]


def sandbox_lines(config: TrainConfig, domains: Iterable[str]) -> list[str]:
    """Return a line with the active level of the sandbox, if a domain runs the code of responses.

    Raises:
        UserError: If the level does not hold on this machine.
    """
    untrusted = untrusted_domains(config, domains)
    if not untrusted:
        return []
    level = choose_level(config.verification.sandbox).name
    if level == UNSAFE:
        return [
            f"warning: no sandbox: verification.sandbox = {UNSAFE} runs the code of responses ({listed(untrusted)}) "
            "with your files, your processes and your network; set verification.sandbox: auto to confine it"
        ]
    return [f"sandbox of untrusted code ({listed(untrusted)}): {level}"]


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
            "fix or delete the row, set data.sources[].layout if it is a row of a public dataset, or set another "
            "domain or your own verifier in verification.functions"
        )
    return (
        "fix or delete the row, set data.sources[].answer_after to the text before the answer, or set another domain "
        "or your own verifier in verification.functions"
    )
