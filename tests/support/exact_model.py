"""A language model small enough to list every response: a random next-token distribution for each prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from brorl.tree import RolloutTree

END = 0
Response = tuple[int, ...]


@dataclass(frozen=True)
class ExactModel:
    """Next-token probabilities by prefix; token 0 ends a response, and so does the length limit."""

    next_token: dict[Response, NDArray[np.float64]]
    max_length: int

    @classmethod
    def random(
        cls, rng: np.random.Generator, vocabulary: int, max_length: int, concentration: float = 1.0
    ) -> ExactModel:
        prefixes = [p for n in range(max_length) for p in product(range(1, vocabulary), repeat=n)]
        return cls({p: rng.dirichlet(np.full(vocabulary, concentration)) for p in prefixes}, max_length)

    def responses(self, prefix: Response = (), mass: float = 1.0) -> Iterator[tuple[Response, float]]:
        """Yield every response with its probability."""
        for token, p in enumerate(self.next_token[prefix].tolist()):
            response = (*prefix, token)
            if token == END or len(response) == self.max_length:
                yield response, mass * p
            else:
                yield from self.responses(response, mass * p)

    def logprobs(self, response: Response) -> list[float]:
        return [float(np.log(self.next_token[response[:i]][token])) for i, token in enumerate(response)]

    def tree(self, responses: Sequence[Response]) -> RolloutTree:
        """Return the tree of some rollouts, with this model's log-probs."""
        finished = [r[-1] == END for r in responses]
        return RolloutTree.from_responses((1,), responses, [self.logprobs(r) for r in responses], finished)
