"""The questions of one source, and what became of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from brorl.prompts.decimal_commas import ColumnReading
from brorl.prompts.question import Question
from brorl.prompts.settings import FileSource, GymSource, Source


@dataclass(frozen=True)
class SourceQuestions:
    """The distinct questions of one source, in the order of its rows until some are held out."""

    source: Source
    train: Sequence[Question]  # questions to train on
    held_out: Sequence[Question] = ()  # questions to evaluate on, in a seeded order
    weight: float = 0.0  # share in training, relative to other sources; 0 for evaluation only
    num_held_out: int = 0  # number of questions held out, evaluated on or not
    num_evaluated_on: int = 0  # training questions dropped because another source evaluates on them
    num_rows: int = 0  # rows read; 0 if the questions were generated
    num_repeated: int = 0  # rows that repeat a question with the same answer
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> number of rows that the layout dropped
    commas: ColumnReading | None = None  # how commas in numbers were read; None if there are none

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.label

    @property
    def questions(self) -> list[Question]:
        """All questions: those to train on, then the held-out ones."""
        return [*self.train, *self.held_out]

    @property
    def published(self) -> bool:
        """Whether the source is a public dataset, whose rows the user cannot correct."""
        return isinstance(self.source, GymSource) or (
            isinstance(self.source, FileSource) and self.source.layout is not None
        )


def reasons(dropped: Mapping[str, int]) -> str:
    """Return as text why rows were dropped, with counts, the most frequent reason first."""
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)
