"""Live diagnostics of a step: the sections `coverage` and `held_out_check` of the metrics.

`coverage` estimates the probability mass that the N rollouts sampled and missed. `held_out_check` tests the update on
new rollouts. Nothing here affects training: the new rollouts have separate seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from brorl.activity import Stopwatch
from brorl.algorithms.groups import Group
from brorl.arrays import FloatArray
from brorl.config.settings import TrainConfig
from brorl.evaluation.pass_at_k import pass_at_k, worst_at_k
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import Sampler, SampleTask
from brorl.runs.step_record import CoverageRecord, HeldOutCheck, PooledCoverage, PromptCoverage, is_due
from brorl.seeds import derived_seed
from brorl.training.coverage import Coverage, leaving_mass, measure_coverage, unsampled_correct_at
from brorl.training.held_out_check import HeldOut, check_on_held_out
from brorl.training.learner import Learner
from brorl.verification.grade import Grader

OTHER_N = (16, 32, 64, 128, 256, 512, 1024, 2048)
SUBSET_SIZES = (2, 4, 8, *OTHER_N)
_COUNTS = ("num_rollouts", "num_correct", "num_distinct")
_EXACT = ("p_pos", "p_neg", "unsampled", "a_2", "b_2", "s_r", "entropy")
_ESTIMATED = ("q_pos", "unsampled_correct", "u_pos_2", "u_neg_2")
_SEED_TAG = 0xCE27  # separates the seeds of held-out draws from those of training


@dataclass(frozen=True)
class Diagnostics:
    """Measures each step of a run."""

    config: TrainConfig  # the recipe
    sampler: Sampler  # samples the held-out rollouts
    learner: Learner  # computes the held-out rollouts' log-probs after the update
    grader: Grader  # verifies and rewards responses
    clock: Stopwatch = field(default_factory=Stopwatch)  # times held-out sampling

    def hold_out(self, step: int, groups: Sequence[Group]) -> list[Group | None]:
        """Draw new rollouts of the same prompts before a step's update, if a check is due.

        Returns:
            One held-out group per group (None where too few rollouts were verified); empty if no check is due.
        """
        if not is_due(step, self.config.diagnostics.held_out_check_every):
            return []
        with self.clock("diagnostics"):
            return self._draw(step, [g.prompt for g in groups])

    def _draw(self, step: int, prompts: Sequence[Prompt]) -> list[Group | None]:
        config = self.config
        task = SampleTask(
            [prompt.token_ids for prompt in prompts],
            config.diagnostics.held_out_rollouts,
            config.sampling.params,
            derived_seed(config.seed, step, _SEED_TAG),
        )
        trees = self.sampler.sample(task)
        groups = [self.grader.rewarded(group, step).verified for group in self.grader.verify(prompts, trees)]
        if not config.recompute_old_logprobs:  # otherwise the old log-probs come from the learner
            return groups
        verified_trees = [group.tree for group in groups if group is not None]
        logprobs = self.learner.logprobs(verified_trees)
        relabelled_trees = iter([replace(t, logprob=lp) for t, lp in zip(verified_trees, logprobs, strict=True)])
        return [group and replace(group, tree=next(relabelled_trees)) for group in groups]

    def record(
        self, sampled: Sequence[Group], trained: Sequence[Group], held_out: Sequence[Group | None]
    ) -> tuple[CoverageRecord | None, HeldOutCheck | None]:
        """Return the measurements. `held_out` is the result of `hold_out` for the trained groups.

        `sampled` must not contain groups with unverified rollouts: an incomplete sample does not show how much
        probability lies elsewhere.
        """
        coverage = coverage_record(sampled) if sampled else None
        drawn = zip(held_out, trained, strict=True) if held_out else ()
        pairs = [(fresh, step_group) for fresh, step_group in drawn if fresh is not None]
        return coverage, check_on_held_out(self._compare(pairs)) if pairs else None

    def _compare(self, pairs: Sequence[tuple[Group, Group]]) -> list[HeldOut]:
        """Return the input of the check. Each pair is a prompt's held-out group and its trained group."""
        trees = [held_out.tree for held_out, _ in pairs]
        return [
            HeldOut(
                count_L=held_out.tree.leaf_count,
                correct_L=held_out.correct_L,
                old_logprob_L=held_out.tree.prefix_logprob[held_out.tree.leaf],
                new_logprob_L=held_out.tree.sum_over_responses(new_logprob_M),
                # Never exactly 0 or 1: if all held-out rollouts were correct, the interval would then have width 0.
                baseline=(trained.num_correct + 0.5) / (trained.tree.num_rollouts + 1),
            )
            for (held_out, trained), new_logprob_M in zip(pairs, self.learner.logprobs(trees), strict=True)
        ]


def coverage_record(groups: Sequence[Group]) -> CoverageRecord:
    """Measure the mass that rollouts sampled and missed, per prompt and pooled.

    Per-prompt numbers are rounded to 4 digits. The pooled estimates of the unsampled mass are None if no prompt has
    duplicate responses.
    """
    measured = [measure_coverage(g.tree, g.correct_L) for g in groups]
    unique = sum(m.all_unique for m in measured)
    names = (*_EXACT, *_ESTIMATED)
    value_GK = np.array([[getattr(m, name) for name in names] for m in measured])
    curve = _curve(groups)
    leaving = _leaving(groups)

    pooled: dict[str, Any] = dict(zip(names, value_GK.mean(0).tolist(), strict=True))
    pooled["duplicate_rate"] = float(np.mean([m.duplicate_rate for m in measured]))
    pooled["groups_all_unique"] = unique
    pooled["coupling"] = _coupling(measured)
    pooled["unsampled_correct_at"] = {n: float(value_G.mean()) for n, value_G in curve.items()}
    pooled["escape_probability_at"] = {last: float(value_G.mean()) for last, value_G in leaving.items()}
    if unique == len(groups):
        pooled |= dict.fromkeys((*_ESTIMATED, "coupling", "unsampled_correct_at"))
    pooled["mixed_fraction_at"] = _mixed_fraction_at(measured)

    prompts: dict[str, Any] = {"id": tuple(g.prompt.id for g in groups)}
    prompts |= {name: tuple(getattr(m, name) for m in measured) for name in _COUNTS}
    prompts |= {name: _rounded(value_G) for name, value_G in zip(names, value_GK.T, strict=True)}
    prompts["unsampled_correct_at"] = {n: _rounded(value_G) for n, value_G in curve.items()}
    prompts["escape_probability_at"] = {last: _rounded(value_G) for last, value_G in leaving.items()}
    return CoverageRecord(pooled=PooledCoverage(**pooled), prompts=PromptCoverage(**prompts))


def _coupling(measured: Sequence[Coverage]) -> float | None:
    """Return term 3 / (term 1 + term 2) of Theorem 1, each summed over prompts. Terms 1 and 2 are never negative."""
    guaranteed = coupling = 0.0
    for m in measured:
        fraction = m.num_correct / m.num_rollouts
        q_pos = min(m.q_pos, 1.0)
        guaranteed += (1 - fraction - m.s_r) * (1 - q_pos) * m.a_2 + (m.s_r + fraction) * q_pos * m.b_2
        coupling += m.s_r * (q_pos * m.u_neg_2 - (1 - q_pos) * m.u_pos_2)
    return coupling / guaranteed if guaranteed > 0 else None


def _curve(groups: Sequence[Group]) -> dict[int, FloatArray]:
    """Return {N: expected unsampled correct mass of each group, shape [G]}, for the groups' own N and others."""
    numbers = sorted({*OTHER_N, *(g.tree.num_rollouts for g in groups)})
    value_GK = np.stack([unsampled_correct_at(g.tree, g.correct_L, numbers) for g in groups])
    return dict(zip(numbers, value_GK.T, strict=True))


def _mixed_fraction_at(measured: Sequence[Coverage]) -> dict[int, float]:
    """Return {N': fraction of groups that would be mixed with N' of the N rollouts}, a mean over all subsets."""
    size = min(m.num_rollouts for m in measured)
    correct = np.array([m.num_correct for m in measured if m.num_rollouts == size])
    smaller = [*(n for n in SUBSET_SIZES if n < size), size]
    return {n: float((pass_at_k(correct, size, n) - worst_at_k(correct, size, n)).mean()) for n in smaller}


def _leaving(groups: Sequence[Group]) -> dict[int, FloatArray]:
    """Return {last position: chance that a new rollout leaves each tree there, shape [G]}, for 1, 2, 3-4, 5-8, ..."""
    longest = max(int(g.tree.total_length.max()) for g in groups)
    bin_T = np.frexp(np.arange(longest))[1]  # the bit length of a 0-based position
    masses = [leaving_mass(g.tree) for g in groups]
    value_GB = np.stack([np.bincount(bin_T[: m.size], m, int(bin_T[-1]) + 1) for m in masses])
    return {1 << i: value_G for i, value_G in enumerate(value_GB.T)}


def _rounded(value_G: FloatArray) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in value_G.tolist())
