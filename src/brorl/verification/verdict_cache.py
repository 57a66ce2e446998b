"""Verdicts by reference and answer, the least recently used ones forgotten.

In: verdicts that another verification would reach again. Out: the same verdicts, with the time 0. An entry holds
digests in place of the texts: references and answers can be long.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from brorl.verification.verifier import Verdict


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
        self._found: OrderedDict[bytes, tuple[bool, float, str]] = OrderedDict()  # correct, score, reason
        self._reference, self._digest = "", _digest("")  # the latest: the answers to one prompt follow each other

    def get(self, reference: str, answer: str) -> Verdict | None:
        """Return the verdict on an answer, with the answer as extracted text; None if it is not known.

        Args:
            reference: The reference.
            answer: The extracted answer.
        """
        key = self._key(reference, answer)
        if key not in self._found:
            return None
        self._found.move_to_end(key)
        correct, score, reason = self._found[key]
        return Verdict(correct, score, answer, reason, 0.0)

    def put(self, reference: str, verdict: Verdict) -> None:
        """Keep a verdict.

        Args:
            reference: The reference.
            verdict: The verdict on its extracted answer; it is not one of those that depend on the machine.

        Raises:
            ValueError: If the verdict has no extracted answer, or is unverified.
        """
        if verdict.extracted is None or verdict.unverified:
            raise ValueError(f"only verdicts on extracted answers can be kept, got the reason {verdict.reason!r}")
        self._found[self._key(reference, verdict.extracted)] = verdict.correct, verdict.score, verdict.reason
        if len(self._found) > self._size:
            self._found.popitem(last=False)

    def _key(self, reference: str, answer: str) -> bytes:
        if reference != self._reference:
            self._reference, self._digest = reference, _digest(reference)
        return self._digest + _digest(answer)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
