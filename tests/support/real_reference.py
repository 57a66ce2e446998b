"""Checks of a pretrained model in float32 against plain transformers: greedy tokens, log-probs and gradients of trees.

Rounding: the gradient of the worst parameter of SmolLM2, that of a norm, differed by 2.1e-4 of its size between two
orders of the same sums. One token whose embedding got a gradient in one way and none in the other made 5e-2.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.model.forward import Forward
from brorl.model.logprobs import by_tree
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from small_models import assert_same_gradients, gradients, plain_logprobs

LOGPROB_BOUND = 2e-4  # nats
GRADIENT_BOUND = 1e-3  # of the norm of each parameter's gradient


def greedy_tokens(model: PreTrainedModel, prompts: Sequence[Sequence[int]], end: Sequence[int], **options: Any) -> list:
    """Return the most likely responses by the engine, and check that all rollouts are the same one."""
    sampling = SamplingParams(temperature=0, max_new_tokens=options.pop("max_new_tokens"))
    trees = NativeEngine(model, end, **options).sample(SampleTask(prompts, 2, sampling, seed=0))
    assert [tree.num_responses for tree in trees] == [1] * len(prompts)
    return [list(tree.responses()[0][0]) for tree in trees]


def generated_tokens(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], end: Sequence[int], max_new_tokens: int
) -> list[list[int]]:
    """Return the most likely responses by `generate`, without padding."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        options = {"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": list(end), "pad_token_id": 0}
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    return found


def assert_trees_equal_rows(
    model: PreTrainedModel, forward: Forward, prompts: Sequence[Sequence[int]], end: Sequence[int], seed: int
) -> None:
    """Sample trees; compare log-probs of engine and learner, and the learner's gradient, with one padded row each."""
    engine = NativeEngine(model, end, forward=forward)
    trees = engine.sample(SampleTask(prompts, 6, SamplingParams(max_new_tokens=8), seed=seed))
    weights = [np.random.default_rng([seed, i]).normal(size=tree.num_responses) for i, tree in enumerate(trees)]
    model.zero_grad()
    total = torch.zeros(())
    expected: list[list[Tensor]] = []
    for tree, weight_L in zip(trees, weights, strict=True):
        responses = [tokens for tokens, _ in tree.responses()]
        rows = plain_logprobs(model, [tree.prompt_ids] * len(responses), responses)
        expected.append([row.detach() for row in rows])
        total = total + sum(w * row.sum() for w, row in zip(weight_L.tolist(), rows, strict=True))
    total.backward()
    expected_gradients = gradients(model)

    model.zero_grad()
    chunks = []
    offsets = np.cumsum([0, *(tree.num_unique_tokens for tree in trees)])
    weight_M = torch.zeros(int(offsets[-1]))  # of a node: the sum over the responses through it
    for tree, weight_L, offset in zip(trees, weights, offsets, strict=False):
        for leaf, weight in zip(tree.leaf, weight_L, strict=True):
            weight_M[offset + tree.path(int(leaf))] += float(weight)
    for chunk in forward.chunk_logprobs(model, trees):
        (chunk.logprob * weight_M[chunk.index]).sum().backward()
        chunks.append(chunk)
    for tree, rows, logprob_M in zip(trees, expected, by_tree(chunks, trees), strict=True):
        for leaf, row in zip(tree.leaf, rows, strict=True):
            path = tree.path(int(leaf))
            np.testing.assert_allclose(tree.logprob[path], row, rtol=0, atol=LOGPROB_BOUND)
            np.testing.assert_allclose(logprob_M.detach()[path], row, rtol=0, atol=LOGPROB_BOUND)
    assert_same_gradients(gradients(model), expected_gradients, GRADIENT_BOUND)
    model.zero_grad(set_to_none=True)
