"""Turns logits into tokens: one inverse-CDF draw per rollout, from the tokens that top-p and top-k keep.

Each rollout has one uniform number per position, determined by (prompt seed, rollout, position). So its tokens do not
depend on the other rows in its batch or on how the batch was split.

Dimensions: P prompts, R rows, K rollouts, V vocabulary tokens in B blocks of C tokens, J = 16 positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from brorl.arrays import FloatArray, IntArray
from brorl.model.device import at_least_float32, to_device
from brorl.model.kernels import kernels_of, suits_triton
from brorl.model.logits import LOGITS_PER_DRAW, MASSES_PER_DRAW, tokens_per_mass
from brorl.model.logprobs import smallest_kept, softmax_lse
from brorl.sampling import SamplingParams

# Uniform numbers are computed 16 positions at a time, and the device draws 16 tokens before the host collects them.
POSITIONS_AT_ONCE = 16


def forbidden_at(depth: int, sampling: SamplingParams) -> tuple[int, ...]:
    """Return the tokens forbidden after `depth` tokens: all stop tokens until `min_new_tokens`, then none."""
    return sampling.stop_token_ids if depth < sampling.min_new_tokens else ()


def without(logits_RV: Tensor, forbidden: tuple[int, ...]) -> Tensor:
    """Return the logits with the forbidden tokens set to -inf."""
    if forbidden:
        logits_RV = logits_RV.clone()
        for token in forbidden:
            logits_RV[:, token].fill_(float("-inf"))
    return logits_RV


class Uniforms:
    """Uniform numbers in [0, 1) for each prompt, rollout and position, independent of access order.

    A prompt's numbers depend on its seed, 0 to 2**96 - 1, and its number of rollouts.
    """

    def __init__(self, seed_P: Sequence[int], rollouts_P: Sequence[int]) -> None:
        self._seed_P = seed_P
        self._rollouts_P = rollouts_P
        self._table = np.empty((len(rollouts_P), POSITIONS_AT_ONCE, max(rollouts_P)))
        self._filled_P = np.zeros(len(rollouts_P), np.bool_)
        self._block = 0

    def at(self, position: int, prompt_K: IntArray, rollout_K: IntArray) -> FloatArray:
        """Return the numbers for K rollouts (prompt index, index within the prompt) at a position, shape [K]."""
        uniform_K: FloatArray = self._of_block(position, prompt_K)[prompt_K, position % POSITIONS_AT_ONCE, rollout_K]
        return uniform_K

    def block(self, position: int, prompt_K: IntArray, rollout_K: IntArray) -> FloatArray:
        """Return the numbers for K rollouts at all 16 positions of the block containing `position`, shape [K, 16]."""
        uniform_KJ: FloatArray = self._of_block(position, prompt_K)[prompt_K, :, rollout_K]
        return uniform_KJ

    def _of_block(self, position: int, prompt_K: IntArray) -> FloatArray:
        """Return the table for the block containing `position`, filled for the given prompts, shape [P, 16, N]."""
        block = position // POSITIONS_AT_ONCE
        if block != self._block:
            self._block = block
            self._filled_P[:] = False
        filled_K = self._filled_P[prompt_K]
        for prompt in [] if filled_K.all() else np.unique(prompt_K[~filled_K]).tolist():
            key = self._seed_P[prompt] << 32 | block
            size = (POSITIONS_AT_ONCE, self._rollouts_P[prompt])
            self._table[prompt, :, : size[1]] = np.random.Generator(np.random.Philox(key=key)).random(size)
            self._filled_P[prompt] = True
        return self._table


def draw_tokens(
    logits_RV: Tensor, row_K: IntArray | None, uniform_K: FloatArray | Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Draw one token for each of K rollouts on R rows, without waiting for the device.

    Args:
        logits_RV: The model's logits of the rows, shape [R, V].
        row_K: Row of each rollout, ascending: [0, 0, 1] draws twice from row 0. None draws once from each row, with
            everything on the device.
        uniform_K: A float64 number in [0, 1) for each rollout, shape [K].
        sampling: Temperature, top-p and top-k.

    Returns:
        Token ids [K], and their log-probs [K] in nats under the distribution that drew them (at temperature 0, the
        distribution at temperature 1). A row with a NaN or +inf, or with only -inf, has no distribution: its log-probs
        are NaN. Rows and rollouts are processed in blocks, which bounds memory and changes no tokens.
    """
    num_rows, vocabulary = logits_RV.shape
    device = logits_RV.device
    row = torch.arange(num_rows, device=device) if row_K is None else to_device(row_K, device)
    uniform = uniform_K if isinstance(uniform_K, Tensor) else to_device(uniform_K, device)
    if sampling.temperature and sampling.top_p == 1 and not sampling.top_k:
        kernels = kernels_of(logits_RV)
        if kernels:
            return kernels.draw_tokens(logits_RV, sampling.temperature, row, uniform)
        if logits_RV.stride(1) == 1 and suits_triton(logits_RV):
            from brorl.model.triton_kernels import draw

            return draw(logits_RV, row, uniform, sampling.temperature, tokens_per_mass(vocabulary))
    size = max(1, LOGITS_PER_DRAW // vocabulary)
    starts = [*range(0, num_rows, size), num_rows]
    edges = starts if row_K is None else np.searchsorted(row_K, starts).tolist()
    blocks = [
        _draw_block(logits_RV[start : start + size], row[a:b] - start if start else row[a:b], uniform[a:b], sampling)
        for start, (a, b) in zip(starts[:-1], pairwise(edges), strict=True)
    ]
    tokens, logprobs = blocks[0] if len(blocks) == 1 else (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
    return tokens, logprobs


def _draw_block(logits_RV: Tensor, row_K: Tensor, uniform_K: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw tokens for one block of rows; see `draw_tokens`."""
    if sampling.temperature and (sampling.top_p < 1 or sampling.top_k):
        smallest_R = smallest_kept(logits_RV, sampling.temperature, sampling.top_p, sampling.top_k)
        logits_RV = logits_RV.masked_fill(logits_RV < smallest_R[:, None], float("-inf"))
    logits_RV = logits_RV.to(at_least_float32(logits_RV.dtype))
    if sampling.temperature not in (0.0, 1.0):
        logits_RV = logits_RV / sampling.temperature
    mass_RV, lse_R = softmax_lse(logits_RV)
    token_K = _inverse_cdf(mass_RV, row_K, uniform_K) if sampling.temperature else logits_RV.argmax(1)[row_K]
    return token_K, logits_RV[row_K, token_K] - lse_R[row_K]


def _inverse_cdf(mass_RV: Tensor, row_K: Tensor, uniform_K: Tensor) -> Tensor:
    """Invert a cumulative distribution in two stages: first over blocks of tokens, then within one block."""
    vocabulary = mass_RV.shape[1]
    block_size = tokens_per_mass(vocabulary)
    if vocabulary % block_size:
        mass_RV = torch.nn.functional.pad(mass_RV, (0, block_size - vocabulary % block_size))
    mass_RBC = mass_RV.unflatten(1, (-1, block_size))
    edge_RB = mass_RBC.sum(2, dtype=torch.float64).cumsum(1)

    size = max(1, MASSES_PER_DRAW // sum(mass_RBC.shape[1:]))
    blocks = zip(row_K.split(size), uniform_K.split(size), strict=True)
    return torch.cat([_from_masses(mass_RBC, edge_RB, *block) for block in blocks]).clamp_(max=vocabulary - 1)


def _from_masses(mass_RBC: Tensor, edge_RB: Tensor, row_K: Tensor, uniform_K: Tensor) -> Tensor:
    """Draw tokens for K rollouts, given token masses [R, B, C] and cumulative block masses [R, B]."""
    edge_KB = edge_RB[row_K]
    target_K = uniform_K * edge_KB[:, -1]  # rounds to below the last edge: a uniform number is at most 1 - 2**-53
    # A row with NaN has no such block. Clamping keeps its indices valid, and its log-probs are NaN.
    block_K = torch.searchsorted(edge_KB, target_K[:, None], right=True)[:, 0].clamp_(max=edge_KB.shape[1] - 1)
    before_K = torch.where(block_K > 0, edge_KB.gather(1, (block_K[:, None] - 1).clamp(min=0))[:, 0], 0.0)
    inner_KC = mass_RBC[row_K, block_K].to(torch.float64).cumsum(1)
    inside_K = _strictly_below(target_K - before_K, inner_KC[:, -1])
    token_K: Tensor = block_K * mass_RBC.shape[2] + torch.searchsorted(inner_KC, inside_K[:, None], right=True)[:, 0]
    return token_K


def _strictly_below(value: Tensor, limit: Tensor) -> Tensor:
    """Guard against rounding: a target that reaches the mass of its block would select a token of probability 0."""
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit)))
