"""AdamW with its moments in the memory of the CPU against `torch.optim.AdamW`, bit by bit."""

from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.training.learner import LearnerSettings
from brorl.training.offloaded_adamw import OffloadedAdamW
from brorl.training.tree_learner import TreeLearner
from learner_support import batch_of, learn
from small_models import small_model

SETTINGS = LearnerSettings(learning_rate=1e-2, max_nodes=128, weight_decay=0.1, warmup_updates=3)


def assert_same(some: TreeLearner, other: TreeLearner) -> None:
    for ours, theirs in zip(some.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    states = [learner.state_dict()["optimizer"]["state"] for learner in (some, other)]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        assert all(torch.equal(state[kind], states[1][index][kind]) for kind in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("from_plain", [False, True])
def test_updates_and_states_are_those_of_adamw(lora: bool, from_plain: bool, rng: np.random.Generator) -> None:
    """Two steps of both, then one more after either takes the state of the other."""
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1, dtype=torch.float32)
    if lora:
        add_adapter(model, LoraSettings(rank=2))
    host = replace(SETTINGS, offload_moments=True)
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
    start = [torch.from_numpy(rng.normal(size=n)) for n in (3, 5, 4)]
    found: list[list[nn.Parameter]] = []
    for optimizer_type in (torch.optim.AdamW, OffloadedAdamW):
        parameters = [nn.Parameter(x.clone()) for x in start]
        groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}]
        optimizer = optimizer_type(groups, lr=0.1, fused=True)
        for scale in (1.0, -2.0):
            parameters[0].grad, parameters[2].grad = scale * start[0], scale * start[2]
            optimizer.step()
        assert parameters[1] not in optimizer.state
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
        found.append(parameters)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_fails_leaves_the_groups_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = OffloadedAdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    monkeypatch.setattr(torch.optim.AdamW, "step", Mock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == parameters
