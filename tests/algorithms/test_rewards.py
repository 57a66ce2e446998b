"""Shaped rewards against a plain loop over rollouts, and the pieces at values worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.algorithms.rewards import overlong_punishment, shaped_rewards, stop_properly
from brorl.algorithms.settings import CosineLength, RewardShaping, RewardTerm

LIMIT = 40
values = st.floats(-2, 2, allow_nan=False).map(lambda x: round(x, 3))


@st.composite
def shapings(draw: st.DrawFn) -> RewardShaping:
    short, long = sorted((draw(values), draw(values))), sorted((draw(values), draw(values)))
    every = draw(st.integers(0, 7))
    cosine = CosineLength(
        every_steps=every,
        on_steps=draw(st.integers(1, max(every, 1))),
        correct_short=short[1],
        correct_long=long[1],
        wrong_short=short[0],
        wrong_long=long[0],
    )
    return RewardShaping(
        partial_credit=not every and draw(st.booleans()),
        stop_properly=draw(st.floats(0, 1)),
        cosine_length=cosine,
        overlong_tokens=draw(st.integers(0, LIMIT)),
        domain_weights=draw(st.dictionaries(st.sampled_from(["math", "code"]), st.floats(0.01, 5))),
        format_pattern=draw(st.sampled_from([None, "<.*>"])),
        format_reward=draw(st.floats(0.01, 0.99)),
    )


def reward_of_one(
    correct: bool, score: float, length: int, truncated: bool, formatted: bool, domain: str, step: int, s: RewardShaping
) -> float:
    """The reward of one rollout, from the papers' equations case by case."""
    reward = score if s.partial_credit else (1.0 if correct else 0.0)
    c = s.cosine_length
    if c.every_steps:
        place = step % c.every_steps or c.every_steps  # 1 to every_steps
        if place <= c.on_steps:
            high, low = (c.correct_short, c.correct_long) if correct else (c.wrong_short, c.wrong_long)
            t = length if length < LIMIT else LIMIT
            reward = low + 0.5 * (high - low) * (1 + math.cos(t * math.pi / LIMIT))
    if formatted and s.format_pattern:
        reward += s.format_reward
    if truncated and reward > 0:
        reward = s.stop_properly * reward
    if s.overlong_tokens and length > LIMIT:
        reward -= 1
    elif length > LIMIT - s.overlong_tokens:
        reward += (LIMIT - s.overlong_tokens - length) / s.overlong_tokens if s.overlong_tokens else 0
    return reward * s.domain_weights[domain] if domain in s.domain_weights else reward


@given(
    shapings(),
    st.lists(
        st.tuples(st.booleans(), st.floats(-1, 1), st.integers(1, LIMIT + 5), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["math", "code", "science"]),
    st.integers(1, 30),
)
def test_rewards_equal_a_loop(
    shaping: RewardShaping, responses: list[tuple[bool, float, int, bool, bool]], domain: str, step: int
) -> None:
    correct, score, length, truncated, formatted = (np.array(column) for column in zip(*responses, strict=True))
    got = shaped_rewards(correct, score, length, truncated, domain, step, shaping, formatted, LIMIT)
    expected = [reward_of_one(*response, domain, step, shaping) for response in responses]
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_by_default_a_response_is_paid_for_being_correct_and_ending_by_itself() -> None:
    correct, truncated = np.array([True, True, False, False]), np.array([False, True, False, True])
    score = np.array([0.25, 0.5, 0.75, 1.0])
    got = shaped_rewards(correct, score, np.array([3, 9, 4, 9]), truncated, "math", 1, RewardShaping())
    np.testing.assert_array_equal(got, [1.0, 0.0, 0.0, 0.0])


def test_further_terms_are_added_before_the_factors() -> None:
    terms = {"brief": RewardTerm(function="a:b", weight=0.5), "rude": RewardTerm(function="a:c", weight=-2.0)}
    shaping = RewardShaping(stop_properly=0.5, terms=terms, domain_weights={"math": 3.0})
    values = {"brief": np.array([0.4, np.nan, 1.0]), "rude": np.array([0.0, 1.0, np.nan])}
    three = (np.array([True, False, True]), np.ones(3), np.array([3, 3, 3]), np.array([False, False, True]))
    got = shaped_rewards(*three, "math", 1, shaping, max_new_tokens=16, terms_L=values)
    np.testing.assert_allclose(got, [(1 + 0.2) * 3, -2.0 * 3, (1 + 0.5) * 0.5 * 3])
    with pytest.raises(ValueError, match="the reward term rude needs a value for each response"):
        shaped_rewards(*three, "math", 1, shaping, max_new_tokens=16, terms_L={"brief": values["brief"]})


def test_cosine_is_in_force_at_the_beginning_of_every_cycle() -> None:
    settings = CosineLength(on_steps=100, every_steps=500)
    assert [step for step in range(1, 1501) if settings.in_force(step)] == [
        *range(1, 101), *range(501, 601), *range(1001, 1101)
    ]  # fmt: skip
    assert all(CosineLength(on_steps=1, every_steps=1).in_force(step) for step in range(1, 20))
    assert not any(CosineLength().in_force(step) for step in range(1, 20))


def test_overlong_punishment_at_its_corners() -> None:
    length = np.array([1, 12, 13, 14, 16, 17, 900])
    got = overlong_punishment(length, 16, 4)
    np.testing.assert_array_equal(got, [0, 0, -0.25, -0.5, -1, -1, -1])
    assert not np.signbit(got[:2]).any()


def test_being_cut_off_never_pays() -> None:
    reward = np.array([1.0, 0.5, 0.0, -0.5, -1.0])
    for coefficient in (0.0, 0.3, 1.0):
        cut = stop_properly(reward, np.ones(5, np.bool_), coefficient)
        assert (cut <= reward).all()
        np.testing.assert_array_equal(cut[:3], coefficient * reward[:3])
        np.testing.assert_array_equal(stop_properly(reward, np.zeros(5, np.bool_), coefficient), reward)


def test_rewards_leave_their_inputs_alone(rng: np.random.Generator) -> None:
    score = rng.random(5)
    before = score.copy()
    shaping = RewardShaping(partial_credit=True, overlong_tokens=4, domain_weights={"d": 2.0})
    got = shaped_rewards(score > 0.5, score, np.arange(1, 6), np.ones(5, np.bool_), "d", 1, shaping, max_new_tokens=4)
    np.testing.assert_array_equal(score, before)
    assert not np.shares_memory(got, score)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (RewardShaping, {"domain_weights": {"math": 1.0, "code": 0.0}}, r"rewards\.domain_weights\.code .* above 0"),
        (
            RewardShaping,
            {"partial_credit": True, "cosine_length": CosineLength(every_steps=200)},
            r"rewards\.partial_credit and rewards\.cosine_length",
        ),
        (CosineLength, {"every_steps": 200, "wrong_short": 1.5}, r"correct_short is 1\.0 and .*wrong_short is 1\.5"),
        (CosineLength, {"every_steps": 200, "correct_long": -0.1}, r"correct_long is -0\.1 and .*wrong_long is 0\.0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_reward_needs_what_it_depends_on() -> None:
    single = np.ones(1, np.bool_), np.ones(1), np.ones(1, np.int64), np.zeros(1, np.bool_)
    with pytest.raises(ValueError, match="needs formatted_L"):
        shaped_rewards(*single, "math", 1, RewardShaping(format_pattern="<.*>"))
    with pytest.raises(ValueError, match="pass max_new_tokens"):
        shaped_rewards(*single, "math", 1, RewardShaping(overlong_tokens=4))


@pytest.mark.parametrize("wrong", range(5))
def test_arrays_of_different_lengths_are_refused(wrong: int) -> None:
    arrays = [np.ones(3, np.bool_), np.ones(3), np.ones(3, np.int64), np.ones(3, np.bool_), np.ones(3, np.bool_)]
    arrays[wrong] = arrays[wrong][:1]  # would be broadcast
    with pytest.raises(ValueError, match="one entry per response"):
        shaped_rewards(*arrays[:4], "math", 1, RewardShaping(), arrays[4])
