"""Averaged weights against sums over the weights of every update; their place in checkpoints and evaluations."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from brorl.api.recipe import resolve_checkpoint
from brorl.errors import UserError
from brorl.training.tree_learner import TreeLearner
from learner_support import batch_of, learn
from recipes import recipe
from run_support import SMALL, command, metrics_without_times
from small_models import small_model

SETTINGS = recipe(learning_rate=1e-3, nodes_per_pass=128, max_grad_norm=1e9)


def weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def averaged(history: list[list[torch.Tensor]], decay: float) -> list[torch.Tensor]:
    """The average as a weighted sum: a plain mean over the first 1 / (1 - d) updates, d^age times it afterwards."""
    start = min(len(history), round(1 / (1 - decay)))
    found = [torch.stack(ws[:start]).mean(0) for ws in zip(*history, strict=True)]
    for new in history[start:]:
        found = [decay * a + (1 - decay) * w for a, w in zip(found, new, strict=True)]
    return found


@pytest.mark.parametrize("decay", [0.5, 0.8])
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
    learner.exchange_average()
    for got, mean, current in zip(weights(model), expected, own, strict=True):
        torch.testing.assert_close(got, mean, rtol=1e-12, atol=1e-14)
        assert not torch.equal(got, current)
    average = weights(model)
    learner.exchange_average()
    assert same(weights(model), own)

    with pytest.raises(ValueError, match=r"no averaged weights; set optimizer.ema_decay"):
        TreeLearner(model, SETTINGS).exchange_average()
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
