"""The order of prompts: a pure function of (seed, source, epoch), which a resumed run continues."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from brorl.prompts.prompt import Prompt, fingerprint
from brorl.seeds import seed_sequence


class PromptSupply(Protocol):
    """Endless prompts in a fixed order, with a state to continue from."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The distinct prompts, source by source."""
        ...

    @property
    def num_prompts(self) -> int:
        """Number of distinct prompts."""
        ...

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the prompts that a supply with this state has returned."""
        ...


class PromptStream:
    """Endless, seeded, resumable order of prompts; every epoch has each prompt once.

    The prompts are shuffled again every epoch. The order of an epoch is a pure function of (seed, source, epoch, number
    of prompts).

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
        ids: set[str] = set()
        for prompt in prompts:
            if prompt.id in ids:
                raise ValueError(f"two prompts have the id {prompt.id!r}; give each prompt another id")
            ids.add(prompt.id)
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
        """Return the next `n` prompts, 0 or more, from as many epochs as needed.

        Raises:
            ValueError: If `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} prompts; ask for 0 or more")
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
            ValueError: If the state has other keys, belongs to other prompts, or is outside of the epoch.
        """
        if set(state) != {"epoch", "position", "num_prompts", "fingerprint"}:
            raise ValueError(
                f"a stream's state has the keys epoch, position, num_prompts and fingerprint, got {sorted(state)}; "
                "pass what state_dict() returned"
            )
        if state["num_prompts"] != self.num_prompts:
            raise ValueError(
                f"the data has changed since the run began: {state['num_prompts']} training prompts then, "
                f"{self.num_prompts} now; put the data back as it was, or start a new run"
            )
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"the data has changed since the run began: still {self.num_prompts} training prompts, but other ids, "
                "tokens, references or domains, or another order; put the data, the prompt settings and the tokenizer "
                "back as they were, or start a new run"
            )
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= self.num_prompts:
            raise ValueError(
                f"a stream of {self.num_prompts} prompts has no epoch {epoch}, position {position}; "
                "pass what state_dict() returned"
            )
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        generator = np.random.default_rng(seed_sequence(self._seed, epoch, self._source))
        order: list[int] = generator.permutation(self.num_prompts).tolist()
        return order
