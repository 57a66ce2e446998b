"""The rows of a decoding batch: distinct live prefixes of one length, with their rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Live prefixes, all of one length, and their rollouts.

    Attributes:
        depth: Number of tokens after the prompt; with 0 each prompt is one row.
        prompt_R: Prompt of each row, shape [R].
        node_R: Forest node of each row's last token, shape [R]; -1 at depth 0.
        token_R: Each row's last token, shape [R]; -1 at depth 0.
        row_K: Row of each rollout, ascending, shape [K].
        rollout_K: Index of each rollout within its prompt, shape [K].
    """

    depth: int
    prompt_R: IntArray
    node_R: IntArray
    token_R: IntArray
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
            row_K[order],
            self.rollout_K[order],
        )
