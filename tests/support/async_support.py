"""Parts of asynchronous runs: an engine of scripted lengths, a verifier of first tokens, collectors in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import SampleTask, SamplingPool, split_prompt_seed
from brorl.training.async_collector import AsyncCollector
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from brorl.verification.grade import Grader
from foreground_collector import ForegroundCollector
from recipes import recipe
from virtual_pool import VirtualPool

RIGHT, WRONG, MORE, END = 7, 8, 6, 9
N = 4


class FirstTokenVerifier:
    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        correct = [text.startswith(str(RIGHT)) for _, text in items]
        return [Verdict(c, float(c), None, "correct" if c else "wrong", 0.0) for c in correct]


@dataclass
class WordyEngine:
    """Draws a first token that is right or wrong, and more tokens of a heavy-tailed number, by the seed alone.

    A log-prob is minus the version of the weights, so the trees show which weights sampled each token.
    """

    mixed_fraction: float = 1.0
    longest: int = 40
    version: int = 0
    sampled: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # prompt and version

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        trees = []
        for prompt, number, own in zip(task.prompts, task.rollouts_P, task.seed_P, strict=True):
            draws = np.random.default_rng(split_prompt_seed(own))
            self.sampled.append((tuple(prompt), self.version))
            mixed = draws.random() < self.mixed_fraction
            responses = []
            for i in range(number):
                begin = [] if prompt[-1] in (MORE, RIGHT, WRONG) else [RIGHT if mixed and i % 2 else WRONG]
                body = begin + [MORE] * min(int(draws.pareto(1.0)), self.longest) + [END]
                responses.append(body[: task.sampling.max_new_tokens])
            trees.append(
                RolloutTree.from_responses(
                    prompt,
                    responses,
                    [[-float(self.version)] * len(r) for r in responses],
                    [r[-1] == END for r in responses],
                )
            )
        return trees

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not list(weights)
        self.version = version


def by_tokens(task: SampleTask, trees: Sequence[RolloutTree]) -> float:
    """Return the virtual seconds of a task: one for each position."""
    assert len(task.prompts) == len(trees)
    return float(max(int(tree.length.max()) for tree in trees))


def prompts_of(number: int) -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), (100 + i,), str(RIGHT), "first") for i in range(number)]


def grader() -> Grader:
    return Grader({"first": FirstTokenVerifier()}, lambda tokens: " ".join(map(str, tokens)), RewardShaping())


def virtual_collector(
    engine: Any,
    *,
    workers: int = 3,
    per_step: int = 3,
    staleness: int = 1,
    duration: Callable[[SampleTask, Sequence[RolloutTree]], float] = by_tokens,
    num_prompts: int = 11,
    **changes: Any,
) -> tuple[AsyncCollector, VirtualPool]:
    """Make a collector in the foreground over a pool with a virtual clock."""
    pool = VirtualPool(engine, workers, duration)
    return collector_over(pool, per_step=per_step, staleness=staleness, num_prompts=num_prompts, **changes), pool


def collector_over(
    pool: SamplingPool,
    *,
    kind: type[AsyncCollector] = ForegroundCollector,
    per_step: int = 3,
    staleness: int = 1,
    num_prompts: int = 11,
    **changes: Any,
) -> AsyncCollector:
    parts = {"stream": PromptStream(prompts_of(num_prompts), seed=0), "grader": grader()}
    parts |= {name: changes.pop(name) for name in ("stream", "grader", "observe") if name in changes}
    settings = {"max_new_tokens": 64, "rollouts_per_prompt": N, "prompts_per_step": per_step, "max_tries": 20}
    return kind(pool=pool, config=recipe(**settings | {"max_staleness": staleness} | changes), **parts)
