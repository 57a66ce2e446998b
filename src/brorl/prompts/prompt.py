"""A prompt: one question as the model reads it, and what its verifier needs."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One question put to the model.

    Args:
        id: Unique name of the prompt; it stays the same over runs.
        text: What the model reads.
        token_ids: `text` as token ids, at least one.
        reference: What the verifier of `domain` needs to judge a response.
        domain: Which verifier judges the responses.
        source: Name of the data the question came from, for results by source.
        question: The question alone, without system prompt and template, for lists; empty if it is unknown.

    Raises:
        ValueError: If there is no token.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    reference: str
    domain: str
    source: str = ""
    question: str = ""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(
                f"prompt {self.id!r} has no tokens (text {self.text!r}); "
                "give it a text that the tokenizer turns into at least one token"
            )


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """Return a hash of what decides a run: the prompts' ids, token ids, references and domains, in order."""
    digest = blake2b(digest_size=16)
    for prompt in prompts:
        for text in (prompt.id, prompt.reference, prompt.domain):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        tokens = np.asarray(prompt.token_ids, dtype="<i8")
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return digest.hexdigest()
