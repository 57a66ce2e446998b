"""Derives random generator seeds from a run's seed and two counters, such as a step and a call.

Each combination gets a different seed. Out-of-range numbers are rejected.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

_WORD = 2**32


def seed_sequence(seed: int, first: int, second: int = 0) -> np.random.SeedSequence:
    """Return the seed sequence for a seed and two counters.

    A numpy seed sequence mixes four 32-bit words. Here they are (low half of the seed, first, second, high half of the
    seed), so different arguments never have equal words. numpy's `SeedSequence([seed, step])` splits a large seed into
    two words: seed 5 + 2**32 with step 0 equals seed 5 with step 1.

    Args:
        seed: 0 to 2**64 - 1.
        first: 0 to 2**32 - 1.
        second: 0 to 2**32 - 1.

    Raises:
        ValueError: If a number is out of range.
    """
    if not 0 <= seed < _WORD**2:
        raise ValueError(f"a seed must be between 0 and 2**64 - 1, got {seed}")
    if not (0 <= first < _WORD and 0 <= second < _WORD):
        raise ValueError(f"the counters of a seed must be between 0 and 2**32 - 1, got {first} and {second}")
    return np.random.SeedSequence([seed % _WORD, first, second, seed // _WORD])


def derived_seed(seed: int, first: int, second: int = 0) -> int:
    """Return an integer seed, 0 to 2**64 - 1, drawn from the `seed_sequence` of the same arguments."""
    return int(seed_sequence(seed, first, second).generate_state(1, np.uint64)[0])


def uniform_hash(key: str) -> int:
    """Return a uniform number from 0 to 2**64 - 1, the same on any machine and in any version of Python."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
