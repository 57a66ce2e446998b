"""Prompt streams: the order of one that is not interrupted, and states of other prompts."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), (i,), str(i), "test") for i in range(count)]


class TestPromptStream:
    @given(st.integers(1, 30), st.lists(st.integers(0, 50), max_size=8), st.integers(0, 2**63))
    def test_every_prompt_comes_once_an_epoch(self, num_prompts: int, takes: list[int], seed: int) -> None:
        prompts = some_prompts(num_prompts)
        stream = PromptStream(prompts, seed)
        taken = [prompt for n in takes for prompt in stream.take(n)]
        assert len(taken) == sum(takes)
        for start in range(0, len(taken), num_prompts):
            epoch = taken[start : start + num_prompts]
            assert len(set(epoch)) == len(epoch)

    def test_epochs_and_seeds_have_orders_of_their_own(self) -> None:
        prompts = some_prompts(20)
        stream, other = PromptStream(prompts, 0), PromptStream(prompts, 1)
        orders = [tuple(stream.take(20)), tuple(stream.take(20)), tuple(other.take(20))]
        assert len(set(orders)) == 3
        assert all(order != tuple(prompts) for order in orders)

    def test_all_orders_are_equally_likely(self) -> None:
        """Chi-square of 6 orders in 600 epochs; 20.5 is the 0.1% point at 5 degrees of freedom."""
        stream = PromptStream(some_prompts(3), 11)
        counts = Counter(tuple(p.id for p in stream.take(3)) for _ in range(600))
        assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 20.5
        assert len(counts) == 6

    def test_the_order_is_the_documented_function_of_seed_source_and_epoch(self, rng: np.random.Generator) -> None:
        """The seed's low word, the epoch, the source and the seed's high word are what numpy mixes."""
        low, high, source, num_prompts = (int(rng.integers(end)) for end in (2**32, 2**31, 5, 40))
        num_prompts += 1
        expected = [
            f"p{i}"
            for epoch in range(3)
            for i in np.random.default_rng([low, epoch, source, high]).permutation(num_prompts)
        ]
        stream = PromptStream(some_prompts(num_prompts), high * 2**32 + low, source)
        assert [p.id for p in stream.take(3 * num_prompts)] == expected

    def test_every_seed_source_and_epoch_has_an_order_of_its_own(self, rng: np.random.Generator) -> None:
        """50! orders: any two that agree have the same random numbers."""
        some, num_sources, num_epochs = int(rng.integers(2**31)), 4, 3
        seeds = [s + high for s in (0, 1, 2, some, some + 1) for high in (0, 2**32, 2 * 2**32, 2**62)] + [2**63 - 1]
        orders = set()
        for seed in set(seeds):
            for source in range(num_sources):
                stream = PromptStream(some_prompts(50), seed, source)
                orders |= {tuple(p.id for p in stream.take(50)) for _ in range(num_epochs)}
        assert len(orders) == len(set(seeds)) * num_sources * num_epochs

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"epoch": -1}, "a stream of 3 prompts has no epoch -1, position 2; pass what state_dict() returned"),
         ({"position": 4}, "a stream of 3 prompts has no epoch 0, position 4; pass what state_dict() returned"),
         ({"seed": 1}, "a stream's state has the keys epoch, position, num_prompts and fingerprint, got "
          "['epoch', 'fingerprint', 'num_prompts', 'position', 'seed']; pass what state_dict() returned")],
    )  # fmt: skip
    def test_refuses_a_state_that_is_not_its_own(self, change: dict[str, int], message: str) -> None:
        stream = PromptStream(some_prompts(3), 0)
        stream.take(2)
        with pytest.raises(ValueError, match="state") as caught:
            stream.load_state_dict(stream.state_dict() | change)
        assert str(caught.value) == message

    @pytest.mark.parametrize("field", ["id", "token_ids", "reference", "domain"])
    def test_refuses_a_state_of_other_prompts(self, field: str, rng: np.random.Generator) -> None:
        prompts = some_prompts(5)
        state = PromptStream(prompts, 0).state_dict()
        changes: dict[str, Any] = {"id": "new", "token_ids": (7, 7), "reference": "new", "domain": "new"}
        i = int(rng.integers(5))
        prompts[i] = replace(prompts[i], **{field: changes[field]})
        with pytest.raises(ValueError, match="changed") as caught:
            PromptStream(prompts, 0).load_state_dict(state)
        assert str(caught.value) == (
            "the data has changed since the run began: still 5 training prompts, but other ids, tokens, references or "
            "domains, or another order; restore the data, the prompt settings and the tokenizer, or "
            "start a new run"
        )

    def test_refuses_a_state_of_more_prompts_and_of_another_order(self) -> None:
        state = PromptStream(some_prompts(5), 0).state_dict()
        with pytest.raises(ValueError, match="changed") as caught:
            PromptStream(some_prompts(4), 0).load_state_dict(state)
        assert str(caught.value) == (
            "the data has changed since the run began: 5 training prompts then, 4 now; restore the data, or "
            "start a new run"
        )
        with pytest.raises(ValueError, match="another order"):
            PromptStream(some_prompts(5)[::-1], 0).load_state_dict(state)

    def test_the_fingerprint_leaves_out_what_decides_nothing(self) -> None:
        again = [replace(prompt, text="other", source="s") for prompt in some_prompts(4)]
        assert PromptStream(some_prompts(4), 0).fingerprint == PromptStream(again, 1).fingerprint

    def test_the_fingerprint_tells_where_one_field_ends(self) -> None:
        pieces = [("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd"), ("abc", "d", "")]
        found = {PromptStream([Prompt(i, "", (1,), r, d)], 0).fingerprint for i, r, d in pieces}
        assert len(found) == len(pieces)
        cuts = [((0, 1), (1,)), ((0,), (1, 1))]
        tokens = {
            PromptStream([Prompt("a", "", i, "", ""), Prompt("b", "", j, "", "")], 0).fingerprint for i, j in cuts
        }
        assert len(tokens) == 2

    def test_refuses_no_prompts_repeated_ids_and_negative_amounts(self) -> None:
        with pytest.raises(ValueError, match="at least one prompt"):
            PromptStream([], 0)
        with pytest.raises(ValueError, match="'p0'"):
            PromptStream(some_prompts(1) * 2, 0)
        with pytest.raises(ValueError, match="a seed must be between 0 and"):
            PromptStream(some_prompts(1), -1)
        with pytest.raises(ValueError, match="counters of a seed"):
            PromptStream(some_prompts(1), 0, source=-1)
        with pytest.raises(ValueError, match="-1"):
            PromptStream(some_prompts(1), 0).take(-1)
