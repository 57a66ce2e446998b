"""Log-probs and the policy gradient against enumeration of every response that a small model can give.

That tokens are drawn with these probabilities is tested in `test_random_trees` and `test_draw`.
"""

from itertools import product

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from brorl.model.logprobs import NextToken
from brorl.model.tree_path import tree_logprobs
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from small_models import small_model

EOS, VOCABULARY, LENGTH = 0, 5, 3
PROMPT = [2, 4, 1]


def truncated(probability: dict[int, float], top_p: float, top_k: int) -> dict[int, float]:
    """Top-k, then the nucleus, written as a loop over tokens from the most probable down."""
    kept: dict[int, float] = {}
    ranked = sorted(probability, key=probability.__getitem__, reverse=True)[: top_k or None]
    total = sum(probability[v] for v in ranked)
    for v in ranked:
        if sum(kept.values()) < top_p:
            kept[v] = probability[v] / total
    return {v: p / sum(kept.values()) for v, p in kept.items()}


def enumerate_responses(model: PreTrainedModel, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of each response: one plain forward pass over every token sequence of full length."""
    sequences = list(product(range(VOCABULARY), repeat=LENGTH))
    ids = torch.tensor([[*PROMPT, *s] for s in sequences])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, len(PROMPT) - 1 : -1]
    probability = torch.softmax(logits / sampling.temperature, dim=-1).numpy()
    frequencies = {}
    for sequence, row in zip(sequences, probability, strict=True):
        total, response = 1.0, ()
        for token, p_V in zip(sequence, row, strict=True):
            total *= truncated(dict(enumerate(p_V)), sampling.top_p, sampling.top_k).get(token, 0.0)
            response += (token,)
            if token == EOS:
                break
        frequencies[response] = total
    return frequencies


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.8}, {"temperature": 1.4, "top_k": 4, "top_p": 0.7}])
def test_log_probs_and_the_policy_gradient_are_those_of_the_truncated_policy(
    settings: dict, rng: np.random.Generator
) -> None:
    """Every response of a tree has its enumerated probability, so nothing is unsampled once all of them are sampled.

    The sum of probability x reward x gradient of the learner's log-prob is the derivative of the expected reward, here
    by a central difference of the enumeration.
    """
    model = small_model("qwen2", vocab_size=VOCABULARY, seed=int(rng.integers(1 << 30)))
    sampling = SamplingParams(max_new_tokens=LENGTH, **settings)
    expected = {r: p for r, p in enumerate_responses(model, sampling).items() if p > 0}
    (sampled,) = NativeEngine(model, EOS).sample(SampleTask([PROMPT], 3_000, sampling, seed=int(rng.integers(1 << 60))))
    leaf_p = dict(zip((r for r, _ in sampled.responses()), np.exp(sampled.prefix_logprob[sampled.leaf]), strict=True))
    assert leaf_p == pytest.approx({r: expected[r] for r in leaf_p}, rel=1e-9)

    reward = {r: float(rng.normal()) for r in expected}
    tree = RolloutTree.from_responses(PROMPT, list(expected))
    next_token = NextToken(sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
    (logprob_M,) = tree_logprobs(model, [tree], next_token=next_token)
    paths = {r: tree.path(int(leaf)) for (r, _), leaf in zip(tree.responses(), tree.leaf, strict=True)}
    sum(expected[r] * reward[r] * logprob_M[paths[r]].sum() for r in expected).backward()
    direction = [torch.from_numpy(rng.normal(size=p.shape)) for p in model.parameters()]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction, strict=True))

    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p += step * d
        moved = enumerate_responses(model, sampling)
        assert {r for r, p in moved.items() if p > 0} == set(expected)
        values.append(sum(moved[r] * reward[r] for r in expected))
    assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-7)
