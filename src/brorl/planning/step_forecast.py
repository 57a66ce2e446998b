"""The expected seconds of a step, from a few small steps on this machine.

Rollouts are cut after `MAX_TOKENS` tokens to keep the measurement short; the forecast bounds the time of longer
responses. A model whose first step is slow takes one more, which is smaller. The small steps train the model, which
must be discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from brorl.algorithms.groups import Group
from brorl.planning.pilot import PilotParts, sample
from brorl.planning.step_cost import StepCost, StepTiming, Work, mean_rounds
from brorl.planning.step_timing import StepTimer
from brorl.planning.tree_growth import tree_growth
from brorl.theory.pass_rates import fit_pass_rates
from brorl.tree import fraction_cut

MAX_TOKENS = 128  # of a measured response
_SIZES = ((8, 2), (16, 4), (32, 8), (64, 8))  # largest rollouts and prompts of the measured steps
_SECONDS = 5.0  # after this no larger size is measured
_FEW_TOKENS = 16  # of a response where only the setup or the threads count
_REPEATS = 3  # of a step with each number of threads


@dataclass(frozen=True)
class StepForecast:
    """The expected seconds of a step."""

    seconds: dict[str, float]  # seconds by phase and their total, for responses of the measured lengths
    # total if every cut response is as long as the length limit allows; equal to the total if no response was cut
    # before it
    max_seconds: float
    fraction_cut: float  # measured responses that were cut before the length limit, as a fraction of all
    fraction_at_limit: float  # measured responses that were cut at the length limit itself, as a fraction of all
    groups: Sequence[Group]  # the groups of the largest measured step
    # expected fraction of mixed groups; None if it is not known, and the seconds are for a step that keeps all groups:
    # every group is trained on, responses were cut (they count as incorrect), or no measured group was mixed
    kept_fraction: float | None
    num_rollouts: int  # measured rollouts
    num_prompts: int  # largest number of prompts in a measured step
    measured_seconds: float  # duration of the measurement
    seconds_of_threads: Mapping[int, float]  # seconds of the same small step by the number of CPU threads


def forecast_step(
    parts: PilotParts, rollouts_per_prompt: int, scratch: Path, threads: Sequence[int] = ()
) -> StepForecast:
    """Run small steps and extrapolate to a whole one."""
    limit = parts.sampling.max_new_tokens
    parts, brief = _cut(parts, MAX_TOKENS), _cut(parts, _FEW_TOKENS)
    timer = StepTimer(parts, parts.model, scratch)
    sizes = sorted({(min(n, rollouts_per_prompt), min(p, parts.prompts_per_step)) for n, p in _SIZES})
    num_rollouts, num_prompts = sizes[0]  # a step to warm up: imports and one-time setup are not part of a step
    timer.finish(sample(brief, parts.stream.take(num_prompts), num_rollouts, 0))
    started = perf_counter()
    timings: list[StepTiming] = []
    groups: list[Group] = []
    for seed, (num_rollouts, num_prompts) in enumerate(sizes, 1):
        is_slow = perf_counter() - started > _SECONDS
        if is_slow and len(timings) > 1:
            break
        if is_slow and timings:  # the second size of a slow model is smaller than the first
            num_rollouts, num_prompts = max(2, sizes[0][0] // 2), max(1, sizes[0][1] // 2)
        sampled = sample(parts, parts.stream.take(num_prompts), num_rollouts, seed)
        groups = max(groups, sampled.groups, key=_num_rollouts)
        timings.append(timer.finish(sampled))
    measured_seconds = perf_counter() - started
    timed = (parts, *sizes[-1]) if measured_seconds < _SECONDS else (brief, *sizes[0])
    seconds_of_threads = _time_threads(timer, *timed, threads) if threads else {}
    longer = limit - parts.sampling.max_new_tokens
    cut = fraction_cut([group.tree for group in groups])
    cut_before = cut if longer else 0.0
    known = parts.dynamic_sampling and not cut_before
    fraction = _kept_fraction(groups, rollouts_per_prompt) if known else None
    cost = StepCost.fit(timings, timer.per_step)
    limited = parts.learner_settings.max_responses_per_outcome  # then the trained nodes do not grow with N
    num_trained = min(2 * limited, rollouts_per_prompt) if limited else rollouts_per_prompt
    work = _whole_step(parts, groups, rollouts_per_prompt, num_trained, fraction)
    longest = _with_longer(work, longer * cut_before, rollouts_per_prompt, num_trained)
    return StepForecast(
        seconds=cost.seconds(work),
        max_seconds=cost.seconds(longest)["total"],
        fraction_cut=cut_before,
        fraction_at_limit=0.0 if longer else cut,
        groups=groups,
        kept_fraction=fraction,
        num_rollouts=sum(round(timing.work.groups) * timing.num_rollouts for timing in timings),
        num_prompts=max(round(timing.work.groups) for timing in timings),
        measured_seconds=measured_seconds,
        seconds_of_threads=seconds_of_threads,
    )


def _cut(parts: PilotParts, max_tokens: int) -> PilotParts:
    """Return the parts with shorter responses."""
    sampling = parts.sampling
    most = min(sampling.max_new_tokens, max(max_tokens, sampling.min_new_tokens))
    return replace(parts, sampling=replace(sampling, max_new_tokens=most))


def _num_rollouts(groups: Sequence[Group]) -> int:
    return sum(group.tree.num_rollouts for group in groups)


def _time_threads(
    timer: StepTimer, parts: PilotParts, num_rollouts: int, num_prompts: int, threads: Sequence[int]
) -> dict[int, float]:
    """Run the same step with each number of CPU threads, and return the mean seconds of each."""
    before, prompts = torch.get_num_threads(), parts.stream.take(num_prompts)
    sampled = sample(parts, prompts, num_rollouts, seed=0)
    works: list[Callable[[], object]] = [
        lambda: sample(parts, prompts, num_rollouts, seed=0),
        lambda: timer.finish(sampled),  # afterwards: learning changes the rollouts of the next sampling
    ]
    means = dict.fromkeys(threads, 0.0)
    try:
        for work in works:
            repeats, sums = 0, dict.fromkeys(threads, 0.0)
            while repeats < _REPEATS and sum(sums.values()) < _SECONDS / 2:
                for number in threads:
                    torch.set_num_threads(number)
                    started = perf_counter()
                    work()
                    sums[number] += perf_counter() - started
                repeats += 1
            means = {number: means[number] + sums[number] / repeats for number in threads}
    finally:
        torch.set_num_threads(before)
    return means


def _kept_fraction(groups: Sequence[Group], rollouts_per_prompt: int) -> float | None:
    """Return the expected fraction of mixed groups; None if no measured group is mixed."""
    if not any(group.is_mixed for group in groups):
        return None
    correct_P = np.array([group.num_correct for group in groups])
    fraction = fit_pass_rates(correct_P, groups[0].tree.num_rollouts).mixed(rollouts_per_prompt)
    return fraction if fraction > 0 else None


def _whole_step(
    parts: PilotParts, groups: Sequence[Group], rollouts_per_prompt: int, num_trained: int, fraction: float | None
) -> Work:
    """Return the work of a whole step, from the groups of the largest measured step."""
    sizes = np.array([num_trained, rollouts_per_prompt])
    grown = [tree_growth(group.tree, sizes, parts.sampling.max_new_tokens) for group in groups]
    trained, nodes = np.mean([g.nodes_J for g in grown], axis=0).tolist()
    responses = float(np.mean([g.responses_J[1] for g in grown]))
    length = float(np.mean([g.tree.num_sampled_tokens / g.tree.num_rollouts for g in groups]))
    return Work.of_step(
        parts.prompts_per_step,
        fraction or 1.0,
        nodes=nodes,
        tokens=rollouts_per_prompt * length,
        responses=responses,
        trained=trained,
        updates=parts.learner_settings.mini_batches,
        rounds=1.0 if fraction is None else mean_rounds(fraction, parts.prompts_per_step),
    )


def _with_longer(work: Work, longer: float, rollouts_per_prompt: int, num_trained: int) -> Work:
    """Return the work if every response has `longer` more tokens, none of them shared."""
    added = longer * rollouts_per_prompt  # tokens of a group
    return replace(
        work,
        unique_tokens=work.unique_tokens + work.groups * added,
        sampled_tokens=work.sampled_tokens + work.groups * added,
        trained_nodes=work.trained_nodes + work.trained_groups * longer * num_trained,
    )
