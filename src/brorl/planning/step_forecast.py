"""Forecast the seconds per training step from a few small timed steps, within a time limit.

This trains the given model, so discard the model afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from brorl.activity import Echo
from brorl.algorithms.groups import Group
from brorl.planning.pass_rates import fit_pass_rates
from brorl.planning.step_cost import StepCost, StepTimer, StepTiming, Work, mean_rounds, sample_groups
from brorl.training.coverage import tree_growth
from brorl.training.local_parts import LocalParts
from brorl.tree import truncation_rate

MAX_TOKENS = 128  # measured responses are truncated after this many tokens
_SIZES = ((8, 2), (16, 4), (32, 8), (64, 8))  # maximum (rollouts, prompts) of each measured step
_SECONDS = 5.0  # no larger size is measured after this time
_FEW_TOKENS = 16  # response length when only the setup or the number of threads matters
_STEPS_A_THREAD_COUNT = 3  # steps per number of threads


@dataclass(frozen=True)
class StepForecast:
    """The expected seconds per step."""

    seconds: dict[str, float]  # stage -> seconds, and their total, for responses of the measured lengths
    max_seconds: float  # the total if every truncated response reaches the length limit
    truncation_rate: float  # 0 to 1: measured responses truncated before the length limit
    fraction_at_limit: float  # 0 to 1: measured responses truncated at the length limit itself
    groups: Sequence[Group]  # groups of the largest measured step
    # Expected fraction of groups that are kept. None if every group is trained on, if responses were truncated (they
    # count as incorrect), or if no measured group was kept; the seconds are then for a step that keeps all groups.
    kept_fraction: float | None
    num_rollouts: int  # measured rollouts
    num_prompts: int  # largest number of prompts in a measured step
    measured_seconds: float  # duration of the measurement
    max_tokens: int  # measured responses were truncated after this many tokens
    is_stopped: bool  # whether the time limit was reached before all sizes were measured
    seconds_of_threads: Mapping[int, float]  # number of CPU threads -> seconds of the same small step


class _Measurement(NamedTuple):
    """Timed small steps."""

    parts: LocalParts  # with the token limit at which responses were truncated
    timings: list[StepTiming]
    groups: Sequence[Group]  # of the largest step
    seconds: float  # total duration
    step_s: tuple[float, float]  # seconds per step: first size with short responses; last size timed
    is_stopped: bool


def _measure(parts: LocalParts, timer: StepTimer, max_seconds: float, echo: Echo) -> _Measurement:
    """Time a tiny step, then larger ones that should finish in time if time is proportional to rollouts."""
    started = perf_counter()
    brief = _cut(parts, _FEW_TOKENS)
    sizes = _sizes(parts)
    num_rollouts, num_prompts = min(2, parts.config.rollouts_per_prompt), 1
    few = brief.config.sampling.max_new_tokens
    for _ in range(2):  # the first includes imports and one-time setup
        begun = perf_counter()
        sampled = sample_groups(brief, parts.stream.take(num_prompts), num_rollouts, 0)
        probe = timer.finish(sampled)
        last_s = perf_counter() - begun
        if perf_counter() - started > max_seconds / 2:
            break
    echo(f"{num_rollouts} rollouts of {few} tokens take {last_s:.2g} s; timing larger steps until {max_seconds:g} s")
    first_size_s = last_s * prod(sizes[0]) / num_rollouts  # a step of the first size with short responses
    left_s = max_seconds - (perf_counter() - started)
    tokens = MAX_TOKENS if left_s * few >= first_size_s * MAX_TOKENS else int(few * left_s / first_size_s)
    if left_s < first_size_s:  # not even that step would finish in time
        seconds = perf_counter() - started
        return _Measurement(brief, [probe], sampled.groups, seconds, (first_size_s, last_s), is_stopped=True)
    is_stopped = tokens < min(MAX_TOKENS, parts.config.sampling.max_new_tokens)
    parts = _cut(parts, tokens)
    begun = perf_counter()
    last_rollouts = 1  # of the last step; `last_s` is its time
    timings: list[StepTiming] = []
    groups: Sequence[Group] = ()
    for seed, size in enumerate(sizes, 1):
        is_slow = perf_counter() - begun > _SECONDS
        if is_slow and len(timings) > 1:
            break
        if is_slow and timings:  # for a slow model, the second size is smaller than the first
            size = max(2, sizes[0][0] // 2), max(1, sizes[0][1] // 2)
        before = perf_counter()
        if timings and before - started + last_s * prod(size) / last_rollouts > max_seconds:
            is_stopped = True
            break
        sampled = sample_groups(parts, parts.stream.take(size[1]), size[0], seed)
        groups = max(groups, sampled.groups, key=_num_rollouts)
        timings.append(timer.finish(sampled))
        last_s = perf_counter() - before
        last_rollouts = prod(size)
    return _Measurement(parts, timings, groups, perf_counter() - started, (first_size_s, last_s), is_stopped)


def _num_rollouts(groups: Sequence[Group]) -> int:
    return sum(group.tree.num_rollouts for group in groups)


def _sizes(parts: LocalParts) -> list[tuple[int, int]]:
    """Return (rollouts, prompts) of the steps to measure, ascending."""
    config = parts.config
    return sorted({(min(n, config.rollouts_per_prompt), min(p, config.prompts_per_step)) for n, p in _SIZES})


def forecast_step(
    parts: LocalParts,
    scratch: Path,
    threads: Sequence[int] = (),
    max_seconds: float = 60.0,
    echo: Echo = lambda _: None,
) -> StepForecast:
    """Run small steps and extrapolate to a whole step. Also time a small step with each number of CPU `threads`.

    Rollouts are truncated after `MAX_TOKENS` tokens to keep the measurement short; the forecast bounds the time for
    longer responses. If the first step is slow, only one more is run, and it is smaller. Except for the first, tiny
    step, no step starts if earlier ones predict that it would end after `max_seconds`; `echo` receives a line after the
    tiny step. The small steps train the model, so discard it afterwards.
    """
    limit = parts.config.sampling.max_new_tokens
    rollouts_per_prompt = parts.config.rollouts_per_prompt
    timer = StepTimer(parts, parts.model, scratch)
    uncut = parts
    parts, timings, groups, measured_seconds, (first_size_s, last_s), is_stopped = _measure(
        parts, timer, max_seconds, echo
    )
    is_fast = measured_seconds < _SECONDS
    timed = (parts, *_sizes(parts)[-1]) if is_fast else (_cut(uncut, _FEW_TOKENS), *_sizes(parts)[0])
    fits = measured_seconds + (2 * len(threads) + 1) * (last_s if is_fast else first_size_s) <= max_seconds
    seconds_of_threads = _time_threads(timer, *timed, threads) if threads and fits else {}
    longer = limit - parts.config.sampling.max_new_tokens
    truncated = truncation_rate([group.tree for group in groups])
    truncated_early = truncated if longer else 0.0
    rule = parts.config.dynamic_sampling
    known = rule.enabled and not truncated_early
    fraction = None
    if known and any(map(rule.keeps, groups)):
        rates = fit_pass_rates(np.array([group.num_correct for group in groups]), groups[0].tree.num_rollouts)
        fraction = rates.kept(rollouts_per_prompt, rule.max_correct(rollouts_per_prompt)) or None
    cost = StepCost.fit(timings, timer.per_step)
    limited = parts.config.optimizer.max_responses_per_outcome  # if set, the trained nodes stop growing with N
    num_trained = min(2 * limited, rollouts_per_prompt) if limited else rollouts_per_prompt
    work = _whole_step(parts, groups, rollouts_per_prompt, num_trained, fraction)
    added = longer * truncated_early  # additional tokens per response, none of them shared
    longest = replace(
        work,
        unique_tokens=work.unique_tokens + work.groups * rollouts_per_prompt * added,
        sampled_tokens=work.sampled_tokens + work.groups * rollouts_per_prompt * added,
        trained_nodes=work.trained_nodes + work.trained_groups * num_trained * added,
    )
    return StepForecast(
        seconds=cost.seconds(work),
        max_seconds=cost.seconds(longest)["total"],
        truncation_rate=truncated_early,
        fraction_at_limit=0.0 if longer else truncated,
        groups=groups,
        kept_fraction=fraction,
        num_rollouts=sum(round(timing.work.groups) * timing.num_rollouts for timing in timings),
        num_prompts=max(round(timing.work.groups) for timing in timings),
        measured_seconds=measured_seconds,
        max_tokens=parts.config.sampling.max_new_tokens,
        is_stopped=is_stopped,
        seconds_of_threads=seconds_of_threads,
    )


def _cut(parts: LocalParts, max_tokens: int) -> LocalParts:
    """Return the parts with a lower limit on response length."""
    sampling = parts.config.sampling
    most = min(sampling.max_new_tokens, max(max_tokens, sampling.min_new_tokens))
    config = parts.config.model_copy(update={"sampling": sampling.model_copy(update={"max_new_tokens": most})})
    return replace(parts, config=config)


def _time_threads(
    timer: StepTimer, parts: LocalParts, num_rollouts: int, num_prompts: int, threads: Sequence[int]
) -> dict[int, float]:
    """Run the same step with each number of CPU threads, and return the mean seconds for each."""
    before = torch.get_num_threads()
    prompts = parts.stream.take(num_prompts)
    sampled = sample_groups(parts, prompts, num_rollouts, seed=0)
    works: list[Callable[[], object]] = [
        lambda: sample_groups(parts, prompts, num_rollouts, seed=0),
        lambda: timer.finish(sampled),  # second, because learning changes later rollouts
    ]
    means = dict.fromkeys(threads, 0.0)
    try:
        for work in works:
            repeats = 0
            sums = dict.fromkeys(threads, 0.0)
            while repeats < _STEPS_A_THREAD_COUNT and sum(sums.values()) < _SECONDS / 2:
                for num_threads in threads:
                    torch.set_num_threads(num_threads)
                    started = perf_counter()
                    work()
                    sums[num_threads] += perf_counter() - started
                repeats += 1
            means = {num_threads: means[num_threads] + sums[num_threads] / repeats for num_threads in threads}
    finally:
        torch.set_num_threads(before)
    return means


def _whole_step(
    parts: LocalParts, groups: Sequence[Group], rollouts_per_prompt: int, num_trained: int, fraction: float | None
) -> Work:
    """Return the work of a whole step, estimated from the groups of the largest measured step."""
    sizes = np.array([num_trained, rollouts_per_prompt])
    grown_J = np.mean([tree_growth(group.tree, sizes) for group in groups], axis=0)
    trained, nodes = grown_J[0].tolist()
    responses = float(grown_J[1, 1])
    length = float(np.mean([g.tree.num_sampled_tokens / g.tree.num_rollouts for g in groups]))
    return Work.of_step(
        parts.config.prompts_per_step,
        fraction or 1.0,
        nodes=nodes,
        tokens=rollouts_per_prompt * length,
        responses=responses,
        trained=trained,
        updates=parts.config.optimizer.mini_batches,
        rounds=1.0 if fraction is None else mean_rounds(fraction, parts.config.prompts_per_step),
    )
