"""Gradient checkpointing: the same gradients as without it, from fewer tensors kept for the backward pass."""

import numpy as np
import pytest
import torch
from transformers import MptConfig, MptForCausalLM, PreTrainedModel

from brorl.errors import UserError
from brorl.model.logits import NextToken
from brorl.model.logprobs import chunk_logprobs, tree_logprobs
from brorl.model.tree_attention import HookedPass, enable_gradient_checkpointing, prefill, tree_attention
from brorl.tree import RolloutTree
from small_models import (
    ARCHITECTURES,
    assert_same_gradients,
    gradients,
    kept_bytes,
    mostly_slow,
    random_tree,
    small_model,
)


def parts_gradient(model: PreTrainedModel, trees: list[RolloutTree], weight_K: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for chunk in chunk_logprobs(model, trees, max_nodes=20, next_token=NextToken(0.8)):
        (chunk.logprob * weight_K[chunk.index]).sum().backward()
    return gradients(model)


def whole_gradient(model: PreTrainedModel, trees: list[RolloutTree], weight_K: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logprob_K = torch.cat(tree_logprobs(model, trees, max_nodes=20, next_token=NextToken(0.8)))
    (logprob_K * weight_K).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES))
@pytest.mark.parametrize("gradient_of", mostly_slow([parts_gradient, whole_gradient]))
def test_gradients_are_those_without_checkpointing(
    architecture: str, gradient_of: object, rng: np.random.Generator
) -> None:
    """Also of `tree_logprobs`, whose layers are computed again after its block of tree attention has ended."""
    model = small_model(architecture, seed=int(rng.integers(1 << 30))).train()
    trees = [random_tree(rng, prompt_length=n) for n in (3, 9, 1)]
    weight_K = torch.from_numpy(rng.normal(size=sum(t.num_unique_tokens for t in trees)))
    expected = gradient_of(model, trees, weight_K)
    enable_gradient_checkpointing(model)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    got = gradient_of(model, trees, weight_K)
    assert_same_gradients(got, expected, 1e-12)
    calls.clear()
    for chunk in chunk_logprobs(model.eval(), trees, max_nodes=20):
        chunk.logprob.sum().backward()
    once = len(calls)
    calls.clear()
    for chunk in chunk_logprobs(model.train(), trees, max_nodes=20):
        chunk.logprob.sum().backward()
    assert len(calls) == 2 * once


def test_a_graph_can_be_back_propagated_twice(rng: np.random.Generator) -> None:
    model = small_model(seed=1).train()
    enable_gradient_checkpointing(model)
    loss = torch.cat(tree_logprobs(model, [random_tree(rng)], max_nodes=20)).sum()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert_same_gradients(gradients(model), {name: 2 * g for name, g in once.items()}, 1e-12)


def test_the_models_own_attention_is_recomputed_as_itself(rng: np.random.Generator) -> None:
    """A plain forward pass outside tree attention keeps its own attention, even if the backward pass runs inside."""
    model = small_model(seed=1).train()
    tokens = torch.from_numpy(rng.integers(0, 17, (2, 9)))
    model(input_ids=tokens).logits.logsumexp(-1).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    enable_gradient_checkpointing(model)
    loss = model(input_ids=tokens).logits.logsumexp(-1).sum()
    with tree_attention(model):
        loss.backward()
    assert_same_gradients(gradients(model), expected, 1e-12)


def test_a_recomputed_prompt_adds_nothing_to_its_cache(rng: np.random.Generator) -> None:
    model = small_model(seed=1).train()
    enable_gradient_checkpointing(model)
    with tree_attention(model):
        prompts = [rng.integers(0, 17, 5).tolist(), rng.integers(0, 17, 3).tolist()]
        cache, logits_PV = prefill(HookedPass(model), prompts)
    key = [k.detach().clone() for k in cache.key]
    (logits_PV.logsumexp(-1).sum() + cache.key[-1].sum()).backward()
    assert len(cache.key) == len(cache.value) == len(key) == 2
    assert all(torch.equal(a, b) for a, b in zip(cache.key, key, strict=True))


def test_what_is_kept_grows_with_the_layers_inputs_only(rng: np.random.Generator) -> None:
    """Two layers' inputs more, not two layers' activations, and far less in all than without checkpointing."""
    trees = [random_tree(rng, num_rollouts=40, branching=6, max_length=9)]
    kept = {}
    for num_layers in (4, 12):
        model = small_model(seed=1, num_hidden_layers=num_layers, intermediate_size=128).train()
        without = kept_bytes(model, chunk_logprobs(model, trees, max_nodes=200))
        enable_gradient_checkpointing(model)
        kept[num_layers] = without, kept_bytes(model, chunk_logprobs(model, trees, max_nodes=200))
    growth_without, growth = (b - a for a, b in zip(*kept.values(), strict=True))
    assert growth < growth_without / 5
    assert kept[12][1] < kept[12][0] / 3


def test_an_architecture_without_such_layers_is_refused() -> None:
    model = MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=17))
    for module in model.modules():
        if type(module).__name__ == "MptBlock":
            module.__class__ = type("PlainBlock", (torch.nn.Module,), {"forward": module.forward})
    with pytest.raises(UserError, match=r"MptForCausalLM .* set engine.gradient_checkpointing: false"):
        enable_gradient_checkpointing(model)
