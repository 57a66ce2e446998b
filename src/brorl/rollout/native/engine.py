"""The native engine: samples N rollouts of each prompt as a tree, on any Hugging Face decoder, on CPU or GPU.

The decoding batch has one row per distinct live prefix, whatever N is; a row with count c draws for its c rollouts at
once. A model whose attention cannot be hooked decodes with its own cache. Memory stays within the limit: rows that do
not fit wait, and are decoded afterwards from their prefix, with the same uniform numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Decoding, Observe, unobserved
from brorl.errors import DivergedError
from brorl.model.device import to_device
from brorl.model.forward import FlatForward, TreeForward, choose_forward
from brorl.model.lean import LeanPass
from brorl.model.stop_strings import StopStrings
from brorl.model.tree_attention import HookedPass
from brorl.rollout.engine import rollouts_of_prompts
from brorl.rollout.native.decoder import Decoder, ModelCacheDecoder, Rows, TreeDecoder
from brorl.rollout.native.draw import Uniforms, draw_tokens
from brorl.rollout.native.forest import Forest
from brorl.rollout.native.row_cache import RowCache, row_cache
from brorl.rollout.native.text_ends import TextEnds
from brorl.sampling import SamplingParams
from brorl.tree import FloatArray, IntArray, RolloutTree


class NativeEngine:
    """Samples trees with the model itself.

    The memory limit decides which rows are computed together, and so the rounding of their logits. A draw close to the
    border between two tokens can then give the other one, and the tree is another sample of the same distribution. The
    log-probs are those of its own tokens, up to rounding.

    Args:
        model: A Hugging Face causal LM; it is used as it is, so training it in place is visible at once.
        eos_token_id: Tokens that end a response; none only with stop strings.
        memory_bytes: Limit of the keys, values and logits of the rows of one batch.
        share_prefixes: False decodes every rollout as a separate row, for tests and for measuring the savings of the
            tree.
        observe: Receives a `Decoding` after every position.
        forward: How rows go through the model; None for tree attention.
        dtype: Sample with matrices that are rounded to this dtype, by a lean pass; None for that of the model.
        stop: Texts that end a response too. None if there are none.

    Raises:
        HooksError: If the model's attention cannot be hooked, and `forward` is not given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_id: int | Sequence[int],
        memory_bytes: int = 4 << 30,
        share_prefixes: bool = True,
        observe: Observe = unobserved,
        forward: TreeForward | FlatForward | None = None,
        dtype: torch.dtype | None = None,
        stop: StopStrings | None = None,
    ) -> None:
        self._forward = forward or choose_forward(model, "tree")
        self.model = model
        self.stop_token_ids = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
        self.version = 0
        self._memory_bytes = memory_bytes
        self._share_prefixes = share_prefixes
        self._observe = observe
        self._dtype = dtype or model.dtype
        self._stop = stop

    def row_costs(self, max_rows: int, max_tokens: int) -> Callable[[IntArray, int], int] | None:
        """Return a model of the memory of so many rows and new tokens per row; None on the flat path.

        The model maps the live rows at each depth, shape [D], and the tokens of all prompts, padding included, to the
        bytes at the peak of a call.
        """
        if isinstance(self._forward, FlatForward):
            return None
        return self._cache(self._forward, max_rows, max_tokens).bytes_for

    def _cache(self, forward: TreeForward, max_rows: int, max_tokens: int) -> RowCache:
        return row_cache(self.model, forward.kv_shapes, self._memory_bytes, max_rows, max_tokens)

    def _decoder(self, max_rows: int, max_tokens: int) -> Decoder:
        if isinstance(self._forward, FlatForward):
            return ModelCacheDecoder(self.model, self._memory_bytes)
        # A copy of the weights in every call: they may have changed since the last one.
        packed = LeanPass(self.model, self._dtype) if self._forward.model_pass.lean else HookedPass(self.model)
        return TreeDecoder(self.model, packed, self._cache(self._forward, max_rows, max_tokens))

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the engine's model; weights that it shares with the learner stay as they are."""
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            if own[name] is not tensor:
                own[name].copy_(tensor)
        self.version = version

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int | Sequence[int],
        sampling: SamplingParams,
        seed: int,
        first: int = 0,
    ) -> list[RolloutTree]:
        """Sample N rollouts of each prompt; see `Sampler.sample`.

        For the same seed and N, rollout n of a prompt with the same number draws the same uniform numbers, whatever the
        other prompts are.

        Raises:
            ValueError: If a prompt is empty or N < 1.
            DivergedError: If logits are not finite.
            OutOfMemoryError: If the memory limit does not hold a single row beside the prompts of its run.
        """
        rollouts_P = rollouts_of_prompts(num_rollouts, len(prompts))
        if min(rollouts_P, default=1) < 1 or not all(len(p) for p in prompts):
            raise ValueError("every prompt needs at least one token and num_rollouts must be >= 1")
        if not prompts:
            return []
        uniforms = Uniforms(seed, rollouts_P, first)
        growth = _Growth(self, prompts, rollouts_P, sampling, uniforms)
        waves = deque(growth.first_waves())
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            with growth.decoder.attention():
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
        rollouts_P: Sequence[int],
        sampling: SamplingParams,
        uniforms: Uniforms,
    ) -> None:
        self._device = engine.model.device
        self._shares_prefixes = engine._share_prefixes
        self._observe = engine._observe
        self._rollouts_P = np.array(rollouts_P)
        self._num_rollouts, self._num_finished = sum(rollouts_P), 0
        self._prompts = [tuple(p) for p in prompts]
        self._sampling = sampling
        self._stop_ids = np.array([*engine.stop_token_ids, *sampling.stop_token_ids], np.int64)
        self._uniforms = uniforms
        self._forest = Forest(prompts)
        self._text_ends = TextEnds(engine._stop, self._forest) if engine._stop else None
        self.decoder = engine._decoder(self._num_rollouts, sampling.max_new_tokens)

    def first_waves(self) -> list[Rows]:
        """Return the rows of each run of prompts that are prefilled, and then decoded, together."""
        return [
            Rows(
                depth=0,
                prompt_R=run,
                node_R=np.full(run.size, -1),
                token_R=np.full(run.size, -1),
                row_K=np.repeat(np.arange(run.size), self._rollouts_P[run]),
                rollout_K=np.concatenate([np.arange(n) for n in self._rollouts_P[run]]),
            )
            for run in self.decoder.split(self._prompts)
        ]

    def trees(self) -> list[RolloutTree]:
        trees = self._forest.trees()
        return trees if self._shares_prefixes else [RolloutTree.merge([tree]) for tree in trees]

    def decode(self, rows: Rows) -> list[Rows]:
        """Decode rows to their ends; return the rows that must wait for memory."""
        waiting: list[Rows] = []
        live, prompt_R = np.unique(rows.prompt_R, return_inverse=True)
        logits_RV = self.decoder.start([self._prompts[p] for p in live])
        if rows.depth:
            logits_RV = self._replay(rows, prompt_R)
        while True:
            num_live = rows.row_K.size
            rows, source_R = self._draw(rows, logits_RV)
            self._num_finished += num_live - rows.row_K.size
            self._observe(Decoding(self._num_finished, self._num_rollouts, self._forest.num_nodes, rows.depth))
            if not rows.node_R.size:
                return waiting
            capacity = self.decoder.rows_that_fit(rows.depth)
            if rows.node_R.size > capacity:
                kept, rest = np.split(np.argsort(rows.prompt_R, kind="stable"), [capacity])
                waiting += [rows.take(part) for part in np.split(rest, range(capacity, rest.size, capacity))]
                kept.sort()
                rows, source_R = rows.take(kept), source_R[kept]
            rows = self.decoder.rearrange(rows, source_R)
            local = np.searchsorted(live, rows.prompt_R)
            still = np.unique(local)
            if 2 * still.size <= live.size:  # drop the prompts that are done
                self.decoder.keep_prompts(still)
                live = live[still]
                local = np.searchsorted(live, rows.prompt_R)
            logits_RV = self.decoder.feed(rows.token_R, rows.depth - 1, local)

    def _draw(self, rows: Rows, logits_RV: Tensor) -> tuple[Rows, IntArray]:
        """Draw one token for every rollout; return the rows that are still live, and the parent row of each."""
        if rows.depth < self._sampling.min_new_tokens:
            logits_RV = logits_RV.index_fill(1, self._tensor(self._stop_ids), float("-inf"))
        uniform_K = self._uniforms.at(rows.depth, rows.prompt_R[rows.row_K], rows.rollout_K)
        if logits_RV.device.type == "mps":
            logits_RV = logits_RV.cpu()  # the draw is exact in float64, which Apple GPUs do not have
        row_K, number_K = (to_device(x_K, logits_RV.device) for x_K in [rows.row_K, uniform_K])
        drawn = draw_tokens(logits_RV, row_K, number_K, self._sampling)
        # One copy, for which the host waits once. Token ids are exact in float64.
        token_K, logprob_K = torch.stack([x_K.double() for x_K in drawn]).cpu().numpy()
        if not np.isfinite(logprob_K).all():
            raise DivergedError(
                f"the logits of token {rows.depth + 1:,} of a response are not finite numbers: the training has "
                "diverged; lower optimizer.learning_rate and resume from an earlier checkpoint"
            )
        token_K = token_K.astype(np.int64)

        key_K = rows.row_K * logits_RV.shape[1] + token_K if self._shares_prefixes else np.arange(token_K.size)
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
        if self._text_ends is not None:
            completes_C = self._text_ends.found(rows.node_R[source_C], token_C, node_C)
            stopped_C |= completes_C & (rows.depth >= self._sampling.min_new_tokens)
        done_C = stopped_C | (rows.depth + 1 == self._sampling.max_new_tokens)
        self._forest.finish(node_C[done_C], count_C[done_C], stopped_C[done_C])

        children = Rows(rows.depth + 1, rows.prompt_R[source_C], node_C, token_C, child_K, rows.rollout_K[order])
        live = np.flatnonzero(~done_C)
        return children.take(live), source_C[live]

    def _replay(self, rows: Rows, prompt_R: IntArray) -> Tensor:
        """Feed again the tokens of rows that waited; return the logits after their last token."""
        self.decoder.restart(prompt_R, rows.depth)
        path_RT = self._forest.paths(rows.node_R, rows.depth - 1)
        for position in range(rows.depth):
            logits_RV = self.decoder.feed(path_RT[:, position], position, prompt_R)
        return logits_RV

    def _tensor(self, array: IntArray | FloatArray) -> Tensor:
        return to_device(array, self._device)
