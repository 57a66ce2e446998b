"""The layout of a dataset: from a row to the fields of a question, or the reason why the row is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Cells = Mapping[str, Any]  # a row, with its columns by name


class Fields(NamedTuple):
    """The fields of a question that a row holds."""

    text: str  # the question, as the user reads it, before any template
    reference: str  # the reference answer, as the verifier of `domain` reads it
    domain: str  # name of the verifier


class DroppedRow(Exception):  # noqa: N818
    """A row has no question that can be verified; the message is a few words that many rows share: they are counted."""


class Layout(NamedTuple):
    """How the rows of some public datasets are read."""

    name: str  # the word that selects it in `data.sources[].layout`
    columns: tuple[str, ...]  # the columns that `read` reads
    # A row and a seed (of shuffled options) to fields. It raises `DroppedRow`, or a ValueError with the problem for a
    # row that is not of this layout.
    read: Callable[[Cells, int], Fields]
    data_sets: tuple[str, ...]  # hub ids of datasets with this layout
    summary: str  # one line for the documentation
    optional: tuple[str, ...] = ()  # columns that `read` reads too where a dataset has them
