"""A question: one row of the user's data before any tokenizer, and the split into training and held-out questions.

In: plain values. Out: `Question`s and two lists of them. A question without words or without a reference is refused
when it is made.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Args:
        role: Who speaks: `system`, `user`, `assistant`, or what else the model's chat template knows.
        content: What is said.
    """

    role: str
    content: str


@dataclass(frozen=True)
class Question:
    """One question with a reference answer, as it stands in the data.

    Args:
        id: Unique name; it stays the same over runs.
        text: The question; empty where `messages` hold it.
        reference: What the verifier of `domain` needs to judge a response.
        domain: Which verifier judges the responses.
        source: Name of the data the question came from.
        messages: A conversation that ends with the user's turn, instead of `text`.

    Raises:
        ValueError: If there are both a text and messages or neither, or the last message is not the user's.
    """

    id: str
    text: str
    reference: str
    domain: str
    source: str = ""
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.messages):
            raise ValueError(
                f"question {self.id!r} needs either a text or messages, got text {self.text!r} and "
                f"{len(self.messages)} messages; leave one of them empty"
            )
        if self.messages and self.messages[-1].role != "user":
            raise ValueError(
                f"the messages of question {self.id!r} end with the role {self.messages[-1].role!r}; "
                "end them with the user's turn, which the model answers"
            )

    @property
    def last_turn(self) -> str:
        """What the model answers: the text, or the last message."""
        return self.messages[-1].content if self.messages else self.text

    @property
    def key(self) -> str:
        """What is asked, as one string: equal keys are the same question, whatever their ids and sources."""
        if not self.messages:
            return self.text
        return json.dumps([[message.role, message.content] for message in self.messages], ensure_ascii=False)

    @property
    def asked(self) -> str:
        """What is asked, apart from system messages and white space: what must not be both trained and evaluated on."""
        said = [message for message in self.messages if message.role != "system"]
        if len(said) <= 1:
            return " ".join((said[0].content if said else self.text).split())
        turns = [[message.role, " ".join(message.content.split())] for message in said]
        return json.dumps(turns, ensure_ascii=False)


class QuestionSplit(NamedTuple):
    """Questions for training and questions that training never sees."""

    train: list[Question]
    held_out: list[Question]


def split_held_out(questions: Iterable[Question], share: float, seed: int) -> QuestionSplit:
    """Split questions by a hash of what they ask.

    A question's side is a pure function of its words and the seed: the order of the rows, what other rows there are,
    which source it comes from, white space and system messages play no part, so that the same question in two sources
    is on one side. With one seed, a larger share holds out all that a smaller one does.

    Args:
        questions: The questions.
        share: Expected share of distinct questions that are held out, 0 to 1.
        seed: Which split.

    Returns:
        Training questions in the order given, and held-out questions in a seeded shuffle that depends on their words
        alone: its first k are a uniform sample, and the same ones for every share that holds out as many.

    Raises:
        ValueError: If the share is outside 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"held_out_share must be 0 to 1, got {share}")
    train: list[Question] = []
    held_out: list[tuple[int, Question]] = []
    for question in questions:
        draw = _draw(question.asked, seed)
        if draw < share * 2**64:
            held_out.append((draw, question))
        else:
            train.append(question)
    held_out.sort(key=lambda pair: (pair[0], pair[1].key, pair[1].id))
    return QuestionSplit(train, [question for _, question in held_out])


def drop_asked(questions: Iterable[Question], evaluated: Iterable[Question]) -> tuple[list[Question], int]:
    """Leave out of training what is evaluated, where both come from different data.

    Args:
        questions: To train on.
        evaluated: To evaluate on.

    Returns:
        Questions that `evaluated` does not ask in the same words, in order, and how many were left out.
    """
    asked = {question.asked for question in evaluated}
    every = list(questions)
    kept = [question for question in every if question.asked not in asked]
    return kept, len(every) - len(kept)


def _draw(key: str, seed: int) -> int:
    """Return a uniform number from 0 to 2**64 - 1, the same on any machine and in any version of Python."""
    return int.from_bytes(blake2b(f"question split {seed}: {key}".encode(), digest_size=8).digest(), "big")


def contents(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages in the form that chat templates take."""
    return [{"role": message.role, "content": message.content} for message in messages]
