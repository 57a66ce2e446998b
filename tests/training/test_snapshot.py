"""The reference policy and the averaged weights: whose weights are in the model when, bit by bit."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from brorl.api.arguments import resolve_checkpoint
from brorl.errors import UserError
from brorl.training.learner import TreeLearner
from brorl.training.learner_state import ReferencePolicy
from learner_support import batch_of, learn
from recipes import recipe
from run_support import SMALL, command, metrics_without_times
from small_models import small_model

SETTINGS = recipe(learning_rate=1e-3, nodes_per_pass=128, max_grad_norm=1e9)


def weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def averaged(history: list[list[torch.Tensor]], decay: float) -> list[torch.Tensor]:
    """The average as a weighted sum: a plain mean over the first 1 / (1 - d) updates, d^age times it afterwards."""
    start = min(len(history), round(1 / (1 - decay)))
    average = [torch.stack(ws[:start]).mean(0) for ws in zip(*history, strict=True)]
    for new in history[start:]:
        average = [decay * a + (1 - decay) * w for a, w in zip(average, new, strict=True)]
    return average


@pytest.mark.parametrize("decay", [0.8, pytest.param(0.5, marks=pytest.mark.slow)])
def test_the_average_is_that_of_the_weights_after_each_update(
    decay: float, rng: np.random.Generator, tmp_path: Path
) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    learner = TreeLearner(model, recipe(SETTINGS, ema_decay=decay, mini_batches=1))
    history = []
    for seed in range(8):
        learn(learner, *batch_of(rng), seed=seed)
        history.append(weights(model))
    own, expected = history[-1], averaged(history, decay)
    learner.swap_averaged_weights()
    for got, mean, current in zip(weights(model), expected, own, strict=True):
        torch.testing.assert_close(got, mean, rtol=1e-12, atol=1e-14)
        assert not torch.equal(got, current)
    average = weights(model)
    learner.swap_averaged_weights()
    assert same(weights(model), own)

    with pytest.raises(ValueError, match=r"no averaged weights; set optimizer.ema_decay"):
        TreeLearner(model, SETTINGS).swap_averaged_weights()
    learner.save_pretrained(tmp_path)
    for folder, saved in ((tmp_path, own), (tmp_path / "ema", average)):
        assert same(weights(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)), saved)
    assert same(weights(model), own)


@pytest.mark.slow
def test_a_run_evaluates_its_averaged_weights_and_saves_them(tmp_path: Path) -> None:
    """A run that starts from them has the same evaluation at its start."""
    settings = (
        *SMALL,
        "--evaluation.num_prompts=16",
        "--evaluation.rollouts_per_prompt=32",
        "--optimizer.ema_decay=0.9",
    )
    fast = ("--steps=3", "--optimizer.learning_rate=3e-3", "--evaluation.every=3", "--optimizer.schedule=cosine")
    outcome = command("train", *settings, *fast, "--output_dir", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert "averaged weights pass@1" in outcome.said
    assert "learning rate 3.00e-03, cosine to 3.00e-04" in outcome.said
    last = metrics_without_times(tmp_path / "run")[-1]
    assert last["ema_evaluation"]["prompts"] != last["evaluation"]["prompts"]
    for folder, evaluation in (("", "evaluation"), ("ema", "ema_evaluation")):
        model = tmp_path / "run" / "checkpoints" / "step-000003" / folder
        path = tmp_path / f"from-{folder}"
        command("train", *settings, "--model", model, "--steps=1", "--output_dir", path)
        assert metrics_without_times(path)[0]["evaluation"]["prompts"] == last[evaluation]["prompts"]
        assert resolve_checkpoint(str(model)) == (str(model), tmp_path / "run" / "config.yaml")
    (tmp_path / "run" / "checkpoints" / "step-000003" / "COMMIT").unlink()
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        resolve_checkpoint(str(model))


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
    with pytest.raises(ValueError, match=r"model.norm.weight should have shape \(3,\), but has \(32,\)"):
        ReferencePolicy(other).load_state_dict(state)
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model.norm.weight should have shape \(32,\), but has None"):
        ReferencePolicy(model).load_state_dict(state)
