"""Splits questions into those to train on and held-out ones, which training never sees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from brorl.prompts.question import Question
from brorl.seeds import uniform_hash

_T = TypeVar("_T")


class Split(NamedTuple, Generic[_T]):
    """Questions to train on, and held-out questions that training never sees."""

    train: list[_T]
    held_out: list[_T]


def split_held_out(questions: Iterable[Question], fraction: float, seed: int) -> Split[Question]:
    """Split questions by a hash of their words (`Question.words`).

    A question's side depends only on its words and the seed, so two sources with the same question agree. The held-out
    questions are shuffled by words and seed. The first k are a uniform sample, and they are the same k for every
    fraction that holds out k or more. A larger fraction holds out all that a smaller fraction does.
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
    return Split(train, [question for _, question in held_out])


def drop_evaluated(questions: Iterable[Question], evaluated: Iterable[Question]) -> tuple[list[Question], int]:
    """Drop training questions whose words are evaluated on; return the rest, in order, and the number dropped."""
    asked = {question.words for question in evaluated}
    every = list(questions)
    kept = [question for question in every if question.words not in asked]
    return kept, len(every) - len(kept)
