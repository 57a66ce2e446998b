"""The choice between trees and rows: measured with a clock that is given, kept in the learner's state."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from brorl.model.chunks import ChunkSize, num_tree_tokens
from brorl.model.flat_path import FlatForward, num_flat_tokens
from brorl.model.tree_path import TreeForward
from brorl.training import learner as learner_module
from brorl.training import policy_logprobs
from brorl.training.learner import TreeLearner
from brorl.training.policy_logprobs import LITTLE_SHARED, measured_forward
from brorl.tree import RolloutTree
from recipes import recipe
from small_models import random_tree, small_model

TREE = TreeForward()


def little_shared(rng: np.random.Generator) -> list[RolloutTree]:
    return [RolloutTree.from_responses([3], rng.integers(0, 17, (4, 20)).tolist()) for _ in range(3)]


def clock(taken: list[float]) -> Callable[[], float]:
    """Return a clock by which pieces of work take these seconds, one after the other."""
    times = itertools.accumulate(itertools.chain.from_iterable((0.0, one) for one in taken))
    return lambda: next(times)


def test_the_last_pass_of_each_way_decides_and_one_line_has_both(rng: np.random.Generator) -> None:
    model, trees = small_model(), little_shared(rng)
    assert num_tree_tokens(trees) > LITTLE_SHARED * num_flat_tokens(trees)
    chosen, line = measured_forward(model, TREE, trees, 1024, clock([9.0, 9.0, 0.5, 9.0, 9.0, 0.2]))
    assert isinstance(chosen, FlatForward)
    assert all(p.grad is None for p in model.parameters())
    distinct, tokens = num_tree_tokens(trees), num_flat_tokens(trees)
    assert line == (
        f"responses share little: {distinct} distinct tokens took 500 ms as trees, {500 / distinct:.4f} ms each, and "
        f"{tokens} tokens took 200 ms as rows, {200 / tokens:.4f} ms each; the learner uses rows"
    )
    chosen, line = measured_forward(model, TREE, trees, 1024, clock([0.0, 0.0, 0.2, 0.0, 0.0, 0.5]))
    assert chosen is TREE
    assert line is not None
    assert line.endswith("the learner uses trees")


def test_recorded_passes_free_their_memory_before_rows_are_measured(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    graphs = SimpleNamespace(clear=lambda: events.append("clear"))

    def measure(_: Any, path: Any, *__: Any) -> float:
        events.append(type(path).__name__)
        return 1.0

    monkeypatch.setattr(policy_logprobs, "_milliseconds", measure)
    measured_forward(small_model(), TreeForward(graphs=graphs), little_shared(rng), 1024)  # type: ignore[arg-type]
    assert events == ["TreeForward", "clear", "FlatForward"]


def test_rows_that_run_out_of_memory_are_not_used(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even smaller passes are tried: a response of the length limit is never split."""
    model, trees = small_model(), little_shared(rng)
    attempts: list[int] = []

    def full(*_: Any, max_nodes: int, **__: Any) -> Any:
        attempts.append(max_nodes)
        parameter = next(model.parameters())
        parameter.grad = torch.ones_like(parameter)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(policy_logprobs, "flat_forward", lambda _: SimpleNamespace(chunk_logprobs=full))
    size = ChunkSize(1024, pytest.fail)
    chosen, line = size.run(lambda: measured_forward(model, TREE, trees, size.value, clock([0.0, 0.0, 0.2, 0.0, 0.0])))
    assert chosen is TREE
    assert line == "responses share little, but there is too little memory for rows; the learner uses trees"
    assert (attempts, size.value) == ([1024], 1024)
    assert all(p.grad is None for p in model.parameters())


def test_nothing_is_measured_where_trees_share(rng: np.random.Generator) -> None:
    def never() -> float:
        raise AssertionError

    trees = [random_tree(rng, num_rollouts=30, prompt_length=20)]
    assert num_tree_tokens(trees) < LITTLE_SHARED * num_flat_tokens(trees)
    assert measured_forward(small_model(), TREE, trees, 1024, never) == (TREE, None)
    flat = FlatForward("a test")
    assert measured_forward(small_model(), flat, little_shared(rng), 1024, never) == (flat, None)


def test_a_part_of_the_trees_is_measured_if_they_do_not_fit(rng: np.random.Generator) -> None:
    trees = little_shared(rng)
    _, line = measured_forward(small_model(), TREE, trees, 40, clock([0.0, 0.0, 1.0, 0.0, 0.0, 2.0]))
    assert line is not None
    assert int(line.split(": ")[1].split()[0]) < num_tree_tokens(trees)


@pytest.mark.parametrize("rows", [True, False])
def test_a_resumed_learner_makes_the_same_choice_without_a_measurement(
    rows: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trees = small_model(dtype=torch.float32), little_shared(rng)
    flat = FlatForward("measured")
    calls: list[Any] = []

    def measured(*args: Any) -> tuple[Any, str]:
        calls.append(args)
        return (flat if rows else TREE), "a line"

    monkeypatch.setattr(learner_module, "measured_forward", measured)
    lines: list[str] = []
    learner = TreeLearner(model, recipe(), lines.append)
    learner._choose_forward(trees)
    assert calls == []  # on a CPU
    assert learner.state_dict()["takes_flat_path"] is None
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    learner._choose_forward(trees)
    assert len(calls) == 1
    assert lines == ["a line"]
    state = learner.state_dict()
    assert state["takes_flat_path"] is rows
    resumed = TreeLearner(model, recipe(), lines.append)
    resumed.load_state_dict(state)
    resumed._choose_forward(trees)
    assert len(calls) == 1
    assert isinstance(resumed._logprobs.forward, FlatForward if rows else TreeForward)
