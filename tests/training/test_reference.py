"""The reference policy: whose weights are in the model when, bit by bit."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from brorl.training.learner_state import ReferencePolicy
from small_models import small_model


@pytest.fixture
def model(rng: np.random.Generator) -> PreTrainedModel:
    """A model with tied embeddings whose first layer is frozen."""
    model = small_model(
        seed=int(rng.integers(1 << 30)), dtype=torch.float32, num_hidden_layers=2, tie_word_embeddings=True
    )
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    return model


def move(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.125).add_(0.01)


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 9)[None]).logits


@pytest.mark.parametrize("offload", [False, True])
def test_the_references_weights_are_in_place_and_the_models_own_come_back(
    model: PreTrainedModel, offload: bool
) -> None:
    start, expected = weights(model), logits(model)
    reference = ReferencePolicy(model, offload)
    move(model)
    own, where = weights(model), [p.data_ptr() for p in model.parameters()]
    assert not same(own, start)
    with reference.in_place():
        assert same(weights(model), start)
        assert torch.equal(logits(model), expected)
    assert same(weights(model), own)
    assert [p.data_ptr() for p in model.parameters()] == where
    assert not torch.equal(logits(model), expected)
    with pytest.raises(KeyboardInterrupt), reference.in_place():
        raise KeyboardInterrupt
    assert same(weights(model), own)
    assert [p.data_ptr() for p in model.parameters()] == where


def test_only_what_is_trained_is_kept(model: PreTrainedModel) -> None:
    reference = ReferencePolicy(model)
    frozen = model.model.layers[0].mlp.up_proj.weight
    kept = reference.state_dict()
    assert set(kept) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(".layers.0." in name for name in kept)
    with torch.no_grad():
        frozen.add_(1.0)  # shared: the reference sees it too
    with reference.in_place():
        assert model.model.layers[0].mlp.up_proj.weight is frozen
        own = frozen.clone()
    assert torch.equal(frozen, own)


@pytest.mark.parametrize("offload", [False, True])
def test_reset_takes_the_current_weights_and_a_later_step_does_not_move_them(
    model: PreTrainedModel, offload: bool
) -> None:
    reference = ReferencePolicy(model, offload)
    move(model)
    reference.reset()
    taken = weights(model)
    move(model)
    with reference.in_place():
        assert same(weights(model), taken)


def test_the_state_of_another_model_is_refused(model: PreTrainedModel) -> None:
    state = ReferencePolicy(model).state_dict()
    other = deepcopy(model)
    other.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"model.norm.weight should have shape \(3,\), and has \(32,\)"):
        ReferencePolicy(other).load_state_dict(state)
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model.norm.weight should have shape \(32,\), and has None"):
        ReferencePolicy(model).load_state_dict(state)
