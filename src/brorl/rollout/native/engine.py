"""The native engine: samples N rollouts of each prompt as a tree, on any Hugging Face decoder, on CPU or GPU.

In: prompts as token ids, N, sampling parameters, a seed. Out: one `RolloutTree` per prompt. The decoding batch has
one row per distinct live prefix, whatever N is; a row with count c draws for its c rollouts at once, independently or
systematically. Models whose attention cannot be hooked are an error. Memory stays within the limit: rows that do not
fit wait, and are decoded afterwards from their prefix, with the same draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Decoding, Observe, unobserved
from brorl.model.hook_check import check_hooks
from brorl.model.tree_attention import PromptCache, packed_logits, prefill, tree_attention
from brorl.rollout.native.cache import DecodeContext, RowCache
from brorl.rollout.native.draw import Uniforms, draw_tokens, systematic_points
from brorl.rollout.native.forest import Forest
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree

IntArray = NDArray[np.int64]
_PREFILL_TOKENS = 16384  # bounds the activations of a prefill


@dataclass(frozen=True)
class Rows:
    """Live prefixes, all of one length, and their rollouts.

    Attributes:
        depth: Number of tokens after the prompt; with 0 each prompt is one row.
        prompt_R: Prompt of each row, shape [R].
        node_R: Forest node of each row's last token, shape [R]; -1 at depth 0.
        token_R: Each row's last token, shape [R]; -1 at depth 0.
        expected_R: How many of the N rollouts were expected to reach each row, N times its prefix's probability, but
            at least 1, shape [R].
        row_K: Row of each rollout, ascending, shape [K].
        rollout_K: Index of each rollout within its prompt, shape [K].
    """

    depth: int
    prompt_R: IntArray
    node_R: IntArray
    token_R: IntArray
    expected_R: NDArray[np.float64]
    row_K: IntArray
    rollout_K: IntArray

    def take(self, rows: IntArray) -> Rows:
        """Return some rows, renumbered in the given order, with their rollouts."""
        if np.array_equal(rows, np.arange(self.node_R.size)):
            return self
        renumber = np.full(self.node_R.size, -1)
        renumber[rows] = np.arange(rows.size)
        row_K = renumber[self.row_K]
        order = np.flatnonzero(row_K >= 0)
        order = order[np.argsort(row_K[order], kind="stable")]
        return Rows(
            self.depth,
            self.prompt_R[rows],
            self.node_R[rows],
            self.token_R[rows],
            self.expected_R[rows],
            row_K[order],
            self.rollout_K[order],
        )


class NativeEngine:
    """Samples trees with the model itself; results do not depend on the memory limit.

    Args:
        model: A Hugging Face causal LM; it is used as it is, so training it in place is visible at once.
        eos_token_id: Token or tokens that end a response.
        memory_bytes: Limit of the keys, values and logits of the rows of one batch.
        share_prefixes: False decodes every rollout as a separate row, for tests and for measuring the savings of the
            tree.
        observe: Receives a `Decoding` after every position.

    Raises:
        HooksError: If the model's attention cannot be hooked.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_id: int | Sequence[int],
        memory_bytes: int = 4 << 30,
        share_prefixes: bool = True,
        observe: Observe = unobserved,
    ) -> None:
        self._kv_shapes = check_hooks(model)
        self.model = model
        self.stop_token_ids = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
        self.version = 0
        self._memory_bytes = memory_bytes
        self._share_prefixes = share_prefixes
        self._observe = observe

    def row_costs(self, max_rows: int, max_tokens: int) -> RowCache:
        """Return an empty cache of rows within the engine's memory limit; it predicts its own memory.

        Args:
            max_rows: Most rows that there can be.
            max_tokens: Most new tokens per row.
        """
        return RowCache(self.model, self._kv_shapes, self._memory_bytes, max_rows, max_tokens)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the engine's model; weights that it shares with the learner stay as they are.

        Args:
            weights: The weights by name.
            version: Their version.
        """
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            if own[name] is not tensor:
                own[name].copy_(tensor)
        self.version = version

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], num_rollouts: int, sampling: SamplingParams, seed: int
    ) -> list[RolloutTree]:
        """Sample N rollouts of each prompt.

        Args:
            prompts: Token ids of P prompts, none empty.
            num_rollouts: N.
            sampling: Temperature, top-p, top-k, length limit, stop tokens, scheme.
            seed: For the same seed and N, rollout n of the p-th prompt draws the same uniform numbers, whatever the
                other prompts are.

        Returns:
            P trees with N rollouts each, in the order of the prompts.

        Raises:
            ValueError: If a prompt is empty, N < 1, or sampling is systematic without shared prefixes.
            OutOfMemoryError: If the memory limit does not hold a single row.
        """
        if num_rollouts < 1 or not all(len(p) for p in prompts):
            raise ValueError("every prompt needs at least one token and num_rollouts must be >= 1")
        if sampling.scheme == "systematic" and not self._share_prefixes:
            raise ValueError(
                "systematic sampling needs the rollouts of a prefix in one row, and this engine has "
                "share_prefixes=False; make it with share_prefixes=True, or set sampling.scheme: iid"
            )
        if not prompts:
            return []
        growth = _Growth(self, prompts, num_rollouts, sampling, seed)
        waves = deque(growth.first_waves(num_rollouts))
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            with tree_attention(self.model):
                while waves:
                    waves.extendleft(reversed(growth.decode(waves.popleft())))
        finally:
            if was_training:
                self.model.train()
        return growth.trees()


class _Growth:
    """One call of `sample`: the forest, the row cache and the draws, which all waves share."""

    def __init__(
        self,
        engine: NativeEngine,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int,
        sampling: SamplingParams,
        seed: int,
    ) -> None:
        self._model = engine.model
        self._device = engine.model.device
        self._share = engine._share_prefixes
        self._observe = engine._observe
        self._num_rollouts, self._num_finished = len(prompts) * num_rollouts, 0
        self._prompts = [tuple(p) for p in prompts]
        self._sampling = sampling
        self._stop_ids = np.array([*engine.stop_token_ids, *sampling.stop_token_ids])
        self._uniforms = Uniforms(seed, len(prompts), num_rollouts)
        self._forest = Forest(prompts)
        self._cache = engine.row_costs(len(prompts) * num_rollouts, sampling.max_new_tokens)

    def first_waves(self, num_rollouts: int) -> list[Rows]:
        """Split the prompts into runs that are prefilled, and then decoded, together."""
        limit = min(_PREFILL_TOKENS, self._cache.prompt_tokens_that_fit())
        starts, longest = [0], 0
        for index, prompt in enumerate(self._prompts):
            longest = max(longest, len(prompt))
            if (index + 1 - starts[-1]) * longest > limit and index > starts[-1]:
                starts.append(index)
                longest = len(prompt)
        runs = [np.arange(a, b) for a, b in pairwise([*starts, len(self._prompts)])]
        return [
            Rows(
                depth=0,
                prompt_R=run,
                node_R=np.full(run.size, -1),
                token_R=np.full(run.size, -1),
                expected_R=np.full(run.size, float(num_rollouts)),
                row_K=np.repeat(np.arange(run.size), num_rollouts),
                rollout_K=np.tile(np.arange(num_rollouts), run.size),
            )
            for run in runs
        ]

    def trees(self) -> list[RolloutTree]:
        return self._forest.trees() if self._share else [_merged(t) for t in self._forest.trees()]

    def decode(self, rows: Rows) -> list[Rows]:
        """Decode rows to their ends; return the rows that must wait for memory."""
        waiting: list[Rows] = []
        live, prompt_R = np.unique(rows.prompt_R, return_inverse=True)
        prompts, logits_RV = prefill(self._model, [self._prompts[p] for p in live])
        if rows.depth:
            logits_RV = self._replay(rows, prompts, prompt_R)
        while True:
            num_live = rows.row_K.size
            rows, source_R = self._draw(rows, logits_RV)
            self._num_finished += num_live - rows.row_K.size
            self._observe(Decoding(self._num_finished, self._num_rollouts, self._forest.num_nodes, rows.depth))
            capacity = self._cache.rows_that_fit(rows.depth, prompts.num_bytes)
            if rows.node_R.size > capacity:
                kept, rest = np.split(np.argsort(rows.prompt_R, kind="stable"), [capacity])
                waiting += [rows.take(part) for part in np.split(rest, range(capacity, rest.size, capacity))]
                kept.sort()
                rows, source_R = rows.take(kept), source_R[kept]
            if not rows.node_R.size:
                return waiting
            rows = self._place(rows, source_R, prompts)
            local = np.searchsorted(live, rows.prompt_R)
            still = np.unique(local)
            if 2 * still.size <= live.size:  # drop the prompts that are done
                prompts, live = prompts.select(self._tensor(still)), live[still]
                local = np.searchsorted(live, rows.prompt_R)
            logits_RV = self._forward(rows.token_R, rows.depth - 1, prompts, local)

    def _draw(self, rows: Rows, logits_RV: Tensor) -> tuple[Rows, IntArray]:
        """Draw one token for every rollout; return the rows that are still live, and the parent row of each."""
        if rows.depth < self._sampling.min_new_tokens:
            logits_RV = logits_RV.index_fill(1, self._tensor(self._stop_ids), float("-inf"))
        uniform_K = self._uniforms.at(rows.depth, rows.prompt_R[rows.row_K], rows.rollout_K)
        match self._sampling.scheme:
            case "iid":
                pass
            case "systematic":
                uniform_K = systematic_points(uniform_K, rows.row_K, rows.expected_R)
            case _:
                assert_never(self._sampling.scheme)
        token, logprob, probability = draw_tokens(
            logits_RV, self._tensor(rows.row_K), self._tensor(uniform_K), self._sampling
        )
        token_K, logprob_K, probability_K = (
            token.cpu().numpy(),
            logprob.double().cpu().numpy(),
            probability.cpu().numpy(),
        )

        key_K = rows.row_K * logits_RV.shape[1] + token_K if self._share else np.arange(token_K.size)
        order = np.argsort(key_K, kind="stable")
        first = np.append(True, key_K[order][1:] != key_K[order][:-1])
        one_of_C = order[first]  # a rollout of each child
        child_K = np.cumsum(first) - 1
        count_C = np.bincount(child_K)
        source_C, token_C = rows.row_K[one_of_C], token_K[one_of_C]
        node_C = self._forest.add(
            rows.depth, rows.prompt_R[source_C], rows.node_R[source_C], token_C, count_C, logprob_K[one_of_C]
        )
        stopped_C = (token_C[:, None] == self._stop_ids).any(1)
        done_C = stopped_C | (rows.depth + 1 == self._sampling.max_new_tokens)
        self._forest.finish(node_C[done_C], count_C[done_C], stopped_C[done_C])

        expected_C = np.maximum(rows.expected_R[source_C] * probability_K[one_of_C], 1.0)
        children = Rows(
            rows.depth + 1, rows.prompt_R[source_C], node_C, token_C, expected_C, child_K, rows.rollout_K[order]
        )
        live = np.flatnonzero(~done_C)
        return children.take(live), source_C[live]

    def _place(self, rows: Rows, source_R: IntArray, prompts: PromptCache) -> Rows:
        """Give every row a slot: the first child of a row keeps its parent's, the others are copied into free ones."""
        num_rows, stored_tokens = rows.node_R.size, rows.depth - 1
        slot_R = np.arange(num_rows)
        if stored_tokens:
            stays_R = np.append(True, source_R[1:] != source_R[:-1]) & (source_R < num_rows)
            free = np.ones(num_rows, np.bool_)
            free[source_R[stays_R]] = False
            slot_R = source_R.copy()
            slot_R[~stays_R] = np.flatnonzero(free)
        order = np.argsort(slot_R)
        self._cache.place(source_R[order], stored_tokens, rows.depth, prompts.num_bytes)
        return rows.take(order)

    def _replay(self, rows: Rows, prompts: PromptCache, prompt_R: IntArray) -> Tensor:
        """Compute again the keys and values of rows that waited; return the logits after their last token."""
        self._cache.place(np.arange(rows.node_R.size), 0, rows.depth, prompts.num_bytes)
        path_RT = self._forest.paths(rows.node_R, rows.depth - 1)
        for position in range(rows.depth):
            logits_RV = self._forward(path_RT[:, position], position, prompts, prompt_R)
        return logits_RV

    def _forward(self, token_R: IntArray, position: int, prompts: PromptCache, prompt_R: IntArray) -> Tensor:
        """Feed one token per row, at a position after its prompt; return logits, shape [R, V]."""
        local_R = self._tensor(prompt_R)
        context = DecodeContext(self._cache, position, prompts, local_R)
        return packed_logits(self._model, self._tensor(token_R), prompts.length[local_R] + position, context, None)

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _merged(tree: RolloutTree) -> RolloutTree:
    """Merge a tree whose rollouts were decoded as separate branches."""
    paths = [tree.path(int(leaf)) for leaf in tree.leaf]
    return RolloutTree.from_responses(
        tree.prompt_ids,
        [tree.token[path].tolist() for path in paths],
        [tree.logprob[path].tolist() for path in paths],
        tree.finished.tolist(),
    )
