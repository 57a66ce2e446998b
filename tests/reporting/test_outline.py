"""Outlines of random trees, against the rollouts one by one."""

import re
from collections import Counter
from math import exp, isnan

import numpy as np
import pytest

from brorl.reporting.outline import Branch, lines_of, outline_of
from brorl.tree import RolloutTree
from made_up_runs import random_tree
from small_models import with_given


def letters(tokens: object) -> str:
    return "".join(chr(97 + t) for t in tokens)  # type: ignore[attr-defined]


def paths(branch: Branch, above: tuple[int, ...] = ()) -> dict[tuple[int, ...], Branch]:
    """Every branch by the tokens up to its end."""
    here = (*above, *branch.tokens)
    found = {here: branch}
    for below in branch.below.values():
        found |= paths(below, here)
    return found


def prefixes(tree: RolloutTree, correct_L: np.ndarray) -> tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]:
    """Rollouts, and correct ones, that begin with each prefix."""
    all_, right = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for (tokens, count), is_correct in zip(tree.responses(), correct_L, strict=True):
        for length in range(len(tokens) + 1):
            all_[tokens[:length]] += count
            right[tokens[:length]] += count * bool(is_correct)
    return all_, right


def test_an_outline_counts_what_the_rollouts_of_all_trees_do(rng: np.random.Generator) -> None:
    for _ in range(20):
        trees = [random_tree(rng, int(rng.integers(1, 40)), unknown=False) for _ in range(rng.integers(1, 3))]
        correct = [rng.random(tree.num_responses) < 0.4 for tree in trees]
        found = paths(outline_of(trees, correct))
        counted = [prefixes(tree, correct_L) for tree, correct_L in zip(trees, correct, strict=True)]
        for path, branch in found.items():
            assert branch.count_K == [all_[path] for all_, _ in counted]
            assert branch.correct_K == [right[path] for _, right in counted]
        ends = {tokens for tree in trees for tokens, _ in tree.responses()}
        assert ends <= set(found)  # no response is lost in a chain
        for k, tree in enumerate(trees):
            for (tokens, _), leaf in zip(tree.responses(), tree.leaf.tolist(), strict=True):
                nodes = tree.path(leaf)
                assert found[tokens].probability_K[k] == pytest.approx(exp(float(tree.logprob[nodes].sum())))
                for other in range(len(trees)):
                    if not found[tokens].count_K[other]:
                        assert isnan(found[tokens].probability_K[other])


def test_the_root_is_the_prompt_whatever_all_responses_share(rng: np.random.Generator) -> None:
    shared = rng.integers(0, 26, 3).tolist()
    tree = RolloutTree.from_responses((1,), [[*shared, i] for i in range(4)] * 2, finished=[True] * 8)
    for one in (tree, RolloutTree.from_responses((1,), [shared])):
        root = outline_of([one], [np.ones(one.num_responses, bool)])
        (first,) = root.below.values()
        assert (root.tokens, first.tokens, first.count_K) == ([], shared, [one.num_rollouts])
        assert [line.text for line in lines_of(root, letters, 10)][:2] == ["", letters(shared)]


def test_the_lines_show_the_largest_branches_and_count_the_rest(rng: np.random.Generator) -> None:
    tree = random_tree(rng, 60, unknown=False)
    root = outline_of([tree], [np.zeros(tree.num_responses, bool)])
    everything = lines_of(root, letters, 10_000)
    assert len(everything) == len(list(root.walk()))
    few = lines_of(root, letters, 6)
    shown = [line.branch for line in few if line.branch is not None]
    assert len(shown) == 6
    smallest = min(branch.count_K[0] for branch in shown)
    beside = [b for b in paths(root).values() if b not in shown and any(b in above.below.values() for above in shown)]
    assert all(branch.count_K[0] <= smallest for branch in beside)
    hidden = [re.fullmatch(r"\.\.\. (\d+) more, (\d+) rollouts?", line.text) for line in few if line.branch is None]
    assert sum(int(m[1]) for m in hidden if m) == len(everything) - len(shown)
    assert sum(int(m[2]) for m in hidden if m) == sum(branch.count_K[0] for branch in beside)


def test_results_are_branches_of_their_own(rng: np.random.Generator) -> None:
    for _ in range(10):
        tree = with_given(random_tree(rng, 30, unknown=False), rng)
        root = outline_of([tree], [rng.random(tree.num_responses) < 0.5])
        flag_of = {tuple(tree.token[tree.path(node)].tolist()): flag for node, flag in enumerate(tree.given.tolist())}
        for path, branch in paths(root).items():
            assert {flag_of[path[:end]] for end in range(len(path) - len(branch.tokens) + 1, len(path) + 1)} <= {
                branch.given
            }
            assert (branch.numbers(0, 30)[1] == "") == branch.given
        lines = lines_of(root, letters, 10_000, lambda tokens: letters(tokens).upper())
        texts = {line.text for line in lines if line.branch is not None and line.branch.given}
        expected = {"result: " + letters(b.tokens).upper() for b in root.walk() if b.given}
        assert texts == expected != set()
        assert {line.text for line in lines_of(root, letters, 10_000) if "result" in line.text} == {
            f"result: {text.removeprefix('result: ').lower()}" for text in texts
        }


def test_the_numbers_of_a_branch() -> None:
    branch = Branch([1], [1200, 0], [300, 0], [0.0123456, float("nan")])
    assert branch.numbers(0, 2000) == ("1,200", "0.012", "25%")
    assert branch.numbers(1, 2000) == ("", "", "")
    rare = Branch([1], [1], [1], [5.5e-30])
    assert rare.numbers(0, 2000) == ("1", "5.5e-30", "100%")


@pytest.mark.slow
def test_a_path_may_have_thousands_of_forks() -> None:
    """At each of them one rollout leaves; more than Python can recurse."""
    forks = 5_000
    ends = np.arange(forks - 1, 2 * forks)
    tree = RolloutTree(
        prompt_ids=(1,), token=np.repeat([0, 1], forks),
        parent=np.array([*range(-1, forks - 1), *range(forks - 2, -2, -1)]),
        count=np.array([*range(forks, 0, -1), *[1] * forks]), logprob=np.full(2 * forks, np.log(0.5)), leaf=ends,
        leaf_count=np.ones(len(ends), int), finished=np.ones(len(ends), bool),
    )  # fmt: skip
    root = outline_of([tree], [np.ones(tree.num_responses, bool)])
    assert len(list(root.walk())) == 1 + 2 * forks
    lines = lines_of(root, letters, 10)
    assert len(lines) == 10 + sum(line.branch is None for line in lines)
