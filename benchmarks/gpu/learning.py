"""Learning: nodes per second by attention, the share of the matrix peak, the first step apart, and peak memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu.device import Device
from gpu.exactness import parity
from gpu.launches import profiled
from gpu.models import LearnerVariant, TimedModel
from gpu.roofline import Ceilings, flops
from harness import Findings, Limits, timed, turns
from ours import tree_work

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.settings import AdvantageSettings
from brorl.config.settings import TrainConfig
from brorl.model.flat_path import num_flat_tokens
from brorl.model.memory_prediction import predict_memory
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.tree_path import TreeForward
from brorl.rollout.settings import EngineSettings
from brorl.training.learner import TreeLearner
from brorl.training.settings import OptimizerSettings
from brorl.tree import RolloutTree

_SHARED = 4  # a response shares up to one part in so many with the one before
_NUM_PASSES = 3  # forward passes whose arithmetic is counted: forward and backward


@dataclass(frozen=True)
class Responses:
    """What is learned from."""

    model: TimedModel
    num_responses: int  # of one prompt
    prompt_tokens: int  # of the prompt
    tokens: int  # of a response
    seed: int  # of weights and responses

    @property
    def name(self) -> str:
        """The model, the responses and their length."""
        return f"{self.model.name} {self.num_responses} responses of {self.tokens}"

    def tree(self, vocabulary: int) -> RolloutTree:
        """Return random responses that share random prefixes."""
        rng = np.random.default_rng(self.seed)
        rows = rng.integers(0, vocabulary, (self.num_responses, self.tokens))
        for row in range(1, self.num_responses):
            shared = int(rng.integers(0, self.tokens // _SHARED))
            rows[row, :shared] = rows[row - 1, :shared]
        prompt = rng.integers(0, vocabulary, self.prompt_tokens).tolist()
        logprobs = np.full(rows.shape, -np.log(vocabulary)).tolist()
        return RolloutTree.from_responses(prompt, rows.tolist(), logprobs)


class Learning:
    """The measurements of some responses.

    Args:
        responses: What is learned from.
        device: The device.
        limits: Limits of the steps after the first one.
        ceilings: Returns the ceilings of the device.
    """

    def __init__(self, responses: Responses, device: Device, limits: Limits, ceilings: Callable[[], Ceilings]) -> None:
        self.responses = responses
        self._device, self._limits, self._ceilings = device, limits, ceilings

    def measure(self, variant: LearnerVariant) -> Findings:
        """Measure a step: old log-probs, gradient and update."""
        if not variant.runs(self._device, "bfloat16"):
            return Findings(skipped="it needs a CUDA device")
        responses, before = self.responses, self._device.bytes_in_use()
        model = responses.model.load(self._device, responses.prompt_tokens + responses.tokens, responses.seed)
        tree = responses.tree(model.config.vocab_size)
        optimizer = OptimizerSettings(learning_rate=1e-7, mini_batches=1)
        engine = EngineSettings(attention="tiled", nodes_per_pass=variant.nodes_per_pass)
        config = TrainConfig(dtype="bfloat16", optimizer=optimizer, engine=engine)
        estimate = advantage_estimator(AdvantageSettings())
        said: list[str] = []
        self._device.reset_peak()
        with ExitStack() as stack:
            with torch.autocast(self._device.torch.type, torch.bfloat16):  # as the learner's passes
                forward = stack.enter_context(variant.applied(model))
            learner = TreeLearner(model, config, said.append, forward=forward)

            def step() -> None:
                learner.learn([parity(tree)], estimate, responses.seed)

            first_s = timed(step, self._device.synchronize).seconds
            if variant.records:  # passes are recorded when they occur for the second time
                step()
            done = [turn.seconds for turn in turns(step, self._limits, self._device.synchronize)]
            peak = self._device.peak_bytes() - before
            top = profiled(step, self._device).top()
        seconds = median(done)
        flops_per_s = flops(model, tree_work(tree), _NUM_PASSES) / seconds
        facts: dict[str, Any] = {
            "step_s": seconds,
            "first_s": first_s,
            "seconds": done,
            "nodes": tree.num_unique_tokens,
            "nodes_per_s": tree.num_unique_tokens / seconds,
            "tokens_per_s": tree.num_sampled_tokens / seconds,
            "unique_fraction": tree.num_unique_tokens / tree.num_sampled_tokens,
            "flat_tokens": num_flat_tokens([tree]),
            "flops_per_s": flops_per_s,
            "matmul_fraction": flops_per_s / self._ceilings().matmul_flops_per_s,
            "peak_bytes": peak,
            "predicted_bytes": self._predicted(variant),
            "top": top,
            "said": said,
            "setting": asdict(responses),
        }
        return Findings(facts=facts)

    def _predicted(self, variant: LearnerVariant) -> int:
        """Return the predicted bytes of the learner, without the weights that the engine samples with."""
        responses = self.responses
        settings = MemorySettings(
            "bfloat16",
            0,
            nodes_per_pass=variant.nodes_per_pass,
            gradient_checkpointing=variant.checkpointing,
            forward="tree" if isinstance(variant.forward, TreeForward) else "flat",
            device=self._device.torch.type,
        )
        sizes = Workload(responses.prompt_tokens, responses.tokens, responses.num_responses, 1)
        plan = predict_memory(responses.model.config(responses.prompt_tokens + responses.tokens), settings, sizes)
        copy = sum(line.num_bytes for line in plan.kept if line.name == "sampling copy")
        return plan.kept_bytes - copy + plan.learning.num_bytes
