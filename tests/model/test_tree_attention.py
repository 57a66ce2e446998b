"""Attention pieces against dense softmax written out."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.model.llama_pass import LlamaPass
from brorl.model.logprobs import softmax_lse
from brorl.model.tree_attention import HooksError, ModelPass, prefill, tree_attention
from small_models import ARCHITECTURES, small_model


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape))


def test_softmax_and_its_log_sum_exp_with_masked_scores(rng: np.random.Generator) -> None:
    score = normal(rng, 5, 4, 7)
    score[0] *= 300.0
    score[1, :, 3:] = -torch.inf
    score[2, 1] = 2.0  # all equal
    weight, lse = softmax_lse(score.clone())
    torch.testing.assert_close(weight, torch.softmax(score, -1), rtol=1e-13, atol=0)
    torch.testing.assert_close(lse, torch.logsumexp(score, -1), rtol=1e-13, atol=1e-13)
    assert (weight[1, :, 3:] == 0).all()


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
    with pytest.raises(HooksError, match="does not pass its forward arguments"), tree_attention(model):
        model(input_ids=ids)  # inside, a forward pass without a context is a mistake


def test_training_mode_dropout_in_the_attention_is_refused(rng: np.random.Generator) -> None:
    model = small_model(attention_dropout=0.5).train()
    with pytest.raises(HooksError, match="LlamaAttention needs dropout"), tree_attention(model):
        prefill(ModelPass(model), [rng.integers(0, 17, 4).tolist()])
