"""The outline of one or more rollout trees of a prompt: its branches, and the lines that draw the largest ones.

A branch is a chain of tokens without a fork, either all sampled or all given. Its probability is that of the text up to
its end under the policy that sampled it. A path can have thousands of forks, so nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, isnan, nan
from typing import NamedTuple

from brorl.arrays import BoolArray
from brorl.format import counted, probability, visible_text
from brorl.tree import RolloutTree


@dataclass(eq=False)
class Branch:
    """A chain of tokens and the branches that follow it; lists hold one number per tree, shape [K]."""

    tokens: list[int]
    count_K: list[int]  # rollouts that pass through the branch
    correct_K: list[int]  # correct rollouts that pass through the branch
    probability_K: list[float]  # P(text up to the branch's end); NaN if the tree has no rollout here
    ends: bool = False  # whether responses end with the branch
    given: bool = False  # whether the branch is a tool result
    # the branches that follow, by first token; those with the most rollouts in the last tree come first
    below: dict[int, Branch] = field(default_factory=dict, repr=False)

    def walk(self) -> Iterator[Branch]:
        """Yield this branch and all its descendants, parents first."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting += branch.below.values()

    def numbers(self, k: int, num_rollouts: int) -> tuple[str, str, str]:
        """Return the count, the probability and the fraction correct in one tree as text; empty without rollouts.

        A tool result has no probability.
        """
        number = self.count_K[k]
        known = self.probability_K[k]
        if not number:
            return "", "", ""
        chance = number / num_rollouts if isnan(known) else known
        return f"{number:,}", "" if self.given else probability(chance), f"{self.correct_K[k] / number:.0%}"


class Line(NamedTuple):
    """A line of a drawn outline."""

    stem: str  # connecting characters on the left, such as `│ ├ `
    text: str
    branch: Branch | None  # None for a line about omitted branches


def outline_of(trees: Sequence[RolloutTree], correct: Sequence[BoolArray]) -> Branch:
    """Join K trees of one prompt, which is the root; `correct` marks the correct distinct responses of each tree."""
    number = len(trees)
    root = Branch([], [tree.num_rollouts for tree in trees], [0] * number, [1.0] * number)
    for k, (tree, correct_L) in enumerate(zip(trees, correct, strict=True)):
        correct_M = tree.sum_below(tree.leaf_count * correct_L)
        root.correct_K[k] = int(tree.leaf_count @ correct_L)
        at: list[Branch] = []
        for node, (token, parent) in enumerate(zip(tree.token.tolist(), tree.parent.tolist(), strict=True)):
            above = (root if parent < 0 else at[parent]).below
            branch = above.setdefault(token, Branch([token], [0] * number, [0] * number, [nan] * number))
            branch.given = bool(tree.given[node])
            branch.count_K[k], branch.correct_K[k] = int(tree.count[node]), round(float(correct_M[node]))
            branch.probability_K[k] = exp(float(tree.prefix_logprob[node]))
            at.append(branch)
        for node in tree.leaf.tolist():
            at[node].ends = True
    for branch in root.walk():  # each branch except the prompt absorbs tokens up to the next fork
        while branch is not root and len(branch.below) == 1 and not branch.ends:
            (only,) = branch.below.values()
            if only.count_K != branch.count_K or only.given != branch.given:
                break
            branch.tokens += only.tokens
            branch.correct_K, branch.probability_K = only.correct_K, only.probability_K
            branch.ends, branch.below = only.ends, only.below
        following = sorted(branch.below.items(), key=lambda item: (item[1].count_K[-1], item[1].count_K), reverse=True)
        branch.below = dict(following)
    return root


def lines_of(
    root: Branch,
    decode: Callable[[Sequence[int]], str],
    num_lines: int,
    decode_reply: Callable[[Sequence[int]], str] | None = None,
) -> list[Line]:
    """Draw the `num_lines` branches with the most rollouts in any tree, and a line where branches are omitted."""
    largest = sorted(root.walk(), key=lambda branch: -max(branch.count_K))[:num_lines]  # parents first
    shown = {id(branch) for branch in largest}
    lines: list[Line] = []
    waiting: list[tuple[Branch | str, str, str]] = [(root, "", "")]  # (item to draw, its stem, stem of lines below)
    while waiting:
        branch, stem, below = waiting.pop()
        if isinstance(branch, str):
            lines.append(Line(stem, branch, None))
            continue
        text = (decode_reply if decode_reply and branch.given else decode)(branch.tokens)
        lines.append(Line(stem, "result: " * branch.given + visible_text(text, one_line=True), branch))
        children: list[Branch | str] = [child for child in branch.below.values() if id(child) in shown]
        if hidden := [child for child in branch.below.values() if id(child) not in shown]:
            more = sum(1 for child in hidden for _ in child.walk())
            rollouts = sum(child.count_K[-1] for child in hidden)
            children.append(f"... {more} more, {counted(rollouts, 'rollout')}")
        for child in children[::-1]:
            last = child is children[-1]
            waiting.append((child, below + ("└ " if last else "├ "), below + ("  " if last else "│ ")))
    return lines
