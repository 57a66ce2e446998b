"""Dynamic sampling: which groups carry a learning signal.

Source: BroRL (arXiv 2510.01180) keeps a group only if 0 < number correct < N; the idea is DAPO's (arXiv 2503.14476,
Eq. 11). The raw verdict decides, before any shaping of rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

from brorl.algorithms.groups import Group


def has_mixed_outcomes(group: Group) -> bool:
    """Tell whether some rollouts of the group are correct and some are not."""
    return 0 < group.num_correct < group.tree.num_rollouts


def keep_mixed_outcomes(groups: Sequence[Group]) -> list[Group]:
    """Return the groups whose outcomes are mixed, in order."""
    return [group for group in groups if has_mixed_outcomes(group)]
