"""One source's questions, a summary of its rows, and the split into training and held-out questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from brorl.prompts.question import Question
from brorl.prompts.settings import FileSource, GymSource, Source
from brorl.seeds import uniform_hash


@dataclass(frozen=True)
class SourceQuestions:
    """One source's distinct questions, in row order until some are held out."""

    source: Source
    train: Sequence[Question]  # questions to train on
    held_out: Sequence[Question] = ()  # questions to evaluate on, in a seeded order
    weight: float = 0.0  # training weight relative to other sources; 0 for evaluation only
    num_held_out: int = 0  # held-out questions, whether evaluated on or not
    num_evaluated_on: int = 0  # training questions dropped because a different source evaluates on them
    num_rows: int = 0  # rows read; 0 if the questions were generated
    num_repeated: int = 0  # rows that repeat a question with the same answer
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> number of rows that the layout dropped
    commas: str = ""  # line that explains how commas in numbers were read; empty if there are none

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.label

    @property
    def questions(self) -> list[Question]:
        """All questions: the training questions, then the held-out questions."""
        return [*self.train, *self.held_out]

    @property
    def published(self) -> bool:
        """Whether the source is a public dataset, whose rows the user cannot correct."""
        return isinstance(self.source, GymSource) or (
            isinstance(self.source, FileSource) and self.source.layout is not None
        )


def split_held_out(questions: Iterable[Question], fraction: float, seed: int) -> tuple[list[Question], list[Question]]:
    """Split questions into training and held-out questions, by a hash of their words (`Question.words`).

    A question's side depends only on its words and the seed, so two sources with the same question agree. The held-out
    questions are shuffled by words and seed. The first k are a uniform sample, and are the same for every fraction that
    holds out at least k. A larger fraction holds out every question that a smaller fraction does.
    """
    train: list[Question] = []
    held_out: list[tuple[int, Question]] = []
    for question in questions:
        draw = uniform_hash(f"question split {seed}: {question.words}")
        if draw < fraction * 2**64:
            held_out.append((draw, question))
        else:
            train.append(question)
    held_out.sort(key=lambda pair: (pair[0], pair[1].key, pair[1].id))
    return train, [question for _, question in held_out]


def drop_evaluated(questions: Iterable[Question], evaluated: Iterable[Question]) -> tuple[list[Question], int]:
    """Drop training questions whose words are evaluated on. Return the rest, in order, and the number dropped."""
    asked = {question.words for question in evaluated}
    every = list(questions)
    kept = [question for question in every if question.words not in asked]
    return kept, len(every) - len(kept)


def reasons(dropped: Mapping[str, int]) -> str:
    """Return the reasons for dropped rows as text, with counts, the most frequent first."""
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)
