"""Verdicts by reference and answer, the least recently used ones forgotten.

A repeated verdict has the time 0. An entry has digests instead of the texts: references and answers can be long.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf
from time import monotonic

from brorl.prompts.prompt import Prompt
from brorl.verdict import Verdict

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
