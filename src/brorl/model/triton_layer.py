"""Kernels of a decoder layer in Triton: rotations of queries and keys, and gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS, _GATES = 16, 1024  # that a program computes


def rotate(
    mixed_RHD: Tensor,
    cos_RD: Tensor,
    sin_RD: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    norms: tuple[Tensor, float, Tensor, float] | None,
) -> None:
    """Turn the queries and keys of rows in place, and scale the queries.

    `mixed_RHD` is dense: H queries, K keys and K values, one behind the other. `norms` has the weights and epsilons of
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
    """Return silu(gate) * up, shape [R, I], from both in each row, shape [R, 2 I]."""
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
        of_query = tl.load(query_norm + d, mask=inside_d, other=0.0).to(tl.float32)
        of_key = tl.load(key_norm + d, mask=inside_d, other=0.0).to(tl.float32)
        first *= inverse[:, None] * tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
        of_query = tl.load(query_norm + D // 2 + d, mask=inside_d, other=0.0).to(tl.float32)
        of_key = tl.load(key_norm + D // 2 + d, mask=inside_d, other=0.0).to(tl.float32)
        second *= inverse[:, None] * tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
    factor = tl.where(is_query, scale, 1.0)[:, None]
    c = tl.load(cos + row * D + d, mask=inside_d, other=0.0).to(tl.float32)[None, :] * factor
    s = tl.load(sin + row * D + d, mask=inside_d, other=0.0).to(tl.float32)[None, :] * factor
    tl.store(at, first * c - second * s, mask=inside)
    tl.store(at + D // 2, second * c + first * s, mask=inside)


@triton.jit
def _gate(both, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * INNER + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + i, gate / (1 + tl.exp(-gate)) * up, mask=i < INNER)
