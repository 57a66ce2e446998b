"""What a step will take, from a few small steps that are really made.

In: the parts of a run before its first step, and the size of a step. Out: seconds by phase. Rollouts are cut after
`MOST_TOKENS` tokens, so that the measurement stays short where responses may be long; what the cut responses can add
is a bound. The model is trained on the way, and must be thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from brorl.algorithms.groups import Group
from brorl.planning.pilot import PilotParts, sample
from brorl.planning.step_cost import StepCost, StepTiming, Work, mean_rounds
from brorl.planning.step_timing import StepTimer
from brorl.planning.tree_growth import tree_growth
from brorl.theory.pass_rates import fit_pass_rates
from brorl.training.stopwatch import Stopwatch

MOST_TOKENS = 128  # of a response that is measured
_SIZES = ((8, 2), (16, 4), (32, 8), (64, 8))  # rollouts and prompts of the steps that are made, at most
_SECONDS = 5.0  # after which no further size is begun


@dataclass(frozen=True)
class StepForecast:
    """What a step will take.

    Attributes:
        seconds: Seconds by phase and their total, for responses of the lengths that were measured.
        most_seconds: Total if every response that was cut goes on to the length limit; the same as the total if none
            was cut short of it.
        kept_share: Expected share of groups with both outcomes; None if every group is trained on, or if no group with
            both outcomes was seen and the seconds are for a step that keeps all groups.
        num_rollouts: Rollouts that were measured.
        num_prompts: Most prompts of a step that was measured.
        measured_seconds: How long that took.
    """

    seconds: dict[str, float]
    most_seconds: float
    kept_share: float | None
    num_rollouts: int
    num_prompts: int
    measured_seconds: float


def forecast_step(parts: PilotParts, rollouts_per_prompt: int, scratch: Path) -> StepForecast:
    """Make small steps and extrapolate to a whole one.

    Args:
        parts: The parts of the run; the model is trained.
        rollouts_per_prompt: N of the step.
        scratch: An empty folder for stored rollouts.
    """
    limit = parts.sampling.max_new_tokens
    parts = replace(parts, sampling=replace(parts.sampling, max_new_tokens=min(limit, MOST_TOKENS)))
    prober = StepTimer(parts, parts.model, scratch)
    sizes = sorted({(min(n, rollouts_per_prompt), min(p, parts.prompts_per_step)) for n, p in _SIZES})
    _make_step(parts, prober, *sizes[0], seed=0)  # what is imported or set up once is no part of a step
    started = perf_counter()
    probes: list[StepTiming] = []
    groups: list[Group] = []
    for seed, (num_rollouts, num_prompts) in enumerate(sizes, 1):
        if len(probes) > 1 and perf_counter() - started > _SECONDS:
            break
        probe, groups = _make_step(parts, prober, num_rollouts, num_prompts, seed)
        probes.append(probe)
    measured_seconds = perf_counter() - started
    share = _kept_share(groups, rollouts_per_prompt) if parts.dynamic_sampling else None
    cost = StepCost.fit(probes, prober.per_step)
    work = _whole_step(parts, groups, probes[-1].work, rollouts_per_prompt, share)
    longer = limit - parts.sampling.max_new_tokens
    seconds = cost.seconds(work)
    return StepForecast(
        seconds,
        cost.seconds(_with_longer(work, groups, longer, rollouts_per_prompt))["total"],
        share,
        sum(round(probe.work.groups) * probe.num_rollouts for probe in probes),
        max(num_prompts for _, num_prompts in sizes[: len(probes)]),
        measured_seconds,
    )


def _make_step(
    parts: PilotParts, prober: StepTimer, num_rollouts: int, num_prompts: int, seed: int
) -> tuple[StepTiming, list[Group]]:
    """Sample, verify, train and store, and return what it took and the groups."""
    clock = Stopwatch()
    sampled = sample(parts, parts.stream.take(num_prompts), num_rollouts, seed, clock)
    work, seconds = prober.finish(sampled, clock)
    return StepTiming(num_rollouts, work, {name: s for name, s in seconds.items() if name != "total"}), sampled.groups


def _kept_share(groups: Sequence[Group], rollouts_per_prompt: int) -> float | None:
    """Return the expected share of groups with both outcomes; None if there was none to go by."""
    n = groups[0].tree.num_rollouts
    correct_P = np.array([group.num_correct for group in groups])
    if not ((correct_P > 0) & (correct_P < n)).any():
        return None
    share = float(fit_pass_rates(correct_P, n).informative(rollouts_per_prompt))
    return share if share > 0 else None


def _whole_step(
    parts: PilotParts, groups: Sequence[Group], measured: Work, rollouts_per_prompt: int, share: float | None
) -> Work:
    """Return what a whole step works on, from the trees of the largest step that was made."""
    depth, wanted = parts.sampling.max_new_tokens, np.array([rollouts_per_prompt])
    grown = [tree_growth(group.tree, wanted, depth) for group in groups]
    nodes, responses = (float(np.mean([getattr(g, name)[0] for g in grown])) for name in ("nodes_J", "responses_J"))
    length = float(np.mean([g.tree.num_sampled_tokens / g.tree.num_rollouts for g in groups]))
    num_prompts = parts.prompts_per_step
    sampled = num_prompts / (share or 1.0)
    some_alone = parts.learner_settings.responses_per_verdict  # then what is trained does not grow with N
    return Work(
        groups=sampled,
        unique_tokens=sampled * nodes,
        sampled_tokens=sampled * rollouts_per_prompt * length,
        responses=sampled * responses,
        trained_groups=num_prompts,
        trained_nodes=num_prompts * (measured.trained_nodes / measured.trained_groups if some_alone else nodes),
        updates=parts.learner_settings.mini_batches,
        rounds=1.0 if share is None else mean_rounds(share, num_prompts),
    )


def _with_longer(work: Work, groups: Sequence[Group], longer: int, rollouts_per_prompt: int) -> Work:
    """Return the work if every response that was cut goes on by `longer` tokens, none of which it shares."""
    cut = sum(int(g.tree.leaf_count[~g.tree.finished].sum()) for g in groups)
    share_cut = cut / sum(g.tree.num_rollouts for g in groups)
    added = longer * share_cut * rollouts_per_prompt  # tokens of a group
    return replace(
        work,
        unique_tokens=work.unique_tokens + work.groups * added,
        sampled_tokens=work.sampled_tokens + work.groups * added,
        trained_nodes=work.trained_nodes + work.trained_groups * added,
    )
