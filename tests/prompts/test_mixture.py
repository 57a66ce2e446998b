"""Mixtures against exact fractions, and against streams that run on their own."""

import json
from collections import Counter
from fractions import Fraction
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptMixture, PromptStream

weights_of_sources = st.lists(
    st.one_of(st.integers(1, 60), st.decimals("0.01", "30", places=2).map(float)), min_size=1, max_size=12
)


def streams(count: int, size: int = 3, seed: int = 0) -> list[PromptStream]:
    return [
        PromptStream([Prompt(f"{s}:{i}", "", (i,), "", "d", f"{s}") for i in range(size + s)], seed)
        for s in range(count)
    ]


@given(weights_of_sources, st.integers(1, 250))
@settings(max_examples=60)
def test_every_prefix_has_each_share_to_within_one(weights: list[float], n: int) -> None:
    total = sum(Fraction(str(weight)) for weight in weights)
    fractions = [Fraction(str(weight)) / total for weight in weights]
    had = [0] * len(weights)
    for turn, prompt in enumerate(PromptMixture(streams(len(weights)), weights).take(n), 1):
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
    assert worst([int(p.source) for p in PromptMixture(streams(len(weights)), weights).take(150)]) < 1


def test_decimal_weights_are_exact() -> None:
    """0.1 and 0.2 are one to two: after every third turn the counts are exact, for as long as one likes."""
    taken = PromptMixture(streams(2), [0.1, 0.2]).take(3000)
    assert all(
        Counter(p.source for p in taken[:end]) == {"0": end // 3, "1": 2 * end // 3} for end in range(3, 3001, 3)
    )


@given(weights_of_sources, st.integers(0, 60))
@settings(max_examples=30)
def test_each_source_keeps_its_own_order(weights: list[float], n: int) -> None:
    taken = PromptMixture(streams(len(weights), seed=5), weights).take(n)
    for source, alone in enumerate(streams(len(weights), seed=5)):
        of_source = [prompt for prompt in taken if prompt.source == f"{source}"]
        assert of_source == alone.take(len(of_source))


@given(weights_of_sources, *[st.lists(st.integers(0, 20), max_size=4)] * 2, st.integers(0, 1000))
@settings(max_examples=60)
def test_a_resumed_supply_equals_the_uninterrupted_one(
    weights: list[float], before: list[int], after: list[int], seed: int
) -> None:
    """A stream, and a mixture of streams, however many prompts are taken at a time."""
    for make in (lambda: streams(1, len(weights), seed)[0], lambda: PromptMixture(streams(len(weights)), weights)):
        supply, at_once, resumed = make(), make(), make()
        taken = [prompt for n in before for prompt in supply.take(n)]
        assert taken == at_once.take(sum(before))
        state = json.loads(json.dumps(supply.state_dict()))
        resumed.take(7)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [resumed.take(n) for n in after] == [supply.take(n) for n in after]
        assert resumed.state_dict() == supply.state_dict()


def test_a_mixture_counts_the_prompts_of_its_streams() -> None:
    assert PromptMixture(streams(3), [5, 2, 1]).num_prompts == 3 + 4 + 5


def refusal(mixture: PromptMixture, state: dict[str, object]) -> str:
    with pytest.raises(ValueError, match="run") as caught:
        mixture.load_state_dict(state)
    return str(caught.value)


def test_refuses_states_of_other_data() -> None:
    state = PromptMixture(streams(2), [1, 2]).state_dict()
    assert refusal(PromptMixture(streams(2), [2, 1]), state) == (
        "the data has changed since the run began: the fractions of the sources were 1/3, 2/3 and are "
        "2/3, 1/3; restore the sources and their weights, or start a new run"
    )
    assert refusal(PromptMixture(streams(3), [1, 2, 3]), state).startswith("the data has changed since the run began")
    assert refusal(PromptMixture(streams(2, size=4), [1, 2]), state) == (
        "the data has changed since the run began: 3 training prompts then, 4 now; restore the data, or start a new run"
    )
    assert "from or to a single source" in refusal(PromptMixture(streams(1), [1]), streams(1)[0].state_dict())
    PromptMixture(streams(2), [10, 20]).load_state_dict(state)  # the same fractions


@pytest.mark.parametrize("weight", [0, 0.0, -1, nan, inf])
def test_refuses_weights_that_are_not_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="weight") as caught:
        PromptMixture(streams(2), [1, weight])
    assert str(caught.value) == (
        f"the weight of a source must be a positive number, got {weight}; remove a source that should not be used"
    )


def test_refuses_missing_weights_shared_ids_and_negative_amounts() -> None:
    with pytest.raises(ValueError, match="got 2 streams and 1 weights"):
        PromptMixture(streams(2), [1])
    with pytest.raises(ValueError, match="got 0 streams and 0 weights"):
        PromptMixture([], [])
    with pytest.raises(ValueError, match="'0:0'; give each source another name"):
        PromptMixture(streams(1) * 2, [1, 1])
    with pytest.raises(ValueError, match="cannot take -1 prompts"):
        PromptMixture(streams(1), [1]).take(-1)
