"""Attention pieces against dense softmax written out."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.model.llama_pass import LlamaPass
from brorl.model.logprobs import softmax_lse
from brorl.model.tree_attention import HooksError, KVShape, ModelPass, PromptCache, prefill, tree_attention
from brorl.rollout.native.decoder import RowMemory
from brorl.rollout.native.slot_attention import Grid, SlotCache, SlotContext, SlotPrompts, cells_of
from small_models import ARCHITECTURES, small_model


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape))


def dense_attention(query_HD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
    """One query token against all keys, head by head; query heads share key-value heads in consecutive groups."""
    heads, kv_heads = query_HD.shape[0], key_SKD.shape[1]
    rows = []
    for h in range(heads):
        k = h // (heads // kv_heads)
        weight = torch.softmax(key_SKD[:, k] @ query_HD[h], dim=0)
        rows.append(weight @ value_SKD[:, k])
    return torch.stack(rows)


def test_softmax_and_its_log_sum_exp_with_masked_scores(rng: np.random.Generator) -> None:
    score = normal(rng, 5, 4, 7)
    score[0] *= 300.0
    score[1, :, 3:] = -torch.inf
    score[2, 1] = 2.0  # all equal
    weight, lse = softmax_lse(score.clone())
    torch.testing.assert_close(weight, torch.softmax(score, -1), rtol=1e-13, atol=0)
    torch.testing.assert_close(lse, torch.logsumexp(score, -1), rtol=1e-13, atol=1e-13)
    assert (weight[1, :, 3:] == 0).all()


def random_cache(rng: np.random.Generator, lengths: list[int], kv_heads: int, head_dim: int) -> PromptCache:
    """Prompts of ragged lengths; the padding holds large numbers that must not matter."""
    longest = max(lengths)
    key, value = (normal(rng, len(lengths), kv_heads, longest, head_dim) for _ in range(2))
    for p, length in enumerate(lengths):
        key[p, :, length:], value[p, :, length:] = 50.0, 50.0
    return PromptCache([key], [value], np.array(lengths))


@pytest.mark.parametrize("window", [None, 2, 5, 7])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("lengths", [[4], [3, 1, 6], [2, 2]])
def test_decoding_slots_attend_to_their_prompts_and_to_themselves(
    lengths: list[int], keeps: bool, window: int | None, rng: np.random.Generator
) -> None:
    prompts, num_rows, stored, reserved = random_cache(rng, lengths, kv_heads=2, head_dim=3), 12, 4, 7
    prompt_R = rng.integers(0, len(lengths), num_rows)
    model, shapes = small_model(), [KVShape(2, 3, 3)]
    cache = SlotCache(model, shapes, RowMemory.of(model, shapes, 1 << 30, 20, reserved))
    cache.start(0)
    cache.place(np.arange(num_rows), np.arange(num_rows), 0, reserved)
    expected_cache = PromptCache(list(prompts.key), list(prompts.value), prompts.length)
    slot_prompts = SlotPrompts(keeps=keeps)
    slot_prompts.fill(prompts)
    prompts = expected_cache
    num_prompts = slot_prompts.shape[0]
    rank, width = cells_of(prompt_R, num_prompts)
    cell_R, slot_C = torch.from_numpy(prompt_R * width + rank), torch.zeros(num_prompts * width, dtype=torch.int64)
    slot_C[cell_R] = torch.arange(num_rows)
    grid = Grid((num_prompts, width), slot_C, cell_R) if num_prompts > 1 else Grid((1, num_rows), None, None)
    own_key, own_value = normal(rng, num_rows, stored + 1, 2, 3), normal(rng, num_rows, stored + 1, 2, 3)
    query = normal(rng, stored + 1, num_rows, 4, 3)
    for position in range(stored + 1):
        context = SlotContext(cache, slot_prompts, grid, torch.tensor([position]), num_rows, 0)
        got = context.attend(0, query[position], own_key[:, position], own_value[:, position], window)
    for row, p in enumerate(prompt_R):
        key, value = (x[0][p, :, : lengths[p]].transpose(0, 1) for x in (prompts.key, prompts.value))
        keys, values = torch.cat([key, own_key[row]]), torch.cat([value, own_value[row]])
        expected = dense_attention(query[stored, row], *(x[-(window or len(x)) :] for x in (keys, values)))
        torch.testing.assert_close(got[row], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prefill_equals_the_models_own_cache_and_logits(
    architecture: str, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """By the modules, and by the Llama pass from the parameters and from a copy; positions beyond its first table."""
    model = small_model(
        architecture, seed=int(rng.integers(1 << 30)), dtype=dtype, max_position_embeddings=1024, scale=0.1
    )
    prompts = [rng.integers(0, 17, n).tolist() for n in (5, 1, 300, 9)]
    ways = [ModelPass(model)]
    if architecture != "hooked":
        ways += [LlamaPass(model), LlamaPass(model, dtype)]
    close = partial(
        torch.testing.assert_close, **dict.fromkeys(("rtol", "atol"), 1e-10 if dtype == torch.float64 else 1e-4)
    )
    with torch.no_grad():
        plain = [model(input_ids=torch.tensor([prompt]), use_cache=True) for prompt in prompts]
        for way in ways:
            with tree_attention(model):
                cache, logits_PV = prefill(way, prompts)
            for cached, order in ((cache, range(4)), (cache.select(np.array([2, 0])), (2, 0))):
                for row, p in enumerate(order):
                    length = len(prompts[p])
                    close(logits_PV[p], plain[p].logits[0, -1])
                    assert int(cached.length[row]) == length
                    own = plain[p].past_key_values.layers
                    for key, value, layer in zip(cached.key, cached.value, own, strict=True):
                        close(key[row][:, :length], layer.keys[0])
                        close(value[row][:, :length], layer.values[0])


def test_the_models_own_attention_is_back_afterwards_even_after_an_error(rng: np.random.Generator) -> None:
    model, ids = small_model(), torch.from_numpy(rng.integers(0, 17, (1, 6)))
    before = model(input_ids=ids).logits
    with pytest.raises(RuntimeError, match="on purpose"), tree_attention(model):
        raise RuntimeError("on purpose")
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)
    with pytest.raises(HooksError, match="does not pass the arguments"), tree_attention(model):
        model(input_ids=ids)  # inside, a forward pass without a context is a mistake


def test_training_mode_dropout_in_the_attention_is_refused(rng: np.random.Generator) -> None:
    model = small_model(attention_dropout=0.5).train()
    with pytest.raises(HooksError, match="LlamaAttention needs dropout"), tree_attention(model):
        prefill(ModelPass(model), [rng.integers(0, 17, 4).tolist()])
