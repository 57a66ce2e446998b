"""What a row asks, as a layout or the columns of a file say it; a row without it raises `DroppedRow`."""

from __future__ import annotations

from dataclasses import dataclass

from brorl.prompts.question import Message


class DroppedRow(Exception):  # noqa: N818
    """A row has no question that can be verified. Dropped rows are counted by message, so messages are general."""


@dataclass(frozen=True)
class Asked:
    """A row's part of a `Question`, which adds the id, the source and the location."""

    text: str  # the question; empty if `messages` hold it
    reference: str  # the verifier of `domain` reads this answer
    domain: str  # name of the verifier
    messages: tuple[Message, ...] = ()  # a conversation that ends with the user's turn

    def __post_init__(self) -> None:
        question = self.messages[-1].content if self.messages else self.text
        for part, missing in ((question, "no question"), (self.reference, "no answer")):
            if not part.strip():
                raise DroppedRow(missing)
            try:
                part.encode()
            except UnicodeEncodeError:
                raise DroppedRow("an unpaired surrogate") from None
