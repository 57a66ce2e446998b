"""What is compared: arms, each with some runs (one a seed), and what each run scored after spending how much.

These are plain values: `brorl.comparison.reading` reads them from run directories, the functions of this package
compare them. Dimensions: A arms, S seeds (runs of an arm), P held-out prompts, the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brorl.cost import Cost, Unit

IntArray = NDArray[np.int64]
_LONGEST_NAME = 14  # characters of an arm's name that tables and figures can repeat


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt that all runs are evaluated on.

    Attributes:
        id: Its name.
        source: The data set that it is from (a "task" of a comparison).
        domain: Which verifier judges its responses.
        text: What the model reads.
        reference: The answer.
    """

    id: str
    source: str
    domain: str
    text: str
    reference: str


@dataclass(frozen=True, eq=False)
class Score:
    """One evaluation of one run.

    Attributes:
        cost: What the run had spent by then.
        num_correct_P: Correct ones among the n responses to each prompt, shape [P].
        sampled_tokens_P: Tokens of the n responses to each prompt, shape [P].
        truncated_share: Share of all responses that were cut.
    """

    cost: Cost
    num_correct_P: IntArray
    sampled_tokens_P: IntArray
    truncated_share: float


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One run of an arm.

    Attributes:
        seed: The run's seed.
        scores: Its evaluations by rising cost; the first is the start, at no cost.
        cost: What the whole run cost.
        phase_seconds: Seconds of the run in each phase (generation, verification, training, ...).
        groups: Groups sampled.
        groups_mixed: Those of them with correct and incorrect rollouts.
        num_updated: Groups trained on.
        ended_early: Why the run ended before its budget was spent; None if it did not.
        path: The run directory.
    """

    seed: int
    scores: tuple[Score, ...]
    cost: Cost
    phase_seconds: Mapping[str, float]
    groups: int
    groups_mixed: int
    num_updated: int
    ended_early: str | None
    path: str


@dataclass(frozen=True, eq=False)
class Arm:
    """One of the things compared.

    Attributes:
        name: What it is called: short.
        title: Its full name, if it is called by a letter; else empty.
        num_rollouts: N; None where it is adaptive.
        prompts_per_step: Groups that a step trains on.
        differs: Settings in which the arms differ, with this arm's values as text.
        trajectories: Its runs, by seed.
    """

    name: str
    title: str
    num_rollouts: int | None
    prompts_per_step: int
    differs: Mapping[str, str]
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Arms that start from one checkpoint.

    Attributes:
        checkpoint: What all runs start from.
        unit: What the budget counts.
        budget: What each run may spend.
        marks: Amounts at which all runs were evaluated, rising; the last is the budget.
        prompts: The held-out prompts, P of them.
        num_samples: Responses per prompt in each evaluation, n.
        ks: Which pass@k to report, rising, each at most n.
        arms: The arms; of two, the first is the one that the other is measured against.
        machine: Processor or accelerator, and how many runs were made at a time.
    """

    checkpoint: str
    unit: Unit
    budget: float
    marks: tuple[float, ...]
    prompts: tuple[HeldOutPrompt, ...]
    num_samples: int
    ks: tuple[int, ...]
    arms: tuple[Arm, ...]
    machine: str


def labelled(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return what each arm is called, and its title: the names and no titles if all are short, else A, B, C, ..."""
    if max(map(len, names), default=0) <= _LONGEST_NAME:
        return [(name, "") for name in names]
    return [(_letters(i), name) for i, name in enumerate(names)]


def _letters(index: int) -> str:
    """Return A to Z, then AA, AB, ..."""
    more, last = divmod(index, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)
