"""bfloat16: hooks are accepted, and sampled log-probs are near the log-probs of the float32 weights before rounding."""

from pathlib import Path

import numpy as np
import pytest
import torch

from brorl.model.forward import check_hooks
from brorl.model.load import load_model
from brorl.model.settings import LoraSettings
from brorl.model.tree_path import tree_logprobs
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from small_models import ARCHITECTURES, mostly_slow, small_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES, "llama", "hooked"))
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_a_bfloat16_sampler_agrees_with_the_float32_learner(
    architecture: str, lora: LoraSettings | None, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Under autocast as the learner computes, in bfloat16 as the engine does, in float32: alike to a few percent."""
    seed = int(rng.integers(1 << 30))
    small_model(architecture, seed=seed, scale=0.1, dtype=torch.float32).save_pretrained(tmp_path)
    sampler = load_model(str(tmp_path), CPU, torch.bfloat16, lora).eval()
    master = load_model(str(tmp_path), CPU, torch.float32).eval()
    check_hooks(sampler)
    (tree,) = NativeEngine(sampler, 0).sample(
        SampleTask([(3, 4, 5, 9)], 64, SamplingParams(max_new_tokens=12), seed=seed)
    )
    with torch.no_grad():
        (exact,) = tree_logprobs(master, [tree])
        (low,) = tree_logprobs(sampler, [tree])
        with torch.autocast("cpu", torch.bfloat16):
            (mixed,) = tree_logprobs(master, [tree])
    for name, logprob in (("sampled", tree.logprob), ("sampler", low.numpy()), ("autocast", mixed.numpy())):
        error = np.abs(logprob - exact.numpy())
        assert error.max() < 0.2, name
        assert error.mean() < 0.03, name
    assert np.abs(low.numpy() - exact.numpy()).max() > 0  # it does compute in bfloat16
