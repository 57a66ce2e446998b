"""Checks of a path: what it samples, scores and differentiates, against the model's own attention and generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from brorl.model.forward import Forward
from brorl.model.logprobs import ChunkLogprobs
from brorl.model.tree_path import tree_logprobs
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from small_models import assert_same_gradients, flattened_logprobs, gradients, random_tree, rollouts, with_given

EOS, PADDING, VOCABULARY, HEADS, WINDOW = 0, 1, 17, 4, 24


def assert_exact(
    model: PreTrainedModel,
    forward: Forward,
    rng: np.random.Generator,
    bound: float,
    plain: PreTrainedModel | None = None,
) -> None:
    """Compare samples, log-probs and gradients with the flattened batch, which goes through `plain` if it is given."""
    prompts = [rng.integers(1, 16, n).tolist() for n in (7, 1, 11)]
    engine = NativeEngine(model, EOS, forward=forward)
    trees = engine.sample(SampleTask(prompts, 8, SamplingParams(max_new_tokens=5), seed=int(rng.integers(1 << 60))))
    plain = plain or model
    plain.zero_grad(set_to_none=True)
    logprobs, weights, total = [], [], torch.zeros((), dtype=torch.float64)
    for tree, rows in zip(trees, flattened_logprobs(plain, trees), strict=True):
        logprob_M, weight_M = np.empty(tree.num_unique_tokens), np.zeros(tree.num_unique_tokens)
        for (_, path), row in zip(rollouts(tree), rows, strict=True):
            np.testing.assert_allclose(tree.logprob[path], row.detach(), rtol=bound, atol=bound)
            coefficient = rng.normal()
            logprob_M[path], total = row.detach(), total + coefficient * row.sum()
            weight_M[path] += coefficient
        logprobs.append(logprob_M)
        weights.append(weight_M)
    total.backward()
    expected = gradients(plain)
    model.zero_grad(set_to_none=True)
    logprob_K, weight_K = np.concatenate(logprobs), torch.from_numpy(np.concatenate(weights))
    for chunk in forward.chunk_logprobs(model, trees, max_nodes=int(rng.integers(1, 99))):
        np.testing.assert_allclose(chunk.logprob.detach(), logprob_K[chunk.index], rtol=bound, atol=bound)
        (chunk.logprob * weight_K[chunk.index]).sum().backward()
    assert_same_gradients(gradients(model), expected, tolerance=10 * bound)


def assert_greedy_equals_generate(
    model: PreTrainedModel, forward: Forward, prompts: Sequence[list[int]], plain: PreTrainedModel | None = None
) -> None:
    """Compare three greedy rollouts of each prompt with those of transformers, by `plain` if it is given."""
    engine = NativeEngine(model, EOS, forward=forward)
    trees = engine.sample(SampleTask(prompts, 3, SamplingParams(temperature=0, max_new_tokens=10), seed=0))
    for prompt, tree in zip(prompts, trees, strict=True):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": EOS, "pad_token_id": EOS}
        generated = (plain or model).generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert tree.responses() == [(tuple(generated[0, len(prompt) :].tolist()), 3)]


Chunks = Callable[..., Iterator[ChunkLogprobs]]


def long_response(rng: np.random.Generator, prompt: int, length: int) -> RolloutTree:
    return RolloutTree.from_responses(
        rng.integers(1, 17, prompt).tolist(), [rng.integers(1, 17, length).tolist()], finished=[False]
    )


def some_trees(rng: np.random.Generator) -> list[RolloutTree]:
    """Ragged, bushy, duplicated, truncated, of first tokens alone; more than a block, longer than a window; given."""
    return [
        random_tree(rng, num_rollouts=20, max_length=9),
        RolloutTree.from_responses([3], [(EOS,), (4,), (4,), (9,)], finished=[True, False, False, False]),
        RolloutTree.from_responses([5, PADDING, 3], [(4, EOS), (9, EOS)]),
        random_tree(rng, num_rollouts=12, branching=2, max_length=30, prompt_length=WINDOW + 5),
        long_response(rng, 3, 2 * WINDOW + 7),
        with_given(random_tree(rng, num_rollouts=20, max_length=9), rng, 0.5),
    ]


def weights_of(rng: np.random.Generator, trees: list[RolloutTree]) -> Tensor:
    """Return random weights of the log-probs and entropies of all nodes, shape [K, 2]."""
    return torch.from_numpy(rng.normal(size=(sum(t.num_nodes for t in trees), 2)))


def learned(
    model: PreTrainedModel, trees: list[RolloutTree], weight_KO: Tensor, chunks: Chunks, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs and entropies (0 without, and at given nodes), and the gradient of their weighted sum."""
    model.zero_grad()
    found = torch.full(weight_KO.shape, torch.nan, dtype=torch.float64)
    for chunk in chunks(model, trees, **options):
        entropy = torch.zeros_like(chunk.logprob) if chunk.entropy is None else chunk.entropy
        outputs = torch.stack([chunk.logprob, entropy], 1)
        assert found[chunk.index].isnan().all()
        found[chunk.index] = outputs.detach().double()
        (outputs * weight_KO[chunk.index]).sum().backward()
    given_K = torch.from_numpy(np.concatenate([tree.given for tree in trees]))
    assert found[~given_K].isfinite().all()
    found = found.nan_to_num(nan=0.0)  # chunks leave given nodes out, and whole trees give them 0
    assert (found[given_K] == 0).all()
    return found, gradients(model)


def gemma(kind: int, **overrides: Any) -> PreTrainedModel:
    """Return a random Gemma 3 or 2 with sliding and full layers, soft-capped in Gemma 2, exact in float64."""
    config_class, model_class = ((Gemma3TextConfig, Gemma3ForCausalLM), (Gemma2Config, Gemma2ForCausalLM))[kind == 2]
    config = config_class(**{
        "vocab_size": 17, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW, "bos_token_id": None,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "eos_token_id": None,
        "pad_token_id": None, "max_position_embeddings": 512, **({"attn_logit_softcapping": 2.0} if kind == 2 else {}),
        **overrides,
    })  # fmt: skip
    model = model_class(config).double().eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # those of transformers round to float32
            module.forward = _gemma_norm.__get__(module)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.25 * torch.randn_like(parameter))
    return model


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    return (1.0 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def assert_products_written_out(
    model: PreTrainedModel,
    plain: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    scale: float,
    rng: np.random.Generator,
    bound: float,
) -> None:
    """Compare with W + alpha / rank * B A in a plain model, on the flattened batch; W by the name of its layer."""
    given = dict(model.named_parameters())
    factors = {
        name: [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }
    leaves = {name: [f.detach().double().requires_grad_() for f in pair] for name, pair in factors.items()}
    for name, parameter in list(plain.named_parameters()):
        module = name.rpartition(".")[0]
        if module in factors and name.endswith("weight"):
            a, b = leaves[module]
            layer = plain.get_submodule(module)
            del layer.weight
            layer.weight = weights[module].double() + scale * b @ a
        else:
            parameter.data = given[name.replace(module, f"{module}.base_layer") if module in factors else name].double()
    trees = [random_tree(rng, prompt_length=n) for n in (4, 2)]
    weight = [torch.from_numpy(rng.normal(size=t.num_unique_tokens)) for t in trees]
    logprobs = tree_logprobs(model, trees, max_nodes=20)
    sum((lp.double() * w).sum() for lp, w in zip(logprobs, weight, strict=True)).backward()
    total = torch.zeros((), dtype=torch.float64)
    for tree, rows, ours, weight_M in zip(trees, flattened_logprobs(plain, trees), logprobs, weight, strict=True):
        for (_, path), row in zip(rollouts(tree), rows, strict=True):
            np.testing.assert_allclose(ours[path].detach().numpy(), row.detach().numpy(), rtol=bound, atol=bound)
            total = total + (row * weight_M[path] / torch.from_numpy(tree.count[path])).sum()
    total.backward()
    expected = {f"{name} {i}": leaf.grad for name, pair in leaves.items() for i, leaf in enumerate(pair)}
    got = {f"{name} {i}": factor.grad.double() for name, pair in factors.items() for i, factor in enumerate(pair)}
    assert_same_gradients(got, expected, bound)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {n for n in given if ".lora_" in n}
