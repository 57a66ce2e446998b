"""Every kind of model is trained, saved and loaded by transformers, whole and as adapters."""

import warnings
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from architectures import EXACT, UNREACHABLE, tiny
from brorl.model.forward import choose_forward
from brorl.model.load import load_model
from brorl.model.lora import adapter_shapes, target_layers
from brorl.model.settings import LoraSettings
from brorl.training.learner import TreeLearner
from learner_support import batch_of, learn
from recipes import recipe
from small_models import mostly_slow

CPU = torch.device("cpu")
KINDS = {**EXACT, **UNREACHABLE}


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4.0)], ids=["whole", "adapters"])
@pytest.mark.parametrize("kind", mostly_slow(KINDS, "smollm3"))
def test_what_is_trained_is_what_transformers_loads(
    kind: str, lora: LoraSettings | None, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Two steps change the weights, and the saved model has the logits of the learner's model."""
    base = tiny(kind, KINDS[kind])
    base.save_pretrained(tmp_path / "base")
    model = load_model(str(tmp_path / "base"), CPU, torch.float32, lora)
    if lora:
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sum(
            map(prod, adapter_shapes(base, lora))
        )
        adapted = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
        assert adapted == set(target_layers(base, ("all-linear",)))
    forward = choose_forward(model, context=16)
    learner = TreeLearner(model, recipe(learning_rate=1e-2), forward=forward)
    ids = torch.from_numpy(rng.integers(1, 17, (2, 9)))
    with torch.no_grad():
        before = model.eval()(input_ids=ids, use_cache=False).logits
    for seed in range(2):
        learn(learner, *batch_of(rng, 2), seed=seed)
    learner.save_pretrained(tmp_path / "saved")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of peft
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / ("base" if lora else "saved"), dtype=torch.float32)
        if lora:
            loaded = PeftModel.from_pretrained(loaded, str(tmp_path / "saved"))
        after, expected = (one.eval()(input_ids=ids, use_cache=False).logits for one in (loaded, model))
        merged = load_model(str(tmp_path / "saved"), CPU, torch.float32).eval()(input_ids=ids, use_cache=False).logits
    scale = float(expected.abs().max())
    assert float((before - expected).abs().max()) > 1e-3 * scale
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4 * scale)
    torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-3 * scale)
