"""The layout of a dataset: from a row to a question without an id, or the reason why the row is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from brorl.prompts.question import Question

Cells = Mapping[str, Any]  # a row, with its columns by name


class DroppedRow(Exception):  # noqa: N818
    """A row has no question that can be verified; the message is a few words that many rows share: they are counted."""


class Layout(NamedTuple):
    """How the rows of some public datasets are read."""

    name: str  # the word that selects it in `data.sources[].layout`
    columns: tuple[str, ...]  # the columns that `read` reads
    # A row and a seed (of shuffled options) to a question of `question_of`. It raises `DroppedRow`, or a ValueError
    # with the problem for a row that is not of this layout.
    read: Callable[[Cells, int], Question]
    data_sets: tuple[str, ...] = ()  # hub ids of datasets with this layout
    summary: str = ""  # one line for the documentation
    optional: tuple[str, ...] = ()  # columns that `read` reads too where a dataset has them
    only: tuple[tuple[str, str], ...] = ()  # columns with the value of the rows that are kept

    def question(self, row: Cells, seed: int) -> Question:
        """Return the question of a row; see `read`. A row that is not one of `only` is dropped."""
        for column, value in self.only:
            if row[column] != value:
                raise DroppedRow(f"the {column} is {row[column]}, not {value}")
        return self.read(row, seed)


def question_of(text: str, reference: str, domain: str, missing: str = "no answer") -> Question:
    """Return the question of a row, without id and source.

    Args:
        text: The question, as the user reads it, before any template.
        reference: The reference answer, as the verifier of the domain reads it.
        domain: Name of the verifier.
        missing: Why a row without a reference is dropped.

    Raises:
        DroppedRow: If one of the two is empty, or is no text of Unicode.
    """
    for part, problem in ((text, "no question"), (reference, missing)):
        if not part.strip():
            raise DroppedRow(problem)
        try:
            part.encode()
        except UnicodeEncodeError:
            raise DroppedRow("an unpaired surrogate") from None
    return Question("", text, reference, domain)
