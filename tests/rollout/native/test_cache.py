"""The caches of rows: their account of memory against what they really reserve, and what rows find in them."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from brorl.errors import OutOfMemoryError
from brorl.model.kernels import KEYS_PER_BLOCK, kernels
from brorl.model.tree_attention import kv_shapes
from brorl.rollout.native.decoder import RowMemory
from brorl.rollout.native.paged_decoder import PagedCache
from brorl.rollout.native.slot_attention import SlotCache, rounded_up
from small_models import small_model


def memory_of(limit: int, max_rows: int, max_tokens: int, **overrides: object) -> tuple[PreTrainedModel, RowMemory]:
    """A model of two layers, and the memory of its rows."""
    model = small_model(vocab_size=23, dtype=torch.float32, **overrides)
    return model, RowMemory.of(model, kv_shapes(model), limit, max_rows, max_tokens)


def arena_of(limit: int, max_rows: int, max_tokens: int, **overrides: object) -> SlotCache:
    model, memory = memory_of(limit, max_rows, max_tokens, **overrides)
    return SlotCache(model, kv_shapes(model), memory)


def test_tokens_are_reserved_in_few_steps() -> None:
    steps = sorted({rounded_up(n) for n in range(1, 20_000)})
    assert steps[:8] == [16, 32, 48, 64, 96, 128, 192, 256]
    assert len(steps) < 22
    assert all(n <= rounded_up(n) <= max(32, 1.5 * n) for n in range(1, 20_000))


@pytest.mark.parametrize("limit", [1 << 30, 100_000])
@pytest.mark.parametrize("max_tokens", [5, 64, 65, 200])
def test_an_arena_keeps_to_its_memory(rng: np.random.Generator, limit: int, max_tokens: int) -> None:
    """Rows multiply and die; keys, values and logits stay within the limit."""
    cache = arena_of(limit, 64, max_tokens)
    per_token, per_row = 2 * 2 * 2 * 8 * 4, 3 * 23 * 4
    prompt_tokens = 50
    cache.start(prompt_tokens * per_token)
    num_rows = 1
    for depth in range(1, max_tokens + 1):
        try:
            fit = cache.rows_that_fit(depth)
        except OutOfMemoryError:
            assert max_tokens == 200  # whose rows do not fit into the smaller limit
            break
        before = num_rows
        num_rows = int(min(rng.integers(1, 65), fit))
        cache.place(np.sort(rng.integers(0, min(before, num_rows), num_rows)), np.arange(num_rows), depth - 1, depth)
        assert cache.value[0].shape[0] >= num_rows
        assert cache.key[1].shape[2] == cache.value[1].shape[2] >= depth
        reserved = sum(store.nbytes for store in cache._stores)
        assert prompt_tokens * per_token + reserved + num_rows * per_row <= limit


def test_what_does_not_fit_is_refused() -> None:
    cache = arena_of(1000, 8, 16)
    cache.start(500)
    message = r"one row of 2 tokens needs .* and the prompts need .*; raise engine\.memory_gib"
    with pytest.raises(OutOfMemoryError, match=message):
        cache.rows_that_fit(2)


@pytest.fixture
def paged() -> type[PagedCache]:
    if kernels() is None:
        pytest.skip("needs a C compiler")
    return PagedCache


@pytest.mark.parametrize("memory", [1 << 30, 60_000])
def test_rows_find_their_tokens_in_shared_blocks(
    paged: type[PagedCache], memory: int, rng: np.random.Generator
) -> None:
    """Rows fork and die at random; every one finds the numbers that were written on its path, and memory is kept to."""
    model = small_model(vocab_size=23, dtype=torch.float32)
    max_rows, length, other, per_row = 40, 3 * KEYS_PER_BLOCK + 5, 1000, 3 * 23 * 4
    made = kernels()
    assert made is not None
    cache = paged(made, kv_shapes(model), RowMemory.of(model, kv_shapes(model), memory, max_rows, length))
    paths: list[list[float]] = []
    rows_D, peak = [], 0
    for position in range(length):
        fit = cache.rows_that_fit(position + 1, other)
        wanted = int(rng.integers(1, max_rows + 1)) if position % 5 else max_rows
        num_rows = min(wanted, fit)
        source_R = np.sort(rng.integers(0, len(paths), num_rows)) if paths else np.zeros(num_rows, np.int64)
        rows_D.append(num_rows)
        cache.rearrange(source_R, position, position + 1, other)
        reserved = sum(x.nbytes for block in cache._blocks for x in block)
        peak = max(peak, reserved + num_rows * per_row + other)
        numbers = rng.random(num_rows)
        paths = [[*(paths[s] if paths else []), x] for s, x in zip(source_R.tolist(), numbers.tolist(), strict=True)]
        block, slot = divmod(position, KEYS_PER_BLOCK)
        for layer in range(2):
            value = cache._blocks[block][2 * layer + 1]
            assert value.data_ptr() == cache.pages[layer][1, block]
            value[cache.slot_BR[block], :, slot] = torch.from_numpy(numbers).float()[:, None, None] + layer
        for row, path in enumerate(paths):
            for layer in range(2):
                got = torch.cat([
                    cache._blocks[b][2 * layer + 1][cache.slot_BR[b, row]] for b in range(block + 1)
                ], 1)[:, : position + 1]  # fmt: skip
                expected = torch.tensor(path).float()[None, :, None] + layer
                assert torch.equal(got, expected.expand_as(got))
    assert peak <= memory
    assert (memory == 60_000) == (max(rows_D[KEYS_PER_BLOCK:]) < max_rows)


def test_a_block_is_stored_once_for_the_rows_that_grow_out_of_it(paged: type[PagedCache]) -> None:
    model = small_model(dtype=torch.float32)
    made = kernels()
    assert made is not None
    cache = paged(made, kv_shapes(model), RowMemory.of(model, kv_shapes(model), 1 << 30, 512, 2 * KEYS_PER_BLOCK))
    for position in range(2 * KEYS_PER_BLOCK):
        num_rows = 1 if position < KEYS_PER_BLOCK else 500
        source_R = np.arange(num_rows) if position != KEYS_PER_BLOCK else np.zeros(num_rows, np.int64)
        cache.rearrange(source_R, position, position + 1, 0)
    assert [block[0].shape[0] for block in cache._blocks] == [64, 500]
    assert not cache.slot_BR[0].any()
