"""Exactness at the sizes of a run: long responses, a large vocabulary, the learner's own tiles and blocks.

The reference is the flat path in float32, which is the model's own forward pass. `exactness` compares it with plain
transformers in float64, on small models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gpu.exactness import autocast, checks_in_bfloat16, computed_by
from gpu.learners import FLAT, VARIANTS, LearnerVariant
from gpu.models import NO_END_TOKEN, speed_config, speed_model
from gpu.parts import Check, Findings
from gpu.references import Errors, errors_of
from gpu.timing import Device

from brorl.rollout.native.engine import NativeEngine
from brorl.sampling import SamplingParams

_SCALE = 4.0  # of the logits; a uniform distribution would hide errors
_LOGPROB_BOUND, _GRADIENT_BOUND = 5e-4, 2e-3  # in float32


@dataclass(frozen=True)
class LongTrial:
    """The sampled responses.

    Attributes:
        size: Name of the model's size.
        num_rollouts: Rollouts of the prompt.
        prompt_tokens: Tokens of the prompt.
        max_new_tokens: Tokens of a response.
        nodes: Nodes per forward pass.
        seed: Seed of the weights, the prompt and the draws.
    """

    size: str
    num_rollouts: int
    prompt_tokens: int
    max_new_tokens: int
    nodes: int
    seed: int


def long_part(device: Device, trial: LongTrial) -> Findings:
    """Compare the timed variants of the learner, and the engine, with the flat path in float32."""
    config = speed_config(trial.size, trial.prompt_tokens + trial.max_new_tokens)
    model = speed_model(config, device, _SCALE, trial.seed)
    rng = np.random.default_rng(trial.seed)
    prompt = rng.integers(0, config.vocab_size, trial.prompt_tokens).tolist()
    sampling = SamplingParams(max_new_tokens=trial.max_new_tokens)
    trees = NativeEngine(model, NO_END_TOKEN).sample([prompt], trial.num_rollouts, sampling, trial.seed)
    weights = [torch.from_numpy(rng.normal(size=tree.num_unique_tokens)).to(device.name) for tree in trees]
    model.train()

    def errors(variant: LearnerVariant, precision: str) -> Errors:
        with variant.applied(model), autocast("bfloat16" if precision == "bfloat16" else "float32", device):
            return errors_of(computed_by(variant, model, trees, weights, trial.nodes), expected)

    flat = LearnerVariant("flat", FLAT)
    expected = computed_by(flat, model, trees, weights, trial.nodes)
    plain = errors(flat, "bfloat16")
    sampled = torch.cat([torch.tensor(tree.logprob) for tree in trees])
    difference = float((sampled - torch.cat(expected.logprobs).cpu()).abs().max())
    checks = [Check("engine float32: log-prob", difference, _LOGPROB_BOUND)]
    for variant in VARIANTS:
        if variant.timed and variant.runs(device, "float32"):
            exact = errors(variant, "float32")
            checks += [
                Check(f"{variant.name} float32: log-prob", exact.logprob, _LOGPROB_BOUND),
                Check(f"{variant.name} float32: gradient", exact.gradient, _GRADIENT_BOUND),
                *checks_in_bfloat16(f"{variant.name} bfloat16", errors(variant, "bfloat16"), plain),
            ]
    nodes = sum(tree.num_unique_tokens for tree in trees)
    return Findings(checks, {"plain bfloat16": plain._asdict(), "nodes": nodes})
