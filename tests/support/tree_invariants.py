"""What every tree that an engine makes or a file holds must be: the canonical tree of its rollouts."""

from dataclasses import replace

from brorl.tree import RolloutTree


def check_tree(tree: RolloutTree) -> None:
    """Check that a tree is the one that its rollouts make, and that no log-prob is above 0, up to rounding.

    Given nodes have the log-prob 0, and a leaf is never given.
    """
    counted = list(zip(tree.responses(), tree.finished.tolist(), strict=True))
    responses = [tokens for (tokens, count), _ in counted for _ in range(count)]
    finished = [ended for (_, count), ended in counted for _ in range(count)]
    made = RolloutTree.from_responses(tree.prompt_ids, responses, finished=finished)
    assert replace(made, logprob=tree.logprob, given=tree.given) == tree
    assert (tree.logprob[tree.given] == 0).all()
    assert not tree.given[tree.leaf].any()
    assert not (tree.logprob > 1e-6).any()
