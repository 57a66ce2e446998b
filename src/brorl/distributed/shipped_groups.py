"""Groups on their way between the driver and the learner ranks: each tree is sent once.

A tree holds almost all bytes of a group, and a learner keeps results per tree between two calls. Both ends hold the
trees of a step by number, and send all other attributes of a group with the number of its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from brorl.algorithms.groups import Group
from brorl.tree import RolloutTree

_ATTRIBUTES = tuple(one.name for one in fields(Group) if one.name != "tree")


@dataclass(frozen=True)
class ShippedGroups:
    """Groups without the trees that the receiver holds.

    Attributes:
        numbers: For each group the number of its tree.
        attributes: For each group all attributes except the tree.
        new_trees: The trees that the receiver does not hold, by number.
    """

    numbers: list[int]
    attributes: list[dict[str, Any]]
    new_trees: dict[int, RolloutTree]


@dataclass
class TreeExchange:
    """One end of the exchange."""

    _tree_of: dict[int, RolloutTree] = field(default_factory=dict)
    _number_of: dict[int, int] = field(default_factory=dict)  # by the id of a tree that `_tree_of` keeps alive

    def pack(self, groups: Sequence[Group]) -> ShippedGroups:
        """Return groups to send; their trees count as held by both ends from now on."""
        new = {}
        for group in groups:
            if id(group.tree) not in self._number_of:
                number = len(self._tree_of)
                new[number] = group.tree
                self._hold(number, group.tree)
        attributes = [{name: getattr(group, name) for name in _ATTRIBUTES} for group in groups]
        return ShippedGroups([self._number_of[id(group.tree)] for group in groups], attributes, new)

    def unpack(self, shipped: ShippedGroups) -> list[Group]:
        """Return received groups; a tree that came before is the same object again."""
        for number, tree in shipped.new_trees.items():
            self._hold(number, tree)
        both = zip(shipped.numbers, shipped.attributes, strict=True)
        return [Group(tree=self._tree_of[number], **attributes) for number, attributes in both]

    def clear(self) -> None:
        """Forget all trees; the other end must do the same."""
        self._tree_of.clear()
        self._number_of.clear()

    def _hold(self, number: int, tree: RolloutTree) -> None:
        self._tree_of[number] = tree
        self._number_of[id(tree)] = number
