"""The caches of rows: their account of memory against what they really reserve, and what rows find in them."""

import numpy as np
import pytest
import torch

from brorl.errors import OutOfMemoryError
from brorl.model.kernels import BLOCK, kernels
from brorl.model.kv_shape import kv_shapes
from brorl.rollout.native.row_cache import PagedRowCache, RowCache
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
    with pytest.raises(OutOfMemoryError, match=r"the prompts beside it need .*; raise engine\.memory_gib"):
        RowCache(model, kv_shapes(model), 1000, 8, 16).bytes_for(np.array([1, 2]), 4)


@pytest.fixture
def paged() -> type[PagedRowCache]:
    if kernels() is None:
        pytest.skip("needs a C compiler")
    return PagedRowCache


@pytest.mark.parametrize("memory", [1 << 30, 60_000])
def test_rows_find_their_tokens_in_shared_blocks(
    paged: type[PagedRowCache], memory: int, rng: np.random.Generator
) -> None:
    """Rows fork and die at random; every one finds the numbers that were written on its path, and memory is kept to."""
    model = small_model(vocab_size=23, dtype=torch.float32)
    max_rows, length, other, per_token, per_row = 40, 3 * BLOCK + 5, 1000, 2 * 2 * 2 * 8 * 4, 3 * 23 * 4
    made = kernels()
    assert made is not None
    cache = paged(made, model, kv_shapes(model), memory, max_rows, length)
    paths: list[list[float]] = []
    rows_D, peak = [], 0
    for position in range(length):
        fit = cache.rows_that_fit(position + 1, other)
        wanted = int(rng.integers(1, max_rows + 1)) if position % 5 else max_rows
        num_rows = min(wanted, fit)
        source_R = np.sort(rng.integers(0, len(paths), num_rows)) if paths else np.zeros(num_rows, np.int64)
        rows_D.append(num_rows)
        cache.rearrange(source_R, position, position + 1, other)
        peak = max(peak, cache.num_bytes + num_rows * per_row + other)
        numbers = rng.random(num_rows)
        paths = [[*(paths[s] if paths else []), x] for s, x in zip(source_R.tolist(), numbers.tolist(), strict=True)]
        block, slot = divmod(position, BLOCK)
        for layer in range(2):
            value = cache._blocks[block][2 * layer + 1]
            assert value.data_ptr() == cache.pages(layer)[1, block]
            value[cache.slot_BR[block], :, slot] = torch.from_numpy(numbers).float()[:, None, None] + layer
        for row, path in enumerate(paths):
            for layer in range(2):
                found = torch.cat([
                    cache._blocks[b][2 * layer + 1][cache.slot_BR[b, row]] for b in range(block + 1)
                ], 1)[:, : position + 1]  # fmt: skip
                expected = torch.tensor(path).float()[None, :, None] + layer
                assert torch.equal(found, expected.expand_as(found))
    assert peak <= memory
    foreseen = paged(made, model, kv_shapes(model), memory, max_rows, length)
    assert peak <= foreseen.bytes_for(np.array(rows_D), other // per_token + 1)
    assert (memory == 60_000) == (max(rows_D[BLOCK:]) < max_rows)


def test_a_block_is_stored_once_for_the_rows_that_grow_out_of_it(paged: type[PagedRowCache]) -> None:
    model = small_model(dtype=torch.float32)
    made = kernels()
    assert made is not None
    cache = paged(made, model, kv_shapes(model), 1 << 30, 512, 2 * BLOCK)
    for position in range(2 * BLOCK):
        num_rows = 1 if position < BLOCK else 500
        source_R = np.arange(num_rows) if position != BLOCK else np.zeros(num_rows, np.int64)
        cache.rearrange(source_R, position, position + 1, 0)
    assert [block[0].shape[0] for block in cache._blocks] == [64, 500]
    assert not cache.slot_BR[0].any()
