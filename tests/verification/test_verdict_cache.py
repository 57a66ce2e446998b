"""The memory of verdicts against a plain list, and its size."""

import tracemalloc

import numpy as np
import pytest

from brorl.verdict import Verdict, unverified_verdict
from brorl.verification.verifier import VerdictCache


def test_it_forgets_the_pair_that_was_used_longest_ago(rng: np.random.Generator) -> None:
    size = int(rng.integers(1, 8))
    cache = VerdictCache(size)
    kept: list[tuple[str, str, Verdict]] = []  # the reference: a list in order of use
    texts = ["", "a", "b", "\ud800", "ab", "a" * 1000]
    for _ in range(600):
        reference, answer = (texts[k] for k in rng.integers(len(texts), size=2))
        known = next((entry for entry in kept if entry[:2] == (reference, answer)), None)
        stored = cache.get(reference, answer)
        assert stored == (known and known[2])
        if known is not None:
            kept.remove(known)
            kept.append(known)
        else:
            correct = bool(rng.integers(2))
            verdict = Verdict(correct, float(rng.random()), answer, f"reason {rng.integers(9)}", float(rng.random()))
            cache.put(reference, verdict)
            kept.append((reference, answer, Verdict(correct, verdict.score, answer, verdict.reason, 0.0)))
            del kept[:-size]


def test_a_pair_is_not_its_text_joined() -> None:
    cache = VerdictCache(10)
    cache.put("ab", Verdict(True, 1.0, "c", "correct", 0.1))
    assert cache.get("a", "bc") is None
    assert cache.get("c", "ab") is None


def test_long_texts_are_not_kept(rng: np.random.Generator) -> None:
    cache = VerdictCache(100)
    numbers = rng.integers(1 << 40, size=100).tolist()
    tracemalloc.start()
    try:
        for number in numbers:
            cache.put(f"{number}" * 10_000, Verdict(False, 0.0, f"{number + 1}" * 10_000, "wrong answer", 0.0))
        bytes_in_use, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bytes_in_use < 1_000_000  # of 20 million characters
    assert cache.get(f"{numbers[0]}" * 10_000, f"{numbers[0] + 1}" * 10_000) is not None


def test_only_verdicts_on_answers_can_be_kept() -> None:
    with pytest.raises(ValueError, match="cache_size must be 1 or more, got 0"):
        VerdictCache(0)
    for verdict in (Verdict(False, 0.0, None, "no answer", 0.0), unverified_verdict("a worker was lost")):
        with pytest.raises(ValueError, match="only verdicts on extracted answers"):
            VerdictCache(1).put("1", verdict)
