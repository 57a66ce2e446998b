"""Each domain's verifier: a built-in verifier or a user's function. A new domain needs a file and a line in `DOMAINS`.

A verifier's module is imported when the verifier is created. Each verifier judges answers with the thoughts removed
and computes extra reward terms. If a term's function fails, the failure is the verdict: a term is never silently 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

from brorl.algorithms.settings import RewardShaping
from brorl.errors import UserError, source_setting
from brorl.format import listed
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import (
    CODE_DOMAIN,
    COUNTDOWN_DOMAIN,
    ENVIRONMENT_DOMAIN,
    GYM_DOMAIN,
    INSTRUCTIONS_DOMAIN,
    MATH_DOMAIN,
    SCIENCE_DOMAIN,
)
from brorl.verdict import CORRECT, RAISED, RETURNED, UNFINISHED, WRONG, Verdict, is_unverified, verdict_of
from brorl.verification.sandbox.inside.calling import PROMPT, REFERENCE, RESPONSE, SOURCE, TEXT
from brorl.verification.sandbox.inside.confinement import UNSAFE
from brorl.verification.sandbox.inside.functions import MAIN_GUARD
from brorl.verification.sandbox.level import choose_level
from brorl.verification.sandbox.pool import LoadError, VerifierCall, WorkerPool, Workers
from brorl.verification.sandbox.request import Reply
from brorl.verification.settings import VerificationSettings
from brorl.verification.thoughts import ThoughtTags
from brorl.verification.verifier import TrialResponses, Verifier

_KEYS = ("correct", "score", "extracted", "reason")
_MAX_TERM = 1e9  # even with the largest weights, squared rewards stay finite in 32 bits


class FunctionVerifier:
    """Verifies responses with a user's function. Raises a UserError if the function cannot be loaded or called.

    Args:
        pool: The workers that call the function.
        function: `package.module:function`, also searched for in the current directory, or `path/to/file.py:function`.
        domain: The function's domain, for error messages.
        as_messages: Whether a reward function with TRL's signature receives completions as message lists.
        section: The settings section that names the function, for error messages.
    """

    def __init__(
        self,
        pool: WorkerPool,
        function: str,
        domain: str,
        as_messages: bool = False,
        section: str = "verification.functions",
    ) -> None:
        self._pool = pool
        self._function = function
        setting = f"{section}.{domain}"
        try:
            (result,) = pool.run([VerifierCall(function, None)])
            if result.failure:
                raise LoadError(f"cannot read the arguments of {function!r}: {result.failure}")
        except LoadError as error:
            raise UserError(f"{setting}: {load_problem(function, str(error))}") from None
        if problem := result.value.get("problem"):
            raise UserError(
                f"{setting}: {function!r} must take two arguments (response, reference) or three (response, reference, "
                "prompt), or have the signature of a reward function for TRL (completions, **columns), verl "
                "(data_source, solution_str, ground_truth, extra_info) or OpenRLHF (queries, prompts, labels): "
                f"{problem}"
            )
        self._takes = frozenset(result.value["takes"])
        self._as_messages = as_messages

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses.

        The reason comes from the function, or is `correct` or `wrong answer`. After a failure it is `verifier raised
        ...`, `verifier returned ...`, `timeout`, `out of memory`, `verifier crashed` or `unverified: ...`. A function
        that cannot decide returns `False` with a reason `unverified: ...`.
        """
        return [verdict_of_reply(result) for result in self.replies(items)]

    def replies(self, items: Sequence[tuple[Prompt, str]]) -> list[Reply]:
        """Call the function on each response. A reply contains the returned value or the failure."""
        return self._pool.run([VerifierCall(self._function, self._values(*item)) for item in items])

    def _values(self, prompt: Prompt, response: str) -> dict[str, object]:
        """Return the values that the function takes, by role."""
        value_of = {
            RESPONSE: response,
            REFERENCE: prompt.reference,
            PROMPT: prompt.question or prompt.text,
            TEXT: prompt.text,
            SOURCE: prompt.source,
        }
        taken = {role: value for role, value in value_of.items() if role in self._takes}
        return {**taken, "as_messages": self._as_messages}

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Accept every reference: only the function can read it."""
        del references
        return {}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the references unchanged. The function may expect a different form of response."""
        return TrialResponses(reference, others, certain=False)


def load_problem(function: str, problem: str) -> str:
    """Return why a function cannot be loaded, and how to fix it."""
    file = re.split(r"\.py:", function)[0] + ".py"
    if MAIN_GUARD in problem:
        return f"workers import {file} to call its function, which starts brorl again; {MAIN_GUARD}"
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", problem)
    if missing and missing[1] != re.split(r"[.:]", function)[0]:
        fix = f"install the package that it imports (pip install {missing[1]}, unless the package has a different name)"
    elif ".pkl:" in function:
        fix = "start a new run, and pass the function again"
    elif Path(file).absolute() == Path(getattr(sys.modules["__main__"], "__file__", None) or "").absolute():
        fix = f"workers import this script to call its function; {MAIN_GUARD}"
    else:
        fix = "use package.module:function, importable from the current directory, or path/to/file.py:function"
    return f"{problem}; {fix}"


def verdict_of_reply(reply: Reply) -> Verdict:
    """Return the verdict that a user's function returned, or its failure."""
    if reply.failure:
        return verdict_of(reply.failure, seconds=reply.seconds)
    try:
        correct, score, extracted, reason = _read(
            reply.value if isinstance(reply.value, dict) else {"score": reply.value}
        )
    except ValueError as error:
        return verdict_of(f"{RETURNED} {error}", seconds=reply.seconds)
    return Verdict(correct, score, extracted, reason or (CORRECT if correct else WRONG), reply.seconds)


def _read(value: dict[str, object]) -> tuple[bool, float, str | None, str | None]:
    """Return (correct, score, extracted, reason) from a returned value; a ValueError describes its problem."""
    unknown = [key for key in value if key not in _KEYS]
    if unknown or not ("correct" in value or "score" in value):
        raise ValueError(f"a dict with the keys {', '.join(value)[:200] or 'none'} (allowed: {', '.join(_KEYS)})")
    outcome = value["score"] if "score" in value else value["correct"]
    if not isinstance(outcome, bool | int | float):
        raise ValueError(f"{type(outcome).__name__}, not a bool, a number from 0 to 1 or a dict")
    if not 0 <= outcome <= 1:  # true for NaN too
        raise ValueError(f"{str(outcome)[:40]}, not a number from 0 to 1")
    correct = value.get("correct", outcome >= 1)
    if not isinstance(correct, bool):
        raise ValueError(f"correct of type {type(correct).__name__}, not bool")
    extracted, reason = (_text(value, key) for key in ("extracted", "reason"))
    if reason is not None and is_unverified(reason) and (correct or outcome):
        raise ValueError(f"the reason {reason!r}, which requires score 0 and correct False")
    return correct, float(outcome), extracted, reason


def _text(value: dict[str, object], key: str) -> str | None:
    text = value.get(key)
    if not isinstance(text, str | None):
        raise ValueError(f"{key} of type {type(text).__name__}, not str")
    return text


@dataclass(frozen=True)
class BuiltIn:
    """Creates a domain's built-in verifier from the workers. The first call imports the module."""

    module: str  # relative to brorl.verification: `domains.math`
    name: str  # the class in that module: `MathVerifier`
    arguments: Callable[[Workers], tuple[Any, ...]] = lambda _workers: ()  # returns the class's arguments

    def __call__(self, workers: Workers, **options: bool) -> Verifier:
        """Import the verifier and create it."""
        module = import_module(f"brorl.verification.{self.module}")
        verifier: Verifier = getattr(module, self.name)(*self.arguments(workers), **options)
        return verifier


DOMAINS: dict[str, Callable[..., Verifier]] = {
    CODE_DOMAIN: BuiltIn(
        "domains.code",
        "CodeVerifier",
        lambda workers: (workers.programs, workers.functions.timeout_s, workers.functions.memory_bytes),
    ),
    COUNTDOWN_DOMAIN: BuiltIn("domains.countdown", "CountdownVerifier"),
    GYM_DOMAIN: BuiltIn("gym.verifier", "GymVerifier", lambda workers: (workers.programs, workers.functions.timeout_s)),
    INSTRUCTIONS_DOMAIN: BuiltIn("domains.ifeval", "InstructionsVerifier"),
    MATH_DOMAIN: BuiltIn("domains.math", "MathVerifier", lambda workers: (workers.functions,)),
    SCIENCE_DOMAIN: BuiltIn("domains.science", "ScienceVerifier", lambda workers: (workers.functions,)),
}
"""Creates each domain's built-in verifier from the workers."""
UNTRUSTED = (CODE_DOMAIN, GYM_DOMAIN)
"""Domains whose built-in verifier runs code from responses in the sandbox."""
WITH_FRACTIONS = (CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN)
"""Domains whose built-in verifier can score an incorrect response between 0 and 1. For code, this runs all tests."""


def make_verifiers(
    domains: Iterable[str],
    settings: VerificationSettings,
    rewards: RewardShaping,
    workers: Workers,
    environment: Callable[[], Verifier] | None = None,
) -> dict[str, Verifier]:
    """Create each domain's verifier, sorted by domain. A user's function replaces a built-in verifier.

    `environment` creates the verifier of the `environment` domain. With partial credit, the domains in `WITH_FRACTIONS`
    score incorrect responses too. Raises a UserError if a domain has no verifier, or if a function cannot be loaded.
    """
    functions = settings.functions
    as_messages = settings.completions == "messages"
    term_functions = {
        name: FunctionVerifier(workers.functions, term.function, name, as_messages, section="rewards.terms")
        for name, term in rewards.terms.items()
    }
    verifiers: dict[str, Verifier] = {}
    for domain in sorted({*domains}):
        if domain in functions:
            own = FunctionVerifier(workers.functions, functions[domain], domain, as_messages)
            verifiers[domain] = DomainVerifier(own, None, term_functions)
        elif domain == ENVIRONMENT_DOMAIN and environment is not None:
            verifiers[domain] = DomainVerifier(environment(), None, term_functions)
        elif domain in DOMAINS:
            options = {"partial_credit": True} if rewards.partial_credit and domain in WITH_FRACTIONS else {}
            verifiers[domain] = DomainVerifier(DOMAINS[domain](workers, **options), settings.thoughts, term_functions)
        else:
            raise UserError(
                f"the data has questions in the domain {domain!r}, which has no verifier (domains with one: "
                f"{', '.join(sorted({*DOMAINS, *functions}))}); set {source_setting('domain')}, or add your own: "
                f"verification.functions: {{{domain}: package.module:function}}"
            )
    return verifiers


def untrusted_domains(settings: VerificationSettings, domains: Iterable[str]) -> list[str]:
    """Return the domains whose verifier runs code from responses."""
    remaining = {*domains} - {*settings.functions}
    return [domain for domain in UNTRUSTED if domain in remaining]


def sandbox_lines(settings: VerificationSettings, domains: Iterable[str], tools: Sequence[str] = ()) -> list[str]:
    """Return a line with the sandbox's level if a domain or tool runs code from responses; otherwise an empty list.

    Raises a UserError if no level works on this machine.
    """
    untrusted = [*untrusted_domains(settings, domains), *tools]
    if not untrusted:
        return []
    level = choose_level(settings.sandbox).name
    if level == UNSAFE:
        return [
            f"warning: no sandbox: verification.sandbox = {UNSAFE} runs code from responses ({listed(untrusted)}) "
            "with your files, your processes and your network; set verification.sandbox: auto to confine it"
        ]
    return [f"sandbox for untrusted code ({listed(untrusted)}): {level}"]


@dataclass(frozen=True)
class DomainVerifier:
    """Passes answers without thoughts to a verifier, and adds reward terms to its verdicts."""

    verifier: Verifier  # decides whether an answer is correct
    tags: ThoughtTags | None = None  # tags around thoughts; None to pass on whole responses
    terms: Mapping[str, FunctionVerifier] | None = None  # name of an extra reward term -> its function

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses and compute their terms. A response ending inside a thought is an `unfinished thought`."""
        verdicts = self._verify_answers(items, self.tags) if self.tags else self.verifier.verify_all(items)
        terms = self.terms or {}
        for name, function in terms.items():
            verdicts = [_with_term(*pair, name) for pair in zip(verdicts, function.replies(items), strict=True)]
        # A verdict with a failed term has fewer values.
        return [verdict if len(verdict.terms) == len(terms) else replace(verdict, terms=()) for verdict in verdicts]

    def _verify_answers(self, items: Sequence[tuple[Prompt, str]], tags: ThoughtTags) -> list[Verdict]:
        answers: list[str | None] = []
        own_s: list[float] = []
        for prompt, response in items:
            start = perf_counter()
            answers.append(tags.answer(prompt.text, response))
            own_s.append(perf_counter() - start)
        pairs = [(prompt, answer) for (prompt, _), answer in zip(items, answers, strict=True) if answer is not None]
        judged = iter(self.verifier.verify_all(pairs))
        verdicts = (verdict_of(UNFINISHED) if answer is None else next(judged) for answer in answers)
        return [replace(verdict, seconds=verdict.seconds + s) for verdict, s in zip(verdicts, own_s, strict=True)]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that no response can match. See `Verifier`."""
        return self.verifier.check_references(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Make responses for a trial, without thoughts. See `Verifier`."""
        return self.verifier.trial_responses(reference, others)


def _with_term(verdict: Verdict, reply: Reply, name: str) -> Verdict:
    """Return a verdict with one more term, or the term's failure as the verdict."""
    failure, value = reply.failure, reply.value
    seconds = verdict.seconds + reply.seconds
    if not failure and value is not None:
        if not isinstance(value, bool | int | float) or (isinstance(value, float) and not isfinite(value)):
            shown = f"{value:g}" if isinstance(value, float) else type(value).__name__
            failure = f"{RETURNED} {shown}, not a number, a bool or None"
        elif abs(value) > _MAX_TERM:
            failure = f"{RETURNED} {str(value)[:40]}, not a number from -{_MAX_TERM:g} to {_MAX_TERM:g}"
    if not failure:
        return replace(verdict, terms=(*verdict.terms, None if value is None else float(value)), seconds=seconds)
    if failure.startswith((RAISED, RETURNED)):
        failure = f"{failure} (rewards.terms.{name})"
    return verdict_of(failure, verdict.extracted, seconds)
