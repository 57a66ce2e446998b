"""AdamW with its moments on the host and in 8 bits, against `torch.optim.AdamW`, float64 and what is stored."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from brorl.algorithms.settings import KLPenalty
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.training import adamw
from brorl.training.adamw import AdamW
from brorl.training.learner import TreeLearner
from learner_support import batch_of, learn
from recipes import recipe
from small_models import mostly_slow, small_model

SETTINGS = recipe(learning_rate=1e-2, nodes_per_pass=128, weight_decay=0.1, warmup_updates=3)
EIGHT = recipe(SETTINGS, states="8bit")


def assert_same(some: TreeLearner, other: TreeLearner) -> None:
    for ours, theirs in zip(some.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    states = [learner.state_dict()["optimizer"]["state"] for learner in (some, other)]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        assert state.keys() == states[1][index].keys()
        assert all(torch.equal(value, states[1][index][kind]) for kind, value in state.items())


@pytest.fixture
def rows_of_slices(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices of a few rows of the small models."""
    monkeypatch.setattr(adamw, "_SLICE", 64 * int(rng.integers(1, 20)))


@pytest.mark.parametrize("lora", mostly_slow([False, True], True))
@pytest.mark.parametrize("from_plain", [False, True])
@pytest.mark.usefixtures("rows_of_slices")
def test_updates_and_states_on_the_host_are_those_of_adamw(
    lora: bool, from_plain: bool, rng: np.random.Generator
) -> None:
    """Two steps of both, then one more after either takes the state of the other."""
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1, dtype=torch.float32)
    if lora:
        add_adapter(model, LoraSettings(rank=2))
    host = recipe(SETTINGS, states="host")
    plain, offloaded = TreeLearner(deepcopy(model), SETTINGS), TreeLearner(deepcopy(model), host)
    batches = [batch_of(rng) for _ in range(3)]
    for seed in (0, 1):
        assert learn(plain, *batches[seed], seed=seed) == learn(offloaded, *batches[seed], seed=seed)
        assert_same(plain, offloaded)
    source, settings = (plain, host) if from_plain else (offloaded, SETTINGS)
    restored = TreeLearner(deepcopy(source.model), settings)
    restored.load_state_dict(deepcopy(source.state_dict()))
    assert_same(restored, source)
    assert learn(restored, *batches[2], seed=2) == learn(plain, *batches[2], seed=2)
    assert_same(restored, plain)


def test_parameters_without_a_gradient_have_no_moments_and_groups_keep_their_rates(rng: np.random.Generator) -> None:
    """Matrices, one of them transposed in memory, and a vector."""
    shapes = [(3,), (5,), (6, 70), (40, 7)]
    start = [torch.from_numpy(rng.normal(size=shape)) for shape in shapes]
    found: list[list[nn.Parameter]] = []
    for make in (torch.optim.AdamW, lambda *groups, **options: AdamW(*groups, states="host", **options)):
        parameters = [nn.Parameter(x.clone()) for x in start]
        parameters[3] = nn.Parameter(start[3].T.contiguous().T)
        groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}]
        optimizer = make(groups, lr=0.1, fused=True)
        for scale in (1.0, -2.0):
            for at in (0, 2, 3):
                parameters[at].grad = torch.empty_like(parameters[at]).copy_(scale * start[at])
            optimizer.step()
        assert parameters[1] not in optimizer.state
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
        found.append(parameters)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def large_model(rng: np.random.Generator) -> Any:
    """Return a model most of whose matrices are quantized, with rows of whole and of cut blocks."""
    return small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1, intermediate_size=300, dtype=torch.float32)


@pytest.mark.usefixtures("rows_of_slices")
def test_updates_in_8_bits_stay_near_those_of_float64(rng: np.random.Generator) -> None:
    """Twenty updates with the same gradients: the path of the weights differs by a few percent of its length."""
    start = [torch.from_numpy(rng.normal(size=shape)) for shape in ((20, 256), (64, 300), (300, 16), (70,))]
    scale = [torch.from_numpy(10 ** rng.uniform(-2, 0, size=x.shape)) for x in start]  # gradients of two decades
    mean = [torch.from_numpy(rng.normal(size=x.shape)) for x in start]
    exact = [nn.Parameter(x.clone()) for x in start]
    rounded = [nn.Parameter(x.float()) for x in start]
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = torch.optim.AdamW(exact, **options), AdamW(rounded, "8bit", fused=True, **options)
    for _ in range(20):
        for weight, other, s, m in zip(exact, rounded, scale, mean, strict=True):
            weight.grad = s * (m + torch.from_numpy(rng.normal(size=m.shape)))
            other.grad = weight.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for parameter, other, before in zip(exact, rounded, start, strict=True):
        weight = parameter.detach()
        path = (weight - before).norm()
        assert path > 0.1 * 20 * 1e-3 * before.numel() ** 0.5
        error = float((other.detach().double() - weight).norm() / path)
        assert error < (0.05 if before.ndim == 2 else 1e-4)
        assert (error > 1e-4) == (before.ndim == 2)  # matrices are rounded
        largest = (other.detach().double() - weight).abs().max() / (20 * 1e-3)
        assert largest < 0.4  # no weight runs away where its second moment is small


@pytest.mark.parametrize(("before", "after"), [("8bit", "device"), ("8bit", "host"), ("device", "8bit")])
def test_moments_of_a_run_with_other_bits_are_converted(before: Any, after: Any, rng: np.random.Generator) -> None:
    """In a new run from a checkpoint: to numbers exactly, to 8 bits within a few percent of the largest."""
    first = TreeLearner(large_model(rng), recipe(SETTINGS, states=before))
    learn(first, *batch_of(rng), seed=0)
    second = TreeLearner(deepcopy(first.model), recipe(SETTINGS, states=after))
    second.load_optimizer_state(deepcopy(first.state_dict()))
    back = TreeLearner(deepcopy(first.model), recipe(SETTINGS, states=before))
    back.load_optimizer_state(deepcopy(second.state_dict()))
    states = [learner.state_dict()["optimizer"]["state"] for learner in (first, back)]
    assert any(value.dtype == torch.uint8 for state in states[0].values() for value in state.values()) == (
        before == "8bit"
    )
    for index, state in states[0].items():
        for kind, value in state.items():
            got = states[1][index][kind]
            if kind != "step" and before == "device" and value.ndim == 2 and value.numel() >= 4096:
                assert 0 < (got - value).abs().max() < 0.02 * value.abs().max()
            elif value.dtype == torch.uint8:  # the largest negative number of a block moves its scale
                assert (got.int() - value.int()).abs().max() <= 1
            else:
                torch.testing.assert_close(got, value, rtol=0.01, atol=0)


def test_a_reset_of_the_reference_clears_codes_and_scales(rng: np.random.Generator) -> None:
    settings = recipe(EIGHT, kl=KLPenalty(coefficient=0.5))
    learner, batch = TreeLearner(large_model(rng), settings), batch_of(rng)
    learn(learner, *batch, seed=0)
    learner.reset_reference(clear_optimizer=True)
    other = TreeLearner(deepcopy(learner.model), settings)
    for trained in (learner, other):  # the same rate of the warm-up
        trained._updates = 3
    assert learn(learner, *batch, seed=1) == learn(other, *batch, seed=1)
    for (_, ours), (_, theirs) in zip(learner.weights(), other.weights(), strict=True):
        assert torch.equal(ours, theirs)
