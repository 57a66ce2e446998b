"""Adapters on a base in NF4: the tree's gradient equals the flattened batch's in the dequantized model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from brorl.config.reading import make_config
from brorl.errors import UserError
from brorl.model.load import load_model
from brorl.model.memory_prediction import predict_memory
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.settings import LoraSettings
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from path_checks import assert_products_written_out
from run_support import SMALL, command
from small_models import small_model

pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
SETTINGS = LoraSettings(rank=4, alpha=8.0, quantization="nf4")


@pytest.fixture
def quantized(tmp_path: Path, rng: np.random.Generator) -> PreTrainedModel:
    """A model in NF4 with adapters that matter."""
    small_model(seed=int(rng.integers(1 << 30)), dtype=torch.float32).save_pretrained(tmp_path / "base")
    model = load_model(str(tmp_path / "base"), CPU, torch.float32, SETTINGS)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.from_numpy(0.3 * rng.normal(size=parameter.shape)).float()
    return model


def dequantized(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of the quantized layers as bitsandbytes stores them, by the name of the layer."""
    from bitsandbytes.functional import dequantize_4bit

    return {
        name: dequantize_4bit(layer.base_layer.weight.data, layer.base_layer.weight.quant_state)
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def test_log_probs_and_gradients_are_those_of_the_dequantized_model(
    quantized: PreTrainedModel, rng: np.random.Generator
) -> None:
    NativeEngine(quantized, 5).sample(
        SampleTask([(1, 2, 3)], 8, SamplingParams(max_new_tokens=4), seed=1)
    )  # as a run does
    scale = SETTINGS.alpha / SETTINGS.rank
    assert_products_written_out(quantized.train(), small_model(), dequantized(quantized), scale, rng, 1e-4)


def test_the_base_takes_four_bits_per_weight(quantized: PreTrainedModel) -> None:
    layers = [m.base_layer for m in quantized.modules() if hasattr(m, "lora_A")]
    assert layers
    assert all(not isinstance(layer.weight, nn.Parameter) or layer.weight.dtype == torch.uint8 for layer in layers)
    stored = sum(layer.weight.numel() for layer in layers)
    assert stored * 2 == sum(w.numel() for w in dequantized(quantized).values())


@pytest.mark.slow
def test_the_predicted_memory_is_less_by_the_quantized_weights() -> None:
    config = small_model(seed=0).config
    lines = {}
    for kind in ("none", "nf4"):
        lora = LoraSettings(rank=4, quantization=kind)
        plan = predict_memory(config, MemorySettings("bfloat16", 1 << 20, lora=lora), Workload())
        lines[kind] = next(line.num_bytes for line in plan.kept if line.name == "weights")
    model = small_model(seed=0)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()]
    numbers = sum(m.weight.numel() for m in linear)
    assert lines["none"] - lines["nf4"] == pytest.approx(numbers * (2 - 4.127 / 8), abs=1)


@pytest.mark.slow
def test_a_run_trains_the_adapters_alone_and_resumes_bitwise(tmp_path: Path) -> None:
    options = ("--lora.rank=4", "--lora.quantization=nf4", "--checkpoint_every=1", "--keep_checkpoints=0")
    outputs = {}
    for name, steps in (("whole", 2), ("parts", 1)):
        folder = tmp_path / name
        assert command("train", "quickstart", *SMALL, *options, f"--steps={steps}", "--output_dir", folder).code == 0
    assert command("resume", tmp_path / "parts", "--steps=2").code == 0
    for name in ("whole", "parts"):
        file = tmp_path / name / "checkpoints" / "step-000002" / "adapter_model.safetensors"
        outputs[name] = file.read_bytes()
    first = (tmp_path / "whole" / "checkpoints" / "step-000001" / "adapter_model.safetensors").read_bytes()
    assert outputs["whole"] == outputs["parts"] != first


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"lora.rank": 0}, "set lora.rank"),
        ({"dtype": "float64"}, "set dtype: float32"),
        ({"cluster.nodes": 1}, "set cluster.nodes: 0"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, object], part: str) -> None:
    with pytest.raises(UserError, match=part):
        make_config({}, {"lora.rank": 4, "lora.quantization": "nf4", **settings}, "test")
