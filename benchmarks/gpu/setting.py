"""The sizes of a speed measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu.learners import LearnerVariant
from transformers import PreTrainedConfig

from brorl.model.forward import TreeForward
from brorl.model.logprobs import DEFAULT_PASS
from brorl.model.memory_plan import MemoryPlan, MemorySettings, Workload, plan_memory


@dataclass(frozen=True)
class Setting:
    """What is sampled and learned from.

    Attributes:
        size: Name of the model's size.
        low_entropy: Whether its head is sharpened to 0.14 nats per token.
        max_new_tokens: Tokens of a response.
        num_rollouts: Rollouts of the prompt, N.
        prompt_tokens: Tokens of the prompt.
        memory_bytes: The engines' limit.
        nodes: Nodes per forward pass of the learner.
        seed: Seed of the weights, the prompt and the draws.
    """

    size: str
    low_entropy: bool
    max_new_tokens: int
    num_rollouts: int
    prompt_tokens: int
    memory_bytes: int
    nodes: int
    seed: int

    @property
    def name(self) -> str:
        """A short name: size, entropy, tokens."""
        return f"{self.size} {'low' if self.low_entropy else 'full'} {self.max_new_tokens}"

    def plan(self, config: PreTrainedConfig, tokens: int, variant: LearnerVariant | None = None) -> MemoryPlan:
        """Return the predicted memory of a run with these sizes.

        Args:
            config: The model's config.
            tokens: Tokens of a response.
            variant: The variant of the learner, if it learns.
        """
        settings = MemorySettings("bfloat16", self.memory_bytes, nodes_per_pass=self.nodes)
        if variant is not None:
            model_pass = variant.forward.model_pass if isinstance(variant.forward, TreeForward) else DEFAULT_PASS
            settings = replace(settings, gradient_checkpointing=variant.checkpointing, attention=model_pass.attention)
        return plan_memory(
            config, settings, Workload(self.prompt_tokens, tokens, num_rows=self.num_rollouts, num_prompts=1)
        )
