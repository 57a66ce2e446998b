"""A question: one row of the user's data before any tokenizer, and the split into training and held-out questions."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Args:
        role: The speaker: `system`, `user`, `assistant`, or another role of the model's chat template.
        content: The text.
    """

    role: str
    content: str


@dataclass(frozen=True)
class Question:
    """One question with a reference answer, as in the data.

    Args:
        id: Unique name, the same in all runs.
        text: The question; empty if `messages` hold it.
        reference: The reference answer, as the verifier of `domain` reads it.
        domain: Name of the verifier.
        source: Name of the data that the question is from.
        messages: A conversation that ends with the user's turn, instead of `text`.
        location: File and row, for messages; empty if it is generated. It is not part of the identity of a question.

    Raises:
        ValueError: If there are both a text and messages or neither, or the last message is not the user's.
    """

    id: str
    text: str
    reference: str
    domain: str
    source: str = ""
    messages: tuple[Message, ...] = ()
    location: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.messages):
            raise ValueError(
                f"question {self.id!r} must have exactly one of text and messages, got text {self.text!r} and "
                f"{len(self.messages)} messages"
            )
        if self.messages and self.messages[-1].role != "user":
            raise ValueError(
                f"the messages of question {self.id!r} end with the role {self.messages[-1].role!r}; "
                "end them with the user's turn, for the model to answer"
            )

    @property
    def name(self) -> str:
        """The id, with its file and row if it has them: `rows:9 (rows.jsonl line 9)`."""
        return f"{self.id} ({self.location})" if self.location else self.id

    @property
    def last_turn(self) -> str:
        """The text, or the last message."""
        return self.messages[-1].content if self.messages else self.text

    @property
    def key(self) -> str:
        """The text or the messages as one string: questions with equal keys are the same question."""
        if not self.messages:
            return self.text
        return json.dumps([[message.role, message.content] for message in self.messages], ensure_ascii=False)

    @property
    def asked(self) -> str:
        """The key without system messages and white space; no two questions to train and evaluate on share it."""
        turns = [message for message in self.messages if message.role != "system"]
        if len(turns) <= 1:
            return " ".join((turns[0].content if turns else self.text).split())
        texts = [[message.role, " ".join(message.content.split())] for message in turns]
        return json.dumps(texts, ensure_ascii=False)


_T = TypeVar("_T")


class Split(NamedTuple, Generic[_T]):
    """Questions to train on, and held-out questions that training never sees."""

    train: list[_T]
    held_out: list[_T]


def split_held_out(questions: Iterable[Question], fraction: float, seed: int) -> Split[Question]:
    """Split questions by a hash of their words (`Question.asked`).

    The side of a question depends on its words and the seed alone: the same question in two sources is on one side.
    With one seed, a larger fraction holds out all that a smaller one does.

    Returns:
        Training questions in their order, and held-out questions in a seeded shuffle by their words: its first k are a
        uniform sample, and the same ones for every fraction that holds out k or more.

    Raises:
        ValueError: If the fraction of distinct questions is not 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"held_out_fraction must be between 0 and 1, got {fraction}")
    train: list[Question] = []
    held_out: list[tuple[int, Question]] = []
    for question in questions:
        draw = uniform_hash(f"question split {seed}: {question.asked}")
        if draw < fraction * 2**64:
            held_out.append((draw, question))
        else:
            train.append(question)
    held_out.sort(key=lambda pair: (pair[0], pair[1].key, pair[1].id))
    return Split(train, [question for _, question in held_out])


def drop_asked(questions: Iterable[Question], evaluated: Iterable[Question]) -> tuple[list[Question], int]:
    """Drop training questions whose words are evaluated on; return the others, in order, and the number dropped."""
    asked = {question.asked for question in evaluated}
    every = list(questions)
    kept = [question for question in every if question.asked not in asked]
    return kept, len(every) - len(kept)


def uniform_hash(key: str) -> int:
    """Return a uniform number from 0 to 2**64 - 1, the same on any machine and in any version of Python."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


def contents(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages in the form of chat templates."""
    return [{"role": message.role, "content": message.content} for message in messages]
