"""The memory of a training step at any size, from the peaks of a few small steps.

In: peaks while sampling and while training, above the loaded model. Out: the predicted bytes at the peak of a step.
The engine's own prediction for its rows is the known part of sampling; affine costs explain the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from brorl.planning.pilot import PilotParts
from brorl.planning.step_cost import AffineCost, fit_affine

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PeakMemory:
    """Bytes above the loaded model at the peaks of one step.

    Attributes:
        num_rollouts: N.
        num_prompts: Prompts of the step.
        rows_D: Expected live rows of a prompt at each depth, shape [D].
        nodes_per_update: Tree nodes of a mini-batch.
        sampling: Peak while sampling.
        training: Peak while training.
    """

    num_rollouts: int
    num_prompts: int
    rows_D: FloatArray
    nodes_per_update: float
    sampling: int
    training: int


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of a step above the loaded model.

    Attributes:
        rows: The engine's own prediction, from live rows of a prompt at each depth, rollouts and prompts.
        sampling: Further bytes while sampling (activations, draws), affine in that prediction and in the rollouts.
        training: Bytes of gradients, optimizer and activations, affine in the nodes of a forward pass.
        resident_bytes: Gradients and optimizer state, which stay while sampling.
        nodes_per_pass: Largest number of nodes in a forward pass of the learner.
    """

    rows: Callable[[FloatArray, int, int], int]
    sampling: AffineCost
    training: AffineCost
    resident_bytes: int
    nodes_per_pass: int

    @classmethod
    def fit(cls, parts: PilotParts, peaks: Sequence[PeakMemory | None], longest_prompt: int) -> MemoryModel | None:
        """Fit the model to some peaks.

        Args:
            parts: The parts of the run.
            peaks: The peak of each measured step; None where the machine does not report its memory.
            longest_prompt: Tokens of the longest prompt.

        Returns:
            The model; None if a peak is missing, or if the engine has no model of its rows.
        """
        known = [p for p in peaks if p is not None and p.training > 0]
        if len(known) < len(peaks) or parts.engine.row_costs(1, 1) is None:
            return None
        settings = parts.learner_settings
        rows = partial(parts.sampling_bytes, prompt_tokens=longest_prompt)
        nodes_per_pass = settings.max_nodes or settings.forward.default_max_nodes(parts.model)
        trainable = sum(p.numel() * p.element_size() for p in parts.model.parameters() if p.requires_grad)
        offloaded = settings.offload_reference and parts.model.device.type == "cuda"
        has_reference = settings.kl is not None and not offloaded
        resident = (3 + has_reference) * trainable  # gradients, two moments, the reference
        rows_K = [rows(p.rows_D, p.num_rollouts, p.num_prompts) for p in known]
        known_K = np.array(rows_K, np.float64) + resident
        sampling = fit_affine(
            np.array([(1.0, r, p.num_rollouts * p.num_prompts) for r, p in zip(rows_K, known, strict=True)]),
            np.maximum([p.sampling for p in known], known_K),
            known_K,
        )
        training = fit_affine(
            np.array([(1.0, min(p.nodes_per_update, nodes_per_pass)) for p in known]),
            np.array([p.training for p in known], np.float64),
        )
        return cls(rows, sampling, training, resident, nodes_per_pass)

    def predict(self, rows_D: FloatArray, num_rollouts: int, num_prompts: int, nodes_per_update: float) -> int:
        """Return the bytes at the peak of a step: of sampling or of training, whichever is larger.

        Args:
            rows_D: Expected live rows of a prompt at each depth, shape [D].
            num_rollouts: N.
            num_prompts: Prompts of one call of the engine.
            nodes_per_update: Tree nodes of a mini-batch.
        """
        rows = self.rows(rows_D, num_rollouts, num_prompts)
        sampling = rows + round(self.sampling((1.0, rows, num_rollouts * num_prompts)))
        training = self.training((1.0, min(nodes_per_update, self.nodes_per_pass)))
        return max(self.resident_bytes + sampling, round(training))
