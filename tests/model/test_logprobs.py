"""Log-probs and gradients on trees against the plain model on the flattened, right-padded N x T batch (float64)."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.model.logits import NextToken
from brorl.model.logprobs import ModelPass, chunk_logprobs, default_max_nodes, tree_logprobs
from brorl.tree import RolloutTree
from small_models import (
    ARCHITECTURES,
    assert_same_gradients,
    flattened_logprobs,
    gradients,
    mostly_slow,
    random_tree,
    rollouts,
    small_model,
)

EOS = 0
every_architecture = pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES, "llama", "hooked"))
every_size = pytest.mark.parametrize("max_nodes", [1, 4, 30, None])


def some_trees(rng: np.random.Generator) -> list[RolloutTree]:
    """Ragged prompts and responses, duplicates, truncated ones; a tree of first tokens only, and one long response."""
    prompt = rng.integers(1, 17, 5).tolist()
    return [
        random_tree(rng),
        RolloutTree.from_responses([3], [(EOS,), (4,), (4,), (9,)], finished=[True, False, False, False]),
        random_tree(rng, branching=1),
        RolloutTree.from_responses(prompt, [rng.integers(1, 17, 25).tolist()], finished=[False]),
        random_tree(rng, num_rollouts=3, branching=10, max_length=12),
    ]


def node_means(trees: list[RolloutTree], flat: list[list[Tensor]]) -> list[np.ndarray]:
    """Log-prob of each node, averaged over the rollouts through it (all of which must agree)."""
    means = []
    for tree, rows in zip(trees, flat, strict=True):
        values: list[list[float]] = [[] for _ in range(tree.num_unique_tokens)]
        for (_, path), row in zip(rollouts(tree), rows, strict=True):
            for node, value in zip(path, row.tolist(), strict=True):
                values[node].append(value)
        assert max(np.ptp(v) for v in values) < 1e-12
        means.append(np.array([np.mean(v) for v in values]))
    return means


def weighted_sum(trees: list[RolloutTree], flat: list[list[Tensor]], weight: list[np.ndarray]) -> Tensor:
    """Sum over all rollouts and tokens, where each of a node's c rollouts carries 1/c of its weight."""
    total = torch.zeros((), dtype=torch.float64)
    for tree, rows, weight_M in zip(trees, flat, weight, strict=True):
        for (_, path), row in zip(rollouts(tree), rows, strict=True):
            total = total + (row * torch.from_numpy(weight_M[path] / tree.count[path])).sum()
    return total


@every_architecture
@every_size
def test_log_probs_and_gradients_equal_the_flattened_batch(
    architecture: str, max_nodes: int | None, rng: np.random.Generator
) -> None:
    temperature = float(rng.choice([1.0, 0.6]))
    model = small_model(architecture, seed=int(rng.integers(1 << 30)))
    model_pass = ModelPass(llama=architecture != "hooked")
    trees = some_trees(rng)
    weight = [rng.normal(size=t.num_unique_tokens) for t in trees]
    flat = flattened_logprobs(model, trees, temperature)
    expected = node_means(trees, flat)
    weighted_sum(trees, flat, weight).backward()
    flat_gradients = gradients(model)

    model.zero_grad()
    logprobs = tree_logprobs(
        model, trees, next_token=NextToken(temperature), max_nodes=max_nodes, model_pass=model_pass
    )
    for got, reference in zip(logprobs, expected, strict=True):
        np.testing.assert_allclose(got.detach().numpy(), reference, rtol=1e-10, atol=1e-12)
    sum((lp * torch.from_numpy(w)).sum() for lp, w in zip(logprobs, weight, strict=True)).backward()
    assert_same_gradients(gradients(model), flat_gradients)

    model.zero_grad()
    all_weights, all_expected = torch.from_numpy(np.concatenate(weight)), np.concatenate(expected)
    seen = []
    for chunk in chunk_logprobs(
        model, trees, next_token=NextToken(temperature), max_nodes=max_nodes, model_pass=model_pass
    ):
        index = chunk.index.numpy()
        np.testing.assert_allclose(chunk.logprob.detach().numpy(), all_expected[index], rtol=1e-10, atol=1e-12)
        (chunk.logprob * all_weights[chunk.index]).sum().backward()
        seen.extend(index.tolist())
    assert sorted(seen) == list(range(all_expected.size))
    assert_same_gradients(gradients(model), flat_gradients)


@pytest.mark.parametrize("llama", [False, True])
@pytest.mark.parametrize("padding", [None, EOS + 1])
def test_tied_embeddings_and_frozen_layers(llama: bool, padding: int | None, rng: np.random.Generator) -> None:
    """Tied weights get both gradients; a frozen first layer gets none, and the rest are as before.

    The embedding of a padding token gets none as an input, also where a chat template ends turns with that token.
    """
    model = small_model(seed=int(rng.integers(1 << 30)), tie_word_embeddings=True, pad_token_id=padding)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    trees = [*some_trees(rng), RolloutTree.from_responses([5, EOS + 1, 3], [(4, EOS), (9, EOS)])]
    weight = [rng.normal(size=t.num_unique_tokens) for t in trees]
    for frozen in (False, True):
        if frozen:
            for parameter in [*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()]:
                parameter.requires_grad_(False)
        model.zero_grad()
        weighted_sum(trees, flattened_logprobs(model, trees), weight).backward()
        expected = gradients(model)
        model.zero_grad()
        all_weights = torch.from_numpy(np.concatenate(weight))
        for chunk in chunk_logprobs(model, trees, max_nodes=10, model_pass=ModelPass(llama=llama)):
            (chunk.logprob * all_weights[chunk.index]).sum().backward()
        assert_same_gradients(gradients(model), expected)


def test_without_gradients_nothing_is_recorded_and_values_agree(rng: np.random.Generator) -> None:
    model, trees = small_model(seed=1), some_trees(rng)
    with torch.no_grad():
        plain = tree_logprobs(model, trees, max_nodes=7)
    recorded = tree_logprobs(model, trees, max_nodes=7)
    for a, b in zip(plain, recorded, strict=True):
        assert not a.requires_grad
        assert b.requires_grad
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-12)
    assert tree_logprobs(model, []) == []


def test_parts_without_a_backward_pass_leave_no_gradient(rng: np.random.Generator) -> None:
    model = small_model(seed=1)
    for _ in chunk_logprobs(model, some_trees(rng), max_nodes=7):
        pass
    assert all(p.grad is None for p in model.parameters())


def fed_tokens(model: PreTrainedModel, trees: list[RolloutTree], **options: int) -> int:
    """Tokens that go through the embedding during one pass over all parts, forward and backward."""
    fed: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, args, _out: fed.append(args[0].numel()))
    for chunk in chunk_logprobs(model, trees, **options):
        chunk.logprob.sum().backward()
    hook.remove()
    return sum(fed)


def test_work_does_not_grow_with_the_number_of_rollouts(rng: np.random.Generator) -> None:
    """Prompts once, nodes that have children once, last tokens never: for 1 or 1000 rollouts of each response alike."""
    model, trees = small_model(seed=1), some_trees(rng)
    many = []
    for tree in trees:
        responses, finished = [r for r, _ in tree.responses()], tree.finished.tolist()
        many.append(RolloutTree.from_responses(tree.prompt_ids, responses * 1000, finished=finished * 1000))
        assert many[-1].num_rollouts == 1000 * tree.num_responses
    inner = sum(np.unique(t.parent[t.parent >= 0]).size for t in trees)
    expected = sum(len(t.prompt_ids) for t in trees) + inner
    assert fed_tokens(model, trees, max_nodes=10_000) == expected
    assert fed_tokens(model, many, max_nodes=10_000) == expected


@pytest.mark.parametrize("max_nodes", [1, 5, 20, 100])
def test_chunks_are_no_larger_than_asked(max_nodes: int, rng: np.random.Generator) -> None:
    """A chunk feeds at most its own nodes and the ancestors of its first response, unless one response is longer."""
    model = small_model(seed=1)
    trees = [random_tree(rng, num_rollouts=40, branching=8, prompt_length=1) for _ in range(4)]
    longest = max(int(t.length.max()) for t in trees)
    fed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _m, args, _out: fed.append(args[0].numel()))
    sizes = [chunk.index.numel() for chunk in chunk_logprobs(model, trees, max_nodes=max_nodes)]
    assert max(fed) <= max(max_nodes, longest) + longest
    assert max(sizes) <= max(max_nodes, longest, max(int((t.parent < 0).sum()) for t in trees) * 4)
    assert len(sizes) >= sum(t.num_unique_tokens for t in trees) / (max_nodes + longest)


def test_default_chunk_shrinks_with_the_vocabulary_where_logits_are_whole() -> None:
    """Whole logits of a chunk stay near 2^27 numbers; between 128 and 1024 nodes, on CUDA 16384."""
    model, sizes = small_model(), {}
    for v in (17, 150_000, 4_000_000):
        model.config.vocab_size = v
        sizes[v] = default_max_nodes(model, whole_logits=True)
        assert default_max_nodes(model) == 1024
        assert default_max_nodes(model, device="cuda") == 16384
    assert sizes[17] == 1024
    assert 0.9 < sizes[150_000] * 150_000 / 2**27 <= 1
    assert sizes[4_000_000] == 128
