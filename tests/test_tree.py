"""The rollout tree against plain loops over the rollouts it stands for."""

import pickle
from collections import Counter
from dataclasses import fields, replace
from itertools import groupby
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.tree import RolloutTree
from tree_invariants import check_tree

EOS = 0
ARRAYS = [f.name for f in fields(RolloutTree) if f.name != "prompt_ids"]
Responses = list[tuple[int, ...]]

tokens = st.integers(0, 3)
responses_of_one_prompt = st.lists(st.lists(tokens, min_size=1, max_size=6).map(tuple), min_size=1, max_size=20)


@st.composite
def rollouts_with_flags(draw: st.DrawFn) -> tuple[Responses, list[bool]]:
    responses = draw(responses_of_one_prompt)
    return responses, draw(st.lists(st.booleans(), min_size=len(responses), max_size=len(responses)))


def logprob_of(prefix: tuple[int, ...]) -> float:
    """Some log-prob that depends on the whole prefix, as a model's does."""
    return -1.0 - (hash(prefix) % 1000) / 1000


def all_prefixes(responses: Responses) -> list[tuple[int, ...]]:
    """Distinct prefixes; Python sorts tuples so that a prefix comes right before what extends it: preorder."""
    return sorted({r[:i] for r in responses for i in range(1, len(r) + 1)})


def build(responses: Responses, finished: list[bool] | None = None) -> RolloutTree:
    logprobs = [[logprob_of(r[: i + 1]) for i in range(len(r))] for r in responses]
    return RolloutTree.from_responses((7, 8), responses, logprobs, finished)


@given(rollouts_with_flags())
def test_round_trip_keeps_counts_and_finish_flags(rollouts: tuple[Responses, list[bool]]) -> None:
    responses, finished = rollouts
    tree = build(responses, finished)
    check_tree(tree)
    found = [(r, bool(f), c) for (r, c), f in zip(tree.responses(), tree.finished, strict=True)]
    assert Counter({(r, f): c for r, f, c in found}) == Counter(zip(responses, finished, strict=True))
    assert [(r, f) for r, f, _ in found] == sorted(set(zip(responses, finished, strict=True)))
    assert tree.prompt_ids == (7, 8)


@given(rollouts_with_flags())
def test_nodes_are_the_distinct_prefixes_in_order_with_their_counts(rollouts: tuple[Responses, list[bool]]) -> None:
    responses, finished = rollouts
    tree = build(responses, finished)
    prefixes = all_prefixes(responses)
    place = {prefix: i for i, prefix in enumerate(prefixes)} | {(): -1}
    assert tree.token.tolist() == [p[-1] for p in prefixes]
    assert tree.parent.tolist() == [place[p[:-1]] for p in prefixes]
    assert tree.count.tolist() == [sum(r[: len(p)] == p for r in responses) for p in prefixes]
    assert tree.logprob.tolist() == [logprob_of(p) for p in prefixes]
    assert tree.depth.tolist() == [len(p) - 1 for p in prefixes]
    below = [[q for q in prefixes if q[: len(p)] == p] for p in prefixes]
    assert tree.end.tolist() == [place[b[-1]] + 1 for b in below]
    assert tree.num_rollouts == len(responses)
    assert tree.num_sampled_tokens == sum(map(len, responses))
    assert tree.num_unique_tokens == len(prefixes)
    assert tree.num_responses == len(set(zip(responses, finished, strict=True)))
    for i, prefix in enumerate(prefixes):
        assert tree.path(i).tolist() == [place[prefix[:n]] for n in range(1, len(prefix) + 1)]


@given(rollouts_with_flags(), st.randoms(use_true_random=False))
def test_order_of_the_rollouts_does_not_matter(rollouts: tuple[Responses, list[bool]], random: Random) -> None:
    pairs = list(zip(*rollouts, strict=True))
    shuffled = list(pairs)
    random.shuffle(shuffled)
    first, second = (build([r for r, _ in p], [f for _, f in p]) for p in (pairs, shuffled))
    assert first == second
    assert first != build([*rollouts[0], (1, 2, 3)], [*rollouts[1], True])  # one rollout more
    assert first != replace(first, prompt_ids=(7, 9))


@given(rollouts_with_flags(), st.data())
def test_sum_below_equals_a_loop_over_responses(rollouts: tuple[Responses, list[bool]], data: st.DataObject) -> None:
    tree = build(*rollouts)
    size = tree.num_responses
    value_L = data.draw(st.lists(st.integers(-50, 50), min_size=size, max_size=size))
    expected = np.zeros(tree.num_unique_tokens)
    for leaf, value in zip(tree.leaf, value_L, strict=True):
        for node in tree.path(int(leaf)):
            expected[node] += value
    np.testing.assert_array_equal(tree.sum_below(np.array(value_L)), expected)
    np.testing.assert_array_equal(tree.sum_below(tree.leaf_count), tree.count)
    assert tree.length.tolist() == [len(tree.path(int(leaf))) for leaf in tree.leaf]


@given(rollouts_with_flags())
def test_sums_along_paths_equal_a_loop_over_prefixes(rollouts: tuple[Responses, list[bool]]) -> None:
    responses, finished = rollouts
    tree = build(responses, finished)
    expected = [sum(logprob_of(p[: i + 1]) for i in range(len(p))) for p in all_prefixes(responses)]
    np.testing.assert_allclose(tree.prefix_logprob, expected, rtol=1e-14)
    assert tree.sum_along_paths(np.ones(len(expected))).tolist() == [len(p) for p in all_prefixes(responses)]
    expected_L = [sum(logprob_of(r[: i + 1]) for i in range(len(r))) for r, _ in tree.responses()]
    np.testing.assert_allclose(tree.sum_over_responses(tree.logprob), expected_L, rtol=1e-14)


def test_sum_below_is_exactly_zero_where_all_responses_have_value_zero(rng: np.random.Generator) -> None:
    responses = [tuple(r) for r in rng.integers(0, 9, (200, 3)).tolist()]
    tree = RolloutTree.from_responses((1,), responses)
    value_L = np.where(rng.random(tree.num_responses) < 0.5, 0.0, rng.normal(size=tree.num_responses) * 1e9)
    alone = tree.leaf[value_L == 0]
    assert (tree.sum_below(value_L)[alone] == 0).all()


def is_given(prefix: tuple[int, ...]) -> bool:
    """Some choice of given tokens that depends on the whole prefix, as a tool's results do; first tokens never are."""
    return len(prefix) > 1 and hash((prefix, "given")) % 3 == 0


def with_an_end(responses: Responses) -> Responses:
    """The responses with one token more, a sampled one: a response never ends with a given token."""
    return [(*r, 4 + hash(r) % 2) for r in responses]


def build_given(
    responses: Responses, finished: list[bool] | None = None, counts: list[int] | None = None
) -> RolloutTree:
    given = [[is_given(r[: i + 1]) and i + 1 < len(r) for i in range(len(r))] for r in responses]
    logprobs = [[logprob_of(r[: i + 1]) for i in range(len(r))] for r in responses]
    return RolloutTree.from_responses((7, 8), responses, logprobs, finished, given, counts)


@given(rollouts_with_flags(), st.data())
def test_given_tokens_count_nowhere_as_sampled(rollouts: tuple[Responses, list[bool]], data: st.DataObject) -> None:
    responses, finished = with_an_end(rollouts[0]), rollouts[1]
    tree = build_given(responses, finished)
    check_tree(tree)
    prefixes = all_prefixes(responses)
    given_M = [is_given(p) and p[-1] < 4 for p in prefixes]
    assert tree.given.tolist() == given_M
    np.testing.assert_array_equal(
        tree.logprob, [0 if g else logprob_of(p) for p, g in zip(prefixes, given_M, strict=True)]
    )
    sampled = [[not is_given(r[: i + 1]) or i + 1 == len(r) for i in range(len(r))] for r in responses]
    assert tree.num_sampled_tokens == sum(map(sum, sampled))
    assert (tree.num_nodes, tree.num_given_tokens) == (len(prefixes), sum(given_M))
    assert tree.num_unique_tokens == len(prefixes) - sum(given_M)
    length_of = {r: (sum(row), len(r)) for r, row in zip(responses, sampled, strict=True)}
    lengths = zip(tree.length.tolist(), tree.total_length.tolist(), strict=True)
    assert list(lengths) == [length_of[r] for r, _ in tree.responses()]
    value_L = np.array([data.draw(st.floats(-9, 9)) for _ in range(tree.num_responses)])
    np.testing.assert_array_equal(tree.token_weights(value_L), np.where(given_M, 0, tree.sum_below(value_L)))


@given(rollouts_with_flags())
def test_turns_and_replies_are_the_stretches_of_a_response(rollouts: tuple[Responses, list[bool]]) -> None:
    tree = build_given(with_an_end(rollouts[0]), rollouts[1])
    num_turns, replies = 0, set()
    for (tokens, count), parts, turns in zip(tree.responses(), tree.parts(), tree.turns(), strict=True):
        flags = [is_given(tokens[: i + 1]) and i + 1 < len(tokens) for i in range(len(tokens))]
        stretches = [[i for i, _ in stretch] for _, stretch in groupby(enumerate(flags), lambda pair: pair[1])]
        assert parts == [(tuple(tokens[i] for i in stretch), flags[stretch[0]]) for stretch in stretches]
        assert turns == [part for part, is_reply in parts if not is_reply]
        num_turns += count * len(turns)
        replies |= {tokens[: stretch[0] + 1] for stretch in stretches if flags[stretch[0]]}
    assert tree.num_turns == num_turns
    assert [tuple(tree.token[tree.path(node)].tolist()) for node in tree.first_given.tolist()] == sorted(replies)


@given(rollouts_with_flags(), st.data())
def test_given_tokens_stay_in_parts_merges_and_counted_responses(
    rollouts: tuple[Responses, list[bool]], data: st.DataObject
) -> None:
    pairs = list(zip(with_an_end(rollouts[0]), rollouts[1], strict=True))
    tree = build_given(*map(list, zip(*pairs, strict=True)))
    assert pickle.loads(pickle.dumps(tree)) == tree
    cut = data.draw(st.integers(0, len(pairs)))
    parts = [build_given(*map(list, zip(*part, strict=True))) for part in (pairs[:cut], pairs[cut:]) if part]
    assert RolloutTree.merge(parts) == tree
    counted = list(Counter(pairs).items())
    assert build_given([r for (r, _), _ in counted], [f for (_, f), _ in counted], [c for _, c in counted]) == tree
    kept = sorted(data.draw(st.sets(st.integers(0, tree.num_responses - 1), min_size=1)))
    smaller, node_index = tree.select(np.array(kept))
    np.testing.assert_array_equal(smaller.given, tree.given[node_index])


def test_a_response_that_ends_with_a_given_token_is_refused() -> None:
    with pytest.raises(ValueError, match="must end with a sampled token"):
        RolloutTree.from_responses((1,), [(2, 3)], given=[[False, True]])


@given(rollouts_with_flags(), st.data())
def test_select_equals_rebuilding_from_the_kept_responses(
    rollouts: tuple[Responses, list[bool]], data: st.DataObject
) -> None:
    tree = build(*rollouts)
    kept = sorted(data.draw(st.sets(st.integers(0, tree.num_responses - 1), min_size=1)))
    smaller, node_index = tree.select(np.array(kept))
    repeated = [
        (r, f)
        for i, ((r, c), f) in enumerate(zip(tree.responses(), tree.finished.tolist(), strict=True))
        for _ in range(c)
        if i in kept
    ]
    assert smaller == build([r for r, _ in repeated], [f for _, f in repeated])
    for name in ("token", "logprob"):
        np.testing.assert_array_equal(getattr(smaller, name), getattr(tree, name)[node_index])


@given(rollouts_with_flags(), st.data())
def test_merge_equals_building_from_all_rollouts(rollouts: tuple[Responses, list[bool]], data: st.DataObject) -> None:
    pairs = list(zip(*rollouts, strict=True))
    part = data.draw(st.lists(st.integers(0, 2), min_size=len(pairs), max_size=len(pairs)))
    parts = [[pair for pair, i in zip(pairs, part, strict=True) if i == wanted] for wanted in range(3)]
    trees = [build([r for r, _ in p], [f for _, f in p]) for p in parts if p]
    merged = RolloutTree.merge(trees)
    assert merged == build(*rollouts)
    assert RolloutTree.merge([RolloutTree.merge(trees[:-1]), trees[-1]] if len(trees) > 1 else trees) == merged


def test_merge_keeps_the_log_prob_of_the_response_that_sorts_first_then_of_the_first_tree() -> None:
    first = RolloutTree.from_responses((1,), [[5, 7]], [[-0.5, -0.7]])
    second = RolloutTree.from_responses((1,), [[5, 7], [5, 6], [4]], [[-0.25, -0.1], [-0.3, -0.6], [-9.0]])
    assert RolloutTree.merge([first, second]).logprob.tolist() == [-9.0, -0.3, -0.6, -0.7]
    assert RolloutTree.merge([second, first]).logprob.tolist() == [-9.0, -0.3, -0.6, -0.1]
    unknown = RolloutTree.from_responses((1,), [[5, 7]])
    assert np.isnan(RolloutTree.merge([unknown, first]).logprob).all()


def test_only_trees_of_one_prompt_merge() -> None:
    trees = [RolloutTree.from_responses(prompt, [[3]]) for prompt in ((1,), (2,))]
    with pytest.raises(ValueError, match="got 2 trees of 2 prompts"):
        RolloutTree.merge(trees)
    with pytest.raises(ValueError, match="got 0 trees"):
        RolloutTree.merge([])


def test_known_tree_with_a_prefix_that_is_a_response_and_the_end_token_as_a_node() -> None:
    responses = [(5, 3, EOS), (5, 3), (5, EOS), (5, 3, EOS), (2, EOS)]
    tree = RolloutTree.from_responses([9], responses, finished=[r[-1] == EOS for r in responses])
    assert tree.token.tolist() == [2, EOS, 5, EOS, 3, EOS]
    assert tree.parent.tolist() == [-1, 0, -1, 2, 2, 4]
    assert tree.count.tolist() == [1, 1, 4, 1, 3, 2]
    assert tree.leaf.tolist() == [1, 3, 4, 5]
    assert tree.leaf_count.tolist() == [1, 1, 1, 2]
    assert tree.finished.tolist() == [True, True, False, True]
    assert np.isnan(tree.logprob).all()  # nobody gave any
    assert tree.end.tolist() == [2, 2, 6, 4, 6, 6]


def test_a_shared_node_keeps_the_log_prob_of_the_response_that_sorts_first() -> None:
    tree = RolloutTree.from_responses((1,), [(2, 4), (2, 3)], [[-0.5, -0.6], [-0.7, -0.8]])
    assert tree.logprob.tolist() == [-0.7, -0.8, -0.6]


def test_large_random_tree_agrees_with_loops(rng: np.random.Generator) -> None:
    """Deep and wide: chains longer than hypothesis draws, so that pointer doubling and subtree ends are exercised."""
    responses = [
        (*(rng.random(rng.integers(1, 120)) < 0.05).astype(int).tolist(), int(rng.integers(2, 50_000)))
        for _ in range(300)
    ]
    tree = RolloutTree.from_responses((1,), responses)
    check_tree(tree)
    prefixes = all_prefixes(responses)
    assert tree.depth.tolist() == [len(p) - 1 for p in prefixes]
    end = list(range(1, len(prefixes) + 1))
    for node in range(len(prefixes) - 1, -1, -1):
        if tree.parent[node] >= 0:
            end[tree.parent[node]] = max(end[tree.parent[node]], end[node])
    assert tree.end.tolist() == end
    assert Counter(dict(tree.responses())) == Counter(responses)


def test_repr_is_one_short_line(rng: np.random.Generator) -> None:
    tree = RolloutTree.from_responses([9, 8], [[1, 2], [1, 3], [1, 2]])
    assert repr(tree) == "RolloutTree(3 rollouts, 2 distinct responses, 3 nodes, prompt of 2 tokens)"
    large = RolloutTree.from_responses([5], rng.integers(0, 50, (2000, 30)).tolist())
    assert len(repr(large)) < 120
    assert "\n" not in repr(large)


def test_arrays_are_read_only() -> None:
    tree = build([(1, 2), (1, 3)])
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(tree, name)[0] = 1


def test_a_pickled_tree_has_its_fields_alone_and_they_are_read_only(rng: np.random.Generator) -> None:
    tree = RolloutTree.from_responses([5], rng.integers(0, 3, (200, 30)).tolist())
    size = len(pickle.dumps(tree))
    tree.prefix_logprob, tree.end, tree.length  # noqa: B018  (cached from here on)
    stored = pickle.dumps(tree)
    assert len(stored) == size
    again = pickle.loads(stored)
    assert again == tree
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(again, name), getattr(tree, name))
        assert getattr(again, name).dtype == getattr(tree, name).dtype
        assert not getattr(again, name).flags.writeable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"responses": []}, "at least one response"),
        ({"responses": [(1,), ()]}, "at least one token"),
        ({"responses": [(1, -1)]}, "negative"),
        ({"responses": [(1, 2)], "logprobs": [[-1.0]]}, "one number per token"),
        ({"responses": [(1, 2)], "logprobs": []}, "one number per token"),
        ({"responses": [(1, 2)], "finished": [True, False]}, "2 entries for 1 response"),
        ({"responses": [(1, 2)], "given": [[False]]}, "given must contain one number per token"),
        ({"responses": [(1, 2)], "counts": [1, 1]}, "counts has 2 entries for 1 response"),
    ],
)
def test_from_responses_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutTree.from_responses((1,), **arguments)


@pytest.mark.parametrize("name", ARRAYS)
def test_lengths_must_agree(name: str) -> None:
    tree = build([(1, 2), (1, 3), (4,)])
    for wrong, message in ((getattr(tree, name)[:-1], "of equal length"), ([getattr(tree, name)], "one-dimensional")):
        with pytest.raises(ValueError, match=message):
            replace(tree, **{name: wrong})


def test_a_tree_without_responses_is_refused() -> None:
    empty: dict = {name: [] for name in ARRAYS}
    with pytest.raises(ValueError, match="at least one response"):
        RolloutTree(prompt_ids=(1,), **empty)
