"""Triton kernels for decoding on a GPU: a decoder layer, the attention of slots, and the draw.

The attention has two kernels, one for the keys of the prompt and one for those of the slot, merged with one softmax.
They read only the tokens in use, each once. Notation: see `slot_attention`; C cells of a grid of prompts and slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS, _GATES = 16, 1024  # heads and gate elements per program


def rotate(
    mixed_RHD: Tensor,
    cos_RD: Tensor,
    sin_RD: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    norms: tuple[Tensor, float, Tensor, float] | None,
) -> None:
    """Rotate the queries and keys of rows in place, and scale the queries.

    `mixed_RHD` is dense: H queries, K keys and K values, one after another. `norms` holds the weights and epsilons of
    the norms of queries and keys before the rotation.
    """
    rows, all_heads, dim = mixed_RHD.shape
    turned = num_heads + num_kv_heads
    query_norm, query_epsilon, key_norm, key_epsilon = norms or (cos_RD, 0.0, cos_RD, 0.0)
    _rotate[rows, triton.cdiv(turned, _HEADS)](
        mixed_RHD, cos_RD, sin_RD, query_norm, key_norm, query_epsilon, key_epsilon, scale,
        QUERIES=num_heads, TURNED=turned, ROW=all_heads * dim, D=dim, HALF=triton.next_power_of_2(dim // 2),
        HEADS=_HEADS, NORMS=norms is not None,
    )  # fmt: skip


def gated(gate_and_up_RI: Tensor) -> Tensor:
    """Return silu(gate) * up, shape [R, I]. Each input row holds gate, then up: shape [R, 2 I]."""
    rows, width = gate_and_up_RI.shape
    out_RI = torch.empty(rows, width // 2, dtype=gate_and_up_RI.dtype, device=gate_and_up_RI.device)
    _gate[rows, triton.cdiv(width // 2, _GATES)](gate_and_up_RI, out_RI, INNER=width // 2, BLOCK=_GATES)
    return out_RI


@triton.jit
def _rotate(
    mixed, cos, sin, query_norm, key_norm, query_epsilon, key_epsilon, scale, QUERIES: tl.constexpr,
    TURNED: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """Program (row, i): norm, rotate and scale the queries and keys of one row's heads i * HEADS and up, in place."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    inside_d = d < D // 2
    inside = (head < TURNED)[:, None] & inside_d[None, :]
    at = mixed + row * ROW + head[:, None] * D + d[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
    is_query = head < QUERIES
    if NORMS:
        square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D
        inverse = 1 / tl.sqrt(square + tl.where(is_query, query_epsilon, key_epsilon))
        query_scale = tl.load(query_norm + d, mask=inside_d, other=0.0).to(tl.float32)
        key_scale = tl.load(key_norm + d, mask=inside_d, other=0.0).to(tl.float32)
        first *= inverse[:, None] * tl.where(is_query[:, None], query_scale[None, :], key_scale[None, :])
        query_scale = tl.load(query_norm + D // 2 + d, mask=inside_d, other=0.0).to(tl.float32)
        key_scale = tl.load(key_norm + D // 2 + d, mask=inside_d, other=0.0).to(tl.float32)
        second *= inverse[:, None] * tl.where(is_query[:, None], query_scale[None, :], key_scale[None, :])
    factor = tl.where(is_query, scale, 1.0)[:, None]
    c = tl.load(cos + row * D + d, mask=inside_d, other=0.0).to(tl.float32)[None, :] * factor
    s = tl.load(sin + row * D + d, mask=inside_d, other=0.0).to(tl.float32)[None, :] * factor
    tl.store(at, first * c - second * s, mask=inside)
    tl.store(at + D // 2, second * c + first * s, mask=inside)


@triton.jit
def _gate(both, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, i): compute BLOCK numbers of one row, starting at i * BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * INNER + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + i, gate / (1 + tl.exp(-gate)) * up, mask=i < INNER)


_NO_WINDOW = 1 << 30  # tokens
_MIN_BLOCK = 16  # fewest rows and columns of a product
_PROMPT_BYTES, _OWN_BYTES = 1 << 13, 1 << 12  # bytes of keys that a program reads at a time


def _with_dense_rows(x_RHD: Tensor) -> Tensor:
    return x_RHD if x_RHD.stride()[1:] == (x_RHD.shape[2], 1) else x_RHD.contiguous()


class PromptLevel(NamedTuple):
    """One layer's keys and values of the prompts, and the mapping between slots and cells."""

    key_KPSD: Tensor
    value_KPSD: Tensor
    length_P: Tensor
    width: int  # maximum slots per prompt
    slot_C: Tensor | None  # the slot of each cell; None if the cells are the slots
    cell_R: Tensor | None  # the cell of each slot


def attend(
    query_RHD: Tensor,
    key_RKD: Tensor,
    value_RKD: Tensor,
    own_key_RKTD: Tensor,
    own_value_RKTD: Tensor,
    prompts: PromptLevel,
    position: Tensor,
    window: int | None,
) -> Tensor:
    """Store the new keys and values of slots, then attend to the prompt and to the slot, and return [R, H, D].

    Args:
        query_RHD: Scaled queries.
        key_RKD: New keys.
        value_RKD: New values.
        own_key_RKTD: Keys of the slots; dense, like their values.
        own_value_RKTD: Values of the slots.
        prompts: The prompts.
        position: Index of the new tokens in their slots, shape [1].
        window: Tokens that a new token sees, including itself; None for all.
    """
    query_RHD, key_RKD, value_RKD = (_with_dense_rows(x) for x in (query_RHD, key_RKD, value_RKD))
    num_slots, num_heads, dim = query_RHD.shape
    num_kv_heads, num_tokens = own_key_RKTD.shape[1:3]
    num_prompts, prompt_tokens = prompts.key_KPSD.shape[1:3]
    groups = num_heads // num_kv_heads
    num_cells = num_prompts * prompts.width
    window = window or _NO_WINDOW
    shape = num_kv_heads, num_cells, groups
    sum_KCGD, mass_KCG, top_KCG = (
        torch.empty(s, dtype=torch.float32, device=query_RHD.device) for s in ((*shape, dim), shape, shape)
    )
    slot_C, cell_R = (x if x is not None else position for x in (prompts.slot_C, prompts.cell_R))
    queries = 64 if query_RHD.dtype.itemsize == 2 else _MIN_BLOCK  # float32 is multiplied without tensor cores
    token_bytes = dim * query_RHD.dtype.itemsize
    sizes = {"G": groups, "D": dim, "BLOCK_D": max(_MIN_BLOCK, triton.next_power_of_2(dim))}
    sizes["GRID"] = prompts.slot_C is not None
    _attend_prompts[triton.cdiv(prompts.width * groups, queries), num_prompts, num_kv_heads](
        query_RHD, prompts.key_KPSD, prompts.value_KPSD, prompts.length_P, position, slot_C, sum_KCGD, mass_KCG,
        top_KCG, prompts.width, num_prompts, prompt_tokens, window, ROW=query_RHD.stride(0), BLOCK_M=queries,
        BLOCK_S=_tokens_at_once(_PROMPT_BYTES, token_bytes), **sizes,
    )  # fmt: skip
    out_RHD = torch.empty(query_RHD.shape, dtype=query_RHD.dtype, device=query_RHD.device)
    _attend_own[num_slots, num_kv_heads](
        query_RHD, key_RKD, value_RKD, own_key_RKTD, own_value_RKTD, position, cell_R, sum_KCGD, mass_KCG, top_KCG,
        out_RHD, num_cells, num_tokens, window, QUERY_ROW=query_RHD.stride(0), KEY_ROW=key_RKD.stride(0),
        VALUE_ROW=value_RKD.stride(0), K=num_kv_heads, BLOCK_G=max(_MIN_BLOCK, triton.next_power_of_2(groups)),
        BLOCK_T=_tokens_at_once(_OWN_BYTES, token_bytes), num_warps=2, num_stages=2, **sizes,
    )  # fmt: skip
    return out_RHD


def _tokens_at_once(num_bytes: int, token_bytes: int) -> int:
    power: int = triton.next_power_of_2(token_bytes)
    return max(_MIN_BLOCK, num_bytes // power)


@triton.jit
def _add_tokens(
    q, key, value, first, end, m, mass_M, acc, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the tokens from `first` to `end` to a softmax, given its largest score m, its mass and its sum of values."""
    d = tl.arange(0, BLOCK_D)
    for begin in range(first // BLOCK * BLOCK, end, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        seen = (s >= first) & (s < end)
        at = s[:, None] * D + d[None, :]
        within = seen[:, None] & (d < D)[None, :]
        k = tl.load(key + at, mask=within, other=0.0)
        score = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        new_m = tl.maximum(m, tl.max(score, 1))
        weight = tl.exp(score - new_m[:, None])
        kept = tl.exp(m - new_m)
        v = tl.load(value + at, mask=within, other=0.0)
        mass_M = mass_M * kept + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        m = new_m
    return m, mass_M, acc


@triton.jit(do_not_specialize=["width", "num_prompts", "tokens", "window"])
def _attend_prompts(
    query, key, value, length, position, slot_of_cell, total, mass, top, width, num_prompts, tokens, window,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GRID: tl.constexpr, ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (i, prompt, key-value head): attend to one prompt with BLOCK_M of its slots' queries, from i * BLOCK_M.

    It writes the unfinished softmax of each query: the sum of values, the mass and the largest score.
    """
    prompt, head = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # G queries of each slot of the prompt
    inside = row < width * G
    cell = prompt * width + row // G
    slot = cell.to(tl.int64)
    if GRID:
        slot = tl.load(slot_of_cell + cell, mask=inside, other=0)
    d = tl.arange(0, BLOCK_D)
    queries = query + slot[:, None] * ROW + ((head * G + row % G) * D)[:, None] + d[None, :]
    q = tl.load(queries, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    end = tl.load(length + prompt)
    first = tl.maximum(end + tl.load(position) - window + 1, 0)
    start = (head * num_prompts + prompt).to(tl.int64) * tokens * D
    m = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, even if a window hides all tokens
    mass_M = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m, mass_M, acc = _add_tokens(q, key + start, value + start, first, end, m, mass_M, acc, D, BLOCK_D, BLOCK_S)
    place = (head * num_prompts * width + cell).to(tl.int64) * G + row % G
    tl.store(total + place[:, None] * D + d[None, :], acc, mask=inside[:, None] & (d < D)[None, :])
    tl.store(mass + place, mass_M, mask=inside)
    tl.store(top + place, m, mask=inside)


@triton.jit(do_not_specialize=["num_cells", "tokens", "window"])
def _attend_own(
    query, new_key, new_value, key, value, position, cell_of_slot, total, mass, top, out, num_cells, tokens, window,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GRID: tl.constexpr, QUERY_ROW: tl.constexpr,
    KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (slot, key-value head): store the slot's new token, and add its tokens to the softmax of its prompt."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(position)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    inside_d = d < D
    inside = (g < G)[:, None] & inside_d[None, :]
    q = tl.load(query + slot * QUERY_ROW + (head * G + g[:, None]) * D + d[None, :], mask=inside, other=0.0)
    k_D = tl.load(new_key + slot * KEY_ROW + head * D + d, mask=inside_d, other=0.0)
    v_D = tl.load(new_value + slot * VALUE_ROW + head * D + d, mask=inside_d, other=0.0)
    start = (slot * K + head) * tokens * D
    tl.store(key + start + end * D + d, k_D, mask=inside_d)
    tl.store(value + start + end * D + d, v_D, mask=inside_d)

    cell = slot
    if GRID:
        cell = tl.load(cell_of_slot + slot)
    place = (head * num_cells + cell) * G + g
    prompt_max = tl.load(top + place, mask=g < G, other=-1e30)
    token_score = tl.sum(q.to(tl.float32) * k_D.to(tl.float32)[None, :], 1)
    m = tl.maximum(prompt_max, token_score)
    kept, weight = tl.exp(prompt_max - m), tl.exp(token_score - m)
    mass_M = tl.load(mass + place, mask=g < G, other=0.0) * kept + weight
    acc = tl.load(total + place[:, None] * D + d[None, :], mask=inside, other=0.0) * kept[:, None]
    acc += weight[:, None] * v_D.to(tl.float32)[None, :]
    first = tl.maximum(end - window + 1, 0)
    m, mass_M, acc = _add_tokens(q, key + start, value + start, first, end, m, mass_M, acc, D, BLOCK_D, BLOCK_T)
    at = out + (slot * K + head) * G * D + g[:, None] * D + d[None, :]
    tl.store(at, acc / mass_M[:, None], mask=inside)


_TOKENS = 4096  # tokens whose logits a program reads at a time


def draw(
    logits_RV: Tensor, row_K: Tensor, uniform_K: Tensor, temperature: float, block_size: int
) -> tuple[Tensor, Tensor]:
    """Draw a token for each of K rollouts as `native.draw.draw_tokens` does, from logits dense within each row.

    `block_size` is a power of two. Masses of blocks are summed in float64, and log-probs are float64.
    """
    num_rows, vocabulary = logits_RV.shape
    num_blocks = triton.cdiv(vocabulary, block_size)
    uniform_K = uniform_K.contiguous()
    device = logits_RV.device
    num_draws = row_K.shape[0]
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
    """Program (row, i): the largest logit and the mass of each of BLOCKS blocks of one row, from i * BLOCKS."""
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
    """Program k: draw a block of rollout k's row and a token in it, and compute its log-prob."""
    k = tl.program_id(0)
    row = tl.load(rows + k)
    b, c = tl.arange(0, BLOCKS), tl.arange(0, C)
    top_B = tl.load(top + row * B + b, mask=b < B, other=float("-inf"))
    largest = tl.max(top_B, 0)
    mass_B = tl.load(mass + row * B + b, mask=b < B, other=0.0) * tl.exp((top_B - largest).to(tl.float64))
    edge_B = tl.cumsum(mass_B, 0)
    total = tl.sum(tl.where(b == B - 1, edge_B, 0.0), 0)
    target = tl.load(uniform + k) * total
    # A row with NaN has no such block: the limits keep its indices valid, and its log-probs are NaN.
    block = tl.minimum(tl.sum(((edge_B <= target) & (b < B)).to(tl.int32), 0), B - 1)
    inside = target - tl.sum(tl.where(b == block - 1, edge_B, 0.0), 0)
    m = tl.sum(tl.where(b == block, top_B, 0.0), 0)
    v = block * C + c
    x = tl.load(logits + row * ROW + v, mask=v < V, other=float("-inf")).to(tl.float32) / temperature
    edge_C = tl.cumsum(tl.exp(x - m).to(tl.float64) * tl.exp((m - largest).to(tl.float64)), 0)
    last = tl.sum(tl.where(c == C - 1, edge_C, 0.0), 0)
    # Rounding can raise a target to the mass of its block; the token is then the last one with nonzero probability.
    place = tl.minimum(tl.sum((edge_C <= inside).to(tl.int32), 0), tl.sum((edge_C < last).to(tl.int32), 0))
    chosen = tl.sum(tl.where(c == place, x, 0.0), 0).to(tl.float64)
    tl.store(token + k, tl.minimum(block * C + place, V - 1).to(tl.int64))
    tl.store(logprob + k, chosen - largest.to(tl.float64) - tl.log(total))
