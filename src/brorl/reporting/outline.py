"""Rollout trees of one prompt as an outline: chains of tokens with counts, probabilities and correct fractions.

Several trees of the same prompt, such as before and after training, share one outline. A branch is a chain of tokens
without a fork. Its probability is the probability of the text up to its end, under the policy that sampled it. Paths
may have any number of forks, so nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import exp, isnan, nan

import numpy as np
from numpy.typing import NDArray

from brorl.format import counted, probability, visible_text
from brorl.tree import RolloutTree


@dataclass(eq=False)
class Branch:
    """A chain of tokens and the branches that follow it, with one number for each of K trees."""

    tokens: list[int]
    count_K: list[int]  # rollouts that pass through it
    correct_K: list[int]  # correct ones among them
    probability_K: list[float]  # of the text up to its end; NaN if a tree has no rollout here
    ends: bool  # whether responses end with it
    branches: list[Branch] = field(default_factory=list, repr=False)  # in the order of falling counts in the last tree

    @property
    def size(self) -> int:
        """Number of branches below it."""
        return sum(1 for _ in _walk(self)) - 1


def _walk(root: Branch) -> Iterator[Branch]:
    """Yield a branch and all branches below it, each after the one above it."""
    waiting = [root]
    while waiting:
        branch = waiting.pop()
        yield branch
        waiting += branch.branches


@dataclass(frozen=True)
class Line:
    """A line of a drawn outline."""

    stem: str  # the lines that connect it
    text: str
    branch: Branch | None  # None for a line about branches that are not shown


def outline_of(trees: Sequence[RolloutTree], correct: Sequence[NDArray[np.bool_]]) -> Branch:
    """Join K trees of one prompt; `correct` marks the correct distinct responses of each tree."""
    if not trees:
        raise ValueError("an outline needs at least one tree")
    number = len(trees)
    root = Branch([], [tree.num_rollouts for tree in trees], [0] * number, [1.0] * number, ends=False)
    below: dict[int, dict[int, Branch]] = {id(root): {}}
    for k, (tree, correct_L) in enumerate(zip(trees, correct, strict=True)):
        correct_M = tree.sum_below(tree.leaf_count * correct_L)
        root.correct_K[k] = int(tree.leaf_count @ correct_L)
        at: list[Branch] = []
        for node, (token, parent) in enumerate(zip(tree.token.tolist(), tree.parent.tolist(), strict=True)):
            above = root if parent < 0 else at[parent]
            found = below[id(above)].get(token)
            if found is None:
                found = Branch([token], [0] * number, [0] * number, [nan] * number, ends=False)
                below[id(above)][token] = found
                below[id(found)] = {}
                above.branches.append(found)
            found.count_K[k], found.correct_K[k] = int(tree.count[node]), round(float(correct_M[node]))
            found.probability_K[k] = exp(float(tree.prefix_logprob[node]))
            at.append(found)
        for node in tree.leaf.tolist():
            at[node].ends = True
    for branch in _walk(root):  # the root is the prompt; no token joins it
        for one in branch.branches:
            _join(one)
        branch.branches.sort(key=lambda b: (b.count_K[-1], b.count_K), reverse=True)
    return root


def _join(branch: Branch) -> None:
    """Join the tokens that follow without a fork."""
    while len(branch.branches) == 1 and not branch.ends and branch.branches[0].count_K == branch.count_K:
        (only,) = branch.branches
        branch.tokens += only.tokens
        branch.correct_K, branch.probability_K = only.correct_K, only.probability_K
        branch.ends, branch.branches = only.ends, only.branches


def lines_of(root: Branch, decode: Callable[[Sequence[int]], str], num_lines: int) -> list[Line]:
    """Draw the branches with the most rollouts in about `num_lines` lines or fewer."""
    shown = {id(branch) for branch in _largest(root, num_lines)}
    lines: list[Line] = []
    waiting: list[tuple[Branch | str, str, str]] = [(root, "", "")]  # what is drawn, its stem, and the stem below it
    while waiting:
        branch, stem, below = waiting.pop()
        if isinstance(branch, str):
            lines.append(Line(stem, branch, None))
            continue
        lines.append(Line(stem, visible_text(decode(branch.tokens), one_line=True), branch))
        following: list[Branch | str] = [one for one in branch.branches if id(one) in shown]
        if hidden := [one for one in branch.branches if id(one) not in shown]:
            more, rollouts = sum(1 + one.size for one in hidden), sum(one.count_K[-1] for one in hidden)
            following.append(f"... {more} more, {counted(rollouts, 'rollout')}")
        for one in following[::-1]:
            last = one is following[-1]
            waiting.append((one, below + ("└ " if last else "├ "), below + ("  " if last else "│ ")))
    return lines


def _largest(root: Branch, number: int) -> list[Branch]:
    """Return the branches with the most rollouts in any tree, each after the branch above it."""
    found: list[Branch] = []
    order = count()  # of equal branches, the first one found
    candidates = [(0, next(order), root)]
    while candidates and len(found) < number:
        _, _, best = heappop(candidates)
        found.append(best)
        for branch in best.branches:
            heappush(candidates, (-max(branch.count_K), next(order), branch))
    return found


def numbers_of(branch: Branch, k: int, num_rollouts: int) -> tuple[str, str, str]:
    """Return the count, the probability and the correct fraction of a branch in one tree as text."""
    number, known = branch.count_K[k], branch.probability_K[k]
    if not number:
        return "", "", ""
    certain = known if not isnan(known) else number / num_rollouts
    return f"{number:,}", probability(certain), f"{branch.correct_K[k] / number:.0%}"
