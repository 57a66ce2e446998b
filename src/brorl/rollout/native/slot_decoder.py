"""The decoder for any device: each row has a slot, and a step reads and writes tensors at fixed addresses.

A row with a single rollout never forks. On CUDA, the device draws such rows' tokens and the host collects them every 16
positions; only rows with more rollouts need the host at each position. The step can then be a CUDA graph. On other
devices, the host draws for all rows.

Dimensions: S slots in the state, R of them in a step, U of these with a row, C cells in the grid of prompts and slots,
P prompts, V vocabulary tokens, J = 16 positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.arrays import FloatArray, IntArray
from brorl.model.chunks import padded_ranges
from brorl.model.context_limit import other_span, position_limit
from brorl.model.device import to_device
from brorl.model.llama_pass import LlamaPass
from brorl.model.shared_prefill import shared_prefill
from brorl.model.tree_attention import PREFILL_TOKENS, ModelPass, tree_attention
from brorl.rollout.native.decoder import Decoder, RowMemory, Rows
from brorl.rollout.native.draw import POSITIONS_AT_ONCE, draw_tokens, forbidden_at, without
from brorl.rollout.native.graphs import StepGraphs
from brorl.rollout.native.slot_attention import (
    Grid,
    SlotCache,
    SlotContext,
    SlotPrompts,
    cells_of,
    power_of_two,
    rounded_up,
)
from brorl.sampling import SamplingParams

_NONE = np.empty(0, np.int64)


class _State:
    """The state of S slots on the device. The tensors keep their addresses until more slots are needed."""

    def __init__(self, slots: int, cells: int, device: torch.device, *, draws: bool) -> None:
        self.size = slots, cells  # slots, and cells in the largest grid of prompts and slots
        drawn = slots if draws else 0
        integer = partial(torch.zeros, dtype=torch.int64, device=device)
        number = partial(torch.zeros, dtype=torch.float64 if draws else torch.float32, device=device)
        self.start_S = integer(slots)  # tokens of the slot's prompt
        self.token_SJ = integer(slots, POSITIONS_AT_ONCE)  # tokens at the last 16 positions, in column position % 16
        self.logprob_SJ = number(drawn, POSITIONS_AT_ONCE)
        self.uniform_SJ = number(drawn, POSITIONS_AT_ONCE)  # uniform numbers for 16 positions
        self.cell_S, self.slot_C = integer(slots), integer(cells)
        self.position = integer(1)  # position of the tokens being fed

    @property
    def addresses(self) -> list[int]:
        """Addresses of the tensors."""
        return [x.data_ptr() for x in vars(self).values() if isinstance(x, Tensor)]


class SlotDecoder(Decoder):
    """Tree attention: a slot attends to its prompt's keys and its own.

    With graphs, the prompts and the logits keep their tensors, and sizes are rounded up so they take few distinct
    values. With `draws`, the device draws for single-rollout rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_pass: ModelPass,
        cache: SlotCache,
        sampling: SamplingParams,
        graphs: StepGraphs | None,
        *,
        draws: bool,
    ) -> None:
        self.cache = cache
        self.sampling = sampling
        self.draws = draws
        self.model_pass = model_pass
        self._model = model
        self._graphs = graphs
        self._parameters = [id(p) for p in model.parameters()]
        self._state = _State(0, 0, model_pass.device, draws=draws)
        self._prompts = SlotPrompts(keeps=graphs is not None)
        self._logits = torch.empty(0, 0, device=model_pass.device)
        self._device_slots = self._used = _NONE  # slots that the device draws for; all slots in use
        self._prompt_S = _NONE  # index of each slot's prompt
        self._grid: Grid | None = None  # grid of the slots in use; None after they change
        # Writes queued for `_upload`: the target on the device, its rows (None for all), and the values.
        self._uploads: list[tuple[Tensor, IntArray | None, IntArray | FloatArray]] = []

    def reuse_for(self, memory: RowMemory, sampling: SamplingParams) -> bool:
        """Prepare for another call with the current weights. Return False if the model's parameters were replaced."""
        parameters = [id(p) for p in self._model.parameters()]
        if parameters != self._parameters:
            return False
        self.cache.memory = memory
        self.sampling = sampling
        if isinstance(self.model_pass, LlamaPass):
            self.model_pass.refresh()
        return True

    def attention(self) -> AbstractContextManager[None]:
        """Hook the model's attention to use contexts; see `Decoder.attention`."""
        return tree_attention(self._model)

    def split(self, prompts: Sequence[tuple[int, ...]]) -> list[IntArray]:
        """Split prompts into waves that leave memory for rows; see `Decoder.split`."""
        most = self.cache.memory.prompt_tokens
        if self._graphs is not None:
            most //= 3  # rounding up gives at most twice as many prompts with 1.5 times as many tokens
        return padded_ranges([len(prompt) for prompt in prompts], min(PREFILL_TOKENS, most))

    def start(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Prefill the prompts of a wave; see `Decoder.start`."""
        cache, logits_PV = shared_prefill(self.model_pass, prompts)
        self._prompts.fill(cache)
        self.cache.start(self._prompts.num_bytes)
        slots = self.cache.max_slots
        cells = slots * self._prompts.shape[0]
        if slots > self._state.size[0] or cells > self._state.size[1]:
            slots_before, cells_before = self._state.size
            sizes = max(slots, slots_before), max(cells, cells_before)
            self._state = _State(*sizes, self.model_pass.device, draws=self.draws)
        self._device_slots = _NONE
        self._prompt_S = np.zeros(slots, np.int64)
        self._state.start_S.zero_()  # slots without a row are computed too; keep their positions valid for this wave
        if self._graphs is not None:
            if self._logits.shape[0] < slots:
                self._logits = logits_PV.new_empty(slots, logits_PV.shape[1])
            self._bind(self._graphs)
        return logits_PV

    def rows_that_fit(self, num_tokens: int) -> int:
        """Return how many rows fit; see `Decoder.rows_that_fit`."""
        return self.cache.rows_that_fit(num_tokens)

    def keep_prompts(self, prompts: IntArray) -> None:
        """Keep only these prompts; see `Decoder.keep_prompts`."""
        self._prompts.keep(prompts)

    def place(self, rows: Rows, prompt_R: IntArray) -> Rows:
        """Copy the rows that move. A row's first child keeps its slot.

        If the device is not drawing for any row, the rows get the first slots.
        """
        if not rows.size:
            return rows
        source_R = rows.slot_R
        slot_R = self._new_slots(source_R, rows.depth)
        order = np.argsort(slot_R)
        source_R, slot_R, prompt_R = source_R[order], slot_R[order], prompt_R[order]
        self.cache.place(source_R, slot_R, rows.depth - 1, rows.depth)
        rows = replace(rows.take(order), slot_R=slot_R)
        self._used = np.concatenate([self._device_slots, slot_R])
        self._grid = None
        self._prompt_S[slot_R] = prompt_R
        self._uploads += [
            (self._state.token_SJ[:, (rows.depth - 1) % POSITIONS_AT_ONCE], slot_R, rows.token_R),
            (self._state.start_S, slot_R, self._prompts.length[prompt_R]),
        ]
        return rows

    def draw_on_device(self, slot_R: IntArray, uniform_RJ: FloatArray) -> None:
        """Let the device draw for single-rollout rows until `collect_drawn`, using these uniform numbers, [R, 16]."""
        self._device_slots = np.concatenate([self._device_slots, slot_R])
        self._uploads.append((self._state.uniform_SJ, slot_R, uniform_RJ))

    def collect_drawn(self) -> tuple[IntArray, FloatArray]:
        """Wait for the slots' tokens at the last 16 positions and their log-probs, each of shape [S, 16].

        After this, the host draws for all rows.
        """
        state = self._state
        top = int(self._used.max()) + 1
        token_SJ, logprob_SJ = torch.stack([state.token_SJ[:top].double(), state.logprob_SJ[:top]]).cpu().numpy()
        self._device_slots = _NONE
        return token_SJ.astype(np.int64), logprob_SJ

    def feed(self, rows: Rows) -> Tensor:
        """Feed one token per slot. Return the logits of the rows that the host draws for. See `Decoder.feed`."""
        position = rows.depth - 1
        state = self._state
        num_slots = int(self._used.max()) + 1
        if self._graphs is not None:
            fit = self.cache.rows_that_fit(rows.depth)
            num_slots = min(rounded_up(num_slots), fit)
        grid = self._grid_of_slots(num_slots)
        self._upload()
        state.position.fill_(position)
        forbidden = forbidden_at(rows.depth, self.sampling) if self._device_slots.size else None
        longest = int(self._prompts.length.max()) + position + 1
        step = partial(self._step, num_slots, grid, longest, forbidden)
        if self._graphs is None:
            step()
        else:
            shapes = num_slots, self.cache.num_tokens, self._prompts.shape, grid.shape
            sampling = self.sampling
            key = shapes, sampling.temperature, sampling.top_p, sampling.top_k, forbidden
            self._graphs.run(key, step, self._logits[:num_slots])
        if rows.size in (0, num_slots):
            return self._logits[: rows.size]
        return self._logits[to_device(rows.slot_R, state.position.device)]

    def _step(self, num_slots: int, grid: Grid, longest: int, forbidden: tuple[int, ...] | None) -> None:
        """Feed each slot's token at the current position, and draw the next one unless `forbidden` is None."""
        state = self._state
        position = self._state.position
        token_R = state.token_SJ[:num_slots].index_select(1, position % POSITIONS_AT_ONCE)[:, 0]
        context = SlotContext(self.cache, self._prompts, grid, position, num_slots, longest)
        inputs = token_R, state.start_S[:num_slots] + position, context, None
        kept = None if self._graphs is None else self._logits[:num_slots]
        into = (kept,) if isinstance(self.model_pass, LlamaPass) else ()
        logits = self.model_pass.row_logits(*inputs, *into).whole()
        if kept is None:
            self._logits = logits
        elif logits is not kept:
            kept.copy_(logits)
        if forbidden is None:
            return
        after = (position + 1) % POSITIONS_AT_ONCE
        uniform_R = state.uniform_SJ[:num_slots].index_select(1, after)[:, 0]
        token_R, logprob_R = draw_tokens(without(logits, forbidden), None, uniform_R, self.sampling)
        state.token_SJ[:num_slots].index_copy_(1, after, token_R[:, None])
        state.logprob_SJ[:num_slots].index_copy_(1, after, logprob_R[:, None].double())

    def _new_slots(self, source_R: IntArray, depth: int) -> IntArray:
        """Return each row's slot at a depth: its source if the row can stay there, otherwise a free slot."""
        if depth == 1 or self.cache.grows(depth):
            return np.arange(source_R.size)
        limit = self.cache.rows_that_fit(depth) if self._device_slots.size else source_R.size
        free, stays_R = np.ones(limit, np.bool_), np.zeros(source_R.size, np.bool_)
        free[self._device_slots] = False
        stays_R[np.unique(source_R, return_index=True)[1]] = True  # the first row of each source
        stays_R &= source_R < limit
        free[source_R[stays_R]] = False
        slot_R = source_R.copy()
        slot_R[~stays_R] = np.flatnonzero(free)[: np.count_nonzero(~stays_R)]
        return slot_R

    def _grid_of_slots(self, num_slots: int) -> Grid:
        """Return the grid of the slots in use."""
        num_prompts = self._prompts.shape[0]
        state = self._state
        if num_prompts == 1:
            return Grid((1, num_slots), None, None)
        if self._grid is None:
            prompt_U = self._prompt_S[self._used]
            rank_U, width = cells_of(prompt_U, num_prompts)
            width = width if self._graphs is None else min(power_of_two(width), num_slots)
            cell_U = prompt_U * width + rank_U
            # A slot without a row uses the first cell, and a cell without a slot uses the first slot.
            cell_R, slot_C = np.zeros(num_slots, np.int64), np.zeros(num_prompts * width, np.int64)
            cell_R[self._used], slot_C[cell_U] = cell_U, self._used
            targets = state.slot_C[: slot_C.size], state.cell_S[:num_slots]
            self._grid = Grid((num_prompts, width), *targets)
            self._uploads += [(targets[0], None, slot_C), (targets[1], None, cell_R)]
        return self._grid

    def _upload(self) -> None:
        """Write all queued changes to the device with one copy from the host."""
        if not self._uploads:
            return
        arrays = [x.ravel().view(np.int64) for _, *both in self._uploads for x in both if x is not None]
        pieces = iter(to_device(np.concatenate(arrays), self._state.position.device).split([x.size for x in arrays]))
        for target, index, values in self._uploads:
            if index is None:
                target.copy_(next(pieces))
            else:
                target.index_copy_(0, next(pieces), next(pieces).view(target.dtype).view(values.shape))
        self._uploads.clear()

    def _bind(self, graphs: StepGraphs) -> None:
        """Bind the graphs to the addresses of all tensors. Turn them off if the model depends on the context length."""
        longest = int(self._prompts.length.max()) + self.cache.memory.max_tokens
        config = self._model.config
        if any(limit is not None and longest > limit.tokens for limit in (position_limit(config), other_span(config))):
            graphs.refuse(f"{type(self._model).__name__} checks the context length, up to {longest:,} tokens")
        weights = [x.data_ptr() for x in (*self._model.parameters(), *self._model.buffers())]
        if isinstance(self.model_pass, LlamaPass):
            weights += self.model_pass.addresses(longest)
        own_addresses = (
            self._logits.data_ptr(),
            *self.cache.addresses,
            *self._state.addresses,
            *self._prompts.addresses,
        )
        graphs.bind([*weights, *own_addresses])
