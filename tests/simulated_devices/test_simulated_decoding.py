"""Decoding on a simulated CUDA device: the trees of a CPU, the weights that are joined, and graphs that it refuses."""

import json
from pathlib import Path

import pytest
from simulated_device import run

pytestmark = [pytest.mark.slow, pytest.mark.linux]

TREES = """
import json
import numpy as np
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from small_models import small_model

lines, same, agrees = [], [], []
for architecture, shared_tokens in (("llama", 0), ("qwen3", 20), ("hooked", 20)):
    rng = np.random.default_rng(7)
    model = small_model(architecture, seed=3, scale=0.3)
    shared = rng.integers(1, 17, shared_tokens).tolist()
    prompts = [shared + rng.integers(1, 17, n).tolist() for n in (5, 2, 9)]
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=40, min_new_tokens=2)
    def sample(memory=1 << 30, **options):
        engine = NativeEngine(model, 0, memory, echo=lines.append, **options)
        return engine.sample(SampleTask(prompts, [30, 1, 12], sampling, seed=5))
    expected = sample()
    model.cuda()
    for trees in (sample(), sample(60_000), sample(share_prefixes=False, graphs="off")):
        same += [a.responses() == b.responses() for a, b in zip(trees, expected, strict=True)]
        agrees += [bool(np.allclose(a.logprob, b.logprob, rtol=1e-11)) for a, b in zip(trees, expected, strict=True)]
try:
    sample(graphs="on")
    error = ""
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
print(json.dumps([same, agrees, [line for line in lines if 'Triton' not in line], error]))
"""

JOINED = """
import torch
from brorl.model.forward import is_exact
from brorl.model.llama_pass import LlamaPass, has_llama_layout, num_copied_weights
from brorl.model.tree_path import TreeForward
from brorl.model.tree_attention import ModelPass, prefill, tree_attention
from small_models import small_model

for architecture in ("llama", "qwen2", "qwen3", "mistral"):
    model = small_model(architecture, seed=5).cuda()
    assert has_llama_layout(model) and is_exact(model, TreeForward(llama_chunks=True))
    packed = LlamaPass(model, model.dtype)
    assert sum(copy.numel() for copy, _ in packed._copies) == num_copied_weights(model, "cuda")
    addresses = packed.addresses(50)
    for _ in range(2):
        packed.refresh()
        with torch.no_grad(), tree_attention(model):
            got, expected = (prefill(way, [[1, 2, 3], [4, 5]])[1] for way in (packed, ModelPass(model)))
        torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=1e-11, atol=1e-12)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert packed.addresses(50) == addresses
"""

RECORDED = """
import json
import numpy as np
import torch
import brorl.rollout.native_engine as native
from brorl.model.flat_path import FlatForward
from brorl.model.forward import choose_forward, without_windows
from brorl.model.tree_path import TreeForward
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.rollout.native.graphs import StepGraphs
from brorl.sampling import SamplingParams
from recorded_steps import RecordedSteps
from small_models import small_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig

def gemma():
    torch.manual_seed(4)
    config = Gemma3TextConfig(
        vocab_size=17, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.4,
    )
    return AutoModelForCausalLM.from_config(config).double().eval()

same, lines, captures = [], [], []
def new_capture():
    captures.append(RecordedSteps())
    return captures[-1]
native.graphs_on = lambda *_: StepGraphs("on", lines.append, new_capture)
for model, shared_tokens in ((small_model("qwen3", seed=3, scale=0.3), 0), (gemma(), 30)):
    rng = np.random.default_rng(7)
    shared = rng.integers(1, 17, shared_tokens).tolist()
    prompts = [shared + rng.integers(1, 17, n).tolist() for n in (25, 2, 9)]
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=35)
    def sample():
        forward = choose_forward(model, context=90)
        task = SampleTask(prompts, [9, 1, 5], sampling, seed=5)
        return NativeEngine(model, 0, forward=forward).sample(task), forward
    expected, on_cpu = sample()
    model.cuda()
    trees, on_device = sample()
    same += [a.responses() == b.responses() for a, b in zip(trees, expected, strict=True)]
    assert isinstance(on_device, TreeForward)
assert isinstance(on_cpu, FlatForward) and on_device.window == 16
assert isinstance(without_windows(model, on_device), FlatForward)
lines = [line for line in lines if 'Triton' not in line]
print(json.dumps([same, lines, sum(capture.replays for capture in captures)]))
"""


def test_trees_are_those_of_a_cpu(device: Path) -> None:
    same, agrees, lines, error = json.loads(run(device, TREES).splitlines()[-1])
    assert len(same) == len(agrees) == 27
    assert all(same)
    assert all(agrees)
    said = "decoding launches its kernels one by one, without CUDA graphs: "
    assert len(lines) == 6  # one for each engine that tried
    assert all(line.startswith(said) for line in lines)
    assert error.startswith("UserError: engine.cuda_graphs = on, but decoding cannot be recorded as CUDA ")


def test_joined_weights_are_counted_and_follow_the_model(device: Path) -> None:
    run(device, JOINED)


def test_recorded_steps_touch_no_memory_of_the_host(device: Path) -> None:
    """A qwen3 whose single rows the device draws, and a Gemma 3 beyond its window, which a CPU samples in its cache."""
    same, lines, replays = json.loads(run(device, RECORDED).splitlines()[-1])
    assert len(same) == 6
    assert all(same)
    assert not lines
    assert replays > 50
