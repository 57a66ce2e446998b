"""Checks of a path: what it samples, scores and differentiates, against the model's own attention and generate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from brorl.model.forward import Forward
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from small_models import assert_same_gradients, flattened_logprobs, gradients, rollouts

END = 0


def assert_exact(
    model: PreTrainedModel,
    forward: Forward,
    rng: np.random.Generator,
    bound: float,
    plain: PreTrainedModel | None = None,
) -> None:
    """Compare samples, log-probs and gradients with the flattened batch, which goes through `plain` if it is given."""
    prompts = [rng.integers(1, 16, n).tolist() for n in (7, 1, 11)]
    engine = NativeEngine(model, END, forward=forward)
    trees = engine.sample(prompts, 8, SamplingParams(max_new_tokens=5), seed=int(rng.integers(1 << 60)))
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
    engine = NativeEngine(model, END, forward=forward)
    trees = engine.sample(prompts, 3, SamplingParams(temperature=0, max_new_tokens=10), seed=0)
    for prompt, tree in zip(prompts, trees, strict=True):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": END, "pad_token_id": END}
        generated = (plain or model).generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert tree.responses() == [(tuple(generated[0, len(prompt) :].tolist()), 3)]
