"""Rollout trees of one prompt as an outline: chains of tokens with counts, probabilities and correct fractions.

Several trees of the same prompt, such as those before and after training, share one outline. A branch is a chain of
tokens without a fork. The probability of a branch is that of its text up to there, under the policy that sampled it.
Paths may have any number of forks, so nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from html import escape
from itertools import count
from math import exp, isnan, nan

import numpy as np
from numpy.typing import NDArray

from brorl.format import counted, probability
from brorl.reporting.visible_text import visible_text
from brorl.tree import RolloutTree

_COLORS = ((214, 96, 77), (247, 233, 168), (76, 161, 108))  # incorrect, half, correct
_OPENED = 0.1  # a branch of the page is open if this fraction of the rollouts of a tree pass through it
_STYLE = """body{font:14px/1.5 ui-monospace,monospace;margin:2em;color:#2b2f36}
h1{font-size:1.4em}.n,.p{flex:none;display:inline-block;width:4.5em;color:#5b626d;text-align:right;white-space:nowrap}
.p{width:5.5em;margin-right:1.2em}.names{padding-left:1em;margin-bottom:.3em}
summary{display:flex;align-items:baseline;list-style:none}summary::-webkit-details-marker{display:none}
summary::before{content:"▸";flex:none;width:1em}details[open]>summary::before{content:"▾"}
.leaf>summary::before{content:""}summary:hover{background:#f3f4f6}
b{font-weight:600;border-radius:3px;padding:0 .2em;white-space:pre-wrap;overflow-wrap:anywhere;min-width:2em}"""


@dataclass(eq=False)
class Branch:
    """A chain of tokens, and what follows it; one number for each of K trees."""

    tokens: list[int]
    count_K: list[int]  # rollouts that pass through it
    correct_K: list[int]  # correct ones among them
    probability_K: list[float]  # of its text; NaN if a tree has no rollout here
    ends: bool  # whether responses end with it
    branches: list[Branch] = field(default_factory=list, repr=False)  # by falling count in the last tree

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
    """Join K trees of one prompt; `correct` says for each of them which distinct responses are correct.

    Raises:
        ValueError: If there is no tree.
    """
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
    """Draw an outline in at most about `num_lines` lines: the branches with the most rollouts.

    Args:
        root: The outline.
        decode: Token ids to text.
        num_lines: Number of branches to show, at least 1.
    """
    shown = {id(branch) for branch in _largest(root, num_lines)}
    lines: list[Line] = []
    waiting: list[tuple[Branch | str, str, str]] = [(root, "", "")]  # what is drawn, its stem, and that of what follows
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
    """Return the branches with the most rollouts in any tree; a branch never without the one above it."""
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


def outline_page(
    title: str, prompt: str, names: Sequence[str], root: Branch, decode: Callable[[Sequence[int]], str], verified: bool
) -> str:
    """Return an outline as one HTML page without scripts; every branch can be opened and closed."""
    headings = "".join(f'<span class="n">{escape(name)}</span><span class="p"></span>' for name in names)
    body = "".join(_details(root, decode, prompt, verified))
    legend = "count, and the probability of the text up to there" + (
        "; color: from incorrect (red) to correct (green)" if verified else ""
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1><p>{escape(legend)}</p><p class="names">{headings}</p>{body}</body></html>
"""


def _details(root: Branch, decode: Callable[[Sequence[int]], str], prompt: str, verified: bool) -> Iterator[str]:
    """Yield the parts of the outline: a branch, what is below it, and its end."""
    waiting: list[tuple[Branch | None, int]] = [(root, 0)]  # with its depth; None is the end of a branch
    while waiting:
        branch, depth = waiting.pop()
        if branch is None:
            yield "</details>"
            continue
        numbers, is_large = [], False
        for k, total in enumerate(root.count_K):
            number, certain, _ = numbers_of(branch, k, total)
            numbers.append(f'<span class="n">{number}</span><span class="p">{certain}</span>')
            is_large = is_large or branch.count_K[k] >= _OPENED * max(total, 1)
        text = prompt if branch is root else visible_text(decode(branch.tokens), one_line=True)
        color = f";background:{_color(branch)}" if verified else ""
        shown = f'<b style="margin-left:min({1.2 * depth:.1f}em,40vw){color}">{escape(visible_text(text))}</b>'
        kind = "" if branch.branches else ' class="leaf"'
        yield f"<details{kind}{' open' if is_large else ''}><summary>{''.join(numbers)}{shown}</summary>"
        waiting.append((None, depth))
        waiting += [(below, depth + 1) for below in branch.branches[::-1]]


def _color(branch: Branch) -> str:
    """Return the color of the correct fraction in the last tree that has rollouts here."""
    k = next(k for k in reversed(range(len(branch.count_K))) if branch.count_K[k])
    fraction = 2 * branch.correct_K[k] / branch.count_K[k]
    low, high = (_COLORS[0], _COLORS[1]) if fraction < 1 else (_COLORS[1], _COLORS[2])
    part = fraction % 1 if fraction < 2 else 1.0
    mixed = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return f"rgb({','.join(map(str, mixed))})"
