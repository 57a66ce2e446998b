"""The draw of `draw` in two kernels: one reads the logits once, the other those of one block of tokens per rollout.

The numbers are those of `draw`: masses of blocks of tokens, summed up and cumulated in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 4096  # that a program reads at once


def draw(
    logits_RV: Tensor, row_K: Tensor, uniform_K: Tensor, temperature: float, block_size: int
) -> tuple[Tensor, Tensor]:
    """Draw a token for each of K rollouts.

    Args:
        logits_RV: Logits; dense in each row.
        row_K: Row of each rollout.
        uniform_K: A float64 number in [0, 1) for each rollout.
        temperature: Divisor of the logits, above 0.
        block_size: Tokens of a block, a power of two.

    Returns:
        Token ids [K], and their log-probs [K] in nats and float64.
    """
    num_rows, vocabulary = logits_RV.shape
    num_blocks = triton.cdiv(vocabulary, block_size)
    uniform_K = uniform_K.contiguous()
    device, num_draws = logits_RV.device, row_K.shape[0]
    top_RB = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    mass_RB = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=device)
    sizes = {"V": vocabulary, "B": num_blocks, "C": block_size, "ROW": logits_RV.stride(0)}
    at_once = max(1, _TOKENS // block_size)
    _sum_blocks[num_rows, triton.cdiv(num_blocks, at_once)](
        logits_RV, top_RB, mass_RB, temperature, BLOCKS=at_once, **sizes
    )
    token_K = torch.empty(num_draws, dtype=torch.int64, device=device)
    logprob_K = torch.empty(num_draws, dtype=torch.float64, device=device)
    if num_draws:
        _invert[num_draws,](
            logits_RV, top_RB, mass_RB, row_K, uniform_K, token_K, logprob_K, temperature,
            BLOCKS=triton.next_power_of_2(num_blocks), **sizes,
        )  # fmt: skip
    return token_K, logprob_K


@triton.jit
def _sum_blocks(
    logits, top, mass, temperature, V: tl.constexpr, B: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    v = b[:, None] * C + tl.arange(0, C)[None, :]
    x = tl.load(logits + row * ROW + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature
    m = tl.max(x, 1)
    shift = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(tl.exp(x - shift[:, None]).to(tl.float64), 1)
    tl.store(top + row * B + b, m, mask=b < B)
    tl.store(mass + row * B + b, total, mask=b < B)


@triton.jit
def _invert(
    logits, top, mass, rows, uniform, token, logprob, temperature, V: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    ROW: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0)
    row = tl.load(rows + k)
    b, c = tl.arange(0, BLOCKS), tl.arange(0, C)
    top_B = tl.load(top + row * B + b, mask=b < B, other=float("-inf"))
    largest = tl.max(top_B, 0)
    mass_B = tl.load(mass + row * B + b, mask=b < B, other=0.0) * tl.exp((top_B - largest).to(tl.float64))
    edge_B = tl.cumsum(mass_B, 0)
    total = tl.sum(tl.where(b == B - 1, edge_B, 0.0), 0)
    target = tl.load(uniform + k) * total
    # The limits are for rows with NaN, which have no such block; their log-probs are NaN.
    block = tl.minimum(tl.sum(((edge_B <= target) & (b < B)).to(tl.int32), 0), B - 1)
    inside = target - tl.sum(tl.where(b == block - 1, edge_B, 0.0), 0)
    m = tl.sum(tl.where(b == block, top_B, 0.0), 0)
    v = block * C + c
    x = tl.load(logits + row * ROW + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature
    edge_C = tl.cumsum(tl.exp(x - m).to(tl.float64) * tl.exp((m - largest).to(tl.float64)), 0)
    last = tl.sum(tl.where(c == C - 1, edge_C, 0.0), 0)
    # Rounding may bring a target to the mass of its block; the token is then the last one with a probability.
    place = tl.minimum(tl.sum((edge_C <= inside).to(tl.int32), 0), tl.sum((edge_C < last).to(tl.int32), 0))
    chosen = tl.sum(tl.where(c == place, x, 0.0), 0).to(tl.float64)
    tl.store(token + k, tl.minimum(block * C + place, V - 1).to(tl.int64))
    tl.store(logprob + k, chosen - largest.to(tl.float64) - tl.log(total))
