"""Verdicts by reference and answer, the least recently used ones forgotten.

In: verdicts that another verification would reach again. Out: the same verdicts, with the time 0. An entry holds
digests in place of the texts: references and answers can be long.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from math import inf
from time import monotonic

from brorl.verification.verifier import Verdict

KEEP_TIMEOUT_S = 3600.0  # long enough for a step; in a later one, the machine may be faster


class VerdictCache:
    """A bounded memory of verdicts.

    Args:
        size: Number of distinct pairs of a reference and an answer whose verdicts are kept, 1 or more.

    Raises:
        ValueError: If the size is below 1.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"cache_size must be 1 or more, got {size}")
        self._size = size
        self._found: OrderedDict[bytes, tuple[bool, float, str, float]] = OrderedDict()  # the last: until when, in s
        self._reference, self._digest = "", _digest("")  # the latest: the answers to one prompt follow each other

    def get(self, reference: str, answer: str) -> Verdict | None:
        """Return the verdict on an answer, with the answer as extracted text; None if it is not known.

        Args:
            reference: The reference.
            answer: The extracted answer.
        """
        key = self._key(reference, answer)
        if key not in self._found or monotonic() >= self._found[key][-1]:
            return None
        self._found.move_to_end(key)
        correct, score, reason, _ = self._found[key]
        return Verdict(correct, score, answer, reason, 0.0)

    def put(self, reference: str, verdict: Verdict, for_s: float = inf) -> None:
        """Keep a verdict.

        Args:
            reference: The reference.
            verdict: The verdict on its extracted answer; it is not one of those that depend on the machine.
            for_s: How long to keep it, in seconds.

        Raises:
            ValueError: If the verdict has no extracted answer, or is unverified.
        """
        if verdict.extracted is None or verdict.unverified:
            raise ValueError(f"only verdicts on extracted answers can be kept, got the reason {verdict.reason!r}")
        key = self._key(reference, verdict.extracted)
        self._found[key] = verdict.correct, verdict.score, verdict.reason, monotonic() + for_s
        if len(self._found) > self._size:
            self._found.popitem(last=False)

    def _key(self, reference: str, answer: str) -> bytes:
        if reference != self._reference:
            self._reference, self._digest = reference, _digest(reference)
        return self._digest + _digest(answer)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
