"""A `PromptStream` orders prompts. The order depends only on (seed, source, epoch) and the weights.

A resumed run continues in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, isfinite
from typing import Any

import numpy as np

from brorl.prompts.prompt import Prompt, fingerprint
from brorl.seeds import seed_sequence


class PromptStream:
    """Endless, seeded, resumable order of the prompts from one or more sources.

    Each epoch of a source visits each of its prompts once. Every prefix of the order matches each source's fraction to
    within one prompt. The schedule is fair: with fraction w, a source's j-th turn comes no earlier than turn
    floor((j - 1) / w), and before turn ceil(j / w). Of the sources that are due, the one with the earliest deadline is
    next. So |turns among the first n - n w| < 1 for every n; choosing the source furthest behind would not ensure that.

    Source: Baruah, Cohen, Plaxton, Varvel, "Proportionate progress", Algorithmica 15 (1996), on one processor.

    Args:
        prompts: Prompts with distinct ids, at least one.
        seed: Seed of the shuffles, 0 to 2**64 - 1.
        weights: Weight of each source (`Prompt.source`) relative to the others, above 0, as a printed decimal: 0.1 to
            0.2 is exactly one to two. None if all prompts come from one source.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, weights: Mapping[str, float] | None = None) -> None:
        wrong = next((weight for weight in (weights or {}).values() if not (isfinite(weight) and weight > 0)), None)
        if wrong is not None:
            raise ValueError(
                f"a source's weight must be a positive number, got {wrong}; remove the source if it should not be used"
            )
        exact = {None: Fraction(1)} if weights is None else {s: Fraction(str(weight)) for s, weight in weights.items()}
        self.prompts = tuple(prompts)
        self._of_source = [[p for p in prompts if source in (None, p.source)] for source in exact]
        if not exact or not all(self._of_source):
            raise ValueError("a stream needs at least one prompt, got none; add data, or lower data.held_out_fraction")
        twice = next((name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"two prompts have the id {twice!r}; give each prompt a different id")
        self._fractions = [weight / sum(exact.values()) for weight in exact.values()]
        self._turns = [0] * len(exact)
        self._seed = seed
        self._orders = [self._order_of(source, 0) for source in range(len(exact))]

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the prompts in order."""
        return fingerprint(self.prompts)

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, spanning as many epochs as needed."""
        taken: list[Prompt] = []
        for _ in range(n):
            turn = sum(self._turns)
            _, source = min(
                (ceil((turns + 1) / fraction), source)
                for source, (turns, fraction) in enumerate(zip(self._turns, self._fractions, strict=True))
                if floor(turns / fraction) <= turn
            )
            prompts = self._of_source[source]
            epoch, position = divmod(self._turns[source], len(prompts))
            if not position:
                self._orders[source] = self._order_of(source, epoch)
            taken.append(prompts[self._orders[source][position]])
            self._turns[source] += 1
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return each source's `turns` so far and exact fraction (`shares`), with fingerprints of the prompts."""
        return {
            "turns": list(self._turns),
            "shares": [str(fraction) for fraction in self._fractions],
            "num_prompts": self.num_prompts,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Prompts, sources, weights and seed must be the same."""
        own = self.state_dict()
        if set(state) != set(own):
            raise ValueError(
                f"a stream's state has the keys {', '.join(own)}, got {sorted(state)}; pass the result of state_dict()"
            )
        shares, own_shares = ", ".join(state["shares"]), ", ".join(own["shares"])
        for name, problem in (
            ("num_prompts", f"{state['num_prompts']} training prompts then, {self.num_prompts} now; restore the data"),
            ("fingerprint", f"still {self.num_prompts} training prompts, but different ids, tokens, references or "
             "domains, or a different order; restore the data, the prompt settings and the tokenizer"),
            ("shares", f"the fractions of the sources were {shares} and are {own_shares}; restore the sources and "
             "their weights"),
        ):  # fmt: skip
            if state[name] != own[name]:
                raise ValueError(f"the data has changed since the run began: {problem}, or start a new run")
        self._turns = list(state["turns"])
        sizes = map(len, self._of_source)
        epochs = [turns // size for turns, size in zip(self._turns, sizes, strict=True)]
        self._orders = [self._order_of(source, epoch) for source, epoch in enumerate(epochs)]

    def _order_of(self, source: int, epoch: int) -> list[int]:
        generator = np.random.default_rng(seed_sequence(self._seed, epoch, source))
        order: list[int] = generator.permutation(len(self._of_source[source])).tolist()
        return order
