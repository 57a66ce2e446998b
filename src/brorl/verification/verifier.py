"""The protocol of verifiers.

A verifier returns a verdict for every string: it never raises because of a response, never evaluates a response as code
in this process, and bounds its time.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from brorl.prompts.prompt import Prompt
from brorl.verdict import Verdict

Key = TypeVar("Key", bound=Hashable)


def malformed(references: Sequence[str], read: Callable[[str], object]) -> dict[str, str]:
    """Return the message of the ValueError that reading a reference raises, for each that raises one."""
    problems: dict[str, str] = {}
    for reference in references:
        try:
            read(reference)
        except ValueError as error:
            problems[reference] = str(error)
    return problems


class TrialResponses(NamedTuple):
    """Responses to one prompt that show whether a verifier works."""

    right: str  # A response with the reference answer
    wrong: Sequence[str]  # responses with other answers; at least one should be incorrect
    # whether the verifier must accept `right`. A user's function may expect another form of response.
    certain: bool = True


class Verifier(Protocol):
    """Verifies the responses of one domain."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify distinct pairs of a prompt and a response's text in one call; return one verdict per pair, in order.

        A verifier can spread them over workers. A response that took too long has the reason `timeout`. One that could
        not be verified because of an infrastructure failure has an `unverified_verdict`; it may be passed again later.

        Raises:
            ValueError: If a prompt's reference is malformed; never because of a response.
        """
        ...

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Return the problem of each reference answer that no response can match, in order.

        It continues a sentence that begins with "the reference answer ..., which": `{"4": "is not a countdown
        puzzle"}`.
        """
        ...

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Make responses for a trial of this verifier, from a reference answer and different ones of other prompts."""
        ...


def verify_distinct(
    items: Mapping[Key, tuple[Prompt, str]],
    verifiers: Mapping[str, Verifier],
    observe: Callable[[int], None] = lambda _: None,
    at_once: int | None = None,
) -> dict[Key, Verdict]:
    """Verify distinct items, domain by domain, `at_once` in a call; unverified ones again after all others."""
    verdict_of: dict[Key, Verdict] = {}
    for _ in range(2):
        keys_of: dict[str, list[Key]] = {}
        for key, (prompt, _text) in items.items():
            if key not in verdict_of or verdict_of[key].unverified:
                keys_of.setdefault(prompt.domain, []).append(key)
        for domain, keys in keys_of.items():
            size = at_once or len(keys)
            for part in (keys[start : start + size] for start in range(0, len(keys), size)):
                verdict_of.update(zip(part, verifiers[domain].verify_all([items[key] for key in part]), strict=True))
                observe(len(verdict_of))
    return verdict_of
