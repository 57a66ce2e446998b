"""Counts kernels, copies and waits of the engine and the learner on the simulated device; prints them as JSON.

Two runs that differ only in their number of positions or chunks give the counts of one. Two models that differ only in
their number of layers then give those of a layer, and of everything else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import simulated_device
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.algorithms.groups import Group
from brorl.model import flex_attention
from brorl.model.tree_path import TreeForward
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.training.learner import TreeLearner
from brorl.tree import RolloutTree
from recipes import recipe
from small_models import small_model

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
LAYERS = (1, 3)
TOKENS = 16  # of a response of the learner


def counted(work: Callable[[], object]) -> Counter[str]:
    """Return how many kernels, copies and waits some work takes; the second time, when caches are filled."""
    work()
    simulated_device.reset()
    work()
    found: Counter[str] = Counter()
    for name, times in simulated_device.counts().items():
        found[name.partition(":")[0]] += times
    return found


def of_one(few: Counter[str], many: Counter[str], more: int) -> dict[str, float]:
    """Return the counts of one of the `more` positions or chunks by which two runs differ."""
    return {kind: (many[kind] - few[kind]) / more for kind in ("kernel", "copy", "wait")}


def model_of(num_layers: int) -> PreTrainedModel:
    """Return a model with a vocabulary of which nobody draws the last token."""
    return small_model(num_hidden_layers=num_layers, vocab_size=97, dtype=torch.float32).cuda()


def decoding(
    num_layers: int, num_prompts: int, temperature: float = 1.0, first: int = 9, last: int = 14
) -> dict[str, float]:
    """Return the counts of a decoded position; no row moves and no prompt ends.

    Rows have one rollout each by then; with temperature 0 each prompt has one row with all rollouts. The positions are
    within the tokens that are reserved together, and between two looks of the host, unless others are given.
    """
    engine = NativeEngine(model_of(num_layers), eos_token_id=1 << 20)

    def sampled(tokens: int) -> Counter[str]:
        sampling = SamplingParams(temperature, max_new_tokens=tokens)
        return counted(lambda: engine.sample(SampleTask(PROMPTS[:num_prompts], 4, sampling, seed=0)))

    return of_one(sampled(first), sampled(last), last - first)


def learning(num_layers: int, forward: TreeForward) -> dict[str, float]:
    """Return the counts of a chunk that goes forward and backward."""
    first = np.arange(8)[:, None]
    responses, logprobs = (first + np.arange(TOKENS)).tolist(), np.full((8, TOKENS), -4.0).tolist()
    tree = RolloutTree.from_responses(PROMPTS[0], responses, logprobs)
    correct_L = np.arange(8) % 2 == 0
    group = Group(Prompt("p", "p", tree.prompt_ids, "", "d"), tree, correct_L, correct_L.astype(float))

    def learned(num_chunks: int) -> Counter[str]:
        nodes = TOKENS * 8 // num_chunks
        learner = TreeLearner(model_of(num_layers), recipe(nodes_per_pass=nodes, attention="tiled"), forward=forward)
        return counted(lambda: learner.learn([group], lambda _: [correct_L - 0.5], seed=0))

    return of_one(learned(2), learned(8), 6)


class _FlexAttention(torch.autograd.Function):
    """Starts as many kernels as FlexAttention on a GPU, and computes nothing: it cannot be compiled here."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.clone()

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value = ctx.saved_tensors
        return (query * query).clone(), key.clone(), value.clone()  # a sum over the values, and the three gradients


def counted_attention(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
    """Replace FlexAttention."""
    output: Tensor = _FlexAttention.apply(query, key, value)
    return output


def main() -> None:
    """Print the counts for each number of layers."""
    torch.set_num_threads(1)
    flex_attention.flex_attention = counted_attention
    flex_attention.compiled = lambda function: function
    found = {f"decoding {p}": [decoding(n, p) for n in LAYERS] for p in (1, 3)}
    found |= {"decoding shared": [decoding(n, 3, 0.0) for n in LAYERS]}
    found |= {"decoding long": [{"wait": 32 * decoding(1, 3, first=9, last=41)["wait"]}]}  # in 32 positions
    ways = {"packed": TreeForward(packed=True), "tiled": TreeForward("tiled")}
    found |= {f"learning {name}": [learning(n, way) for n in LAYERS] for name, way in ways.items()}
    print(json.dumps(found))
