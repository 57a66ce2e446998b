"""The invariants of a rollout tree, which every tree that an engine makes or a file holds must keep."""

from collections.abc import Iterator

import numpy as np

from brorl.tree import RolloutTree


def check_tree(tree: RolloutTree) -> None:
    """Check every invariant of the representation.

    Raises:
        ValueError: Naming the first invariant that does not hold.
    """
    for invariant, holds in invariants(tree):
        if not holds:
            raise ValueError(f"not a rollout tree: violates '{invariant}'")


def invariants(tree: RolloutTree) -> Iterator[tuple[str, bool]]:
    """Yield each invariant and whether it holds; a later one is only computed if the earlier ones hold."""
    node_M = np.arange(tree.token.size)
    yield "parents before children", bool((tree.parent < node_M).all() and (tree.parent >= -1).all())
    inner = np.flatnonzero(tree.parent >= 0)
    yield "depth-first preorder", bool((inner < tree.end[tree.parent[inner]]).all())
    siblings = np.lexsort((node_M, tree.parent))
    same_parent = tree.parent[siblings[1:]] == tree.parent[siblings[:-1]]
    ascending = tree.token[siblings[1:]] > tree.token[siblings[:-1]]
    yield "siblings sorted by token, none twice", bool(ascending[same_parent].all())
    yield "tokens not negative", bool((tree.token >= 0).all())
    yield "leaves are nodes", bool((tree.leaf >= 0).all() and (tree.leaf < node_M.size).all())
    yield "leaves in preorder, none twice", bool((np.diff(tree.leaf * 2 + tree.finished) > 0).all())
    yield "leaf counts positive", bool((tree.leaf_count > 0).all())
    own_M = np.bincount(tree.leaf, weights=tree.leaf_count, minlength=node_M.size)
    children_M = np.bincount(tree.parent[inner], weights=tree.count[inner], minlength=node_M.size)
    conserved = bool((tree.count == own_M + children_M).all() and (tree.count > 0).all())
    yield "count = rollouts that end here + counts of the children, positive", conserved
    yield "log-probs at most 0", not bool((tree.logprob > 1e-6).any())
