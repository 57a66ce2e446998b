"""Rewards from verdicts, lengths and truncation: one number per distinct response.

`shaped_rewards` applies these steps in order:

1. Start from the base: 1 for correct and 0 for incorrect, or the verifier's score with partial credit.
2. In training steps that use the cosine length reward, replace the base with it.
3. Add the format reward to responses in the required format, and add the weighted values of additional terms.
4. Stop properly: multiply the reward of a truncated response by a coefficient.
5. Add the soft overlong punishment.
6. Multiply by the weight of the prompt's domain.

Settings are rejected if steps 1 and 2 could reward a correct response less than an incorrect one of the same length.
Dynamic sampling and pass@k use the raw verdict, never these rewards.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from brorl.algorithms.settings import CosineLength, RewardShaping
from brorl.arrays import BoolArray, FloatArray, IntArray


def shaped_rewards(
    correct_L: BoolArray,
    score_L: FloatArray,
    length_L: IntArray,
    truncated_L: BoolArray,
    domain: str,
    step: int,
    shaping: RewardShaping,
    formatted_L: BoolArray | None = None,
    max_new_tokens: int | None = None,
    terms_L: Mapping[str, FloatArray] | None = None,
) -> FloatArray:
    """Return the shaped rewards of one prompt's responses; see the module docstring.

    Args:
        correct_L: Raw verdict of each distinct response, shape [L].
        score_L: The verifier's score, finite, shape [L].
        length_L: Number of tokens, including the end token, at least 1, shape [L].
        truncated_L: Whether the response was truncated, shape [L].
        domain: Domain of the prompt.
        step: Number of the training step, from 1.
        shaping: The settings.
        formatted_L: Whether the response has the required format, shape [L]; required with a format reward.
        max_new_tokens: Length limit of a response in tokens; required if a reward depends on the length.
        terms_L: Values of each additional term by name, shape [L]; NaN if a response has none (nothing is added).

    Returns:
        Rewards, shape [L].

    Raises:
        ValueError: If an array does not have one entry per response, or a required argument is missing.
    """
    if formatted_L is None:
        if shaping.format_pattern is not None:
            raise ValueError("a format reward needs formatted_L (which responses match the format); pass it")
        formatted_L = np.zeros(correct_L.shape, np.bool_)
    if max_new_tokens is None:
        if shaping.cosine_length.every_steps or shaping.overlong_tokens:
            raise ValueError("a length reward needs the response length limit; pass max_new_tokens")
        max_new_tokens = 1
    terms_L = terms_L or {}
    if missing := [name for name in shaping.terms if name not in terms_L]:
        raise ValueError(f"the reward term {missing[0]} needs a value for each response; pass terms_L")
    shapes = [value.shape for value in (correct_L, score_L, length_L, truncated_L, formatted_L, *terms_L.values())]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            "correct, score, length, truncated, formatted and terms must each have one entry per response, got shapes "
            f"{shapes}"
        )
    reward_L = np.asarray(score_L if shaping.partial_credit else correct_L, np.float64)
    if shaping.cosine_length.in_force(step):
        reward_L = cosine_length_reward(correct_L, length_L, shaping.cosine_length, max_new_tokens)
    if shaping.format_pattern is not None:
        reward_L = reward_L + shaping.format_reward * formatted_L
    for name, term in shaping.terms.items():
        reward_L = reward_L + term.weight * np.nan_to_num(terms_L[name], nan=0.0)
    reward_L = stop_properly(reward_L, truncated_L, shaping.stop_properly)
    if shaping.overlong_tokens:
        reward_L = reward_L + overlong_punishment(length_L, max_new_tokens, shaping.overlong_tokens)
    return reward_L * shaping.domain_weights.get(domain, 1.0)


def cosine_length_reward(
    correct_L: BoolArray, length_L: IntArray, settings: CosineLength, max_length: int
) -> FloatArray:
    """Interpolate the reward by length, along a half cosine from its `short` to its `long` value.

        r(t) = long + (short - long) (1 + cos(pi min(t, T) / T)) / 2,   T = max_length

    Correct and incorrect responses have separate values `short` and `long`.

    Source: Yeo et al. (arXiv 2502.03373), Eq. 1. The source rewards responses that reach T separately; here they get
        `long`, and `stop_properly` handles truncated ones.
    """
    short_L = np.where(correct_L, settings.correct_short, settings.wrong_short)
    long_L = np.where(correct_L, settings.correct_long, settings.wrong_long)
    share_L = np.minimum(length_L, max_length) / max_length
    reward_L: FloatArray = long_L + (short_L - long_L) * (1 + np.cos(np.pi * share_L)) / 2
    return reward_L


def stop_properly(reward_L: FloatArray, truncated_L: BoolArray, coefficient: float) -> FloatArray:
    """Multiply the reward of truncated responses by a coefficient c, 0 to 1, unless that would raise it: min(r, c r).

    Negative rewards do not change: multiplying them by 0 would make truncation the best way to be wrong.

    Source: ProRL v2 ("stop properly"), which defines c r for rewards of 0 or more.
    """
    return np.where(truncated_L, np.minimum(reward_L, coefficient * reward_L), reward_L)


def overlong_punishment(length_L: IntArray, max_length: int, tokens: int) -> FloatArray:
    """Return the soft overlong punishment: 0 at first, then linearly down to -1.

        0 if t <= L_max - L_cache;   -1 if t > L_max;   else ((L_max - L_cache) - t) / L_cache

    with t tokens, L_max = max_length, and L_cache = tokens, 1 to L_max.

    Examples:
        >>> overlong_punishment(np.array([70, 90, 110]), max_length=100, tokens=20)
        array([ 0. , -0.5, -1. ])

    Source: DAPO (arXiv 2503.14476), Eq. 13.
    """
    excess_L = np.asarray(length_L - (max_length - tokens), np.float64)
    return 0.0 - np.clip(excess_L / tokens, 0.0, 1.0)  # 0.0, not -0.0, where there is no punishment
