"""The trees of P prompts while they grow: nodes in the order of their draw, stop strings, and preorder at the end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from brorl.arrays import BoolArray, FloatArray, IntArray
from brorl.model.stop_strings import StopStrings
from brorl.tree import RolloutTree


class Forest:
    """The trees of P prompts while they grow; node numbers are shared by all of them."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompts = [tuple(p) for p in prompts]
        self._nodes: list[tuple[IntArray, ...]] = []  # (prompt, parent, token, count, depth) per call of `add`
        self._logprobs: list[FloatArray] = []
        self._starts: list[int] = []  # number of the first node per call of `add`
        self._leaves: list[tuple[IntArray, ...]] = []  # (node, count, finished) per call of `finish`
        self._size = 0

    def add(
        self, depth: int, prompt_C: IntArray, parent_C: IntArray, token_C: IntArray, count_C: IntArray,
        logprob_C: FloatArray,
    ) -> IntArray:  # fmt: skip
        """Record C new nodes at a depth (parent -1 at depth 0) and return their numbers, shape [C]."""
        self._nodes.append((prompt_C, parent_C, token_C, count_C, np.full_like(token_C, depth)))
        self._logprobs.append(logprob_C)
        self._starts.append(self._size)
        self._size += token_C.size
        return np.arange(self._size - token_C.size, self._size)

    def finish(self, node_C: IntArray, count_C: IntArray, stopped_C: BoolArray) -> None:
        """Record responses that end at nodes, with the number of rollouts that do."""
        self._leaves.append((node_C, count_C, stopped_C.astype(np.int64)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes so far, over all prompts."""
        return self._size

    def path(self, node: int) -> list[int]:
        """Return the tokens from the prompt down to one node, without a copy of the forest."""
        tokens = []
        while node >= 0:
            call = bisect_right(self._starts, node) - 1
            _, parent, token, _, _ = self._nodes[call]
            tokens.append(int(token[node - self._starts[call]]))
            node = int(parent[node - self._starts[call]])
        return tokens[::-1]

    def paths(self, node_R: IntArray, depth: int) -> IntArray:
        """Return the tokens from the prompt down to nodes of one depth, shape [R, depth + 1]."""
        _, parent, token, _, _ = self._concatenated()
        tokens = np.empty((node_R.size, depth + 1), np.int64)
        for column in range(depth, -1, -1):
            tokens[:, column] = token[node_R]
            node_R = parent[node_R]
        return tokens

    def trees(self) -> list[RolloutTree]:
        """Return one tree per prompt."""
        prompt, parent, token, count, depth = self._concatenated()
        new_index, start = _preorder(prompt, parent, token, depth, len(self._prompts))
        order = np.argsort(new_index)
        parent = np.where(parent >= 0, new_index[parent] - start[prompt], -1)[order]
        token, count, logprob = token[order], count[order], np.concatenate(self._logprobs)[order]

        leaf, leaf_count, stopped = (np.concatenate(a) for a in zip(*self._leaves, strict=True))
        leaf_order = np.argsort(new_index[leaf])
        leaf, leaf_count = new_index[leaf][leaf_order], leaf_count[leaf_order]
        stopped = stopped[leaf_order].astype(np.bool_)
        leaf_start = np.searchsorted(leaf, start)
        return [
            RolloutTree(
                prompt_ids=prompt_ids,
                token=token[start[p] : start[p + 1]],
                parent=parent[start[p] : start[p + 1]],
                count=count[start[p] : start[p + 1]],
                logprob=logprob[start[p] : start[p + 1]],
                leaf=leaf[leaf_start[p] : leaf_start[p + 1]] - start[p],
                leaf_count=leaf_count[leaf_start[p] : leaf_start[p + 1]],
                finished=stopped[leaf_start[p] : leaf_start[p + 1]],
            )
            for p, prompt_ids in enumerate(self._prompts)
        ]

    def _concatenated(self) -> tuple[IntArray, ...]:
        if len(self._nodes) > 1:
            self._nodes = [tuple(np.concatenate(arrays) for arrays in zip(*self._nodes, strict=True))]
            self._starts = [0]
        return self._nodes[0]


def _preorder(
    prompt: IntArray, parent: IntArray, token: IntArray, depth: IntArray, num_prompts: int
) -> tuple[IntArray, IntArray]:
    """Number all nodes in depth-first preorder, prompt after prompt, siblings by token."""
    num_nodes = token.size
    by_depth = np.argsort(depth, kind="stable")
    levels = np.split(by_depth, np.cumsum(np.bincount(depth))[:-1])
    above = np.where(parent >= 0, parent, num_nodes + prompt)  # one root per prompt follows the nodes
    size = np.ones(num_nodes + num_prompts, np.int64)
    size[num_nodes:] = 0
    for level in reversed(levels):
        np.add.at(size, above[level], size[level])

    new_index = np.empty(num_nodes + num_prompts, np.int64)
    new_index[num_nodes:] = np.cumsum(size[num_nodes:]) - size[num_nodes:] - 1
    for level in levels:
        level = level[np.lexsort((token[level], above[level]))]
        before = np.cumsum(size[level]) - size[level]
        first = np.flatnonzero(np.append(True, above[level][1:] != above[level][:-1]))
        before -= np.repeat(before[first], np.diff(np.append(first, level.size)))
        new_index[level] = new_index[above[level]] + 1 + before
    return new_index[:num_nodes], np.append(new_index[num_nodes:] + 1, num_nodes)


class TextEnds:
    """Finds the nodes with which a response ends, because they complete a stop string.

    The last characters of every live prefix are kept, so a node costs one search in a short text. The few nodes in
    which it finds something are decoded from the start of the response, and these texts decide.

    Args:
        stop: The stop strings, one at least.
        forest: The forest that grows.
    """

    def __init__(self, stop: StopStrings, forest: Forest) -> None:
        self._stop = stop
        self._forest = forest
        self._tail_of = {-1: ""}  # last characters, without spaces, of each live node; -1 is every prompt

    def found(self, parent_C: IntArray, token_C: IntArray, node_C: IntArray) -> BoolArray:
        """Return whether each of C new nodes completes a stop string, shape [C].

        Args:
            parent_C: Node above each, -1 for a prompt; all children of a node are in one call.
            token_C: Token of each.
            node_C: Number of each in the forest.
        """
        tail_of, piece_of, kept = self._tail_of, self._stop.pieces, self._stop.longest
        parents = parent_C.tolist()
        texts = [tail_of[parent] + piece_of[token] for parent, token in zip(parents, token_C.tolist(), strict=True)]
        for parent in {*parents} - {-1}:
            del tail_of[parent]
        tail_of.update(zip(node_C.tolist(), [text[-kept:] for text in texts], strict=True))
        likely_in, end_with, path = self._stop.likely_in, self._stop.end_with, self._forest.path
        return np.array([
            likely_in(text) is not None and end_with(path(node))
            for text, node in zip(texts, node_C.tolist(), strict=True)
        ], np.bool_)  # fmt: skip
