"""The values of a comparison: arms, each with runs of several seeds, and the scores and costs of each run.

Plain values: `brorl.comparison.reading` reads them from run directories, the other modules compare them. Dimensions: A
arms, S seeds (runs of an arm), M evaluation points, P held-out prompts (the same for all runs), n responses per prompt.
An evaluation point is an amount of the budget's unit at which every run is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
        source: Its data set (a "task" of a comparison).
        domain: The domain of its verifier.
        text: The text that the model reads.
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
        cost: Cost of the run up to the evaluation.
        num_correct_P: Correct responses among the n responses to each prompt, shape [P].
        sampled_tokens_P: Tokens of the n responses to each prompt, shape [P].
        truncation_rate: Fraction of all responses that were truncated.
        num_unverified_P: Responses to each prompt that could not be verified, shape [P]; None if all were verified.
    """

    cost: Cost
    num_correct_P: IntArray
    sampled_tokens_P: IntArray
    truncation_rate: float
    num_unverified_P: IntArray | None = None

    def of_prompts(self, index_P: IntArray) -> Score:
        """Return the evaluation of some prompts, all of whose responses were verified; the truncated fraction stays."""
        correct_P, tokens_P = self.num_correct_P[index_P], self.sampled_tokens_P[index_P]
        return replace(self, num_correct_P=correct_P, sampled_tokens_P=tokens_P, num_unverified_P=None)


@dataclass(frozen=True, eq=False)
class RunScores:
    """One run of an arm.

    Attributes:
        seed: The run's seed.
        scores: Its evaluations by rising cost; the first is the start, at no cost.
        cost: Cost of the whole run.
        phase_seconds: Seconds of the run in each phase (generation, verification, training, ...).
        groups: Groups sampled.
        groups_mixed: Mixed groups among them.
        num_updated: Groups trained on.
        ended_early: Why the run ended before its budget was spent; None if it did not.
        path: The run directory.
        phase_begins: Cost at which each phase of its objective after the first began, by the phase's title.
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
    phase_begins: Mapping[str, Cost] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Arm:
    """One of the things compared.

    Attributes:
        name: Its short name.
        title: Its full name if the short name is a letter; else empty.
        num_rollouts: N; None if it is adaptive.
        prompts_per_step: Groups that a step trains on.
        differs: Settings in which the arms differ, with this arm's values as text.
        runs: Its runs, by seed.
    """

    name: str
    title: str
    num_rollouts: int | None
    prompts_per_step: int
    differs: Mapping[str, str]
    runs: tuple[RunScores, ...]

    def phase_begins(self, unit: Unit) -> dict[str, float]:
        """Return the mean cost at which its runs began each phase after the first, by the phase's title."""
        titles = dict.fromkeys(title for run in self.runs for title in run.phase_begins)
        begins = {t: [r.phase_begins[t].of(unit) for r in self.runs if t in r.phase_begins] for t in titles}
        return {title: sum(costs) / len(costs) for title, costs in begins.items()}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Arms that start from one checkpoint.

    Attributes:
        checkpoint: The model that all runs start from.
        unit: Unit of the budget.
        budget: Budget of each run.
        eval_points: Amounts at which all runs were evaluated, rising; the last is the budget.
        prompts: The held-out prompts.
        num_samples: Responses per prompt in each evaluation, n.
        ks: The reported pass@k, rising, each at most n.
        arms: The arms; of two, the second is measured against the first.
        machine: Processor or accelerator, and how many runs were made in parallel.
        num_left_out: Held-out prompts that are not among `prompts`: in an evaluation of a run some of the responses
            could not be verified because of the machine.
    """

    checkpoint: str
    unit: Unit
    budget: float
    eval_points: tuple[float, ...]
    prompts: tuple[HeldOutPrompt, ...]
    num_samples: int
    ks: tuple[int, ...]
    arms: tuple[Arm, ...]
    machine: str
    num_left_out: int = 0

    @property
    def ordered_by_rollouts(self) -> bool:
        """Whether every arm has its own N, at most one of them being adaptive."""
        return len({arm.num_rollouts for arm in self.arms}) == len(self.arms)

    def task_names(self) -> list[str]:
        """Return the sources of the held-out prompts, sorted."""
        return sorted({prompt.source for prompt in self.prompts})

    def prompts_of(self, task: str) -> IntArray:
        """Return the indices of a task's prompts."""
        return np.array([i for i, prompt in enumerate(self.prompts) if prompt.source == task])


def labelled(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the short name and the title of each arm: the names without titles if all are short, else A, B, C, ..."""
    if max(map(len, names), default=0) <= _LONGEST_NAME:
        return [(name, "") for name in names]
    return [(_letters(i), name) for i, name in enumerate(names)]


def _letters(index: int) -> str:
    """Return A to Z, then AA, AB, ..."""
    more, last = divmod(index, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)
