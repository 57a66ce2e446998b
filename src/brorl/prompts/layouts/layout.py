"""The layout of a data set: from a row to the fields of a question, or the reason why the row is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Fields(NamedTuple):
    """The fields of a question that a row holds.

    Attributes:
        text: The question, as the user reads it, before any template.
        reference: The reference answer, as the verifier of `domain` reads it.
        domain: Name of the verifier.
    """

    text: str
    reference: str
    domain: str


class Dropped(Exception):  # noqa: N818
    """A row has no question that can be verified; the message is a few words that many rows share: they are counted."""


class Layout(NamedTuple):
    """How the rows of some public data sets are read.

    Attributes:
        name: The word that selects it in `data.sources[].layout`.
        columns: The columns that `read` reads.
        read: A row, with its columns by name, and a seed (of shuffled options) to fields. It raises `Dropped`, or a
            ValueError with the problem for a row that is not of this layout.
        data_sets: Hub ids of data sets with this layout.
        summary: One line for the documentation.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any], int], Fields]
    data_sets: tuple[str, ...]
    summary: str
