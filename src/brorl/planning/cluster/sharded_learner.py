"""The learner on R ranks: its memory and the seconds of a step.

In: a model, unit costs, the work of a step. Out: bytes and seconds. Weights, gradients, AdamW's moments and the
reference are float32 and sharded over the ranks; each layer is gathered in bfloat16 for a pass. Attention does not
store its weights, and logits exist for a part of the nodes, which is how the sharded learner computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from brorl.planning.cluster.model_shape import ModelShape
from brorl.planning.cluster.step_work import StepWork
from brorl.planning.cluster.unit_costs import Case, UnitCosts

TREE_BYTES = 32
"""Bytes of a node of a rollout tree: token, parent, count and log-prob of 8 bytes each."""
_PASS_NODES = 8_192  # of a forward pass where the recipe does not set them, as in brorl.model.logprobs
_LOGIT_NODES = 1024  # nodes whose logits exist at once
_TEMPORARY_LAYERS = 3  # as in brorl.model.memory_plan


@dataclass(frozen=True)
class LearnerSettings:
    """Settings that decide the learner's memory.

    Attributes:
        reference: Whether a reference policy is in the memory of the GPUs.
        gradient_checkpointing: Whether activations are computed again.
        lora_rank: Rank of the adapters; 0 trains all weights.
        nodes_per_pass: Nodes of a forward pass; None for 8,192, or one response of the maximum length if that is more.
    """

    reference: bool
    gradient_checkpointing: bool
    lora_rank: int = 0
    nodes_per_pass: int | None = None


@dataclass(frozen=True)
class ShardedLearner:
    """A learner on R ranks of one GPU each.

    Attributes:
        model: The model.
        work: The work of a step.
        costs: The unit costs.
        settings: The settings that decide the memory.
        ranks: R >= 1.
        per_machine: GPUs of a machine.
    """

    model: ModelShape
    work: StepWork
    costs: UnitCosts
    settings: LearnerSettings
    ranks: int
    per_machine: int

    @property
    def trained_parameters(self) -> int:
        """Weights with a gradient."""
        if not self.settings.lora_rank:
            return self.model.parameters
        m = self.model
        widths = 4 * (m.hidden + m.heads * m.head_dim) + 3 * (m.hidden + m.inner)
        return self.settings.lora_rank * m.layers * widths

    @property
    def nodes(self) -> int:
        """Tokens of a forward pass: halved until a pass fits, but never below the longest response with its prompt."""
        longest = ceil(self.work.lengths.limit + self.work.prompt_tokens)
        nodes = max(self.settings.nodes_per_pass or _PASS_NODES, longest)
        while nodes > longest and self.state_bytes + self._pass_bytes(nodes) > self._usable_bytes:
            nodes = max(nodes // 2, longest)
        return nodes

    @property
    def state_bytes(self) -> float:
        """Weights, gradients, moments and reference on one rank; they stay between steps."""
        copies = 4 + 4 + 8 + (4 if self.settings.reference else 0)
        frozen = 2 * self.model.parameters if self.settings.lora_rank else 0
        return (copies * self.trained_parameters + frozen) / self.ranks

    @property
    def pass_bytes(self) -> float:
        """Activations, logits and gathered weights of a forward and a backward pass on one rank."""
        return self._pass_bytes(self.nodes)

    def _pass_bytes(self, nodes: int) -> float:
        m = self.model
        layer = nodes * (6 * m.hidden * 4 + 2 * m.hidden * 2 + (4 * m.inner + 7 * m.heads * m.head_dim) * 2)
        kept = m.layers * nodes * m.hidden * 4 + layer if self.settings.gradient_checkpointing else m.layers * layer
        logits = 3 * min(nodes, _LOGIT_NODES) * m.vocabulary * 4
        gathered = 2 * (m.weight_bytes / m.layers + 2 * m.vocabulary * m.hidden) if self.ranks > 1 else m.weight_bytes
        return kept + _TEMPORARY_LAYERS * layer + logits + gathered

    @property
    def fits(self) -> bool:
        """Whether a rank's memory holds its state and a pass."""
        return self.state_bytes + self.pass_bytes <= self._usable_bytes

    @property
    def _usable_bytes(self) -> float:
        return self.costs.memory.best * self.costs.memory_fraction.best

    def bandwidth(self, case: Case) -> float:
        """Return the bytes per second of collectives between the ranks."""
        wire = self.costs.link if self.ranks <= self.per_machine else self.costs.network
        return wire.best * self.costs.link_fraction.at(case)

    @property
    def flops(self) -> float:
        """Operations of all passes of a step."""
        per_token = self.model.matmul_flops + self.model.attention_flops * self.work.trained_context
        return self.work.passes * self.work.trained_tokens * per_token

    def seconds(self, case: Case) -> float:
        """Return the seconds of a step: computing or communicating, which overlap, times the imbalance.

        For every forward pass each rank gathers the weights in bfloat16, and every backward pass also scatters the
        gradients in float32.
        """
        return max(self.computing_seconds(case), self.communication_seconds(case)) * self.costs.imbalance.at(case)

    def computing_seconds(self, case: Case) -> float:
        """Return the seconds of the operations of a step, dealt evenly."""
        return self.flops / (self.ranks * self.costs.flops.best * self.costs.train_fraction.at(case))

    def communication_seconds(self, case: Case) -> float:
        """Return the seconds of all collectives of a step; 0 for one rank."""
        if self.ranks == 1:
            return 0.0
        updates = self.work.mini_batches
        passes = updates * ceil(self.work.trained_tokens / (updates * self.ranks * self.nodes))
        moved = (self.work.passes - 1) * self.model.weight_bytes + 4 * self.trained_parameters
        return passes * moved * (1 - 1 / self.ranks) / self.bandwidth(case)

    def tree_seconds(self, case: Case) -> float:
        """Return the seconds in which every machine of the learner receives the trees of a step."""
        return self.work.trained_tokens * TREE_BYTES / self.costs.tree_rate.at(case)
