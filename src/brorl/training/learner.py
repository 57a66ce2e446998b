"""The learner: groups and advantages in, an updated model out, with the exact gradient of the tree.

Each step makes M mini-batch updates of AdamW. Parts of the trees go through the model one after the other, so memory
does not depend on N. It refuses nothing silently: a loss that is not finite stops the run before the weights change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.algorithms.groups import Group
from brorl.algorithms.learning_rate import warmed_up
from brorl.algorithms.policy_loss import clipped_policy_loss, node_weights
from brorl.algorithms.response_subset import choose_responses
from brorl.errors import DivergedError
from brorl.model.logprobs import tree_logprobs, tree_parts
from brorl.tree import RolloutTree

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class LearnerSettings:
    """How the learner updates.

    Attributes:
        learning_rate: Full learning rate of AdamW, already scaled for the batch.
        mini_batches: Updates per step, M; groups are dealt out to them at random.
        clip_low: Lower clip of the ratio, see `clipped_policy_loss`.
        clip_high: Upper clip of the ratio.
        temperature: Temperature that the rollouts were sampled at.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Gradients are scaled down to this global norm.
        warmup_updates: Updates over which the learning rate rises linearly.
        responses_per_verdict: Back-propagate at most this many correct and this many incorrect distinct responses per
            group, weighted so that the gradient stays unbiased; 0 for all.
        recompute_old_logprobs: Take the old log-probs from the learner's own forward pass instead of the engine's.
        max_nodes: Nodes per forward pass; None for the default. Sets memory, not results.
        autocast: Compute in bfloat16 where that is safe; the weights stay as they are.
    """

    learning_rate: float
    mini_batches: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.28
    temperature: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_updates: int = 0
    responses_per_verdict: int = 0
    recompute_old_logprobs: bool = False
    max_nodes: int | None = None
    autocast: bool = False


@dataclass(frozen=True)
class Update:
    """What a step did; means over its mini-batches.

    Attributes:
        loss: Policy loss.
        grad_norm: Global gradient norm before clipping.
        clip_share: Share of the summed |advantage| whose gradient the clip removed.
        old_policy_kl: Mean over sampled tokens of old minus new log-prob, during the updates (the k1 estimate, nats).
        entropy: Minus the mean log-prob of the sampled tokens when they were sampled, nats per token.
        learning_rate: Of the last mini-batch.
        trained_nodes: Tree nodes that went through the loss.
    """

    loss: float
    grad_norm: float
    clip_share: float
    old_policy_kl: float
    entropy: float
    learning_rate: float
    trained_nodes: int


class Learner(Protocol):
    """Updates a model from groups."""

    def step(self, groups: Sequence[Group], advantages: Sequence[FloatArray], seed: int) -> Update:
        """Make one step's updates."""
        ...

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-prob (nats) of every node under the current weights, at the sampling temperature."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the current weights by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything besides the weights that the next step depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...


@dataclass(frozen=True)
class MiniBatch:
    """Trees with one old log-prob and two weights per node, concatenated over the trees (K nodes in all)."""

    trees: list[RolloutTree]
    old_logprob_K: Tensor
    positive_K: Tensor
    negative_K: Tensor
    count_K: Tensor
    num_tokens: int


class TreeLearner:
    """Trains a model in place, in one process."""

    def __init__(self, model: PreTrainedModel, settings: LearnerSettings) -> None:
        self.model = model
        self._settings = settings
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=model.device.type in ("cpu", "cuda"),
        )
        self._updates = 0

    def step(self, groups: Sequence[Group], advantages: Sequence[FloatArray], seed: int) -> Update:
        """Make the M mini-batch updates of one step.

        Args:
            groups: The batch, at least M groups.
            advantages: For each group the advantage of each distinct response, shape [L].
            seed: Decides how groups are dealt to mini-batches, and which responses are back-propagated if not all are.

        Returns:
            What was done.

        Raises:
            DivergedError: If the loss or the gradient is not finite; the weights are then as before that update.
        """
        if len(groups) < self._settings.mini_batches:
            raise ValueError(f"{self._settings.mini_batches} mini-batches need as many groups, got {len(groups)}")
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(groups))
        self.model.train()
        sums = np.zeros(4)
        trained_nodes = 0
        batches = [
            self._mini_batch([groups[i] for i in part], [advantages[i] for i in part], generator)
            for part in np.array_split(order, self._settings.mini_batches)
        ]
        for batch in batches:
            sums += self._update(batch)
            trained_nodes += sum(t.num_unique_tokens for t in batch.trees)
        loss, grad_norm, clip_share, kl = (sums / len(batches)).tolist()
        return Update(
            loss=loss,
            grad_norm=grad_norm,
            clip_share=clip_share,
            old_policy_kl=kl,
            entropy=-_token_mean([g.tree for g in groups]),
            learning_rate=self._learning_rate(),
            trained_nodes=trained_nodes,
        )

    @torch.no_grad()
    def logprobs(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-prob (nats) of every node under the current weights, at the sampling temperature.

        Args:
            trees: P trees.

        Returns:
            For each tree the log-probs, shape [M].
        """
        was_training = self.model.training
        self.model.eval()
        try:
            with self._autocast():
                logprobs = tree_logprobs(
                    self.model,
                    trees,
                    temperature=self._settings.temperature,
                    max_nodes=self._settings.max_nodes,
                )
        finally:
            self.model.train(was_training)
        return [lp.double().cpu().numpy() for lp in logprobs]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the current weights by name."""
        return self.model.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the number of updates."""
        return {"optimizer": self._optimizer.state_dict(), "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]

    def _learning_rate(self) -> float:
        return warmed_up(self._settings.learning_rate, self._updates, self._settings.warmup_updates)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.model.device.type, torch.bfloat16) if self._settings.autocast else nullcontext()

    def _mini_batch(
        self, groups: list[Group], advantages: list[FloatArray], generator: np.random.Generator
    ) -> MiniBatch:
        """Sum advantages to node weights and move them to the model's device."""
        trees, positive, negative = [], [], []
        for group, advantage_L in zip(groups, advantages, strict=True):
            tree = group.tree
            if self._settings.responses_per_verdict:
                chosen, factor_K = choose_responses(
                    tree.leaf_count * advantage_L,
                    group.correct_L,
                    self._settings.responses_per_verdict,
                    generator,
                )
                if not chosen.size:
                    continue  # no response of this group has an advantage: it teaches nothing
                tree, _ = tree.select(chosen)
                advantage_L = advantage_L[chosen] * factor_K
            weights = node_weights(tree, advantage_L)
            trees.append(tree)
            positive.append(weights.positive_M)
            negative.append(weights.negative_M)
        if self._settings.recompute_old_logprobs:
            trees = [replace(t, logprob=lp) for t, lp in zip(trees, self.logprobs(trees), strict=True)]
        return MiniBatch(
            trees=trees,
            old_logprob_K=self._tensor([t.logprob for t in trees]),
            positive_K=self._tensor(positive),
            negative_K=self._tensor(negative),
            count_K=self._tensor([t.count for t in trees]),
            num_tokens=sum(g.tree.num_sampled_tokens for g in groups),
        )

    def _update(self, batch: MiniBatch) -> FloatArray:
        """Accumulate the gradient of one mini-batch and apply it; return loss, gradient norm, clip share and KL."""
        settings = self._settings
        self._optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(3, dtype=torch.float64, device=self.model.device)
        with self._autocast():
            for part in tree_parts(
                self.model, batch.trees, temperature=settings.temperature, max_nodes=settings.max_nodes
            ):
                old_logprob_K = batch.old_logprob_K[part.index]
                result = clipped_policy_loss(
                    part.logprob,
                    old_logprob_K,
                    batch.positive_K[part.index],
                    batch.negative_K[part.index],
                    clip_low=settings.clip_low,
                    clip_high=settings.clip_high,
                    num_tokens=batch.num_tokens,
                )
                result.loss.backward()
                kl = (batch.count_K[part.index] * (old_logprob_K - part.logprob.detach())).sum()
                sums += torch.stack([result.loss.detach(), result.clipped_weight, kl])
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, settings.max_grad_norm)
        if not (torch.isfinite(grad_norm) and torch.isfinite(sums).all()):
            raise DivergedError(
                f"loss {float(sums[0])} with gradient norm {float(grad_norm)}; lower optimizer.learning_rate"
            )
        self._updates += 1
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._learning_rate()
        self._optimizer.step()
        weight = (batch.positive_K - batch.negative_K).sum().clamp(min=1e-30)
        loss, clipped, kl = sums
        means = torch.stack([loss, grad_norm.double(), clipped / weight, kl / batch.count_K.sum().clamp(min=1)])
        return means.cpu().numpy()

    def _tensor(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        return torch.from_numpy(np.concatenate([np.empty(0), *arrays])).to(self.model.device, dtype)


def _token_mean(trees: Sequence[RolloutTree]) -> float:
    """Mean log-prob of the sampled tokens."""
    total = sum(float((t.count * t.logprob).sum()) for t in trees)
    return total / sum(t.num_sampled_tokens for t in trees)
