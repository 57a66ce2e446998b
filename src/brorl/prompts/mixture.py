"""Prompts of several sources in exact proportion to their weights.

In: a stream for each source, and weights. Out: one supply of prompts. The streams shuffle; the order of the sources is
not random.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, isfinite
from typing import Any

from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream


class PromptMixture:
    """Interleaved prompts of several sources; every prefix has each source's share to within one prompt.

    The order is a fair schedule: the j-th turn of source i with share w_i comes at turn floor((j - 1) / w_i) or later,
    and before turn ceil(j / w_i). Of the sources that may come, the one with the earliest deadline is next. This keeps
    |turns of i among the first n - n w_i| < 1 for every n and any number of sources. To pick the source that lags most
    does not: with many sources, some lag by more than one prompt.

    Source: Baruah, Cohen, Plaxton, Varvel, "Proportionate progress", Algorithmica 15 (1996), on one processor.

    Args:
        streams: One for each source, with distinct ids.
        weights: Fractions of the sources, relative to each other, above 0. Their printed decimals count: 0.1 and 0.2
            are exactly one to two.

    Raises:
        ValueError: If there is no stream, the numbers differ, a weight is out of its range, or sources share an id.
    """

    def __init__(self, streams: Sequence[PromptStream], weights: Sequence[float]) -> None:
        if not streams or len(streams) != len(weights):
            raise ValueError(
                "a mixture needs one weight for each of its streams and at least one stream, "
                f"got {len(streams)} streams and {len(weights)} weights"
            )
        for weight in weights:
            if not (isfinite(weight) and weight > 0):
                raise ValueError(
                    f"the weight of a source must be a positive number, got {weight}; leave out a source that "
                    "should not be used"
                )
        ids: set[str] = set()
        for stream in streams:
            for prompt in stream.prompts:
                if prompt.id in ids:
                    raise ValueError(
                        f"two sources have a prompt with the id {prompt.id!r}; give each source another name"
                    )
                ids.add(prompt.id)
        exact = [Fraction(str(weight)) for weight in weights]
        self._streams = tuple(streams)
        self._fractions = tuple(weight / sum(exact) for weight in exact)
        self._turns = [0] * len(streams)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The distinct prompts, source by source."""
        return tuple(prompt for stream in self._streams for prompt in stream.prompts)

    @property
    def num_prompts(self) -> int:
        """Number of distinct prompts of all sources."""
        return sum(stream.num_prompts for stream in self._streams)

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, 0 or more.

        Raises:
            ValueError: If `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} prompts; ask for 0 or more")
        return [prompt for _ in range(n) for prompt in self._streams[self._next_source()].take(1)]

    def state_dict(self) -> dict[str, Any]:
        """Return the `turns` of each source so far, the `shares` as exact fractions, and the `streams`' states."""
        return {
            "turns": list(self._turns),
            "shares": [str(share) for share in self._fractions],
            "streams": [stream.state_dict() for stream in self._streams],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`; sources, weights and seeds must be the same.

        Raises:
            ValueError: If the state is not that of a mixture, or belongs to other sources, weights or prompts.
        """
        if set(state) != {"turns", "shares", "streams"}:
            raise ValueError(
                f"a mixture's state has the keys turns, shares and streams, got {sorted(state)}; "
                "the data has changed since the run began, from or to a single source: put it back as it was, "
                "or start a new run"
            )
        shares = [str(share) for share in self._fractions]
        if state["shares"] != shares:
            raise ValueError(
                f"the data has changed since the run began: sources with shares {', '.join(state['shares'])} then, "
                f"{', '.join(shares)} now; put the sources and their weights back as they were, or start a new run"
            )
        for stream, of_stream in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(of_stream)
        self._turns = list(state["turns"])

    def _next_source(self) -> int:
        turn = sum(self._turns)
        due = [
            (ceil((had + 1) / share), i)
            for i, (had, share) in enumerate(zip(self._turns, self._fractions, strict=True))
            if floor(had / share) <= turn
        ]
        _, source = min(due)
        self._turns[source] += 1
        return source
