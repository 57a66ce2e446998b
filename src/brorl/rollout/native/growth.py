"""Grows the trees of one call: draws a token for every rollout, finds the rows that continue, and feeds them.

Rows that do not fit in memory wait; later, they are decoded from their prefixes with the same uniform numbers.

Dimensions: R rows, K rollouts, C children (new nodes), S slots, P prompts, V vocabulary tokens, J = 16 positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from brorl.activity import Decoding, Observe
from brorl.arrays import BoolArray, FloatArray, IntArray
from brorl.errors import DivergedError
from brorl.rollout.native.decoder import Decoder, Rows
from brorl.rollout.native.draw import POSITIONS_AT_ONCE, Uniforms, draw_tokens, forbidden_at, without
from brorl.rollout.native.slot_decoder import SlotDecoder
from brorl.sampling import SamplingParams, StopStrings
from brorl.tree import RolloutTree


class Growth:
    """One call of `sample`: its growing trees and its draws, shared by all waves.

    `sampling.stop_token_ids` contains all tokens that end a response, and `stop` all strings that do.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], rollouts_P: Sequence[int], decoder: Decoder, sampling: SamplingParams,
        uniforms: Uniforms, *, stop: StopStrings | None, shares_prefixes: bool, observe: Observe,
    ) -> None:  # fmt: skip
        self._prompts = [tuple(p) for p in prompts]
        self._rollouts_P = np.array(rollouts_P)
        self._decoder = decoder
        self._device_drawer = decoder if isinstance(decoder, SlotDecoder) and decoder.draws else None
        # rows whose tokens the device draws, one entry for each depth since the host last collected tokens
        self._device_rows: list[Rows] = []
        self._sampling = sampling
        self._uniforms = uniforms
        self._stop_ids = np.array(sampling.stop_token_ids, np.int64)
        self._shares_prefixes = shares_prefixes
        self._observe = observe
        self._num_finished = 0
        self._trees = GrowingTrees(prompts)
        self._text_ends = TextEnds(stop, self._trees) if stop else None

    def grow(self) -> list[RolloutTree]:
        """Decode all rollouts to the end and return one tree per prompt."""
        waves = deque(self._first_rows(wave) for wave in self._decoder.split(self._prompts))
        with self._decoder.attention():
            while waves:
                waves.extendleft(reversed(self._decode(waves.popleft())))
        trees = self._trees.trees()
        return trees if self._shares_prefixes else [RolloutTree.merge([tree]) for tree in trees]

    def _first_rows(self, wave: IntArray) -> Rows:
        """Return the initial rows for a wave: prompts that are prefilled and decoded together."""
        no_node = np.full(wave.size, -1)
        index_R = np.arange(wave.size)
        rollouts_R = self._rollouts_P[wave]
        rollout_K = np.concatenate([np.arange(n) for n in rollouts_R])
        return Rows(0, wave, no_node, no_node, index_R, np.repeat(index_R, rollouts_R), rollout_K)

    def _decode(self, rows: Rows) -> list[Rows]:
        """Decode rows to the end and return those that must wait for memory."""
        waiting: list[Rows] = []
        live = np.unique(rows.prompt_R)
        logits_RV = self._decoder.start([self._prompts[p] for p in live])
        if rows.depth:
            rows = self._fitting(rows, waiting)
            rows, logits_RV = self._replayed(rows, np.searchsorted(live, rows.prompt_R))
        while True:
            rows = self._draw(rows, logits_RV)
            if rows.depth % POSITIONS_AT_ONCE == 0 or rows.depth == self._sampling.max_new_tokens:
                rows = self._with_device_rows(rows)
            self._observe(Decoding(self._num_finished, int(self._rollouts_P.sum()), self._trees.num_nodes, rows.depth))
            if not rows.size and not self._device_rows:
                return waiting
            rows = self._fitting(rows, waiting)
            if not self._device_rows:
                still = np.unique(rows.prompt_R)
                if 2 * still.size <= live.size:  # drop finished prompts
                    self._decoder.keep_prompts(np.searchsorted(live, still))
                    live = still
            rows = self._decoder.place(rows, np.searchsorted(live, rows.prompt_R))
            rows = self._hand_single_rows_to_device(rows)
            logits_RV = self._decoder.feed(rows)

    def _fitting(self, rows: Rows, waiting: list[Rows]) -> Rows:
        """Return the rows that fit in memory next to those that the device draws for. The others wait."""
        capacity = self._decoder.rows_that_fit(rows.depth)
        room = capacity - sum(single_rows.size for single_rows in self._device_rows)
        if rows.size <= room:
            return rows
        kept, rest = np.split(np.argsort(rows.prompt_R, kind="stable"), [room])
        waiting += [rows.take(wave) for wave in np.split(rest, range(capacity, rest.size, capacity))]
        kept.sort()
        return rows.take(kept)

    def _hand_single_rows_to_device(self, rows: Rows) -> Rows:
        """Hand single-rollout rows to the device if it can draw, and return the other rows."""
        if self._device_drawer is None or not rows.size:
            return rows
        single_R = np.bincount(rows.row_K, minlength=rows.size) == 1
        single_rows = rows.take(np.flatnonzero(single_R))
        if single_rows.size:
            self._device_rows.append(single_rows)
            uniform_RJ = self._uniforms.block(rows.depth, single_rows.prompt_R, single_rows.rollout_K)
            self._device_drawer.draw_on_device(single_rows.slot_R, uniform_RJ)
        return rows.take(np.flatnonzero(~single_R))

    def _with_device_rows(self, rows: Rows) -> Rows:
        """Record the device's draws, and return all rows that continue, in slot order."""
        if not self._device_rows or self._device_drawer is None:
            return rows
        token_SJ, logprob_SJ = self._device_drawer.collect_drawn()
        drawn_rows = replace(self._device_rows[0].take(np.arange(0)), depth=self._device_rows[0].depth)
        while drawn_rows.depth < rows.depth:
            for single_rows in self._device_rows:
                if single_rows.depth == drawn_rows.depth:
                    drawn_rows = drawn_rows.join(single_rows)
            place = drawn_rows.slot_R, drawn_rows.depth % POSITIONS_AT_ONCE
            drawn_rows = self._grown(drawn_rows, token_SJ[place], logprob_SJ[place])
        self._device_rows = []
        rows = rows.join(drawn_rows)
        return rows.take(np.argsort(rows.slot_R, kind="stable"))

    def _draw(self, rows: Rows, logits_RV: Tensor) -> Rows:
        """Draw one token for every rollout and return the rows that continue."""
        if not rows.size:
            return replace(rows, depth=rows.depth + 1)
        uniform_K = self._uniforms.at(rows.depth, rows.prompt_R[rows.row_K], rows.rollout_K)
        logits_RV = without(logits_RV, forbidden_at(rows.depth, self._sampling))
        drawn = draw_tokens(logits_RV, rows.row_K, uniform_K, self._sampling)
        # A single copy, so the host waits only once. Token ids are exact in float64.
        token_K, logprob_K = torch.stack([x_K.double() for x_K in drawn]).cpu().numpy()
        return self._grown(rows, token_K.astype(np.int64), logprob_K)

    def _grown(self, rows: Rows, token_K: IntArray, logprob_K: FloatArray) -> Rows:
        """Record the tokens drawn for rows, and return the rows that continue, in their parents' slots."""
        if not np.isfinite(logprob_K).all():
            raise DivergedError(
                f"the logits of token {rows.depth + 1:,} of a response are not finite: training has diverged; lower "
                "optimizer.learning_rate and resume from an earlier checkpoint"
            )
        # Rollouts with the same row and token share a child: rows [0 0 0 1] that draw tokens [7 5 7 5] have the
        # children (0, 5), (0, 7) and (1, 5), of 1, 2 and 1 rollouts.
        width = int(token_K.max(initial=0)) + 1
        key_K = rows.row_K * width + token_K if self._shares_prefixes else np.arange(token_K.size)
        order = np.argsort(key_K, kind="stable")  # rollouts sorted by child: [1 0 2 3]
        sorted_key_K = key_K[order]
        first_K = np.append(True, sorted_key_K[1:] != sorted_key_K[:-1])[: token_K.size]
        child_K = np.cumsum(first_K) - 1  # child of each rollout in this order: [0 1 1 2]
        count_C = np.bincount(child_K)
        rollout_C = order[first_K]  # one rollout of each child: [1 0 3]
        row_C, token_C = rows.row_K[rollout_C], token_K[rollout_C]
        prompt_C, parent_C = rows.prompt_R[row_C], rows.node_R[row_C]
        node_C = self._trees.add(rows.depth, prompt_C, parent_C, token_C, count_C, logprob_K[rollout_C])

        stopped_C = (token_C[:, None] == self._stop_ids).any(1)
        if self._text_ends is not None:
            completes_C = self._text_ends.completes_stop(parent_C, token_C, node_C)
            stopped_C |= completes_C & (rows.depth >= self._sampling.min_new_tokens)
        done_C = stopped_C | (rows.depth + 1 == self._sampling.max_new_tokens)
        if self._text_ends is not None:
            self._text_ends.forget(node_C[done_C])
        self._trees.finish(node_C[done_C], count_C[done_C], stopped_C[done_C])
        self._num_finished += int(count_C[done_C].sum())
        children = Rows(rows.depth + 1, prompt_C, node_C, token_C, rows.slot_R[row_C], child_K, rows.rollout_K[order])
        return children.take(np.flatnonzero(~done_C))

    def _replayed(self, rows: Rows, prompt_R: IntArray) -> tuple[Rows, Tensor]:
        """Feed waiting rows' tokens again. Return the rows with their slots, and the logits after each row."""
        path_RT = self._trees.paths(rows.node_R, rows.depth - 1)
        fed = replace(rows, slot_R=prompt_R)
        for position in range(rows.depth):
            fed = replace(fed, depth=position + 1, token_R=path_RT[:, position])
            fed = self._decoder.place(fed, prompt_R)
            logits_RV = self._decoder.feed(fed)
        return fed, logits_RV


class GrowingTrees:
    """The trees of P prompts while they grow. Nodes are numbered 0, 1, 2, ... in the order of `add`."""

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
        """Record the nodes where responses end, and how many rollouts end at each."""
        self._leaves.append((node_C, count_C, stopped_C.astype(np.int64)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes so far, over all prompts."""
        return self._size

    def path(self, node: int) -> list[int]:
        """Return the tokens from the prompt down to a node, without copying all nodes."""
        tokens = []
        while node >= 0:
            call = bisect_right(self._starts, node) - 1
            _, parent, token, _, _ = self._nodes[call]
            tokens.append(int(token[node - self._starts[call]]))
            node = int(parent[node - self._starts[call]])
        return tokens[::-1]

    def paths(self, node_R: IntArray, depth: int) -> IntArray:
        """Return the tokens from the prompt down to nodes of equal depth, shape [R, depth + 1]."""
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
        token, count = token[order], count[order]
        logprob = np.concatenate(self._logprobs)[order]

        leaf, leaf_count, stopped = (np.concatenate(a) for a in zip(*self._leaves, strict=True))
        leaf_order = np.argsort(new_index[leaf])
        leaf, leaf_count = new_index[leaf][leaf_order], leaf_count[leaf_order]
        stopped = stopped[leaf_order].astype(np.bool_)
        leaf_start = np.searchsorted(leaf, start)
        trees = []
        for p, prompt_ids in enumerate(self._prompts):
            nodes = slice(start[p], start[p + 1])
            leaves = slice(leaf_start[p], leaf_start[p + 1])
            trees.append(
                RolloutTree(
                    prompt_ids=prompt_ids,
                    token=token[nodes],
                    parent=parent[nodes],
                    count=count[nodes],
                    logprob=logprob[nodes],
                    leaf=leaf[leaves] - start[p],
                    leaf_count=leaf_count[leaves],
                    finished=stopped[leaves],
                )
            )
        return trees

    def _concatenated(self) -> tuple[IntArray, ...]:
        if len(self._nodes) > 1:
            self._nodes = [tuple(np.concatenate(arrays) for arrays in zip(*self._nodes, strict=True))]
            self._starts = [0]
        return self._nodes[0]


def _preorder(
    prompt: IntArray, parent: IntArray, token: IntArray, depth: IntArray, num_prompts: int
) -> tuple[IntArray, IntArray]:
    """Return each node's preorder index, with siblings sorted by token, and where each prompt starts, shape [P + 1]."""
    # Compute subtree sizes from the deepest level up, then indices from the roots down. A node's index is its
    # parent's index + 1 + the sizes of its earlier siblings: siblings of sizes [3 1 2] below node 4 get [5 8 9].
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
        before -= np.repeat(before[first], np.diff(np.append(first, level.size)))  # count from the first sibling
        new_index[level] = new_index[above[level]] + 1 + before
    return new_index[:num_nodes], np.append(new_index[num_nodes:] + 1, num_nodes)


class TextEnds:
    """Finds the nodes that end a response by completing a stop string.

    The last characters of every live prefix are kept, so a node costs one search in a short string. In the rare case
    that the search finds a stop string, the whole response is decoded to decide.
    """

    def __init__(self, stop: StopStrings, trees: GrowingTrees) -> None:
        self._stop = stop
        self._trees = trees
        self._tail_of = {-1: ""}  # last characters, without spaces, of each live node; -1 stands for all prompts

    def completes_stop(self, parent_C: IntArray, token_C: IntArray, node_C: IntArray) -> BoolArray:
        """Return whether each of C new nodes completes a stop string. All children of a node come in the same call."""
        tail_of = self._tail_of
        piece_of = self._stop.pieces
        kept = self._stop.longest
        parents = parent_C.tolist()
        texts = [tail_of[parent] + piece_of[token] for parent, token in zip(parents, token_C.tolist(), strict=True)]
        for parent in {*parents} - {-1}:
            del tail_of[parent]
        tail_of.update(zip(node_C.tolist(), [text[-kept:] for text in texts], strict=True))
        likely_in, end_with, path = self._stop.likely_in, self._stop.end_with, self._trees.path
        return np.array([
            likely_in(text) is not None and end_with(path(node))
            for text, node in zip(texts, node_C.tolist(), strict=True)
        ], np.bool_)  # fmt: skip

    def forget(self, node_C: IntArray) -> None:
        """Drop the text of nodes where all rollouts end."""
        for node in node_C.tolist():
            del self._tail_of[node]
