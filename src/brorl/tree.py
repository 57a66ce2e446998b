"""The rollout tree: N rollouts of one prompt, stored once per distinct prefix, with counts.

A node is a distinct token prefix of a response. Its count is the number of rollouts that pass through it. Nodes are in
depth-first preorder, with siblings sorted by token. Rollouts [5 7], [5 7], [5 8 9] give 4 nodes:

    token  [5, 7, 8, 9]    parent [-1, 0, 0, 2]    count [3, 2, 1, 1]
    leaf   [1, 3]          leaf_count [2, 1]

Two trees are equal if and only if they hold the same multiset of rollouts. In preorder, every subtree and every run of
consecutive responses is a slice. Empty responses are rejected.

A node can be *given*: its token comes from a tool result and was not sampled by the policy. Its log-prob is 0, so a sum
along a path is the log-prob of the sampled tokens, and a given token has ratio 1 and divergence 0. Given nodes never
count as sampled tokens. A leaf is never given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from brorl.arrays import BoolArray, FloatArray, IntArray

ARRAY_DTYPES: dict[str, type[np.generic]] = {
    "token": np.int64,
    "parent": np.int64,
    "count": np.int64,
    "logprob": np.float64,
    "leaf": np.int64,
    "leaf_count": np.int64,
    "finished": np.bool_,
    "given": np.bool_,
}
_Array = TypeVar("_Array", bound=NDArray[Any])


@dataclass(frozen=True, eq=False, repr=False)
class RolloutTree:
    """All rollouts of one prompt as a prefix tree with counts (M nodes, L distinct responses, N rollouts)."""

    prompt_ids: tuple[int, ...]  # token ids of the prompt; they are not nodes
    token: IntArray  # token id of each node, shape [M]
    # Index of each node's parent, shape [M]; -1 for the first token after the prompt. Parents come first.
    parent: IntArray
    count: IntArray  # number of rollouts that pass through each node, shape [M]
    # Log-probability (nats) of each node's token after its prefix, shape [M]; NaN if unknown, 0 if given. It is under
    # the sampling distribution: at the sampling temperature, over the tokens that top-p and top-k keep.
    logprob: FloatArray
    leaf: IntArray  # last node of each distinct response, in preorder, shape [L]
    leaf_count: IntArray  # number of rollouts that produced each distinct response, shape [L]
    finished: BoolArray  # True if the response ended, False if it was truncated, shape [L]
    # Whether each node is given, shape [M]; an empty array means every node was sampled.
    given: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))

    def __post_init__(self) -> None:
        if not np.size(self.given):
            object.__setattr__(self, "given", np.zeros(np.shape(self.token), np.bool_))
        for name, dtype in ARRAY_DTYPES.items():
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if array.base is not None or array.flags.writeable:
                array = array.view()
                array.flags.writeable = False
            object.__setattr__(self, name, array)
        nodes, leaves = self.token.shape, self.leaf.shape
        if len(nodes) != 1 or any(getattr(self, n).shape != nodes for n in ("parent", "count", "logprob", "given")):
            raise ValueError("token, parent, count, logprob and given must be one-dimensional and of equal length")
        if len(leaves) != 1 or any(getattr(self, n).shape != leaves for n in ("leaf_count", "finished")):
            raise ValueError("leaf, leaf_count and finished must be one-dimensional and of equal length")
        if not self.leaf.size:
            raise ValueError("a tree needs at least one response")
        if self.given[self.leaf].any():
            raise ValueError("a response must end with a sampled token, not with a given one")

    def __reduce__(self) -> tuple[type[RolloutTree], tuple[Any, ...]]:
        """Pickle only the fields, not the cached values. The copy's arrays are also read-only."""
        return type(self), (self.prompt_ids, *(getattr(self, name) for name in ARRAY_DTYPES))

    @classmethod
    def from_responses(
        cls,
        prompt_ids: Sequence[int],
        responses: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]] | None = None,
        finished: Sequence[bool] | None = None,
        given: Sequence[Sequence[bool]] | None = None,
        counts: Sequence[int] | None = None,
    ) -> RolloutTree:
        """Merge N responses (duplicates allowed) into their prefix tree.

        Args:
            prompt_ids: Token ids of the prompt.
            responses: N non-empty sequences of token ids, including the stop token if there is one.
            logprobs: Log-probability (nats) of each token in each response. A node shared by several responses takes
                its value from the one that sorts first.
            finished: Whether each response ended rather than being truncated; all True by default.
            given: Whether each token in each response was given, not sampled; all False by default. The last token
                cannot be given.
            counts: The number of rollouts that produced each response; 1 each by default.

        Returns:
            The tree in canonical order.

        Raises:
            ValueError: If there are no responses, a response is empty, a token is negative, or lengths do not match.

        Examples:
            >>> RolloutTree.from_responses([1, 2], [[5, 7], [5, 7], [5, 8, 9]])
            RolloutTree(3 rollouts, 2 distinct responses, 4 nodes, prompt of 2 tokens)
        """
        token_NT, length_N = _padded(responses)
        logprob_NT = _padded_like("logprobs", logprobs, length_N, np.full(token_NT.shape, np.nan))
        given_NT = _padded_like("given", given, length_N, np.zeros(token_NT.shape, np.bool_))
        finished_N = np.ones(len(responses), np.bool_) if finished is None else np.asarray(finished, np.bool_)
        count_N = np.ones_like(length_N) if counts is None else np.asarray(counts, np.int64)
        for name, values_N in (("finished", finished_N), ("counts", count_N)):
            if values_N.shape != length_N.shape:
                raise ValueError(f"{name} has {values_N.size} entries for {length_N.size} responses")

        prompt = tuple(int(t) for t in prompt_ids)
        logprob_NT = np.where(given_NT, 0.0, logprob_NT)
        return cls._from_rows(prompt, token_NT, logprob_NT, given_NT, finished_N, count_N)

    @classmethod
    def merge(cls, trees: Sequence[RolloutTree]) -> RolloutTree:
        """Merge trees for the same prompt into one tree with all their rollouts.

        Args:
            trees: At least one tree, all for the same prompt.

        Returns:
            The tree that `from_responses` would build from all the rollouts, in the order of the input trees.

        Raises:
            ValueError: If there are no trees or their prompts differ.
        """
        prompts = {tree.prompt_ids for tree in trees}
        if len(prompts) != 1:
            raise ValueError(f"merge needs trees of one prompt, got {len(trees)} trees of {len(prompts)} prompts")
        width = max(int(tree.total_length.max()) for tree in trees)
        pairs = [(tree, tree._response_nodes(width)) for tree in trees]
        return cls._from_rows(
            prompts.pop(),
            np.concatenate([np.where(node_LT >= 0, tree.token[node_LT], -1) for tree, node_LT in pairs]),
            np.concatenate([np.where(node_LT >= 0, tree.logprob[node_LT], np.nan) for tree, node_LT in pairs]),
            np.concatenate([(node_LT >= 0) & tree.given[node_LT] for tree, node_LT in pairs]),
            np.concatenate([tree.finished for tree in trees]),
            np.concatenate([tree.leaf_count for tree in trees]),
        )

    @classmethod
    def _from_rows(
        cls,
        prompt_ids: tuple[int, ...],
        token_RT: IntArray,
        logprob_RT: FloatArray,
        given_RT: BoolArray,
        finished_R: BoolArray,
        count_R: IntArray,
    ) -> RolloutTree:
        """Build a tree from R responses, one per row, padded with token -1. Row r stands for `count_R[r]` rollouts."""
        # 1. Sort the rows, say [5 7 _] before [5 8 9]. The big-endian bytes of (token + 1) sort like the tokens, with
        # the padding (0) first.
        rows = (token_RT + 1).astype(">u8")
        keys = [(row.tobytes(), bool(done)) for row, done in zip(rows, finished_R, strict=True)]
        order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
        sorted_token_RT, sorted_finished_R, sorted_count_R = token_RT[order], finished_R[order], count_R[order]

        # 2. A prefix is new if any of its tokens differs from the row above: [new new _], [- new new].
        valid_RT = sorted_token_RT >= 0
        new_RT = valid_RT.copy()
        new_RT[1:] &= np.logical_or.accumulate(sorted_token_RT[1:] != sorted_token_RT[:-1], axis=1)

        # 3. Number new prefixes in reading order, and copy the rest from the row above: [0 1 _], [0 2 3].
        node_RT = np.where(new_RT, np.cumsum(new_RT).reshape(new_RT.shape) - 1, -1)
        node_RT = np.maximum.accumulate(node_RT, axis=0)
        parent_RT = np.concatenate([np.full_like(node_RT[:, :1], -1), node_RT[:, :-1]], axis=1)

        # 4. Merge equal rows into one response.
        length_R = valid_RT.sum(axis=1)
        leaf_R = node_RT[np.arange(len(order)), length_R - 1]
        changes_R = (leaf_R[1:] != leaf_R[:-1]) | (sorted_finished_R[1:] != sorted_finished_R[:-1])
        starts = np.flatnonzero(np.append(True, changes_R))
        return cls(
            prompt_ids=prompt_ids,
            token=sorted_token_RT[new_RT],
            parent=parent_RT[new_RT],
            count=np.bincount(node_RT[valid_RT], weights=np.repeat(sorted_count_R, length_R)),
            logprob=logprob_RT[order][new_RT],
            leaf=leaf_R[starts],
            leaf_count=np.add.reduceat(sorted_count_R, starts),
            finished=sorted_finished_R[starts],
            given=given_RT[order][new_RT],
        )

    @property
    def num_truncated(self) -> int:
        """Number of rollouts that were truncated at the length limit."""
        return int(self.leaf_count[~self.finished].sum())

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts N, duplicates counted."""
        return int(self.leaf_count.sum())

    @property
    def num_responses(self) -> int:
        """Number of distinct responses L."""
        return self.leaf.size

    @property
    def num_nodes(self) -> int:
        """Number of nodes M."""
        return self.token.size

    @property
    def num_unique_tokens(self) -> int:
        """Number of sampled nodes: the tokens actually decoded."""
        return self.num_nodes - self.num_given_tokens

    @property
    def num_given_tokens(self) -> int:
        """Number of given nodes: tokens of tool results, counted once per distinct transcript."""
        return int(self.given.sum())

    @property
    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens across all N rollouts. A shared prefix counts once per rollout."""
        return int(self.sampled_count.sum())

    @property
    def num_turns(self) -> int:
        """Number of turns across all N rollouts: one per rollout, plus one after each reply."""
        return self.num_rollouts + int(self.count[self.first_given].sum())

    @cached_property
    def first_given(self) -> IntArray:
        """First node of each run of given nodes: one per reply to a distinct turn that called a tool."""
        return np.flatnonzero(self.given & ~self.given[self.parent])

    @cached_property
    def sampled_count(self) -> IntArray:
        """Number of rollouts that sampled each node's token, shape [M]: its count, or 0 for a given node."""
        return np.where(self.given, 0, self.count)

    @cached_property
    def depth(self) -> IntArray:
        """Number of ancestors of each node, shape [M]; 0 for the first token after the prompt."""
        return self._count_along_paths(np.ones(self.num_nodes, np.bool_)) - 1

    @cached_property
    def end(self) -> IntArray:
        """End of each node's subtree, shape [M]: node i and its descendants are the slice [i, end[i])."""
        last_M = np.arange(self.num_nodes)  # last child of each node; the node itself if it has none
        below = np.flatnonzero(self.parent >= 0)
        last_M[self.parent[below]] = below  # for repeated indices, numpy keeps the last
        while True:  # pointer doubling: log2(depth) rounds to the last descendant
            further_M = last_M[last_M]
            if (further_M == last_M).all():
                break
            last_M = further_M
        end_M: IntArray = last_M + 1
        return end_M

    @cached_property
    def prefix_logprob(self) -> FloatArray:
        """Log-probability (nats) of each node's whole prefix, shape [M]: the sum of `logprob` along its path."""
        return self.sum_along_paths(self.logprob)

    @cached_property
    def length(self) -> IntArray:
        """Number of sampled tokens of each distinct response, shape [L]."""
        return self._count_along_paths(~self.given)[self.leaf]

    @cached_property
    def total_length(self) -> IntArray:
        """Number of tokens of each distinct response, including given ones, shape [L]."""
        return self.depth[self.leaf] + 1

    def responses(self) -> list[tuple[tuple[int, ...], int]]:
        """Return the distinct responses as (token ids, count), in the order of `leaf`."""
        rows = self.token[self._response_nodes(int(self.total_length.max()))].tolist()
        lengths, counts = self.total_length.tolist(), self.leaf_count.tolist()
        return [(tuple(r[:n]), c) for r, n, c in zip(rows, lengths, counts, strict=True)]

    def turns(self) -> list[list[tuple[int, ...]]]:
        """Return the token ids of each turn in the distinct responses, without given tokens, in the order of `leaf`."""
        if not self.given.any():
            return [[tokens] for tokens, _ in self.responses()]
        return [[tokens for tokens, is_given in parts if not is_given] for parts in self.parts()]

    def parts(self) -> list[list[tuple[tuple[int, ...], bool]]]:
        """Return the turns and replies of each distinct response: (token ids, whether they are given)."""
        parts_L = []
        for path in np.split(self.response_nodes(), np.cumsum(self.total_length)[:-1]):
            edges = np.flatnonzero(np.diff(self.given[path])) + 1
            parts_L.append([
                (tuple(self.token[nodes].tolist()), bool(self.given[nodes[0]])) for nodes in np.split(path, edges)
            ])  # fmt: skip
        return parts_L

    def response_nodes(self) -> IntArray:
        """Return the nodes of the distinct responses, one response after another, in the order of `leaf`."""
        node_LT = self._response_nodes(int(self.total_length.max()))
        return node_LT[node_LT >= 0]

    def _response_nodes(self, width: int) -> IntArray:
        """Return the nodes of each distinct response, padded with -1, shape [L, width]."""
        node_LT = np.full((self.leaf.size, width), -1, np.int64)
        row, node = np.arange(self.leaf.size), self.leaf
        while row.size:  # each iteration moves all responses one step toward the prompt
            node_LT[row, self.depth[node]] = node
            node = self.parent[node]
            row, node = row[node >= 0], node[node >= 0]
        return node_LT

    def path(self, node: int) -> IntArray:
        """Return the nodes from the first token down to `node`, shape [depth + 1]."""
        nodes = np.empty(self.depth[node] + 1, np.int64)
        for i in range(nodes.size - 1, -1, -1):
            nodes[i] = node
            node = int(self.parent[node])
        return nodes

    def _count_along_paths(self, marked_M: BoolArray) -> IntArray:
        """For each node, count the marked nodes on its path, including itself, shape [M]."""
        # Among the nodes up to node i, exactly those whose subtrees ended are not on its path.
        num_ended_M = np.bincount(self.end[marked_M], minlength=self.num_nodes + 1)[:-1].cumsum()
        count_M: IntArray = np.cumsum(marked_M) - num_ended_M
        return count_M

    @cached_property
    def _leaf_ranges(self) -> tuple[IntArray, IntArray]:
        """The responses [start, stop) below each node, as start, stop, start, stop and so on.

        Neighbors with the same responses below them share a range. The second array is the number of nodes per range.
        """
        num_before = np.append(0, np.bincount(self.leaf, minlength=self.num_nodes).cumsum())  # leaves before each node
        start_M, stop_M = num_before[:-1], num_before[self.end]
        changes_M = (start_M[1:] != start_M[:-1]) | (stop_M[1:] != stop_M[:-1])
        first = np.flatnonzero(np.append(True, changes_M))
        return np.stack([start_M[first], stop_M[first]], axis=1).ravel(), np.diff(first, append=self.num_nodes)

    def sum_below(self, value_L: NDArray[Any]) -> FloatArray:
        """For each node, sum a value over the distinct responses that pass through it.

        Args:
            value_L: One number per distinct response, shape [L].

        Returns:
            Sums, shape [M].
        """
        ranges, num_nodes = self._leaf_ranges
        padded = np.append(np.asarray(value_L, np.float64), 0.0)
        # A difference of cumulative sums would not do: a node with only zeros below it must get exactly 0.
        return np.repeat(np.add.reduceat(padded, ranges)[::2], num_nodes)

    def token_weights(self, value_L: NDArray[Any]) -> FloatArray:
        """For each node, sum a value over the distinct responses that sampled its token, shape [M]; 0 for given nodes.

        These are the token weights of a loss; `sum_below` returns prefix weights.
        """
        return np.where(self.given, 0.0, self.sum_below(value_L))

    def sum_along_paths(self, value_M: NDArray[Any]) -> FloatArray:
        """For each node, sum a value along its path, from the first token through the node itself; shape [M]."""
        # The last entries stand for index -1, above the first token; adding -0.0 changes nothing.
        sum_M, jump_M = np.append(np.asarray(value_M, np.float64), -0.0), np.append(self.parent, -1)
        while (jump_M >= 0).any():  # pointer doubling: log2(depth) rounds
            sum_M += sum_M[jump_M]
            jump_M = jump_M[jump_M]
        return sum_M[:-1]

    def sum_over_responses(self, value_M: NDArray[Any]) -> FloatArray:
        """For each distinct response, sum a value over all its nodes, including given ones; shape [L]."""
        return self.sum_along_paths(value_M)[self.leaf]

    def select(self, leaves: IntArray) -> tuple[RolloutTree, IntArray]:
        """Keep only the selected distinct responses.

        Args:
            leaves: Indices into `leaf` of the responses to keep, ascending, shape [K], K >= 1.

        Returns:
            The smaller tree, and for each of its nodes the index in this tree.
        """
        kept_L = np.zeros(self.leaf.size, np.bool_)
        kept_L[leaves] = True
        count_M = self.sum_below(np.where(kept_L, self.leaf_count, 0)).astype(np.int64)
        node_index = np.flatnonzero(count_M)
        renumber = np.append(np.cumsum(count_M > 0) - 1, -1)  # index -1 reads the last entry, so parent -1 stays -1
        tree = RolloutTree(
            prompt_ids=self.prompt_ids,
            token=self.token[node_index],
            parent=renumber[self.parent[node_index]],
            count=count_M[node_index],
            logprob=self.logprob[node_index],
            leaf=renumber[self.leaf[kept_L]],
            leaf_count=self.leaf_count[kept_L],
            finished=self.finished[kept_L],
            given=self.given[node_index],
        )
        return tree, node_index

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RolloutTree):
            return NotImplemented
        return self.prompt_ids == other.prompt_ids and all(
            np.array_equal(getattr(self, n), getattr(other, n), equal_nan=n == "logprob") for n in ARRAY_DTYPES
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"RolloutTree({self.num_rollouts:,} rollouts, {self.num_responses:,} distinct responses, "
            f"{self.num_nodes:,} nodes, prompt of {len(self.prompt_ids):,} tokens)"
        )


def truncation_rate(trees: Sequence[RolloutTree]) -> float:
    """Return the fraction of rollouts that were truncated at the length limit; 0 if there are no trees."""
    return sum(tree.num_truncated for tree in trees) / max(sum(tree.num_rollouts for tree in trees), 1)


def _padded(responses: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return tokens padded with -1, shape [N, T], and lengths, shape [N]."""
    length_N = np.array([len(r) for r in responses], np.int64)
    if not length_N.size or not length_N.all():
        raise ValueError("every prompt needs at least one response, and every response at least one token")
    token_NT = np.full((length_N.size, int(length_N.max())), -1, np.int64)
    for row, response in zip(token_NT, responses, strict=True):
        row[: len(response)] = response
    if (token_NT[np.arange(token_NT.shape[1]) < length_N[:, None]] < 0).any():
        raise ValueError("token ids must not be negative")
    return token_NT, length_N


def _padded_like(name: str, values: Sequence[Sequence[Any]] | None, length_N: IntArray, padded: _Array) -> _Array:
    """Write each response's values, if any, into the array `padded`, shape [N, T]."""
    if values is None:
        return padded
    if [len(v) for v in values] != length_N.tolist():
        raise ValueError(f"{name} must contain one number per token of every response")
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return padded
