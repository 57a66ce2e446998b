"""The protocol of verifiers, and the verdicts that they remember.

A verifier returns a verdict for every string: it never raises because of a response, never evaluates a response as code
in this process, and bounds its time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf
from time import monotonic
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


Pair = tuple[str, str]  # a reference and an answer

KEEP_TIMEOUT_S = 3600.0  # long enough for a step; in a later one, the machine may be faster


class VerdictCache:
    """A memory of the verdicts on `size` distinct pairs of a reference and an answer, 1 or more."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"cache_size must be 1 or more, got {size}")
        self._size = size
        self._entries: OrderedDict[bytes, tuple[bool, float, str, float]] = OrderedDict()  # the last: until when, in s
        self._reference, self._digest = "", _digest("")  # the latest: the answers to one prompt follow each other

    def verify_all(
        self,
        items: Sequence[tuple[Prompt, str]],
        find: Callable[[Prompt, str], Verdict | str],
        decide: Callable[[list[Pair]], Sequence[tuple[Verdict, float]]],
    ) -> list[Verdict]:
        """Verify responses, each distinct pair of a reference and an answer once, and return their verdicts in order.

        `find` returns the answer in a response, or the verdict if its format decides; `decide` the verdict on each
        unknown pair, and how long to keep it in seconds (0 keeps none).
        """
        verdicts: list[Verdict | None] = []
        own_s: list[float] = []
        unknown: dict[Pair, list[int]] = {}
        for index, (prompt, response) in enumerate(items):
            start = time.perf_counter()
            answer = find(prompt, response)
            verdict = self.get(prompt.reference, answer) if isinstance(answer, str) else answer
            if isinstance(answer, str) and verdict is None:
                unknown.setdefault((prompt.reference, answer), []).append(index)
            verdicts.append(verdict)
            own_s.append(time.perf_counter() - start)
        for ((reference, _), indices), (decided, keep_s) in zip(unknown.items(), decide([*unknown]), strict=True):
            if keep_s:
                self.put(reference, decided, keep_s)
            for index in indices:
                verdicts[index] = decided if index == indices[0] else replace(decided, seconds=0.0)
        timed = zip(verdicts, own_s, strict=True)
        return [replace(verdict, seconds=verdict.seconds + own) for verdict, own in timed if verdict is not None]

    def get(self, reference: str, answer: str) -> Verdict | None:
        """Return the verdict on an extracted answer; None if it is not known."""
        key = self._key(reference, answer)
        if key not in self._entries or monotonic() >= self._entries[key][-1]:
            return None
        self._entries.move_to_end(key)
        correct, score, reason, _ = self._entries[key]
        return Verdict(correct, score, answer, reason, 0.0)

    def put(self, reference: str, verdict: Verdict, for_s: float = inf) -> None:
        """Keep a verdict for some seconds; a ValueError says that it has no extracted answer, or is unverified."""
        if verdict.extracted is None or verdict.unverified:
            raise ValueError(f"only verdicts on extracted answers can be kept, got the reason {verdict.reason!r}")
        key = self._key(reference, verdict.extracted)
        self._entries[key] = verdict.correct, verdict.score, verdict.reason, monotonic() + for_s
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def _key(self, reference: str, answer: str) -> bytes:
        if reference != self._reference:
            self._reference, self._digest = reference, _digest(reference)
        return self._digest + _digest(answer)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
