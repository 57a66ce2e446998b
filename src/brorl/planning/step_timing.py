"""Times the real phases of a step at a few sizes, and takes the pilot on the way.

In: the parts of a run before its first step, the size of the pilot, the numbers of rollouts in question. Out: what a
plan is made from: counts, costs in seconds, a model of memory. The run's model is left as it is: what trains is a copy.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from brorl.algorithms.groups import Group
from brorl.errors import UserError
from brorl.model.logprobs import default_max_nodes
from brorl.model.peak_memory import bytes_in_use, peak_bytes, reset_peak
from brorl.planning.pilot import (
    PilotParts,
    PilotSummary,
    Sampled,
    count_pilot,
    gradient_products,
    sample,
    summarise,
)
from brorl.planning.pilot_counts import PilotCounts
from brorl.planning.step_cost import AffineCost, StepCost, StepTiming, Work, fit_affine
from brorl.planning.tree_growth import tree_growth
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import Engine, RowCosts
from brorl.runs.run_directory import RunDirectory
from brorl.training.stopwatch import Stopwatch
from brorl.training.tree_learner import TreeLearner

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_CALLS = 4  # of the engine for the pilot: one to warm up, and three that are timed
_REPEATS = 3
_QUICK_SECONDS = 10.0  # a pilot that takes longer gets probes of a quarter of its size


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of a step above that of the loaded model.

    Attributes:
        cache: The engine's own account of rows, given the most rows there can be.
        sampling: Bytes besides it (activations, draws), affine in that account and in the rollouts of a call.
        training: Bytes of gradients, optimizer and activations, affine in the nodes of a forward pass.
        resident_bytes: Gradients and optimizer state, which stay while sampling.
        longest_prompt: Tokens.
        nodes_per_pass: Most nodes of a forward pass of the learner.
    """

    cache: Callable[[int], RowCosts]
    sampling: AffineCost
    training: AffineCost
    resident_bytes: int
    longest_prompt: int
    nodes_per_pass: int

    def predict(self, rows_D: FloatArray, num_rollouts: int, num_prompts: int, nodes_per_update: float) -> int:
        """Return the bytes at the peak of a step: of sampling or of training, whichever is larger.

        Args:
            rows_D: Live rows of a prompt at each depth, shape [D].
            num_rollouts: N.
            num_prompts: Prompts of one call of the engine.
            nodes_per_update: Tree nodes of a mini-batch.
        """
        sampling = self.account(rows_D, num_rollouts, num_prompts)
        sampling += round(self.sampling((1.0, sampling, num_rollouts * num_prompts)))
        training = self.training((1.0, min(nodes_per_update, self.nodes_per_pass)))
        return max(self.resident_bytes + sampling, round(training))

    def account(self, rows_D: FloatArray, num_rollouts: int, num_prompts: int) -> int:
        """Return what the engine itself counts while sampling."""
        return _account(self.cache, rows_D, num_rollouts, num_prompts, self.longest_prompt)


@dataclass(frozen=True)
class Measured:
    """What a plan is made from.

    Attributes:
        counts: The pilot, prompt by prompt.
        summary: What its rollouts look like.
        cost: Seconds of a step.
        probes: What they were fitted to.
        memory: Predicts memory; None where the machine does not tell its own.
        rows_JD: Expected live rows of a prompt at each depth, shape [J, D].
    """

    counts: PilotCounts
    summary: PilotSummary
    cost: StepCost
    probes: list[StepTiming]
    memory: MemoryModel | None
    rows_JD: FloatArray


@dataclass(frozen=True)
class _Memory:
    """Bytes at the peaks of one probe, while sampling and while training, above the loaded model."""

    num_rollouts: int
    num_prompts: int
    rows_D: FloatArray
    nodes_per_update: float
    sampling: int
    training: int


class UninformativePilotError(UserError):
    """The pilot found no prompt with both outcomes: there is nothing to plan from."""

    exit_code = 1


def timing_sizes(
    num_prompts: int, num_rollouts: int, prompts_per_step: int, most_rollouts: int, quick: bool
) -> list[tuple[int, int]]:
    """Choose (rollouts per prompt, prompts) of the timing probes, besides the pilot itself.

    No probe has more rollouts than the pilot; after a slow pilot, no more than a quarter of them.

    Args:
        num_prompts: Prompts of the pilot.
        num_rollouts: Rollouts of each.
        prompts_per_step: Groups that a step of the recipe trains on.
        most_rollouts: Largest N in question.
        quick: Whether the pilot was.
    """
    most = num_prompts * num_rollouts // (1 if quick else 4)
    low = min(16, num_rollouts)
    sizes = [(low, max(1, prompts_per_step // 4)), (low, prompts_per_step)]
    sizes += [(min(factor * num_rollouts, most_rollouts, most), prompts_per_step) for factor in (4, 8)]
    return sorted({(n, max(1, min(p, most // n, num_prompts))) for n, p in sizes})


def measure(
    parts: PilotParts,
    num_prompts: int,
    num_rollouts: int,
    wanted: IntArray,
    scratch: Path,
    say: Callable[[str], None],
) -> Measured:
    """Take the pilot and time the probes.

    Args:
        parts: The parts of the run.
        num_prompts: Prompts of the pilot.
        num_rollouts: Rollouts of each; even.
        wanted: Numbers of rollouts in question, ascending, shape [J].
        scratch: An empty folder on the disk where runs are stored.
        say: Told what is being done.

    Returns:
        What was measured.

    Raises:
        UninformativePilotError: If no prompt had both correct and incorrect rollouts.
    """
    prompts = parts.stream.take(num_prompts)
    size = ceil(num_prompts / _CALLS)
    calls = [prompts[i : i + size] for i in range(0, num_prompts, size)]
    clocks = [Stopwatch() for _ in calls]
    sampled = [
        sample(parts, call, num_rollouts, seed=int(parts.generator(10 + i).integers(1 << 62)), clock=clock)
        for i, (call, clock) in enumerate(zip(calls, clocks, strict=True))
    ]
    groups = [g for s in sampled for g in s.groups]
    if not any(g.is_mixed for g in groups):
        raise UninformativePilotError(_nothing_mixed(groups))
    summary = summarise(groups, sum(clock.seconds()["generation"] for clock in clocks))
    spent = sum(clock.seconds()["generation"] + clock.seconds()["verification"] for clock in clocks)

    say("gradients of the pilot's prompts, on a copy of the model")
    first = StepTimer(parts, copy.deepcopy(parts.model), scratch)
    products = gradient_products(first.learner.model, groups, parts, parts.generator(1))
    first.finish(sampled[0], Stopwatch())  # what is imported or set up once is no memory of a step
    del first
    say("timing the phases of a step")
    prober = StepTimer(parts, copy.deepcopy(parts.model), scratch)
    quick = spent <= _QUICK_SECONDS
    sizes = timing_sizes(num_prompts, num_rollouts, parts.prompts_per_step, int(wanted[-1]), quick)
    memory = [prober.observe(prompts[:p], n, quick) for n, p in sizes]  # warms up, too
    timed: dict[tuple[int, int], list[tuple[Work, dict[str, float]]]] = {}
    for repeat in range(_REPEATS):
        for n, p in sizes:
            start = repeat * p % max(num_prompts - p, 1)
            timed.setdefault((n, p), []).append(prober.time(prompts[start : start + p], n, seed=repeat))
        if 1 + repeat < len(calls):
            done = prober.finish(sampled[1 + repeat], clocks[1 + repeat])
            timed.setdefault((num_rollouts, size), []).append(done)
    probes = [_median(n, observed) for (n, _), observed in sorted(timed.items())]

    growth = [tree_growth(g.tree, wanted, parts.sampling.max_new_tokens) for g in groups]
    return Measured(
        counts=count_pilot(parts, groups, growth, wanted, products),
        summary=summary,
        cost=StepCost.fit(probes, prober.per_step),
        probes=probes,
        memory=_fit_memory(parts, memory, max(len(p.token_ids) for p in prompts)),
        rows_JD=np.mean([g.rows_JD for g in growth], axis=0),
    )


def _nothing_mixed(groups: Sequence[Group]) -> str:
    solved = sum(g.num_correct > 0 for g in groups)
    seen = f"all were in {solved} and none in {len(groups) - solved}"
    return (
        f"in none of {len(groups)} prompts were some of {groups[0].tree.num_rollouts} rollouts correct and some not "
        f"({seen}), so there is no pass rate and no gradient to plan from; raise --pilot-rollouts or --pilot-prompts, "
        "or choose other prompts or another model"
    )


class StepTimer:
    """Runs the phases of a step.

    Args:
        parts: The parts of the run.
        model: What is trained: the run's model, or a copy if that must stay as it is.
        scratch: An empty folder for stored rollouts.
    """

    def __init__(self, parts: PilotParts, model: PreTrainedModel, scratch: Path) -> None:
        self._parts = parts
        self._directory = RunDirectory(scratch)
        self._device = parts.model.device
        gc.collect()  # what loading left behind must not look like memory that a step gives back
        self._loaded_bytes = bytes_in_use(self._device)
        self.learner = TreeLearner(model, parts.learner_settings)
        self.per_step = {"generation": 1.0, "verification": 1.0, "training": 1.0, "diagnostics": 1.0}
        if parts.store_every:
            self.per_step["storing"] = 1 / parts.store_every

    def time(self, prompts: Sequence[Prompt], num_rollouts: int, seed: int) -> tuple[Work, dict[str, float]]:
        """Run a step and return what it worked on and the seconds of each phase."""
        clock = Stopwatch()
        return self.finish(sample(self._parts, prompts, num_rollouts, seed, clock), clock)

    def finish(self, sampled: Sampled, clock: Stopwatch) -> tuple[Work, dict[str, float]]:
        """Run what comes after sampling and verifying."""
        groups = sampled.groups
        with clock("training"):
            batch = self.learner.penalised(self._batch(groups))
            update = self.learner.step(batch, self._parts.estimate_advantages(batch), seed=0)
        if self._parts.store_every:
            with clock("storing"):
                texts = [self._parts.grader.texts(g.tree) for g in groups]
                self._directory.write_rollouts(0, groups, sampled.verdicts, texts)
        with clock("diagnostics"):
            self._parts.diagnose(groups)
        work = Work(
            groups=len(groups),
            unique_tokens=sum(g.tree.num_unique_tokens for g in groups),
            sampled_tokens=sum(g.tree.num_sampled_tokens for g in groups),
            responses=sum(g.tree.num_responses for g in groups),
            trained_groups=len(batch),
            trained_nodes=update.trained_nodes,
            updates=self._parts.learner_settings.mini_batches,
        )
        return work, clock.seconds()

    def observe(self, prompts: Sequence[Prompt], num_rollouts: int, quick: bool) -> _Memory | None:
        """Return the memory at the peaks of a step; None where the machine does not tell.

        With `quick` a step goes before: the allocator of a CPU keeps much of what a phase has freed in the next one.
        """
        bytes_in_use(self._device)  # gives back what steps of other sizes left
        if quick:
            self.time(prompts, num_rollouts, seed=1)
        reset_peak(self._device)
        sampled = sample(self._parts, prompts, num_rollouts, 2, Stopwatch())
        sampling = peak_bytes(self._device)
        reset_peak(self._device)
        work, _ = self.finish(sampled, Stopwatch())
        training = peak_bytes(self._device)
        if sampling is None or training is None or self._loaded_bytes is None:
            return None
        depth = self._parts.sampling.max_new_tokens
        grown = [tree_growth(g.tree, np.array([num_rollouts]), depth) for g in sampled.groups]
        return _Memory(
            num_rollouts=num_rollouts,
            num_prompts=len(prompts),
            rows_D=np.mean([g.rows_JD[0] for g in grown], axis=0),
            nodes_per_update=work.trained_nodes / work.updates,
            sampling=sampling - self._loaded_bytes,
            training=training - self._loaded_bytes,
        )

    def _batch(self, groups: list[Group]) -> list[Group]:
        """Return the groups, repeated until every mini-batch has one."""
        least = self._parts.learner_settings.mini_batches
        return [groups[i % len(groups)] for i in range(max(least, len(groups)))]


def _median(num_rollouts: int, observed: Sequence[tuple[Work, dict[str, float]]]) -> StepTiming:
    """Return the mean work and the median seconds of repeats."""
    works = [vars(work) for work, _ in observed]
    work = Work(**{name: float(np.mean([w[name] for w in works])) for name in works[0]})
    phases = [name for name in observed[0][1] if name != "total"]
    return StepTiming(num_rollouts, work, {p: float(np.median([s[p] for _, s in observed])) for p in phases})


def _fit_memory(parts: PilotParts, observed: Sequence[_Memory | None], longest_prompt: int) -> MemoryModel | None:
    """Explain the peaks of the probes by the engine's own account and what comes on top."""
    seen = [o for o in observed if o is not None and o.training > 0]
    cache = _row_costs(parts.engine, parts.sampling.max_new_tokens)
    if len(seen) < len(observed) or cache is None:
        return None
    nodes_per_pass = parts.learner_settings.max_nodes or default_max_nodes(parts.model)
    trainable = sum(p.numel() * p.element_size() for p in parts.model.parameters() if p.requires_grad)
    settings = parts.learner_settings
    offloaded = settings.offload_reference and parts.model.device.type == "cuda"
    has_reference = settings.kl is not None and not offloaded
    resident = (3 + has_reference) * trainable  # gradients, two moments, the reference
    accounts = [_account(cache, o.rows_D, o.num_rollouts, o.num_prompts, longest_prompt) for o in seen]
    known_K = np.array(accounts, np.float64) + resident
    sampling = fit_affine(
        np.array([(1.0, a, o.num_rollouts * o.num_prompts) for a, o in zip(accounts, seen, strict=True)]),
        np.maximum([o.sampling for o in seen], known_K),
        known_K,
    )
    training = fit_affine(
        np.array([(1.0, min(o.nodes_per_update, nodes_per_pass)) for o in seen]),
        np.array([o.training for o in seen], np.float64),
    )
    return MemoryModel(cache, sampling, training, resident, longest_prompt, nodes_per_pass)


def _row_costs(engine: Engine, max_tokens: int) -> Callable[[int], RowCosts] | None:
    """Return the engine's model of row memory by the most rows that there can be; None for an engine without one."""
    if engine.row_costs(1, max_tokens) is None:
        return None

    def costs(max_rows: int) -> RowCosts:
        found = engine.row_costs(max_rows, max_tokens)
        assert found is not None  # the engine has just returned one
        return found

    return costs


def _account(
    cache: Callable[[int], RowCosts], rows_D: FloatArray, num_rollouts: int, num_prompts: int, longest_prompt: int
) -> int:
    rows = np.ceil(rows_D * num_prompts).astype(np.int64)
    return cache(num_rollouts * num_prompts).bytes_for(rows[rows > 0], num_prompts * longest_prompt)
