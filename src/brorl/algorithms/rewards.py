"""Rewards of responses, from verdicts, lengths and truncation.

In: for one prompt's L distinct responses the verdict, the verifier's score, the number of tokens, whether the
response was truncated and whether it has the wanted format. Out: their rewards. All rollouts with the same response
have the same reward: one number per distinct response.

`shaped_rewards` applies these steps in order, each to the result of the previous one:

1. the base: 1 for correct and 0 for incorrect, or the verifier's score with partial credit;
2. the cosine length reward instead of the base, in the steps in which it applies;
3. the format reward, added to responses of the wanted format;
4. stop properly: the reward of a truncated response times a coefficient;
5. the soft overlong punishment, added;
6. the weight of the prompt's domain, as a factor.

Settings with which a correct response could earn less than an incorrect one of the same length in steps 1 and 2 are an
error. Dynamic sampling and pass@k use the raw verdict, never these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class CosineLength:
    """Settings of the cosine length reward.

    The defaults pay short correct answers more and long ones no less than half, and leave incorrect ones at 0: the
    length penalty of ProRL v2, which names no numbers.

    Attributes:
        max_length: Length in tokens at which the `long` rewards are reached; the limit of a response's length.
        correct_short: Reward of a correct response as its length goes to 0.
        correct_long: Reward of a correct response of `max_length` tokens.
        wrong_short: Reward of an incorrect response as its length goes to 0.
        wrong_long: Reward of an incorrect response of `max_length` tokens.
        on_steps: Number of steps at the start of each cycle in which the reward applies.
        every_steps: Length of the cycle in steps; if `on_steps` equals it, the reward always applies.

    Raises:
        ValueError: If a number is out of its range, or a response could earn less for being correct.
    """

    max_length: int
    correct_short: float = 1.0
    correct_long: float = 0.5
    wrong_short: float = 0.0
    wrong_long: float = 0.0
    on_steps: int = 1
    every_steps: int = 1

    def __post_init__(self) -> None:
        at = "rewards.cosine_length"
        if self.max_length < 1:
            raise ValueError(f"{at}.max_length must be at least 1 token, got {self.max_length}")
        for name in ("correct_short", "correct_long", "wrong_short", "wrong_long"):
            if not isfinite(getattr(self, name)):
                raise ValueError(f"{at}.{name} must be a finite number, got {getattr(self, name)}")
        for end in ("short", "long"):
            correct, wrong = getattr(self, f"correct_{end}"), getattr(self, f"wrong_{end}")
            if correct < wrong:
                raise ValueError(
                    f"{at}.correct_{end} is {correct} and {at}.wrong_{end} is {wrong}: a correct response would earn "
                    "less than an incorrect one; raise the first or lower the second"
                )
        if self.every_steps < 1:
            raise ValueError(f"{at}.every_steps must be at least 1, got {self.every_steps}")
        if not 0 <= self.on_steps <= self.every_steps:
            raise ValueError(
                f"{at}.on_steps must be between 0 and {at}.every_steps = {self.every_steps}, got {self.on_steps}"
            )

    def in_force(self, step: int) -> bool:
        """Whether a step uses the cosine reward; steps count from 1.

        It applies in the first `on_steps` of every `every_steps` steps: a run that ends with a cycle, or in the rest of
        one, ends on the plain reward.

        Source: ProRL v2 applies its penalty at intervals ("scheduled"); which part of a cycle is not stated.
        """
        return (step - 1) % self.every_steps < self.on_steps


@dataclass(frozen=True)
class Overlong:
    """Settings of the soft overlong punishment.

    Attributes:
        max_length: Length in tokens from which on the punishment is full, L_max.
        cache: Over how many tokens before that it grows, L_cache; 0 punishes from `max_length` + 1 on, at once.
        penalty: The full punishment; 1 in the source.

    Raises:
        ValueError: If a number is out of its range.
    """

    max_length: int
    cache: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"the overlong punishment needs a max_length of at least 1 token, got {self.max_length}")
        if not 0 <= self.cache <= self.max_length:
            raise ValueError(
                f"rewards.overlong_tokens must be between 0 and the length limit of {self.max_length} tokens, got "
                f"{self.cache}"
            )
        if not 0 <= self.penalty < float("inf"):
            raise ValueError(f"the overlong penalty must be a finite number >= 0, got {self.penalty}")


@dataclass(frozen=True)
class RewardShaping:
    """From verdicts to rewards; by default 1 for a correct, finished response, and 0 otherwise.

    Attributes:
        partial_credit: Pay the verifier's score in place of 1 or 0.
        stop_properly: Factor of the reward of a truncated response, 0 to 1; 1 switches it off.
        cosine_length: The cosine length reward; None for none.
        overlong: The soft overlong punishment; None for none.
        domain_weights: Weight of each domain's rewards, positive; domains that are not named have weight 1. With
            advantages that are normalized within each group (GRPO) they have no effect.
        format_reward: Added to the reward of a response of the wanted format, at least 0 and below 1.

    Raises:
        ValueError: If a number is out of its range, or both partial credit and the cosine reward set the base.
    """

    partial_credit: bool = False
    stop_properly: float = 0.0
    cosine_length: CosineLength | None = None
    overlong: Overlong | None = None
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    format_reward: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.stop_properly <= 1:
            raise ValueError(f"rewards.stop_properly must be between 0 and 1, got {self.stop_properly}")
        if self.partial_credit and self.cosine_length:
            raise ValueError(
                "rewards.partial_credit and rewards.cosine_length both set the base reward, and the cosine reward has "
                "no partial credit; switch one of them off"
            )
        if not 0 <= self.format_reward < 1:
            raise ValueError(
                f"rewards.format_reward must be at least 0 and below 1, got {self.format_reward}: an incorrect "
                "response of the wanted format would earn as much as a correct one without it"
            )
        for domain, weight in self.domain_weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"rewards.domain_weights.{domain} must be a finite number above 0, got {weight}; to leave a "
                    "domain out, leave its prompts out of the data"
                )


def shaped_rewards(
    correct_L: BoolArray,
    score_L: FloatArray,
    length_L: IntArray,
    truncated_L: BoolArray,
    domain: str,
    step: int,
    shaping: RewardShaping,
    formatted_L: BoolArray | None = None,
) -> FloatArray:
    """Return the rewards of one prompt's responses, in the order that the module's docstring states.

    Args:
        correct_L: Raw verdict of each distinct response, shape [L].
        score_L: The verifier's score, finite, shape [L].
        length_L: Number of tokens, end token included, at least 1, shape [L].
        truncated_L: Whether the response was cut off, shape [L].
        domain: Domain of the prompt.
        step: The step, from 1.
        shaping: The settings.
        formatted_L: Whether the response has the wanted format, shape [L]; needed where there is a format reward.

    Returns:
        Rewards, shape [L].

    Raises:
        ValueError: If the arrays do not have one entry per response each, or `formatted_L` is needed and missing.
    """
    if formatted_L is None:
        if shaping.format_reward:
            raise ValueError("a format reward needs to know which responses have the format; give formatted_L")
        formatted_L = np.zeros(correct_L.shape, np.bool_)
    shapes = [value.shape for value in (correct_L, score_L, length_L, truncated_L, formatted_L)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            f"correct, score, length, truncated and formatted need one entry per response each, got shapes {shapes}"
        )
    cosine, overlong = shaping.cosine_length, shaping.overlong
    reward_L = np.asarray(score_L if shaping.partial_credit else correct_L, np.float64)
    if cosine and cosine.in_force(step):
        reward_L = cosine_length_reward(correct_L, length_L, cosine)
    reward_L = reward_L + shaping.format_reward * formatted_L
    reward_L = stop_properly(reward_L, truncated_L, shaping.stop_properly)
    if overlong:
        reward_L = reward_L + overlong_punishment(length_L, overlong)
    return reward_L * shaping.domain_weights.get(domain, 1.0)


def cosine_length_reward(correct_L: BoolArray, length_L: IntArray, settings: CosineLength) -> FloatArray:
    """Let the reward go with the length, along half a cosine from its `short` to its `long` value.

        r(t) = long + (short - long) (1 + cos(pi min(t, T) / T)) / 2,   T = max_length

    with the two values for correct responses, or those for incorrect ones.

    Args:
        correct_L: Raw verdicts, shape [L].
        length_L: Number of tokens, shape [L].
        settings: The four values and T.

    Returns:
        Rewards, shape [L].

    Source: Yeo et al. (arXiv 2502.03373), Eq. 1. The source pays responses that reach T a value of its own; here they
    get `long`, and `stop_properly` handles truncated ones.
    """
    short_L = np.where(correct_L, settings.correct_short, settings.wrong_short)
    long_L = np.where(correct_L, settings.correct_long, settings.wrong_long)
    share_L = np.minimum(length_L, settings.max_length) / settings.max_length
    reward_L: FloatArray = long_L + (short_L - long_L) * (1 + np.cos(np.pi * share_L)) / 2
    return reward_L


def stop_properly(reward_L: FloatArray, truncated_L: BoolArray, coefficient: float) -> FloatArray:
    """Multiply the reward of truncated responses by a coefficient c, unless that would raise it: min(r, c r).

    Args:
        reward_L: Rewards, shape [L].
        truncated_L: Whether each response was truncated, shape [L].
        coefficient: c, 0 to 1.

    Returns:
        Rewards, shape [L].

    Source: ProRL v2 ("stop properly"), which states c r for rewards of 0 or more. A negative reward stays: times 0,
    truncation would be the best incorrect response.
    """
    return np.where(truncated_L, np.minimum(reward_L, coefficient * reward_L), reward_L)


def overlong_punishment(length_L: IntArray, settings: Overlong) -> FloatArray:
    """Return the punishment for length: 0 at first, then linearly down to minus the penalty.

        0 if t <= L_max - L_cache;   -penalty if t > L_max;   else penalty ((L_max - L_cache) - t) / L_cache

    Args:
        length_L: Number of tokens t, shape [L].
        settings: L_max, L_cache and the penalty.

    Returns:
        Numbers of 0 or less, shape [L].

    Source: DAPO (arXiv 2503.14476), Eq. 13.
    """
    excess_L = np.asarray(length_L - (settings.max_length - settings.cache), np.float64)
    share_L = np.clip(excess_L / max(settings.cache, 1), 0.0, 1.0)  # lengths are whole numbers: 1 or more is full
    return 0.0 - settings.penalty * share_L  # 0.0 and not -0.0 where nothing is taken off
