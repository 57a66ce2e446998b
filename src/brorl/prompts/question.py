"""A `Question` from the data: text or messages, with the reference answer for a verifier."""

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

    role: str  # `system`, `user`, `assistant`, or any other role in the model's chat template
    content: str


@dataclass(frozen=True)
class Question:
    """One question with a reference answer, as in the data."""

    id: str  # unique name, the same in every run
    text: str  # the question; empty if it is in `messages`
    reference: str  # the answer that the verifier of `domain` reads: `22`, or JSON such as a program's tests
    domain: str  # name of the verifier
    source: str = ""  # name of the question's source
    messages: tuple[Message, ...] = ()  # instead of `text`: a conversation that ends with the user's turn
    # File and row, for error messages; empty for a generated question. Ignored in comparisons.
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
        """The id, with the file and row if known: `rows:9 (rows.jsonl line 9)`."""
        return f"{self.id} ({self.location})" if self.location else self.id

    @property
    def last_turn(self) -> str:
        """The text, or the last message."""
        return self.messages[-1].content if self.messages else self.text

    @property
    def key(self) -> str:
        """The text or the messages as one string. Questions with equal keys are the same question.

        For an environment, the key is the whole row: games with the same text differ in other columns.
        """
        if self.domain == ENVIRONMENT_DOMAIN:
            return self.reference
        if not self.messages:
            return self.text
        return json.dumps([[message.role, message.content] for message in self.messages], ensure_ascii=False)

    @property
    def words(self) -> str:
        """The key without system messages and extra white space. Training drops questions with evaluated words."""
        if self.domain == ENVIRONMENT_DOMAIN:
            return self.key
        turns = [message for message in self.messages if message.role != "system"]
        if len(turns) <= 1:
            return " ".join((turns[0].content if turns else self.text).split())
        texts = [[message.role, " ".join(message.content.split())] for message in turns]
        return json.dumps(texts, ensure_ascii=False)


def with_text_after(question: Question, text: str) -> Question:
    """Append text to the last turn of a question."""
    if not question.messages:
        return replace(question, text=question.text + text)
    *before, last = question.messages
    return replace(question, messages=(*before, replace(last, content=last.content + text)))
