"""The work of one step at any size: prompts, rollouts, tokens, nodes.

Lengths of responses are lognormal and cut at the length limit. Without measurements the fraction of distinct tokens is
that of a policy with the same entropy at every token. A real policy of the same mean entropy shares more, so this is an
upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import erf, exp, expm1, log, sqrt

import numpy as np

from brorl.planning.cluster.hardware import Origin
from brorl.tree import FloatArray

SPREAD = 0.7
"""Assumed standard deviation of the log of a length."""
ENTROPY = 0.3
"""Assumed nats per token of a reasoning model, for the fraction of distinct tokens."""


@dataclass(frozen=True)
class ResponseLengths:
    """The distribution of min(X, limit) with X lognormal; its parameter is solved for the mean after the cut."""

    mean: float  # mean length in tokens, after the cut; above 0 and below the limit
    limit: float  # length limit in tokens
    spread: float = SPREAD  # standard deviation of log X; 0 for equal lengths

    def __post_init__(self) -> None:
        if not 0 < self.mean <= self.limit or (self.spread > 0 and self.mean > 0.999 * self.limit):
            raise ValueError(f"the mean length must be above 0 and below the limit {self.limit:g}, got {self.mean:g}")
        if self.spread < 0:
            raise ValueError(f"the spread of lengths must be at least 0, got {self.spread:g}")

    @cached_property
    def location(self) -> float:
        """Mean of log X."""
        if self.spread == 0:
            return log(self.mean)
        low, high = log(self.mean) - 40.0, log(self.limit) + 40.0 * self.spread
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if self._moment(1, middle) < self.mean else (low, middle)
        return (low + high) / 2

    @property
    def mean_square(self) -> float:
        """Mean of the squared length."""
        return self.mean**2 if self.spread == 0 else self._moment(2, self.location)

    @property
    def mean_progress(self) -> float:
        """Tokens that a response has at a random time of its decoding: E[L^2] / (2 E[L])."""
        return self.mean_square / (2 * self.mean)

    @property
    def truncation_rate(self) -> float:
        """Fraction of responses that reach the limit."""
        return 0.0 if self.spread == 0 else 1 - _normal((log(self.limit) - self.location) / self.spread)

    def draw(self, number: int, generator: np.random.Generator) -> FloatArray:
        """Draw lengths, not rounded, shape [number]."""
        drawn = np.exp(self.location + self.spread * generator.standard_normal(number))
        lengths: FloatArray = np.minimum(drawn, self.limit)
        return lengths

    def _moment(self, order: int, location: float) -> float:
        """Return E[min(X, limit)^order]: the lognormal's partial moment, and the part at the limit."""
        cut = (log(self.limit) - location) / self.spread
        partial = exp(order * location + (order * self.spread) ** 2 / 2) * _normal(cut - order * self.spread)
        return partial + self.limit**order * (1 - _normal(cut))


def _normal(x: float) -> float:
    """Return the standard normal distribution function."""
    return (1 + erf(x / sqrt(2))) / 2


@dataclass(frozen=True)
class StepWork:
    """The work of a step."""

    prompts: int  # groups that a step trains on, P
    rollouts: int  # rollouts per prompt, N
    prompt_tokens: float  # tokens of a prompt
    lengths: ResponseLengths  # lengths of the responses
    distinct_fraction: float  # distinct tokens over sampled tokens of the responses, in (0, 1]
    response_fraction: float  # distinct responses over rollouts, in (0, 1]
    kept_fraction: float  # fraction of sampled groups that a step trains on (mixed groups), in (0, 1]
    mini_batches: int  # updates per step
    # forward passes of the learner per node in units of one pass: 3 for a forward and a backward pass, 1 more each for
    # gradient checkpointing, recomputed old log-probs and the reference
    passes: float
    origins: dict[str, Origin]  # origin of each assumed or measured quantity, by its name here
    shares_prompts: bool = True  # whether a prompt is computed once per group and not once per rollout

    def __post_init__(self) -> None:
        for name in ("distinct_fraction", "response_fraction", "kept_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name):g}")

    @property
    def sampled_groups(self) -> float:
        """Groups that are sampled for a step, with those that dynamic sampling drops."""
        return self.prompts / self.kept_fraction

    @property
    def sampled_rows(self) -> float:
        """Rollouts that are sampled for a step."""
        return self.sampled_groups * self.rollouts

    @property
    def sampled_tokens(self) -> float:
        """Their tokens, duplicates counted."""
        return self.sampled_rows * self.lengths.mean

    @property
    def prompt_copies(self) -> int:
        """How often a group's prompt is computed."""
        return 1 if self.shares_prompts else self.rollouts

    @property
    def trained_tokens(self) -> float:
        """Tokens that go through the learner in one pass: distinct tokens of the kept groups, and their prompts."""
        responses = self.rollouts * self.lengths.mean * self.distinct_fraction
        return self.prompts * (responses + self.prompt_copies * self.prompt_tokens)

    @property
    def trained_context(self) -> float:
        """Mean tokens before a trained token of a response."""
        return self.prompt_tokens + self.lengths.mean_progress


def distinct_fraction(rollouts: int, mean_length: float, entropy: float = ENTROPY) -> float:
    """Return the fraction of distinct tokens of N rollouts of a policy with the same entropy at every token.

    After t tokens such a policy has about e^(h t) equally likely prefixes, so that N rollouts have min(N, e^(h t))
    distinct ones. A rollout shares (log N - 1 + 1/N) / h tokens.
    """
    fully = log(rollouts) / entropy  # depth at which every rollout has its own prefix
    if mean_length >= fully:
        shared = (log(rollouts) - 1 + 1 / rollouts) / entropy
        return 1 - shared / mean_length
    return expm1(entropy * mean_length) / entropy / (rollouts * mean_length)
