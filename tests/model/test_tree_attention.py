"""Attention pieces against dense softmax written out."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.model.logits import softmax_lse
from brorl.model.tree_attention import (
    Grouping,
    HooksError,
    PartialAttention,
    PromptCache,
    attend_prompt,
    prefill,
    tree_attention,
)
from brorl.model.tree_batch import ChunkSlice, TreeBatch, split_into_chunks
from brorl.tree import RolloutTree
from small_models import ARCHITECTURES, random_tree, small_model


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


def test_merged_parts_equal_one_softmax_over_all_keys(rng: np.random.Generator) -> None:
    score, value = normal(rng, 6, 3, 20) * 40, normal(rng, 6, 20, 5)
    score[:2, :, :7] -= 900.0  # one part outweighs the other beyond the range of exp
    score[2:4, :, 8:] -= 900.0
    score[4, :, 1:12] = -torch.inf
    expected = torch.softmax(score, dim=-1) @ value
    for split in (1, 8, 19):
        first, second = (PartialAttention.over(score[..., s].clone(), value[:, s]) for s in split_at(split))
        torch.testing.assert_close(first.merged(second), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(second.merged(first), expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_merged_parts_equal_finite_differences(rng: np.random.Generator) -> None:
    inputs = [normal(rng, 2, 3, 4), normal(rng, 2, 3, 5), normal(rng, 2, 4, 2), normal(rng, 2, 5, 2)]
    inputs[0][0, :, 2:] = -20.0

    def merged(score_a: Tensor, score_b: Tensor, value_a: Tensor, value_b: Tensor) -> Tensor:
        return PartialAttention.over(score_a * 1.0, value_a).merged(PartialAttention.over(score_b * 1.0, value_b))

    assert_gradients(merged, inputs)


def assert_gradients(function: Callable, inputs: list[Tensor]) -> None:
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(function, leaves, rtol=1e-6, atol=1e-8, check_undefined_grad=False)


def test_softmax_and_its_log_sum_exp_with_masked_scores(rng: np.random.Generator) -> None:
    score = normal(rng, 5, 4, 7)
    score[0] *= 300.0
    score[1, :, 3:] = -torch.inf
    score[2, 1] = 2.0  # all equal
    weight, lse = softmax_lse(score.clone())
    torch.testing.assert_close(weight, torch.softmax(score, -1), rtol=1e-13, atol=0)
    torch.testing.assert_close(lse, torch.logsumexp(score, -1), rtol=1e-13, atol=1e-13)
    assert (weight[1, :, 3:] == 0).all()
    finite = score[2:].clone()
    for chosen in (lambda s: softmax_lse(s)[0], lambda s: softmax_lse(s)[1], lambda s: softmax_lse(s)):
        assert_gradients(chosen, [finite])


def split_at(place: int) -> tuple[slice, slice]:
    return slice(0, place), slice(place, None)


@pytest.mark.parametrize("num_prompts", [1, 4])
def test_grouping_places_every_token_with_its_prompt_and_brings_it_back(
    num_prompts: int, rng: np.random.Generator
) -> None:
    prompt_T = rng.integers(0, num_prompts, 25)
    grouping = Grouping(prompt_T, num_prompts, torch.device("cpu"))
    x_T = normal(rng, 25, 3)
    grid = grouping.spread(x_T)
    torch.testing.assert_close(grouping.gather(grid), x_T, rtol=0, atol=0)
    for p in range(num_prompts):
        cells = {tuple(row) for row in grid[p].tolist()}
        assert {tuple(row) for row in x_T[prompt_T == p].tolist()} <= cells


def random_cache(rng: np.random.Generator, lengths: list[int], kv_heads: int, head_dim: int) -> PromptCache:
    """Prompts of ragged lengths; the padding holds large numbers that must not matter."""
    longest = max(lengths)
    key, value = (normal(rng, len(lengths), kv_heads, longest, head_dim) for _ in range(2))
    bias = torch.zeros(len(lengths), 1, longest, dtype=torch.float64)
    for p, length in enumerate(lengths):
        key[p, :, length:], value[p, :, length:], bias[p, :, length:] = 50.0, 50.0, -torch.inf
    return PromptCache([key], [value], bias if min(lengths) < longest else None, np.array(lengths))


@pytest.mark.parametrize("lengths", [[4], [3, 1, 6], [2, 2]])
def test_attention_to_prompts_equals_dense_attention(lengths: list[int], rng: np.random.Generator) -> None:
    cache = random_cache(rng, lengths, kv_heads=2, head_dim=3)
    prompt_T = rng.integers(0, len(lengths), 12)
    query = normal(rng, 12, 4, 3)
    own_key, own_value = normal(rng, 12, 3, 2, 3), normal(rng, 12, 3, 2, 3)  # three keys of its own for each token
    own_score = torch.einsum("thd,tshd->ths", query, own_key.repeat_interleave(2, dim=2))[:, :, None]
    own = PartialAttention.over(own_score.clone(), own_value.transpose(1, 2).repeat_interleave(2, dim=1))
    own = PartialAttention(*(x.flatten(1, 2) for x in own))
    got = attend_prompt(query, cache, 0, Grouping(prompt_T, len(lengths), query.device)).merged(own)
    for t, p in enumerate(prompt_T):
        key, value = (x[0][p, :, : lengths[p]].transpose(0, 1) for x in (cache.key, cache.value))
        expected = dense_attention(query[t], torch.cat([key, own_key[t]]), torch.cat([value, own_value[t]]))
        torch.testing.assert_close(got[t], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_nodes", [1, 6, 1000])
def test_fed_nodes_attend_to_their_prompt_and_their_path(max_nodes: int, rng: np.random.Generator) -> None:
    """Every chunk of random trees; queries, keys and values are random, the reference walks up the tree."""
    trees = [random_tree(rng, prompt_length=n, branching=4) for n in (3, 1, 5)]
    cache = random_cache(rng, [3, 1, 5], kv_heads=2, head_dim=3)
    offsets = np.cumsum([0] + [t.num_unique_tokens for t in trees])[:-1]
    for pieces in split_into_chunks(trees, max_nodes):
        batch = TreeBatch(trees, offsets, pieces, cache)
        if not batch.target_index.numel():
            continue
        fed = [(piece.tree, node) for piece in pieces for node in nodes_to_feed(trees[piece.tree], piece)]
        assert batch.token_F.tolist() == [int(trees[p].token[node]) for p, node in fed]
        assert batch.position_F.tolist() == [len(trees[p].prompt_ids) + int(trees[p].depth[node]) for p, node in fed]
        query, key, value = normal(rng, len(fed), 4, 3), normal(rng, len(fed), 2, 3), normal(rng, len(fed), 2, 3)
        got = batch.context(cache).attend(0, query, key, value)
        place = {pair: i for i, pair in enumerate(fed)}
        for i, (p, node) in enumerate(fed):
            path = [place[p, int(n)] for n in trees[p].path(node)]
            own = [x[p, :, : len(trees[p].prompt_ids)].transpose(0, 1) for x in (cache.key[0], cache.value[0])]
            expected = dense_attention(query[i], torch.cat([own[0], key[path]]), torch.cat([own[1], value[path]]))
            torch.testing.assert_close(got[i], expected, rtol=1e-12, atol=1e-12)


def nodes_to_feed(tree: RolloutTree, piece: ChunkSlice) -> list[int]:
    """Nodes with children that responses [start, stop) pass through and no earlier response's chunk has owned..."""
    mine = [set(tree.path(int(leaf)).tolist()) for leaf in tree.leaf[piece.start : piece.stop]]
    earlier = {n for leaf in tree.leaf[: piece.start] for n in tree.path(int(leaf)).tolist()}
    owned = set().union(*mine) - earlier
    inner = {int(tree.parent[n]) for n in owned if tree.parent[n] >= 0}
    above = {int(a) for n in inner for a in tree.path(n)}  # ...and all of their ancestors
    return sorted(above)


@pytest.mark.parametrize("max_nodes", [1, 3, 10, 40, 10_000])
def test_cut_hands_out_every_response_once_and_in_order(max_nodes: int, rng: np.random.Generator) -> None:
    trees = [random_tree(rng, num_rollouts=int(rng.integers(1, 30)), branching=6) for _ in range(5)]
    chunks = list(split_into_chunks(trees, max_nodes))
    pieces = [piece for chunk in chunks for piece in chunk]
    handed_out = [(piece.tree, leaf) for piece in pieces for leaf in range(piece.start, piece.stop)]
    assert handed_out == [(p, leaf) for p, tree in enumerate(trees) for leaf in range(tree.num_responses)]
    assert all(piece.start < piece.stop for piece in pieces)
    sizes, responses = [], []
    for chunk in chunks:
        sizes.append(0)
        responses.append(sum(piece.stop - piece.start for piece in chunk))
        for piece in chunk:
            leaf = trees[piece.tree].leaf
            sizes[-1] += int(leaf[piece.stop - 1] - (leaf[piece.start - 1] if piece.start else -1))
    assert sum(sizes) == sum(t.num_unique_tokens for t in trees)
    assert all(size <= max_nodes or count == 1 for size, count in zip(sizes, responses, strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_equals_the_models_own_cache_and_logits(architecture: str, rng: np.random.Generator) -> None:
    model = small_model(architecture, seed=int(rng.integers(1 << 30)))
    prompts = [rng.integers(0, 17, n).tolist() for n in (5, 1, 9, 9)]
    with torch.no_grad():
        with tree_attention(model):
            cache, logits = prefill(model, prompts)
        for cached, order in ((cache, range(4)), (cache.select(np.array([2, 0])), (2, 0))):
            for row, p in enumerate(order):
                plain = model(input_ids=torch.tensor([prompts[p]]), use_cache=True)
                torch.testing.assert_close(logits[p], plain.logits[0, -1], rtol=1e-11, atol=1e-12)
                assert int(cached.length[row]) == len(prompts[p])
                for layer, (key, value) in enumerate(zip(cached.key, cached.value, strict=True)):
                    own = plain.past_key_values.layers[layer]
                    torch.testing.assert_close(key[row][:, : len(prompts[p])], own.keys[0], rtol=1e-11, atol=1e-12)
                    torch.testing.assert_close(value[row][:, : len(prompts[p])], own.values[0], rtol=1e-11, atol=1e-12)


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
        prefill(model, [rng.integers(0, 17, 4).tolist()])
