"""The row cache's account of memory, against what it really reserves."""

import numpy as np
import pytest
import torch

from brorl.errors import OutOfMemoryError
from brorl.model.kv_shape import kv_shapes
from brorl.rollout.native.decoder import RowCache
from small_models import small_model


def reserved(cache: RowCache) -> list[int]:
    """Bytes of the keys and values of each layer."""
    return [sum(x[layer].numel() * x[layer].element_size() for x in (cache.key, cache.value)) for layer in range(2)]


@pytest.mark.parametrize("memory", [1 << 30, 250_000])
def test_bytes_are_foreseen(rng: np.random.Generator, memory: int) -> None:
    """Rows multiply and die; the peak is the worst moment, one layer copied at a time."""
    model = small_model(vocab_size=23, dtype=torch.float32)
    rows_D = rng.integers(1, 40, 30)
    prompt_tokens, max_rows = 50, 64
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key-value heads, head dimension, bytes
    cache = RowCache(model, kv_shapes(model), memory, max_rows, 32)
    peak = 0
    for depth, wanted in enumerate(rows_D.tolist(), 1):
        num_rows = min(wanted, cache.rows_that_fit(depth, prompt_tokens * per_token))
        before = reserved(cache)
        cache.rearrange(np.arange(num_rows), depth - 1, depth, prompt_tokens * per_token)
        after = reserved(cache)
        twice = before[0] if after != before else 0
        peak = max(peak, prompt_tokens * per_token + sum(after) + twice + num_rows * 3 * 23 * 4)
    assert RowCache(model, kv_shapes(model), memory, max_rows, 32).bytes_for(rows_D, prompt_tokens) == peak


def test_what_does_not_fit_is_refused() -> None:
    model = small_model()
    with pytest.raises(OutOfMemoryError, match=r"raise engine\.memory_gib"):
        RowCache(model, kv_shapes(model), 1000, 8, 16).bytes_for(np.array([1, 2]), 4)
