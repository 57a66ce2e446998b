"""The order of prompts: a pure function of (seed, source, epoch), which a resumed run continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, isfinite
from typing import Any, TypeAlias

import numpy as np

from brorl.prompts.prompt import Prompt, fingerprint
from brorl.seeds import seed_sequence


def _check_ids(prompts: Sequence[Prompt], problem: str) -> None:
    twice = next((name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1), None)
    if twice is not None:
        raise ValueError(problem.format(repr(twice)))


class PromptStream:
    """Endless, seeded, resumable order of prompts; every epoch has each prompt once.

    Args:
        prompts: The prompts, with distinct ids, at least one.
        seed: Seed of the shuffles, 0 to 2**64 - 1.
        source: Number of the source in its run, 0 to 2**32 - 1. Each has its own shuffles.

    Raises:
        ValueError: If there are no prompts, ids repeat, or a number is out of its range.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, source: int = 0) -> None:
        if not prompts:
            raise ValueError("a stream needs at least one prompt, got none; add data, or lower data.held_out_fraction")
        _check_ids(prompts, "two prompts have the id {}; give each prompt another id")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._source = source
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, in the order given."""
        return self._prompts

    @property
    def num_prompts(self) -> int:
        """Number of prompts in one epoch."""
        return len(self._prompts)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the prompts, in order."""
        return fingerprint(self._prompts)

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, from as many epochs as needed."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self._position == self.num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            end = min(self._position + n - len(taken), self.num_prompts)
            taken += [self._prompts[i] for i in self._order[self._position : end]]
            self._position = end
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return `epoch`, `position` (prompts of the epoch already taken), `num_prompts` and `fingerprint`."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_prompts": self.num_prompts,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`; prompts and seed must be the same.

        Raises:
            ValueError: If the state has other keys, or belongs to other prompts.
        """
        if set(state) != {"epoch", "position", "num_prompts", "fingerprint"}:
            raise ValueError(
                f"a stream's state has the keys epoch, position, num_prompts and fingerprint, got {sorted(state)}; "
                "pass what state_dict() returned"
            )
        if state["num_prompts"] != self.num_prompts:
            raise ValueError(
                f"the data has changed since the run began: {state['num_prompts']} training prompts then, "
                f"{self.num_prompts} now; restore the data, or start a new run"
            )
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the data has changed since the run began: still {self.num_prompts} training prompts, but other ids, "
                "tokens, references or domains, or another order; restore the data, the prompt settings and the "
                "tokenizer, or start a new run"
            )
        epoch, position = state["epoch"], state["position"]
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        generator = np.random.default_rng(seed_sequence(self._seed, epoch, self._source))
        order: list[int] = generator.permutation(self.num_prompts).tolist()
        return order


class PromptMixture:
    """Interleaved prompts of several sources; every prefix has each source's fraction to within one prompt.

    The order is a fair schedule: the j-th turn of source i with fraction w_i comes at turn floor((j - 1) / w_i) or
    later, and before turn ceil(j / w_i). Of the sources that may come, the one with the earliest deadline is next. This
    keeps |turns of i among the first n - n w_i| < 1 for every n. To pick the source that lags most does not.

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
                    f"the weight of a source must be a positive number, got {weight}; remove a source that "
                    "should not be used"
                )
        exact = [Fraction(str(weight)) for weight in weights]
        self._streams = tuple(streams)
        _check_ids(self.prompts, "two sources have a prompt with the id {}; give each source another name")
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
        """Return the next `n` prompts."""
        return [prompt for _ in range(n) for prompt in self._streams[self._next_source()].take(1)]

    def state_dict(self) -> dict[str, Any]:
        """Return the `turns` of each source so far, its exact fraction (`shares`), and the states of the `streams`."""
        return {
            "turns": list(self._turns),
            "shares": [str(fraction) for fraction in self._fractions],
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
                "the data has changed since the run began, from or to a single source: restore it, "
                "or start a new run"
            )
        shares = [str(fraction) for fraction in self._fractions]
        if state["shares"] != shares:
            raise ValueError(
                f"the data has changed since the run began: the fractions of the sources were "
                f"{', '.join(state['shares'])} and are {', '.join(shares)}; restore the sources and their weights, or "
                "start a new run"
            )
        for stream, of_stream in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(of_stream)
        self._turns = list(state["turns"])

    def _next_source(self) -> int:
        turn = sum(self._turns)
        due = [
            (ceil((turns + 1) / fraction), i)
            for i, (turns, fraction) in enumerate(zip(self._turns, self._fractions, strict=True))
            if floor(turns / fraction) <= turn
        ]
        _, source = min(due)
        self._turns[source] += 1
        return source


PromptSupply: TypeAlias = PromptStream | PromptMixture
"""Endless prompts in a fixed order, with a state to continue from."""
