"""Prompts, memory limits and comparisons of trees for tests of the native engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from transformers import PreTrainedModel

import brorl.rollout.native_engine as native
from brorl.tree import RolloutTree

EOS = 0


def ragged_prompts(rng: np.random.Generator, count: int, vocab_size: int = 17) -> list[list[int]]:
    return [rng.integers(1, vocab_size, rng.integers(1, 12)).tolist() for _ in range(count)]


def assert_same_trees(first: list[RolloutTree], second: list[RolloutTree]) -> None:
    """Identical tokens, counts and flags; log-probs up to the rounding of another batch shape."""
    for a, b in zip(first, second, strict=True):
        assert a.prompt_ids == b.prompt_ids
        for name in ("token", "parent", "count", "leaf", "leaf_count", "finished", "given"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        np.testing.assert_allclose(a.logprob, b.logprob, rtol=1e-11, atol=1e-12)


def room_for(model: PreTrainedModel, rows: int, tokens: int, prompts: list[list[int]]) -> int:
    """Bytes of rows of keys, values and logits (taken three times), and of twice the padded prompts, in float64."""
    token = 2 * 2 * 2 * 8 * 8  # keys and values, 2 layers, 2 heads of 8 numbers
    padded_prompts = len(prompts) * max(map(len, prompts), default=0)
    row = tokens * token + 3 * model.config.vocab_size * 8
    return rows * row + 2 * padded_prompts * token


def lockstep(monkeypatch: pytest.MonkeyPatch, sample: Callable[[], list]) -> list:
    """Sample with an engine whose host draws every token."""
    with monkeypatch.context() as patch:
        patch.setattr(native, "draws_on", lambda _: False)
        patch.setattr(native, "graphs_on", lambda *_: None)
        return sample()
