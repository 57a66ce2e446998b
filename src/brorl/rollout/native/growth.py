"""The growth of the trees of one call: draw a token for every rollout, find the rows that live on, feed them.

Rows that do not fit into memory wait, and are decoded afterwards from their prefix, with the same uniform numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from brorl.activity import Decoding, Observe
from brorl.arrays import FloatArray, IntArray
from brorl.errors import DivergedError
from brorl.model.stop_strings import StopStrings
from brorl.rollout.native.decoder import Decoder
from brorl.rollout.native.draw import DrawRule, Uniforms, draw_tokens, without
from brorl.rollout.native.forest import Forest, TextEnds
from brorl.rollout.native.rows import BLOCK, Rows
from brorl.rollout.native.slots import SlotDecoder
from brorl.tree import RolloutTree


class Growth:
    """One call of `sample`: the forest and the draws, which all waves share.

    Args:
        prompts: Token ids of P prompts.
        rollouts_P: Rollouts of each.
        decoder: Feeds the rows.
        rule: From logits to tokens.
        uniforms: Numbers of the draws.
        stop: Texts that end a response; None if there are none.
        shares_prefixes: Whether rollouts with the same tokens are one row.
        observe: Receives a `Decoding` after every position.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        rollouts_P: Sequence[int],
        decoder: Decoder,
        rule: DrawRule,
        uniforms: Uniforms,
        *,
        stop: StopStrings | None,
        shares_prefixes: bool,
        observe: Observe,
    ) -> None:
        self._prompts = [tuple(p) for p in prompts]
        self._rollouts_P = np.array(rollouts_P)
        self._decoder = decoder
        self._drawing = decoder if isinstance(decoder, SlotDecoder) and decoder.draws else None
        self._alone: list[Rows] = []  # rows for which the device draws, by the depth at which the host saw them last
        self._rule, self._uniforms = rule, uniforms
        self._stop_ids = np.array(rule.stop_token_ids, np.int64)
        self._shares_prefixes, self._observe = shares_prefixes, observe
        self._num_finished = 0
        self._forest = Forest(prompts)
        self._text_ends = TextEnds(stop, self._forest) if stop else None
        self._waves: deque[Rows] = deque()

    def grow(self) -> list[RolloutTree]:
        """Decode all rollouts to their ends; return one tree per prompt."""
        self._waves.extend(self._first_rows(run) for run in self._decoder.split(self._prompts))
        with self._decoder.attention():
            while self._waves:
                waiting = self._decode(self._waves.popleft())
                self._waves.extendleft(reversed(waiting))
        trees = self._forest.trees()
        return trees if self._shares_prefixes else [RolloutTree.merge([tree]) for tree in trees]

    def _first_rows(self, run: IntArray) -> Rows:
        """Return the rows of prompts that are prefilled, and then decoded, together."""
        none = np.full(run.size, -1)
        rollouts = self._rollouts_P[run]
        return Rows(
            depth=0,
            prompt_R=run,
            node_R=none,
            token_R=none,
            slot_R=np.arange(run.size),
            row_K=np.repeat(np.arange(run.size), rollouts),
            rollout_K=np.concatenate([np.arange(n) for n in rollouts]),
        )

    def _decode(self, rows: Rows) -> list[Rows]:
        """Decode rows to their ends; return the rows that must wait for memory."""
        waiting: list[Rows] = []
        live = np.unique(rows.prompt_R)
        logits_RV = self._decoder.start([self._prompts[p] for p in live])
        if rows.depth:
            rows = self._fitting(rows, waiting)
            rows, logits_RV = self._replayed(rows, np.searchsorted(live, rows.prompt_R))
        while True:
            rows = self._draw(rows, logits_RV)
            if rows.depth % BLOCK == 0 or rows.depth == self._rule.sampling.max_new_tokens:
                rows = self._with_those_alone(rows)
            self._observe(Decoding(self._num_finished, int(self._rollouts_P.sum()), self._forest.num_nodes, rows.depth))
            if not rows.size and not self._alone:
                return waiting
            rows = self._fitting(rows, waiting)
            if not self._alone:
                still = np.unique(rows.prompt_R)
                if 2 * still.size <= live.size:  # drop the prompts that are done
                    self._decoder.keep_prompts(np.searchsorted(live, still))
                    live = still
            rows = self._decoder.place(rows, np.searchsorted(live, rows.prompt_R))
            rows = self._release(rows)
            logits_RV = self._decoder.feed(rows)

    def _fitting(self, rows: Rows, waiting: list[Rows]) -> Rows:
        """Return the rows that fit into memory, beside those for which the device draws; the others wait."""
        capacity = self._decoder.rows_that_fit(rows.depth)
        room = capacity - sum(alone.size for alone in self._alone)
        if rows.size <= room:
            return rows
        kept, rest = np.split(np.argsort(rows.prompt_R, kind="stable"), [room])
        waiting += [rows.take(part) for part in np.split(rest, range(capacity, rest.size, capacity))]
        kept.sort()
        return rows.take(kept)

    def _release(self, rows: Rows) -> Rows:
        """Let the device draw for rows with one rollout, if it can; return the others."""
        if self._drawing is None or not rows.size:
            return rows
        single_R = np.bincount(rows.row_K, minlength=rows.size) == 1
        alone = rows.take(np.flatnonzero(single_R))
        if alone.size:
            self._alone.append(alone)
            uniform_RB = self._uniforms.block(rows.depth, alone.prompt_R, alone.rollout_K)
            self._drawing.release(alone.slot_R, uniform_RB)
        return rows.take(np.flatnonzero(~single_R))

    def _with_those_alone(self, rows: Rows) -> Rows:
        """Record what the device drew; return all rows that live on, in the order of their slots."""
        if not self._alone or self._drawing is None:
            return rows
        token_SB, logprob_SB = self._drawing.drawn()
        found = replace(self._alone[0].take(np.arange(0)), depth=self._alone[0].depth)
        while found.depth < rows.depth:
            for alone in self._alone:
                if alone.depth == found.depth:
                    found = found.join(alone)
            drawn = found.slot_R, found.depth % BLOCK
            found = self._grown(found, token_SB[drawn], logprob_SB[drawn])
        self._alone = []
        rows = rows.join(found)
        return rows.take(np.argsort(rows.slot_R, kind="stable"))

    def _draw(self, rows: Rows, logits_RV: Tensor) -> Rows:
        """Draw one token for every rollout; return the rows that live on."""
        if not rows.size:
            return replace(rows, depth=rows.depth + 1)
        uniform_K = self._uniforms.at(rows.depth, rows.prompt_R[rows.row_K], rows.rollout_K)
        logits_RV = without(logits_RV, self._rule.forbidden(rows.depth))
        if logits_RV.device.type == "mps":
            logits_RV = logits_RV.cpu()  # the draw is exact in float64, which Apple GPUs do not have
        drawn = draw_tokens(logits_RV, rows.row_K, uniform_K, self._rule.sampling)
        # One copy, for which the host waits once. Token ids are exact in float64.
        token_K, logprob_K = torch.stack([x_K.double() for x_K in drawn]).cpu().numpy()
        return self._grown(rows, token_K.astype(np.int64), logprob_K)

    def _grown(self, rows: Rows, token_K: IntArray, logprob_K: FloatArray) -> Rows:
        """Record the tokens that follow some rows; return the rows that live on, in the slots of their parents."""
        if not np.isfinite(logprob_K).all():
            raise DivergedError(
                f"the logits of token {rows.depth + 1:,} of a response are not finite numbers: the training has "
                "diverged; lower optimizer.learning_rate and resume from an earlier checkpoint"
            )
        sampling = self._rule.sampling
        width = int(token_K.max(initial=0)) + 1
        key_K = rows.row_K * width + token_K if self._shares_prefixes else np.arange(token_K.size)
        order = np.argsort(key_K, kind="stable")
        first = np.append(True, key_K[order][1:] != key_K[order][:-1])[: token_K.size]
        one_of_C = order[first]  # a rollout of each child
        child_K = np.cumsum(first) - 1
        count_C = np.bincount(child_K)
        source_C, token_C = rows.row_K[one_of_C], token_K[one_of_C]
        node_C = self._forest.add(
            rows.depth, rows.prompt_R[source_C], rows.node_R[source_C], token_C, count_C, logprob_K[one_of_C]
        )
        stopped_C = (token_C[:, None] == self._stop_ids).any(1)
        if self._text_ends is not None:
            completes_C = self._text_ends.found(rows.node_R[source_C], token_C, node_C)
            stopped_C |= completes_C & (rows.depth >= sampling.min_new_tokens)
        done_C = stopped_C | (rows.depth + 1 == sampling.max_new_tokens)
        self._forest.finish(node_C[done_C], count_C[done_C], stopped_C[done_C])
        self._num_finished += int(count_C[done_C].sum())
        children = Rows(
            rows.depth + 1, rows.prompt_R[source_C], node_C, token_C, rows.slot_R[source_C], child_K,
            rows.rollout_K[order],
        )  # fmt: skip
        return children.take(np.flatnonzero(~done_C))

    def _replayed(self, rows: Rows, prompt_R: IntArray) -> tuple[Rows, Tensor]:
        """Feed again the tokens of rows that waited; return the rows in their slots, and the logits after each."""
        path_RT = self._forest.paths(rows.node_R, rows.depth - 1)
        fed = replace(rows, slot_R=prompt_R)
        for position in range(rows.depth):
            fed = replace(fed, depth=position + 1, token_R=path_RT[:, position])
            fed = self._decoder.place(fed, prompt_R)
            logits_RV = self._decoder.feed(fed)
        return fed, logits_RV
