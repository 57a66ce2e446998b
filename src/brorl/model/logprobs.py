"""From logits to the log-probs of tree nodes, under the distribution that the rollouts were drawn from.

Both paths, `tree_path` and `flat_path`, end here. Sampling also calls `smallest_kept` for top-p and top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from brorl.arrays import IntArray
from brorl.model.compilation import compiled
from brorl.model.device import at_least_float32, to_device
from brorl.model.logits import LOGITS_PER_BLOCK, RowLogits
from brorl.tree import RolloutTree


@dataclass(frozen=True)
class NextToken:
    """Turns a model's logits into the distribution that tokens are drawn from."""

    temperature: float = 1.0  # divisor of the logits, above 0; the temperature of the rollouts
    min_new_tokens: int = 0  # tokens before a response may contain a stop token, 0 or more
    stop_token_ids: tuple[int, ...] = ()  # the stop tokens; required if `min_new_tokens` is above 0
    top_p: float = 1.0  # mass of the kept tokens; see `smallest_kept`
    top_k: int = 0  # number of kept tokens, 0 for all

    def __post_init__(self) -> None:
        if self.min_new_tokens and not self.stop_token_ids:
            raise ValueError("min_new_tokens forbids stop tokens at first; pass stop_token_ids")

    def logits(self, logits_RV: Tensor, length_R: Tensor) -> Tensor:
        """Divide logits [R, V] by the temperature, before top-p and top-k, in at least float32; early stops get -inf.

        `length_R` is the number of tokens in each row's response so far.
        """
        logits_RV = logits_RV.to(at_least_float32(logits_RV.dtype))
        if self.temperature != 1.0:
            logits_RV = logits_RV / self.temperature
        return self._without_early_stops(logits_RV, length_R)

    def smallest_kept(self, logits_RV: Tensor, length_R: Tensor) -> Tensor | None:
        """Return the smallest logit that each row keeps, shape [R], in the model's dtype; None if all are kept."""
        if self.top_p == 1 and not self.top_k:
            return None
        size = max(1, _LOGITS_PER_SORT // logits_RV.shape[1])
        blocks = zip(logits_RV.split(size), length_R.split(size), strict=True)
        sampling = self.temperature, self.top_p, self.top_k
        return torch.cat([smallest_kept(self._without_early_stops(*block), *sampling) for block in blocks])

    def _without_early_stops(self, logits_RV: Tensor, length_R: Tensor) -> Tensor:
        if not self.min_new_tokens:
            return logits_RV
        token_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
        is_stop_V = torch.zeros_like(token_V, dtype=torch.bool)
        for stop in self.stop_token_ids:
            is_stop_V = is_stop_V | (token_V == stop)
        forbidden_RV = is_stop_V & (length_R < self.min_new_tokens)[:, None]
        return logits_RV.masked_fill(forbidden_RV, float("-inf"))


PLAIN = NextToken()  # temperature 1, and any token at any time
_FEW = 1024  # tokens sorted first to find a nucleus: sorting all takes 20 times as long
_LOGITS_PER_SORT = 1 << 22  # a sort has temporaries 8 times the size of its logits


def smallest_kept(logits_RV: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Return the smallest logit that each row keeps under top-k and then top-p, shape [R].

    A row keeps all logits that are at least this large. The logits are not yet divided by the temperature. Top-p keeps
    the smallest set whose mass among the top-k reaches `top_p`: probabilities 0.5, 0.3, 0.2 and a `top_p` of 0.7 keep
    two tokens. A `top_k` of 0 keeps all.

    Ties with the last kept token are kept too. The engine and the learner compute the logits of tied tokens in
    different orders, so rounding can break a tie on either side. Logits below the last token's by at most the
    `_rounding` of the dtype, relative to the row's largest logit or the last token's, count as ties; the same tolerance
    applies to reaching the mass.

    Source: nucleus sampling, arXiv 1904.09751; top-k comes first, as in Hugging Face transformers and vLLM.
    """
    vocabulary = logits_RV.shape[1]
    dtype = at_least_float32(logits_RV.dtype)
    rounding = _rounding(logits_RV.dtype)
    count = top_k if 0 < top_k < vocabulary else vocabulary
    largest_R = logits_RV.amax(1).abs()

    def with_ties(last_R: Tensor) -> Tensor:
        return last_R - rounding * torch.maximum(last_R.abs(), largest_R)

    smallest_R = with_ties(logits_RV.topk(count, dim=1).values[:, -1]) if count < vocabulary else logits_RV.amin(1)
    if top_p == 1:
        return smallest_R
    kept_RV = logits_RV.masked_fill(logits_RV < smallest_R[:, None], float("-inf"))
    lse_R1 = (kept_RV.to(dtype) / temperature).logsumexp(1, keepdim=True)
    few = min(_FEW, count) if logits_RV.device.type == "cpu" else count  # the test below would make other devices wait
    while True:
        ordered_RK = logits_RV.topk(few, dim=1).values
        mass_RK = (ordered_RK.to(dtype) / temperature - lse_R1).exp_()
        before_RK = mass_RK.cumsum(1) - mass_RK
        is_beyond_RK = before_RK >= max(top_p - rounding, 0.0)
        is_beyond_RK[:, 0] = False
        if few == count or bool(is_beyond_RK[:, -1].all()):
            last_R = ordered_RK.masked_fill(is_beyond_RK, float("inf")).amin(1)
            return torch.maximum(with_ties(last_R), smallest_R)
        few = count


def _rounding(dtype: torch.dtype) -> float:
    """Return how far rounding can separate logits that are exactly equal in theory, relative to the largest logit.

    Sums over a hidden size are in float32 or float64, and their rounding grows with its square root. 16-bit logits are
    rounded once, after the sum, to one unit in the last place or less.
    """
    return torch.finfo(dtype).eps * (64 if dtype.itemsize > 2 else 1)


def softmax_lse(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over the last dimension, shape [..., S], and the log-sum-exp, shape [...].

    Each row needs a finite entry; -inf gets a weight of exactly 0.
    """
    weight = score.softmax(-1)
    return weight, score.amax(-1) - weight.amax(-1).log()


def by_tree(chunks: Sequence[ChunkLogprobs], trees: Sequence[RolloutTree]) -> list[Tensor]:
    """Return the log-probs of each tree's nodes in order, shape [M]: 0 for given nodes.

    Together, the chunks contain every sampled node once.
    """
    if not trees:
        return []
    index = torch.cat([c.index for c in chunks])
    logprob = torch.cat([c.logprob for c in chunks])
    sizes = [tree.num_nodes for tree in trees]
    if index.numel() == sum(sizes):
        return list(logprob[torch.argsort(index)].split(sizes))
    return list(logprob.new_zeros(sum(sizes)).index_copy(0, index, logprob).split(sizes))


def node_offsets(trees: Sequence[RolloutTree]) -> IntArray:
    """Return how many nodes come before each tree, shape [P]: trees of 5, 3 and 4 nodes give [0, 5, 8]."""
    sizes = [tree.num_nodes for tree in trees]
    return np.cumsum([0, *sizes])[:-1]


@dataclass(frozen=True)
class ChunkLogprobs:
    """Log-probs of the nodes of one chunk."""

    index: Tensor  # indices of the nodes among those of all trees, in the trees' order, shape [K]
    logprob: Tensor  # log-probs of the nodes in nats, shape [K]
    # entropy (nats) of the distribution each node was drawn from, shape [K]; None if not requested
    entropy: Tensor | None = None


class NodeBlocks(NamedTuple):
    """Nodes, ordered by the block of rows that predicts them."""

    place_K: IntArray  # the row that predicts each node, within its block, shape [K]
    token_K: IntArray  # token id, shape [K]
    index_K: IntArray  # index among the nodes of all trees, shape [K]
    edges: Sequence[int]  # the nodes of block b are those from edges[b] up to edges[b + 1]

    @classmethod
    def of(cls, row_K: IntArray, token_K: IntArray, index_K: IntArray, num_rows: int, size: int) -> NodeBlocks:
        """Return the blocks of nodes, in any order, for blocks of `size` rows out of `num_rows`."""
        if size >= num_rows:
            return cls(row_K, token_K, index_K, (0, row_K.size))
        order_K = np.argsort(row_K, kind="stable")
        row_K = row_K[order_K]
        edges = np.searchsorted(row_K, np.arange(0, num_rows + size, size))
        return cls(row_K % size, token_K[order_K], index_K[order_K], edges.tolist())

    def padded(self, multiple: int, num_rows: int, vocabulary: int) -> tuple[NodeBlocks, IntArray]:
        """Return equally long blocks, whose length is a multiple, and the position of each node in them, shape [K].

        Each block has at least `num_rows` rows. The other positions have an index of -1. Their rows and tokens differ,
        because the gradients of many equal ones would be summed one by one.
        """
        sizes = np.diff(self.edges)
        length = -(-max(1, int(sizes.max())) // multiple) * multiple
        output_K = np.arange(self.place_K.size) + np.repeat(np.arange(sizes.size) * length - self.edges[:-1], sizes)
        filler = np.arange(sizes.size * length)
        padded = filler % num_rows, filler % vocabulary, np.full(filler.size, -1)
        for array, own_K in zip(padded, (self.place_K, self.token_K, self.index_K), strict=True):
            array[output_K] = own_K
        return NodeBlocks(*padded, range(0, filler.size + 1, length)), output_K


@dataclass(frozen=True)
class LogprobHead:
    """Computes log-probs, and entropies if requested, from logits.

    Only the logits of one block are kept; the backward pass recomputes the softmax. With top-p or top-k, the
    distribution is over the tokens that the row's logits keep. A node's token can be missing from them if the weights
    or the numerics differ from those that drew it. The distribution then includes this token, so the node's log-prob is
    finite and has a gradient.
    """

    next_token: NextToken  # turns logits into the distribution that drew the rollouts
    entropy: bool  # whether to compute entropies
    logits_per_block: int | None = None  # logits computed at a time; None for the default
    compile: bool = False  # whether the reductions over the vocabulary are compiled

    def logprobs(
        self, rows: RowLogits, length_R: IntArray, row_K: IntArray, token_K: IntArray, index_K: IntArray
    ) -> ChunkLogprobs:
        """Return the log-probs of K nodes, in any order, from the logits of R rows.

        `length_R` is the number of tokens in each row's response so far. `row_K` is the row that predicts each node,
        and `index_K` is the node's index among the nodes of all trees.
        """
        size = self.rows_per_block(rows.row.shape[0], 0 if rows.embedding is None else rows.vocabulary)
        blocks = NodeBlocks.of(row_K, token_K, index_K, rows.row.shape[0], size)
        arrays = blocks.index_K, length_R, blocks.place_K, blocks.token_K
        index, length, place, token = (to_device(array, rows.row.device) for array in arrays)
        return ChunkLogprobs(index, *self.of_blocks(rows, length, place, token, blocks.edges))

    def rows_per_block(self, num_rows: int, vocabulary: int) -> int:
        """Return the rows whose logits are computed at a time; all if they are not computed here (vocabulary 0)."""
        return max(1, (self.logits_per_block or LOGITS_PER_BLOCK) // vocabulary) if vocabulary else num_rows

    def of_blocks(
        self, rows: RowLogits, length_R: Tensor, place_K: Tensor, token_K: Tensor, edges: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of the nodes of `NodeBlocks`, shape [K], and their entropies if requested."""
        if rows.embedding is None:
            return self._of_logits(rows.row, length_R, place_K, token_K)
        size = self.rows_per_block(rows.row.shape[0], rows.vocabulary)
        blocks = []
        parts = zip(rows.row.split(size), length_R.split(size), pairwise(edges), strict=True)
        for hidden_Bh, length_B, edge in parts:
            run = partial(self._of_block, rows.embedding, hidden_Bh, length_B)
            nodes = place_K[slice(*edge)], token_K[slice(*edge)]
            if torch.is_grad_enabled():
                blocks.append(checkpoint(run, *nodes, use_reentrant=False, preserve_rng_state=False))
            else:
                blocks.append(run(*nodes))
        logprobs, entropies = zip(*blocks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if self.entropy else None

    def _of_block(
        self, embedding: nn.Module, hidden_Bh: Tensor, length_B: Tensor, row_K: Tensor, token_K: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self._of_logits(embedding(hidden_Bh), length_B, row_K, token_K)

    def _of_logits(
        self, logits_RV: Tensor, length_R: Tensor, row_K: Tensor, token_K: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of K nodes, and their entropies if requested."""
        reduced: tuple[Tensor, Tensor] = _Reduced.apply(self, logits_RV, length_R, row_K, token_K)  # type: ignore[no-untyped-call]
        logprob_K, entropy_R = reduced
        return logprob_K, entropy_R[row_K] if self.entropy else None

    def call_with_settings(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function with the distribution, the entropy flag and tensors; compiled if `compile` is set."""
        compile_it = self.compile and inputs[0].shape[0] > 1  # a single row would be compiled separately
        return (compiled(function) if compile_it else function)(self.next_token, self.entropy, *inputs)


class _Reduced(torch.autograd.Function):
    """Log-probs of nodes and entropies of rows. Keeps the logits in their own dtype."""

    @staticmethod
    def forward(
        ctx: Any, head: LogprobHead, logits_RV: Tensor, length_R: Tensor, row_K: Tensor, token_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        smallest_R = head.next_token.smallest_kept(logits_RV, length_R)
        inputs = logits_RV.detach(), length_R, smallest_R, row_K, token_K  # one graph, with and without gradients
        logprob_K, lse_R, entropy_R = head.call_with_settings(_reduce, *inputs)
        if smallest_R is not None:
            outside_K = logits_RV[row_K, token_K] < smallest_R[row_K]
            logprob_K = torch.where(outside_K, torch.nn.functional.logsigmoid(logprob_K), logprob_K)
        ctx.head = head
        ctx.save_for_backward(logits_RV, length_R, smallest_R, row_K, token_K, lse_R, entropy_R, logprob_K)
        return logprob_K, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_K: Tensor, grad_entropy_R: Tensor) -> tuple[Tensor | None, ...]:
        head: LogprobHead = ctx.head
        logits_RV, length_R, smallest_R, row_K, token_K, lse_R, entropy_R, logprob_K = ctx.saved_tensors
        grad_K = torch.where(torch.isfinite(logprob_K), grad_K, 0.0)  # tokens that cannot be drawn have no gradient
        if smallest_R is not None:
            outside_K = logits_RV[row_K, token_K] < smallest_R[row_K]
            grad_K = torch.where(outside_K, grad_K * -torch.expm1(logprob_K), grad_K)  # derivative of logsigmoid
        sum_R = torch.zeros_like(lse_R).index_add_(0, row_K, grad_K)
        grad_RV = head.call_with_settings(
            _gradient, logits_RV, length_R, smallest_R, lse_R, entropy_R, sum_R, grad_entropy_R
        )
        of_token_K = (grad_K / head.next_token.temperature).to(grad_RV.dtype)
        return None, grad_RV.index_put_((row_K, token_K), of_token_K, accumulate=True), None, None, None


def _reduce(
    next_token: NextToken,
    entropy: bool,
    logits_RV: Tensor,
    length_R: Tensor,
    smallest_R: Tensor | None,
    row_K: Tensor,
    token_K: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs of nodes, and the log-sum-exps and entropies (0 if not requested) of rows.

    If a node's token is not kept, its log-prob here is the log of its mass divided by the mass of the kept tokens.
    """
    scaled_RV = next_token.logits(logits_RV, length_R)
    high_R = scaled_RV.amax(1)
    mass_RV = _kept((scaled_RV - high_R[:, None]).exp_(), logits_RV, smallest_R)
    total_R = mass_RV.sum(1)
    lse_R = high_R + total_R.log()
    entropy_R = torch.zeros_like(lse_R)
    if entropy:
        finite_RV = torch.where(mass_RV > 0, scaled_RV, 0.0)  # 0 times -inf is not 0
        entropy_R = lse_R - (mass_RV * finite_RV).sum(1) / total_R
    return scaled_RV[row_K, token_K] - lse_R[row_K], lse_R, entropy_R


def _gradient(
    next_token: NextToken,
    entropy: bool,
    logits_RV: Tensor,
    length_R: Tensor,
    smallest_R: Tensor | None,
    lse_R: Tensor,
    entropy_R: Tensor,
    sum_R: Tensor,
    grad_entropy_R: Tensor,
) -> Tensor:
    """Return the gradient of the logits without the terms of the nodes' own tokens, in the dtype of the logits."""
    logprob_RV = next_token.logits(logits_RV, length_R) - lse_R[:, None]
    factor_RV = -sum_R[:, None]
    if entropy:
        finite_RV = torch.where(torch.isfinite(logprob_RV), logprob_RV, 0.0)  # 0 times -inf is not 0
        factor_RV = factor_RV - grad_entropy_R[:, None] * (finite_RV + entropy_R[:, None])
    mass_RV = _kept(logprob_RV.exp_(), logits_RV, smallest_R)
    return mass_RV.mul_(factor_RV / next_token.temperature).to(logits_RV.dtype)


def _kept(mass_RV: Tensor, logits_RV: Tensor, smallest_R: Tensor | None) -> Tensor:
    """Set the mass of the tokens that a row does not keep to 0."""
    return mass_RV if smallest_R is None else mass_RV.masked_fill_(logits_RV < smallest_R[:, None], 0.0)
