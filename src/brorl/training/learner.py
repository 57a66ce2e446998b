"""The learner: groups in, an updated model out, with the exact gradient of the tree.

Each step makes one AdamW update per mini-batch. Memory does not depend on N; if it runs out, the mini-batch restarts
with smaller chunks. A non-finite loss stops the run before the weights change. Several ranks shard the model and make
the same update as one process: denominators cover the whole mini-batch, and gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Echo, Observe, Updating, unobserved
from brorl.algorithms.advantages import EstimateAdvantages
from brorl.algorithms.groups import Group
from brorl.algorithms.losses import penalized_group
from brorl.arrays import FloatArray
from brorl.config.settings import TrainConfig
from brorl.errors import DivergedError
from brorl.model.flat_path import FlatForward
from brorl.model.forward import Forward
from brorl.model.load import check_saved
from brorl.model.sharding import full_tensor, save_whole
from brorl.model.tree_path import TreeForward
from brorl.runs.checkpoint import EMA
from brorl.runs.step_record import UpdateRecord
from brorl.training.adamw import AdamW
from brorl.training.learner_state import (
    AveragedWeights,
    Snapshot,
    in_memory,
    sharded_header,
    with_moments_of,
    write_sharded,
)
from brorl.training.mini_batch import (
    MiniBatch,
    chunk_loss,
    means,
    prepare_mini_batches,
    sequence_loss_coefficients,
    to_tensor,
    zero_sums,
)
from brorl.training.policy_logprobs import PolicyLogprobs, autocast, flat_forward, measured_forward
from brorl.training.ranks import ALONE, Ranks
from brorl.tree import RolloutTree


class Learner(Protocol):
    """Updates a model from groups.

    A learner can have several ranks. Every method is then collective: each rank calls the same methods in the same
    order with the same arguments, and gets the same result.
    """

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups that carry over, with the old log-probs that a later step will need."""
        ...

    def learn(
        self, groups: Sequence[Group], estimate_advantages: EstimateAdvantages, seed: int, lr_scale: float = 1.0
    ) -> UpdateRecord:
        """Make the updates of one step.

        Args:
            groups: The batch.
            estimate_advantages: Maps the groups, after any KL penalty on their rewards, to the advantages of each
                group's distinct responses, shape [L].
            seed: Seeds all random choices in the step.
            lr_scale: Multiplies the learning rate in this step.
        """
        ...

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-prob (nats) of every node of each tree under the current weights, shape [M].

        Log-probs are normalized over the tokens that sampling can draw.
        """
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the trained weights by name, unsharded and one at a time. Every rank must iterate to the end."""
        ...

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of the model's parameters, or of its trained parameters."""
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write weights and config to a folder that all ranks can reach, and averaged weights to its subfolder `ema`.

        A learner with several ranks also writes its shards of the optimizer, the reference and the average.
        """
        ...

    def swap_averaged_weights(self) -> None:
        """Swap the current weights and their average, which must exist. A second call swaps them back.

        No update may happen in between.
        """
        ...

    def reset_reference(self, clear_optimizer: bool) -> None:
        """Set the reference, which must exist, to the current weights; optionally clear AdamW's moments (ProRL v1)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next step needs, without weights. With several ranks, `shards` names a folder."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state saved by any number of ranks. `shards` is the path of its folder."""
        ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load AdamW's moments from the matching state of a different run. Keep learning rate and update count."""
        ...


class TreeLearner:
    """Trains a model in place.

    Args:
        model: The model, sharded if there are several ranks. A KL penalty uses its current weights as the reference.
        config: The recipe.
        echo: Receives lines for the user: smaller chunks after memory ran out, and the cost of the flat path.
        observe: Receives an `Updating` before each update.
        ranks: The processes that share the model.
        forward: How trees go through the model; None for tree attention.
        stop_token_ids: The tokens that end a response; empty if only the length limit ends responses.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        echo: Echo = lambda _: None,
        observe: Observe = unobserved,
        ranks: Ranks = ALONE,
        *,
        forward: Forward | None = None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.model = model
        self._config = config
        self._ranks = ranks
        self._echo = echo
        self._observe = observe
        self._chose_forward = False
        self._takes_flat_path: bool | None = None  # whether that is faster; None until measured
        self._save_checked = False
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(self._trained.values())
        optimizer = config.optimizer
        self._optimizer = AdamW(
            self._parameters,
            optimizer.states,
            lr=config.scaled_learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=model.device.type in ("cpu", "cuda"),
        )
        self._updates = 0
        self._logprobs = PolicyLogprobs(model, config, forward or TreeForward(), stop_token_ids, echo, ranks)
        self._node_limit = self._logprobs.nodes
        self._average = AveragedWeights(model) if optimizer.ema_decay else None
        self._tensor = partial(to_tensor, model)

    def learn(
        self, groups: Sequence[Group], estimate_advantages: EstimateAdvantages, seed: int, lr_scale: float = 1.0
    ) -> UpdateRecord:
        """See `Learner`. Each mini-batch gives one update, and rank 0 estimates the advantages.

        Raises:
            DivergedError: If the loss or the gradient is not finite. The update then does not change the weights.
        """
        num_batches = self._config.optimizer.mini_batches
        if len(groups) < num_batches:
            raise ValueError(f"{num_batches} mini-batches need at least as many groups, got {len(groups)}")
        self.model.train()
        if not self._chose_forward:
            self._chose_forward = True
            self._choose_forward([group.tree for group in groups])

        is_fresh = [group.old_logprob_M is None for group in groups]
        groups = self._with_advantages(groups, estimate_advantages)
        generator = np.random.default_rng(seed)
        batches, step_metrics = prepare_mini_batches(groups, is_fresh, self._logprobs, generator)
        updates: list[dict[str, float]] = []
        for batch in batches:
            self._observe(Updating(len(updates), len(batches)))
            updates.append(self._update(batch, lr_scale))
        retries = self._node_limit.retries
        self._node_limit.retries = 0
        return UpdateRecord(
            **step_metrics,
            **self._mean_metrics(updates),
            entropy=-_mean_sampled_logprob([group.tree for group in groups]),
            learning_rate=self._learning_rate(lr_scale),
            nodes_per_pass=self._node_limit.value,
            out_of_memory_retries=retries,
        )

    def _with_advantages(self, groups: Sequence[Group], estimate_advantages: EstimateAdvantages) -> list[Group]:
        """Return groups with advantages, after any KL penalty on their rewards. Rank 0 estimates the advantages."""
        kl = self._config.kl
        if kl.is_in_reward:
            groups = [penalized_group(group, kl) for group in self._logprobs.with_all_logprobs(groups)]
        advantages = self._ranks.call_on_first_rank(lambda: estimate_advantages(groups))
        return [replace(group, advantage_L=a_L) for group, a_L in zip(groups, advantages, strict=True)]

    def _mean_metrics(self, updates: Sequence[dict[str, float]]) -> dict[str, Any]:
        """Return means over the step's updates. The KL and the entropy are None if the loss does not include them."""
        metrics: dict[str, Any] = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        if self._logprobs.reference is None:
            metrics["reference_kl"] = None
        if not self._config.loss.entropy_coefficient:
            metrics["bonus_entropy"] = None
        return metrics

    def _choose_forward(self, trees: Sequence[RolloutTree]) -> None:
        """Report the cost of the flat path and, on CUDA, choose between trees and the flat path; once per run."""
        if line := self._logprobs.forward.cost_line(trees):
            self._echo(line)
        engine = self._config.engine
        on_one_gpu = self.model.device.type == "cuda" and self._ranks.size == 1
        if engine.forward == engine.attention == "auto" and on_one_gpu and self._takes_flat_path is None:
            with autocast(self._config, self.model):
                self._logprobs.forward, line = self._node_limit.run(
                    lambda: measured_forward(self.model, self._logprobs.forward, trees, self._node_limit.value)
                )
            self._takes_flat_path = isinstance(self._logprobs.forward, FlatForward)
            if line:
                self._echo(line)

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """See `Learner`. Waiting groups will be clipped relative to the current weights."""
        return self._logprobs.with_old_logprobs(groups)

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """See `Learner`."""
        return self._logprobs.gathered(trees)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner`. Several ranks gather the weights one at a time."""
        if self._ranks.size == 1:
            return iter(self._trained.items())
        return ((name, full_tensor(parameter.detach())) for name, parameter in self._trained.items())

    def num_parameters(self, only_trainable: bool = False) -> int:
        """See `Learner`."""
        return sum(p.numel() for p in (self._parameters if only_trainable else self.model.parameters()))

    def save_pretrained(self, folder: Path) -> None:
        """See `Learner`. The first time, check that transformers loads exactly the saved weights."""
        self._optimizer.zero_grad(set_to_none=True)  # frees memory: the check below reads the weights again
        self._save_model(folder)
        self._save_checked = True
        if self._average is not None:
            self._average.exchange()
            try:
                self._save_model(folder / EMA)
            finally:
                self._average.exchange()
        if self._ranks.size > 1:
            write_sharded(folder, self._optimizer, self._trained, self._snapshots)

    def _save_model(self, folder: Path) -> None:
        saved = save_whole(self.model, folder, self._ranks.rank == 0)
        if saved and not self._save_checked:
            check_saved(self.model, saved, folder)

    @property
    def _snapshots(self) -> list[Snapshot]:
        return [snapshot for snapshot in (self._logprobs.reference, self._average) if snapshot is not None]

    def swap_averaged_weights(self) -> None:
        """See `Learner`."""
        if self._average is None:
            raise ValueError("there are no averaged weights; set optimizer.ema_decay")
        self._average.exchange()

    def reset_reference(self, clear_optimizer: bool) -> None:
        """See `Learner`."""
        if self._logprobs.reference is None:
            raise ValueError("there is no reference policy to reset; set kl.coefficient above 0")
        self._logprobs.reference.reset()
        if clear_optimizer:
            self._optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `Learner`. Several ranks omit the tensors, which `save_pretrained` writes."""
        state: dict[str, Any] = {
            "updates": self._updates,
            "max_nodes": self._node_limit.value,
            "max_nodes_at_start": self._node_limit.initial,
            "takes_flat_path": self._takes_flat_path,
        }
        if self._ranks.size > 1:
            return state | sharded_header(self._optimizer, self._trained, self._snapshots)
        snapshots = {snapshot.name: snapshot.state_dict() for snapshot in self._snapshots}
        return {"optimizer": self._optimizer.state_dict(), **state, **snapshots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Learner`. Raise a ValueError if entries are missing (it names them) or the model is different."""
        state = in_memory(state, self._trained, [snapshot.name for snapshot in self._snapshots])
        for snapshot in self._snapshots:
            if snapshot.name not in state:
                raise ValueError(
                    f"the state contains no {snapshot.name} weights; resume with the kl.coefficient and "
                    "optimizer.ema_decay that the run started with, or start a new run from its weights"
                )
            snapshot.load_state_dict(state[snapshot.name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
        self._takes_flat_path = state["takes_flat_path"]
        if self._takes_flat_path:
            self._logprobs.forward = flat_forward(self._logprobs.forward)
        if state["max_nodes_at_start"] == self._node_limit.initial:  # otherwise engine.nodes_per_pass was changed
            self._node_limit.restrict(state["max_nodes"])

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """See `Learner`."""
        current = self._optimizer.state_dict()
        state = in_memory(state, self._trained)
        self._optimizer.load_state_dict(with_moments_of(state["optimizer"], current, self._parameters))

    def _learning_rate(self, factor: float) -> float:
        rate = self._config.scaled_learning_rate
        warmup = self._config.optimizer.warmup_updates
        return factor * (rate * min(1.0, self._updates / warmup) if warmup else rate)

    def _update(self, batch: MiniBatch, lr_scale: float) -> dict[str, float]:
        """Accumulate and apply the gradient of one mini-batch. Return its entries for `UpdateRecord`."""
        optimizer = self._config.optimizer
        sums = self._ranks.sum(self._node_limit.run(lambda: self._accumulate(batch)))
        grad_norm = full_tensor(torch.nn.utils.clip_grad_norm_(self._parameters, optimizer.max_grad_norm))
        if not (torch.isfinite(grad_norm) and torch.isfinite(sums).all()):
            raise DivergedError(
                f"the loss is {float(sums[0])} and the gradient norm {float(grad_norm)}; start a new run with a lower "
                "optimizer.learning_rate, which cannot change on resume"
            )
        self._updates += 1
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._learning_rate(lr_scale)
        self._node_limit.once(self._optimizer.step)  # its first call allocates the moments
        if self._average is not None and optimizer.ema_decay:
            self._average.add(optimizer.ema_decay, self._updates)
        return means(sums, self._ranks.sum(batch.totals())) | {"grad_norm": float(grad_norm)}

    def _accumulate(self, batch: MiniBatch) -> Tensor:
        """Compute a mini-batch's gradient from zero, chunk by chunk. Return sums over its nodes, shape [S]."""
        loss = self._config.loss
        logprobs = self._logprobs
        self._optimizer.zero_grad(set_to_none=True)
        sums = zero_sums(self.model.device)
        coefficient_K = None
        if loss.is_sequence_level:
            coefficients, sequence_sums = sequence_loss_coefficients(batch, logprobs.local(batch.trees), loss)
            coefficient_K = self._tensor(coefficients)
            sums = sums + sequence_sums
        options = {"entropy": loss.entropy_coefficient > 0, "recompute_prompts": self._ranks.size > 1}
        with autocast(self._config, self.model):
            for chunk in logprobs.chunks(batch.trees, **options):
                loss_of_chunk, sums_of_chunk = chunk_loss(chunk, batch, self._config, coefficient_K)
                loss_of_chunk.backward()
                sums = sums + sums_of_chunk
                del chunk, loss_of_chunk  # the next pass is recorded only if no autograd graph is left
            logprobs.passes.finish()
        return sums


def _mean_sampled_logprob(trees: Sequence[RolloutTree]) -> float:
    """Return the mean log-prob (nats) of sampled tokens at sampling time, including duplicates."""
    total = sum(float((t.count * t.logprob).sum()) for t in trees)
    return total / sum(t.num_sampled_tokens for t in trees)
