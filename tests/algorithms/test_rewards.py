"""Shaped rewards against a plain loop over rollouts, and the pieces at values worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.algorithms.rewards import (
    CosineLength,
    Overlong,
    RewardShaping,
    cosine_length_reward,
    overlong_punishment,
    shaped_rewards,
    stop_properly,
)

LIMIT = 40
values = st.floats(-2, 2, allow_nan=False).map(lambda x: round(x, 3))


@st.composite
def shapings(draw: st.DrawFn) -> RewardShaping:
    short, long = sorted((draw(values), draw(values))), sorted((draw(values), draw(values)))
    every = draw(st.integers(1, 7))
    cosine = CosineLength(LIMIT, short[1], long[1], short[0], long[0], draw(st.integers(0, every)), every)
    overlong = Overlong(LIMIT, draw(st.integers(0, LIMIT)), draw(st.floats(0, 3)))
    with_cosine = draw(st.booleans())
    return RewardShaping(
        partial_credit=not with_cosine and draw(st.booleans()),
        stop_properly=draw(st.floats(0, 1)),
        cosine_length=cosine if with_cosine else None,
        overlong=overlong if draw(st.booleans()) else None,
        domain_weights=draw(st.dictionaries(st.sampled_from(["math", "code"]), st.floats(0.01, 5))),
        format_reward=draw(st.floats(0, 0.99)),
    )


def reward_of_one(
    correct: bool, score: float, length: int, truncated: bool, formatted: bool, domain: str, step: int, s: RewardShaping
) -> float:
    """The reward of one rollout, from the papers' equations case by case."""
    reward = score if s.partial_credit else (1.0 if correct else 0.0)
    c = s.cosine_length
    if c is not None:
        place = step % c.every_steps or c.every_steps  # 1 to every_steps
        if place <= c.on_steps:
            high, low = (c.correct_short, c.correct_long) if correct else (c.wrong_short, c.wrong_long)
            t = length if length < c.max_length else c.max_length
            reward = low + 0.5 * (high - low) * (1 + math.cos(t * math.pi / c.max_length))
    if formatted:
        reward += s.format_reward
    if truncated and reward > 0:
        reward = s.stop_properly * reward
    o = s.overlong
    if o is not None:
        if length > o.max_length:
            reward -= o.penalty
        elif length > o.max_length - o.cache:
            reward += o.penalty * ((o.max_length - o.cache) - length) / o.cache
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
    got = shaped_rewards(correct, score, length, truncated, domain, step, shaping, formatted)
    expected = [reward_of_one(*response, domain, step, shaping) for response in responses]
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_by_default_a_response_is_paid_for_being_correct_and_ending_by_itself() -> None:
    correct, truncated = np.array([True, True, False, False]), np.array([False, True, False, True])
    score = np.array([0.25, 0.5, 0.75, 1.0])
    got = shaped_rewards(correct, score, np.array([3, 9, 4, 9]), truncated, "math", 1, RewardShaping())
    np.testing.assert_array_equal(got, [1.0, 0.0, 0.0, 0.0])


def test_every_piece_is_applied_in_the_stated_order() -> None:
    """One response that all pieces touch: cosine 0.75, cut to 0.3, minus 0.5, times 10."""
    shaping = RewardShaping(
        stop_properly=0.4,
        cosine_length=CosineLength(max_length=16, correct_short=1.0, correct_long=0.5),
        overlong=Overlong(max_length=16, cache=16),
        domain_weights={"math": 10.0, "code": 3.0},
    )
    one = (np.array([True]), np.array([1.0]), np.array([8]), np.array([True]))
    assert shaped_rewards(*one, "math", 1, shaping) == pytest.approx([(0.75 * 0.4 - 0.5) * 10], rel=1e-12)
    assert shaped_rewards(*one, "science", 1, shaping) == pytest.approx([0.75 * 0.4 - 0.5], rel=1e-12)


def test_cosine_at_its_ends_and_in_the_middle() -> None:
    settings = CosineLength(100, correct_short=2.0, correct_long=1.0, wrong_short=-1.0, wrong_long=-0.5)
    length = np.array([0, 50, 100, 250])
    right = cosine_length_reward(np.ones(4, np.bool_), length, settings)
    wrong = cosine_length_reward(np.zeros(4, np.bool_), length, settings)
    np.testing.assert_allclose(right, [2.0, 1.5, 1.0, 1.0], rtol=1e-15)
    np.testing.assert_allclose(wrong, [-1.0, -0.75, -0.5, -0.5], rtol=1e-15)


def test_cosine_is_in_force_at_the_beginning_of_every_cycle() -> None:
    settings = CosineLength(9, on_steps=100, every_steps=500)
    assert [step for step in range(1, 1501) if settings.in_force(step)] == [
        *range(1, 101), *range(501, 601), *range(1001, 1101)
    ]  # fmt: skip
    assert all(CosineLength(9).in_force(step) for step in range(1, 20))
    assert not any(CosineLength(9, on_steps=0, every_steps=3).in_force(step) for step in range(1, 20))


def test_overlong_punishment_at_its_corners() -> None:
    length = np.array([1, 12, 13, 14, 16, 17, 900])
    got = overlong_punishment(length, Overlong(max_length=16, cache=4))
    np.testing.assert_array_equal(got, [0, 0, -0.25, -0.5, -1, -1, -1])
    assert not np.signbit(got[:2]).any()
    at_once = overlong_punishment(length, Overlong(max_length=16, cache=0, penalty=0.5))
    np.testing.assert_array_equal(at_once, [0, 0, 0, 0, 0, -0.5, -0.5])


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
    shaping = RewardShaping(partial_credit=True, overlong=Overlong(4, 4), domain_weights={"d": 2.0})
    got = shaped_rewards(score > 0.5, score, np.arange(1, 6), np.ones(5, np.bool_), "d", 1, shaping)
    np.testing.assert_array_equal(score, before)
    assert not np.shares_memory(got, score)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (RewardShaping, {"stop_properly": 1.5}, r"rewards\.stop_properly must be between 0 and 1, got 1\.5"),
        (RewardShaping, {"stop_properly": float("nan")}, r"rewards\.stop_properly .* got nan"),
        (RewardShaping, {"domain_weights": {"math": 1.0, "code": 0.0}}, r"rewards\.domain_weights\.code .* above 0"),
        (
            RewardShaping,
            {"partial_credit": True, "cosine_length": CosineLength(9)},
            r"rewards\.partial_credit and rewards\.cosine_length",
        ),
        (CosineLength, {"max_length": 0}, r"rewards\.cosine_length\.max_length must be at least 1"),
        (CosineLength, {"max_length": 9, "wrong_long": float("inf")}, r"cosine_length\.wrong_long must be a finite"),
        (CosineLength, {"max_length": 9, "wrong_short": 1.5}, r"correct_short is 1\.0 and .*wrong_short is 1\.5"),
        (CosineLength, {"max_length": 9, "correct_long": -0.1}, r"correct_long is -0\.1 and .*wrong_long is 0\.0"),
        (CosineLength, {"max_length": 9, "every_steps": 0}, r"every_steps must be at least 1, got 0"),
        (CosineLength, {"max_length": 9, "on_steps": 3, "every_steps": 2}, r"every_steps = 2, got 3"),
        (Overlong, {"max_length": 0, "cache": 0}, r"overlong punishment needs a max_length of at least 1"),
        (Overlong, {"max_length": 4, "cache": 5}, r"rewards\.overlong_tokens must .* limit of 4 tokens, got 5"),
        (Overlong, {"max_length": 4, "cache": 2, "penalty": -1.0}, r"overlong penalty .* got -1\.0"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_format_reward_needs_the_formats() -> None:
    one = np.ones(1, np.bool_), np.ones(1), np.ones(1, np.int64), np.zeros(1, np.bool_)
    with pytest.raises(ValueError, match="give formatted_L"):
        shaped_rewards(*one, "math", 1, RewardShaping(format_reward=0.1))
    with pytest.raises(ValueError, match=r"below 1, got 1\.0"):
        RewardShaping(format_reward=1.0)


@pytest.mark.parametrize("wrong", range(5))
def test_arrays_of_different_lengths_are_refused(wrong: int) -> None:
    arrays = [np.ones(3, np.bool_), np.ones(3), np.ones(3, np.int64), np.ones(3, np.bool_), np.ones(3, np.bool_)]
    arrays[wrong] = arrays[wrong][:1]  # would be broadcast
    with pytest.raises(ValueError, match="one entry per response each"):
        shaped_rewards(*arrays[:4], "math", 1, RewardShaping(), arrays[4])
