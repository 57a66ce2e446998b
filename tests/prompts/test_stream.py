"""The order of prompts against exact fractions, uninterrupted runs and states of other prompts."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from error_names import check_names


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), (i,), str(i), "test") for i in range(count)]


def of_sources(sizes: Sequence[int]) -> list[Prompt]:
    return [Prompt(f"{s}:{i}", "", (i,), "", "d", f"{s}") for s, size in enumerate(sizes) for i in range(size)]


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

    def test_the_order_is_the_documented_function_of_seed_source_and_epoch(self, rng: np.random.Generator) -> None:
        """The seed's low word, the epoch, the source and the seed's high word are what numpy mixes."""
        low, high = (int(rng.integers(end)) for end in (2**32, 2**31))
        sizes = (rng.integers(40, size=3) + 1).tolist()
        stream = PromptStream(of_sources(sizes), high * 2**32 + low, dict.fromkeys("012", 1))
        taken = stream.take(3 * 3 * max(sizes))
        for source, size in enumerate(sizes):
            expected = [
                f"{source}:{i}"
                for epoch in range(3)
                for i in np.random.default_rng([low, epoch, source, high]).permutation(size)
            ]
            assert [p.id for p in taken if p.source == f"{source}"][: 3 * size] == expected

    def test_every_seed_source_and_epoch_has_an_order_of_its_own(self, rng: np.random.Generator) -> None:
        """50! orders: any two that agree have the same random numbers."""
        some, num_sources, num_epochs = int(rng.integers(2**31)), 4, 3
        seeds = {s + high for s in (0, 1, 2, some, some + 1) for high in (0, 2**32, 2 * 2**32, 2**62)} | {2**63 - 1}
        orders = set()
        for seed in seeds:
            stream = PromptStream(of_sources([50] * num_sources), seed, dict.fromkeys("0123", 1))
            for _ in range(num_epochs):
                taken = stream.take(50 * num_sources)
                orders |= {tuple(p.token_ids[0] for p in taken if p.source == source) for source in "0123"}
        assert len(orders) == len(seeds) * num_sources * num_epochs

    def test_refuses_a_state_that_is_not_its_own(self) -> None:
        stream = PromptStream(some_prompts(3), 0)
        with pytest.raises(ValueError, match=r"got \['fingerprint', .*; pass the result of state_dict"):
            stream.load_state_dict(stream.state_dict() | {"seed": 1})

    @pytest.mark.parametrize("field", ["id", "token_ids", "reference", "domain"])
    def test_refuses_a_state_of_other_prompts(self, field: str, rng: np.random.Generator) -> None:
        prompts = some_prompts(5)
        state = PromptStream(prompts, 0).state_dict()
        changes: dict[str, Any] = {"id": "new", "token_ids": (7, 7), "reference": "new", "domain": "new"}
        i = int(rng.integers(5))
        prompts[i] = replace(prompts[i], **{field: changes[field]})
        with pytest.raises(ValueError, match="changed") as caught:
            PromptStream(prompts, 0).load_state_dict(state)
        check_names(caught.value, "still 5 training prompts", "ids, tokens, references or domains", "restore the data")

    def test_refuses_a_state_of_more_prompts_and_of_another_order(self) -> None:
        state = PromptStream(some_prompts(5), 0).state_dict()
        with pytest.raises(ValueError, match="changed") as caught:
            PromptStream(some_prompts(4), 0).load_state_dict(state)
        check_names(caught.value, "5 training prompts then, 4 now", "restore the data", "start a new run")
        with pytest.raises(ValueError, match="a different order"):
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

    def test_refuses_no_prompts_repeated_ids_and_negative_seeds(self) -> None:
        with pytest.raises(ValueError, match="at least one prompt"):
            PromptStream([], 0)
        with pytest.raises(ValueError, match="'p0'"):
            PromptStream(some_prompts(1) * 2, 0)
        with pytest.raises(ValueError, match="a seed must be between 0 and"):
            PromptStream(some_prompts(1), -1)
        with pytest.raises(ValueError, match="at least one prompt"):
            PromptStream(some_prompts(1), 0, {"other": 1})


weights_of_sources = st.lists(
    st.one_of(st.integers(1, 60), st.decimals("0.01", "30", places=2).map(float)), min_size=1, max_size=12
)


def mixture(weights: Sequence[float], size: int = 3, seed: int = 0) -> PromptStream:
    """Sources of 3, 4, 5, ... prompts."""
    prompts = of_sources([size + s for s in range(len(weights))])
    return PromptStream(prompts, seed, {f"{s}": weight for s, weight in enumerate(weights)})


@given(weights_of_sources, st.integers(1, 250))
def test_every_prefix_has_each_share_to_within_one(weights: list[float], n: int) -> None:
    total = sum(Fraction(str(weight)) for weight in weights)
    fractions = [Fraction(str(weight)) / total for weight in weights]
    had = [0] * len(weights)
    for turn, prompt in enumerate(mixture(weights).take(n), 1):
        had[int(prompt.source)] += 1
        assert all(abs(count - turn * fraction) < 1 for count, fraction in zip(had, fractions, strict=True))


def test_shares_hold_where_the_largest_lag_would_not_keep_them() -> None:
    """Largest lag first leaves sources behind by more than one prompt here; found by search."""
    weights = [1.0] * 29 + [16.4, 19.1, 22.7, 25.9]
    total = sum(Fraction(str(weight)) for weight in weights)
    fractions = [Fraction(str(weight)) / total for weight in weights]

    def worst(order: list[int]) -> Fraction:
        had, found = [0] * len(weights), Fraction(0)
        for turn, source in enumerate(order, 1):
            had[source] += 1
            found = max(found, *(abs(c - turn * fraction) for c, fraction in zip(had, fractions, strict=True)))
        return found

    greedy: list[int] = []
    for turn in range(1, 151):
        counts = Counter(greedy)
        greedy.append(max(range(len(weights)), key=lambda i, turn=turn, c=counts: turn * fractions[i] - c[i]))
    assert worst(greedy) > 1
    assert worst([int(p.source) for p in mixture(weights).take(150)]) < 1


def test_decimal_weights_are_exact() -> None:
    """0.1 and 0.2 are one to two: after every third turn the counts are exact, for as long as one likes."""
    taken = mixture([0.1, 0.2]).take(3000)
    assert all(
        Counter(p.source for p in taken[:end]) == {"0": end // 3, "1": 2 * end // 3} for end in range(3, 3001, 3)
    )


@given(weights_of_sources, *[st.lists(st.integers(0, 20), max_size=4)] * 2, st.integers(0, 1000))
def test_a_resumed_stream_equals_the_uninterrupted_one(
    weights: list[float], before: list[int], after: list[int], seed: int
) -> None:
    """Of one and of several sources, however many prompts are taken at a time."""
    supply, at_once, resumed = (mixture(weights, seed=seed) for _ in range(3))
    taken = [prompt for n in before for prompt in supply.take(n)]
    assert taken == at_once.take(sum(before))
    state = json.loads(json.dumps(supply.state_dict()))
    resumed.take(7)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [resumed.take(n) for n in after] == [supply.take(n) for n in after]
    assert resumed.state_dict() == supply.state_dict()


def test_refuses_states_of_other_sources() -> None:
    state = mixture([1, 2]).state_dict()
    with pytest.raises(ValueError, match="run") as caught:
        mixture([2, 1]).load_state_dict(state)
    check_names(caught.value, "were 1/3, 2/3 and are 2/3, 1/3", "restore the sources and their weights")
    for other in (mixture([1, 2, 3]), mixture([1, 2], size=4), PromptStream(of_sources([3, 4]), 0)):
        with pytest.raises(ValueError, match="the data has changed since the run began"):
            other.load_state_dict(state)
    mixture([10, 20]).load_state_dict(state)  # the same fractions


@pytest.mark.parametrize("weight", [0, 0.0, -1, nan, inf])
def test_refuses_weights_that_are_not_positive(weight: float) -> None:
    with pytest.raises(ValueError, match=f"a source's weight must be a positive number, got {weight};"):
        mixture([1, weight])
