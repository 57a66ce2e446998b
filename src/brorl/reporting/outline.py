"""Rollout trees of one prompt as an outline: chains of tokens with counts, probabilities and correct fractions.

Several trees of the same prompt, such as those before and after training, share one outline. A branch is a chain of
tokens without a fork. The probability of a branch is that of its text up to there, under the policy that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import exp, isnan, nan

import numpy as np
from numpy.typing import NDArray

from brorl.format import counted, plain
from brorl.reporting.visible_text import visible_text
from brorl.tree import RolloutTree

_COLORS = ((214, 96, 77), (247, 233, 168), (76, 161, 108))  # incorrect, half, correct


@dataclass
class Branch:
    """A chain of tokens, and what follows it; one number for each of K trees."""

    tokens: list[int]
    count_K: list[int]  # rollouts that pass through it
    correct_K: list[int]  # correct ones among them
    probability_K: list[float]  # of its text; NaN if a tree has no rollout here
    ends: bool  # whether responses end with it
    branches: list[Branch] = field(default_factory=list)  # by falling count in the last tree

    @property
    def size(self) -> int:
        """Number of branches below it."""
        return sum(1 + branch.size for branch in self.branches)


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
    root.branches = _joined(root.branches)  # the root is the prompt; no token joins it
    return root


def _joined(branches: Sequence[Branch]) -> list[Branch]:
    """Join tokens without a fork to chains, and sort."""
    return sorted(map(_chained, branches), key=lambda b: (b.count_K[-1], b.count_K), reverse=True)


def _chained(branch: Branch) -> Branch:
    while len(branch.branches) == 1 and not branch.ends and branch.branches[0].count_K == branch.count_K:
        (only,) = branch.branches
        branch = Branch(
            branch.tokens + only.tokens, only.count_K, only.correct_K, only.probability_K, only.ends, only.branches
        )
    branch.branches = _joined(branch.branches)
    return branch


def lines_of(root: Branch, decode: Callable[[Sequence[int]], str], num_lines: int) -> list[Line]:
    """Draw an outline in at most about `num_lines` lines: the branches with the most rollouts.

    Args:
        root: The outline.
        decode: Token ids to text.
        num_lines: Number of branches to show, at least 1.
    """
    shown = {id(branch) for branch in _largest(root, num_lines)}

    def draw(branch: Branch, stem: str, first: str, rest: str) -> Iterator[Line]:
        yield Line(stem + first, visible_text(decode(branch.tokens), one_line=True), branch)
        visible = [b for b in branch.branches if id(b) in shown]
        hidden = [b for b in branch.branches if id(b) not in shown]
        for i, one in enumerate(visible):
            last = i == len(visible) - 1 and not hidden
            yield from draw(one, stem + rest, "└ " if last else "├ ", "  " if last else "│ ")
        if hidden:
            rollouts = sum(b.count_K[-1] for b in hidden)
            more = sum(1 + b.size for b in hidden)
            yield Line(stem + rest + "└ ", f"... {more} more, {counted(rollouts, 'rollout')}", None)

    return list(draw(root, "", "", ""))


def _largest(root: Branch, number: int) -> list[Branch]:
    """Return the branches with the most rollouts in any tree; a branch never without the one above it."""
    found, candidates = [root], list(root.branches)
    while candidates and len(found) < number:
        best = max(candidates, key=lambda branch: max(branch.count_K))
        candidates.remove(best)
        candidates += best.branches
        found.append(best)
    return found


def numbers_of(branch: Branch, k: int, num_rollouts: int) -> tuple[str, str, str]:
    """Return the count, the probability and the correct fraction of a branch in one tree as text."""
    count, probability = branch.count_K[k], branch.probability_K[k]
    if not count:
        return "", "", ""
    certain = probability if not isnan(probability) else count / num_rollouts
    return f"{count:,}", plain(certain, 2), f"{branch.correct_K[k] / count:.0%}"


def outline_page(
    title: str, prompt: str, names: Sequence[str], root: Branch, decode: Callable[[Sequence[int]], str], verified: bool
) -> str:
    """Return an outline as one HTML page without scripts; every branch can be opened and closed."""
    headings = "".join(f'<span class="n">{escape(name)}</span>' for name in names)
    body = _details(root, decode, root.count_K, prompt, verified, depth=0)
    legend = "count, and the probability of the text up to there" + (
        "; color: from incorrect (red) to correct (green)" if verified else ""
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body{{font:14px/1.5 ui-monospace,monospace;margin:2em;color:#2b2f36}}
.n{{display:inline-block;min-width:9.5em;color:#5b626d}}summary{{white-space:pre}}summary:hover{{background:#f3f4f6}}
.leaf summary{{list-style:none;padding-left:1.05em}}b{{font-weight:600;border-radius:3px;padding:0 .2em}}</style></head>
<body><h1>{escape(title)}</h1><p>{escape(legend)}</p><p style="padding-left:1.05em">{headings}</p>{body}</body></html>
"""


def _details(
    branch: Branch,
    decode: Callable[[Sequence[int]], str],
    total_K: Sequence[int],
    text: str | None,
    verified: bool,
    depth: int,
) -> str:
    numbers = []
    for k, total in enumerate(total_K):
        count, probability, _ = numbers_of(branch, k, total)
        numbers.append(f'<span class="n">{f"{count}  {probability}" if count else ""}</span>')
    shown = escape(visible_text(decode(branch.tokens) if text is None else text, one_line=True))
    color = f";background:{_color(branch)}" if verified else ""
    below = "".join(_details(b, decode, total_K, None, verified, depth + 1) for b in branch.branches)
    kind = "" if branch.branches else ' class="leaf"'
    opened = " open" if max(c / max(t, 1) for c, t in zip(branch.count_K, total_K, strict=True)) >= 0.1 else ""
    text = f'<b style="margin-left:{1.5 * depth:g}em{color}">{shown}</b>'
    return f"<details{kind}{opened}><summary>{''.join(numbers)}{text}</summary>{below}</details>"


def _color(branch: Branch) -> str:
    """Return the color of the correct fraction in the last tree that has rollouts here."""
    k = next(k for k in reversed(range(len(branch.count_K))) if branch.count_K[k])
    fraction = 2 * branch.correct_K[k] / branch.count_K[k]
    low, high = (_COLORS[0], _COLORS[1]) if fraction < 1 else (_COLORS[1], _COLORS[2])
    part = fraction % 1 if fraction < 2 else 1.0
    mixed = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return f"rgb({','.join(map(str, mixed))})"
