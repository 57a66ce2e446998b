"""A `Prompt` is a model's input: a question in its template, as text and token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import numpy as np

_MAX_REFERENCE_LENGTH = 2_000  # characters; longer references are shortened when stored


class PromptIds(tuple[int, ...]):
    """A prompt's token ids together with its data row, because two games can begin with the same text.

    Equality ignores the row.
    """

    row: str  # columns as JSON

    def __new__(cls, token_ids: Iterable[int], row: str) -> Self:
        """Make the ids of a prompt."""
        ids = super().__new__(cls, token_ids)
        ids.row = row
        return ids

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[int, ...], str]]:
        """Pickle the row too."""
        return type(self), (tuple(self), self.row)


def row_of(token_ids: Sequence[int]) -> str:
    """Return the row attached to a prompt's ids; an empty string if there is none."""
    return token_ids.row if isinstance(token_ids, PromptIds) else ""


@dataclass(frozen=True)
class Prompt:
    """One question for the model."""

    id: str  # unique name, the same in every run
    text: str  # the model's input: the question with system prompt and template
    token_ids: tuple[int, ...]  # `text` as token ids; empty in stored rollouts, which are not sampled again
    reference: str  # the answer that the verifier of `domain` reads
    domain: str  # name of the verifier
    source: str = ""  # name of the question's source, for results by source
    question: str = ""  # the question without system prompt and template, for lists; empty if unknown


def stored_reference(reference: str) -> str:
    """Return a reference as it is stored with responses: if it is long, only its beginning, its length and a hash.

    Every response is stored with its reference, and a program's tests can take megabytes.
    """
    if len(reference) <= _MAX_REFERENCE_LENGTH:
        return reference
    digest = blake2b(reference.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{reference[:_MAX_REFERENCE_LENGTH]}... ({len(reference):,} characters, blake2b {digest})"


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """Return a hash of the prompts' ids, token ids, references and domains, in order."""
    digest = blake2b(digest_size=16)
    for prompt in prompts:
        for text in (prompt.id, prompt.reference, prompt.domain):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        tokens = np.asarray(prompt.token_ids, dtype="<i8")
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return digest.hexdigest()
