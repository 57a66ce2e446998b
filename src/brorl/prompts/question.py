"""A `Question` is read from data: a text or messages, with the reference answer that a verifier reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

CODE_DOMAIN = "code"
COUNTDOWN_DOMAIN = "countdown"
ENVIRONMENT_DOMAIN = "environment"
GYM_DOMAIN = "gym"
INSTRUCTIONS_DOMAIN = "ifeval"
MATH_DOMAIN = "math"
SCIENCE_DOMAIN = "science"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str  # `system`, `user`, `assistant`, or another role of the model's chat template
    content: str


@dataclass(frozen=True)
class Question:
    """One question with a reference answer, as in the data."""

    id: str  # unique name, the same in all runs
    text: str  # the question; empty if `messages` hold it
    reference: str  # the verifier of `domain` reads this answer: `22`, or JSON such as tests of a program
    domain: str  # name of the verifier
    source: str = ""  # name of the data that the question is from
    messages: tuple[Message, ...] = ()  # instead of `text`: a conversation that ends with the user's turn
    # File and row, for error messages; empty for a generated question. Equality ignores it.
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
        """The id, followed by file and row if known: `rows:9 (rows.jsonl line 9)`."""
        return f"{self.id} ({self.location})" if self.location else self.id

    @property
    def last_turn(self) -> str:
        """The text, or the last message."""
        return self.messages[-1].content if self.messages else self.text

    @property
    def key(self) -> str:
        """The text or the messages as one string. Questions with equal keys are the same question.

        The question of an environment is its whole row: games with the same text differ in their other columns.
        """
        if self.domain == ENVIRONMENT_DOMAIN:
            return self.reference
        if not self.messages:
            return self.text
        return json.dumps([[message.role, message.content] for message in self.messages], ensure_ascii=False)

    @property
    def words(self) -> str:
        """The key without system messages and white space. Training drops questions whose words are evaluated on."""
        if self.domain == ENVIRONMENT_DOMAIN:
            return self.key
        turns = [message for message in self.messages if message.role != "system"]
        if len(turns) <= 1:
            return " ".join((turns[0].content if turns else self.text).split())
        texts = [[message.role, " ".join(message.content.split())] for message in turns]
        return json.dumps(texts, ensure_ascii=False)


def with_text_after(question: Question, text: str) -> Question:
    """Return a question with a text at the end of its last turn."""
    if not question.messages:
        return replace(question, text=question.text + text)
    *before, last = question.messages
    return replace(question, messages=(*before, replace(last, content=last.content + text)))
