"""Which new nodes of a growing forest complete a stop string.

The last characters of every live prefix are kept, so a node costs one search in a short text. The few nodes in which it
finds something are decoded from the start of the response, and these texts decide.
"""

from __future__ import annotations

import numpy as np

from brorl.arrays import BoolArray, IntArray
from brorl.model.stop_strings import StopStrings
from brorl.rollout.native.forest import Forest


class TextEnds:
    """Finds the nodes with which a response ends, because they complete a stop string.

    Args:
        stop: The stop strings, one at least.
        forest: The forest that grows.
    """

    def __init__(self, stop: StopStrings, forest: Forest) -> None:
        self._stop = stop
        self._forest = forest
        self._tail_of = {-1: ""}  # last characters, without spaces, of each live node; -1 is every prompt

    def found(self, parent_C: IntArray, token_C: IntArray, node_C: IntArray) -> BoolArray:
        """Return whether each of C new nodes completes a stop string, shape [C].

        Args:
            parent_C: Node above each, -1 for a prompt; all children of a node are in one call.
            token_C: Token of each.
            node_C: Number of each in the forest.
        """
        tail_of, piece_of, kept = self._tail_of, self._stop.pieces, self._stop.longest
        parents = parent_C.tolist()
        texts = [tail_of[parent] + piece_of[token] for parent, token in zip(parents, token_C.tolist(), strict=True)]
        for parent in {*parents} - {-1}:
            del tail_of[parent]
        tail_of.update(zip(node_C.tolist(), [text[-kept:] for text in texts], strict=True))
        likely_in, end_with, path = self._stop.likely_in, self._stop.end_with, self._forest.path
        return np.array([
            likely_in(text) is not None and end_with(path(node))
            for text, node in zip(texts, node_C.tolist(), strict=True)
        ], np.bool_)  # fmt: skip
