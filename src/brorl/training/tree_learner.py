"""The learner: it updates a model with the exact gradient of the tree, in one process or on many ranks.

Each step makes M mini-batch updates of AdamW. The trees go through the model in chunks, so memory does not depend on N.
If memory runs out, a mini-batch starts again with smaller chunks. A loss that is not finite stops the run before the
weights change.

On several ranks the model is sharded, and every rank calls the same methods with the same arguments. The responses of a
mini-batch are dealt to the ranks. Every denominator is that of the whole mini-batch, and gradients add up, so the
update is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Echo, Observe, Updating, unobserved
from brorl.algorithms.advantages import EstimateAdvantages
from brorl.algorithms.groups import Group
from brorl.arrays import FloatArray
from brorl.errors import DivergedError
from brorl.model.chunk_size import ChunkSize, Passes
from brorl.model.forward import FlatForward, Forward, TreeForward, num_flat_tokens, num_tree_tokens
from brorl.model.load import check_saved
from brorl.model.sharding import SyncedForward, full_tensor, save_whole
from brorl.model.tree_batch import split_into_chunks
from brorl.runs.checkpoint import EMA
from brorl.training.adamw import AdamW
from brorl.training.chunk_loss import chunk_loss, means, no_sums, response_losses
from brorl.training.learner import LearnerSettings, StepMetrics
from brorl.training.learner_state import (
    AveragedWeights,
    ReferencePolicy,
    Snapshot,
    in_memory,
    sharded_header,
    with_moments_of,
    write_sharded,
)
from brorl.training.mini_batch import MiniBatch, StepPreparation, TreeScores, to_tensor
from brorl.training.ranks import ALONE, Ranks
from brorl.tree import RolloutTree

LITTLE_SHARED = 0.8  # distinct tokens over all tokens of rows, prompts included, above which rows can be faster


def rows_forward(forward: Forward) -> Forward:
    """Return the way of rows for a model."""
    if isinstance(forward, FlatForward):
        return forward
    return FlatForward("rows were faster when the run began", whole_logits=forward.model_pass.whole_logits)


def device_seconds() -> float:
    """Return a time after all work of the CUDA device."""
    torch.cuda.synchronize()
    return perf_counter()


def measured_forward(
    model: PreTrainedModel,
    forward: Forward,
    trees: Sequence[RolloutTree],
    max_nodes: int,
    seconds: Callable[[], float] = device_seconds,
) -> tuple[Forward, str | None]:
    """Return the faster way for a mini-batch, and a line about the measurement; None if trees share too much for one.

    Trees compute each distinct token once; rows have few tokens more where responses share little, and a dense kernel.
    Each way makes a forward and a backward pass over the first chunk of the trees, twice, and the second one counts.
    The gradients are cleared.

    Args:
        model: A model on a device where work waits in a queue.
        forward: How trees go through it.
        trees: The trees of a mini-batch.
        max_nodes: Nodes per pass.
        seconds: Returns a time after all work of the device.
    """
    if not isinstance(forward, TreeForward) or num_tree_tokens(trees) <= LITTLE_SHARED * num_flat_tokens(trees):
        return forward, None
    slices = next(split_into_chunks(trees, max_nodes))
    some = [trees[one.tree].select(np.arange(one.start, one.stop))[0] for one in slices]
    flat = rows_forward(forward)
    taken = []
    for way in (forward, flat):
        for _ in range(2):  # the first one compiles and allocates
            start = seconds()
            for chunk in way.chunk_logprobs(model, some, max_nodes=max_nodes):
                chunk.logprob.sum().backward()
            model.zero_grad(set_to_none=True)
            end = seconds()
        taken.append(1e3 * (end - start))
    tokens = num_tree_tokens(some), num_flat_tokens(some)
    chosen = flat if taken[1] < taken[0] else forward
    line = (
        f"responses share little: {tokens[0]:,} distinct tokens took {taken[0]:,.0f} ms as trees, "
        f"{taken[0] / tokens[0]:.4f} ms each, and {tokens[1]:,} tokens {taken[1]:,.0f} ms as rows, "
        f"{taken[1] / tokens[1]:.4f} ms each; the learner takes {'rows' if chosen is flat else 'trees'}"
    )
    return chosen, line


class TreeLearner:
    """Trains a model in place.

    Args:
        model: The model, sharded if there are several ranks; its current weights become the reference, if there is one.
        settings: How the model is updated.
        echo: Receives a line when memory runs out and smaller chunks are tried, and the cost of the flat path.
        observe: Receives an `Updating` before each update.
        ranks: The processes that share the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings,
        echo: Echo = lambda _: None,
        observe: Observe = unobserved,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self._ranks = ranks
        self._passes = SyncedForward(model, ranks.maximum) if ranks.size > 1 else Passes()
        self._observe = observe
        self._echo = echo
        self._cost_line_shown = False
        self._rows: bool | None = None  # whether the learner takes rows; None before a choice
        self._save_checked = False
        self._settings = settings
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(self._trained.values())
        self._optimizer = AdamW(
            self._parameters,
            settings.states,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=model.device.type in ("cpu", "cuda"),
        )
        self._updates = 0
        nodes = settings.max_nodes or settings.forward.default_max_nodes(model)
        self._nodes = ChunkSize(nodes, echo, self._passes)
        self._reference = ReferencePolicy(model, settings.offload_reference) if settings.kl else None
        self._average = AveragedWeights(model) if settings.ema_decay else None
        self._tensor = partial(to_tensor, model)
        self._scores = TreeScores(model, settings, self._nodes, self._passes, ranks)
        self._preparation = StepPreparation(self._scores, settings, self._reference, ranks, self._tensor)

    def learn(
        self, groups: Sequence[Group], estimate_advantages: EstimateAdvantages, seed: int, lr_scale: float = 1.0
    ) -> StepMetrics:
        """Make the M mini-batch updates of one step; see `Learner.learn`. Rank 0 estimates the advantages.

        Raises:
            DivergedError: If the loss or the gradient is not finite. The weights are then those before that update.
            OutOfMemoryError: If memory is too small for the smallest chunks.
        """
        settings = self._settings
        if len(groups) < settings.mini_batches:
            raise ValueError(f"{settings.mini_batches} mini-batches need as many groups, got {len(groups)}")
        self.model.train()
        if not self._cost_line_shown:
            self._cost_line_shown = True
            self._begin([group.tree for group in groups])

        is_fresh = [group.old_logprob_M is None for group in groups]
        if settings.kl and settings.kl.placement == "reward":
            groups = self._preparation.penalized(groups, settings.kl)
        advantages = self._ranks.of_first(lambda: estimate_advantages(groups))
        groups = [replace(group, advantage_L=a_L) for group, a_L in zip(groups, advantages, strict=True)]
        batches, found = self._preparation.prepare(groups, is_fresh, np.random.default_rng(seed))

        updates: list[dict[str, float]] = []
        for batch in batches:
            self._observe(Updating(len(updates), len(batches)))
            updates.append(self._update(batch, lr_scale))
        metrics: dict[str, Any] = found | {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
        if self._reference is None:
            metrics["reference_kl"] = None
        if not settings.loss.entropy_coefficient:
            metrics["bonus_entropy"] = None
        retries, self._nodes.retries = self._nodes.retries, 0
        return StepMetrics(
            **metrics,
            entropy=-_token_mean([g.tree for g in groups]),
            learning_rate=self._learning_rate(lr_scale),
            nodes_per_pass=self._nodes.value,
            out_of_memory_retries=retries,
        )

    def _begin(self, trees: Sequence[RolloutTree]) -> None:
        """Say what the flat path costs, and choose between trees and rows on CUDA, once in a run."""
        if line := self._scores.forward.cost_line(trees):
            self._echo(line)
        on_one_gpu = self.model.device.type == "cuda" and self._ranks.size == 1
        if self._settings.measures_rows and on_one_gpu and self._rows is None:
            with self._scores.autocast():
                self._scores.forward, line = self._nodes.run(
                    lambda: measured_forward(self.model, self._scores.forward, trees, self._nodes.value)
                )
            self._rows = isinstance(self._scores.forward, FlatForward)
            if line:
                self._echo(line)

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups that are carried to a later step, with the old log-probs that the later step needs.

        The updates of this step move the weights away from those that sampled the groups. The clip of a later step
        measures the distance from these log-probs. If the old log-probs are the engine's, the groups are unchanged.
        """
        return self._preparation.with_old_logprobs(groups)

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-prob (nats) of every node, shape [M], by the current weights, as `NextToken` draws."""
        return self._scores.gathered(trees)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the trained weights by name; several ranks gather them one by one, and all of them must iterate."""
        trained = ((name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad)
        if self._ranks.size == 1:
            return trained
        return ((name, full_tensor(parameter.detach())) for name, parameter in trained)

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of the model's parameters, or of those that are trained."""
        return sum(p.numel() for p in (self._parameters if only_trainable else self.model.parameters()))

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights and the model's config in Hugging Face format; see `Learner.save_pretrained`.

        Raises:
            UserError: If transformers does not load the first weights of this process as they were saved.
        """
        self._optimizer.zero_grad(set_to_none=True)  # makes room for the weights that are read again
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
        whole = save_whole(self.model, folder, self._ranks.rank == 0)
        if whole and not self._save_checked:
            check_saved(self.model, whole, folder)

    @property
    def _snapshots(self) -> list[Snapshot]:
        return [one for one in (self._reference, self._average) if one is not None]

    def exchange_average(self) -> None:
        """Exchange the weights and their average; see `Learner.exchange_average`.

        Raises:
            ValueError: If there is no average.
        """
        if self._average is None:
            raise ValueError("there are no averaged weights; set optimizer.ema_decay")
        self._average.exchange()

    def reset_reference(self, clear_optimizer: bool) -> None:
        """Take the current weights as the reference; `clear_optimizer` clears AdamW's moments (ProRL v1).

        Raises:
            ValueError: If there is no reference.
        """
        if self._reference is None:
            raise ValueError("there is no reference policy to reset; set kl.coefficient above 0")
        self._reference.reset()
        if clear_optimizer:
            self._optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the number of updates, the nodes per pass and the weights of the snapshots.

        On several ranks `save_pretrained` writes the tensors, and this is the rest.
        """
        state: dict[str, Any] = {
            "updates": self._updates,
            "max_nodes": self._nodes.value,
            "max_nodes_at_start": self._nodes.initial,
            "rows": self._rows,
        }
        if self._ranks.size > 1:
            return state | sharded_header(self._optimizer, self._trained, self._snapshots)
        snapshots = {one.name: one.state_dict() for one in self._snapshots}
        return {"optimizer": self._optimizer.state_dict(), **state, **snapshots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, of a learner with any number of ranks; see `Learner.load_state_dict`.

        Raises:
            ValueError: If there is a reference or an average here and none in the state, or one of another model.
        """
        state = in_memory(state, self._trained, [one.name for one in self._snapshots])
        for one in self._snapshots:
            if one.name not in state:
                raise ValueError(
                    f"the state contains no {one.name} weights; resume with the kl.coefficient and the "
                    "optimizer.ema_decay that the run started with, or start a new run from its weights"
                )
            one.load_state_dict(state[one.name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
        self._rows = state["rows"]
        if self._rows:
            self._scores.forward = rows_forward(self._scores.forward)
        if state["max_nodes_at_start"] == self._nodes.initial:  # else engine.nodes_per_pass was changed
            self._nodes.restrict(state["max_nodes"])

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the moments of another run's optimizer; learning rate, warm-up and updates stay those of this run.

        Raises:
            ValueError: If the moments are of another model.
        """
        own = self._optimizer.state_dict()
        state = in_memory(state, self._trained)
        self._optimizer.load_state_dict(with_moments_of(state["optimizer"], own, self._parameters))

    def _learning_rate(self, factor: float) -> float:
        rate, warmup = self._settings.learning_rate, self._settings.warmup_updates
        return factor * (rate * min(1.0, self._updates / warmup) if warmup else rate)

    def _update(self, batch: MiniBatch, lr_scale: float) -> dict[str, float]:
        """Accumulate the gradient of one mini-batch and apply it; return its entries of `StepMetrics`."""
        local = self._nodes.run(lambda: self._accumulate(batch))
        sums = self._ranks.sum(local)
        grad_norm = full_tensor(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm))
        if not (torch.isfinite(grad_norm) and torch.isfinite(sums).all()):
            raise DivergedError(
                f"the loss is {float(sums[0])} and the gradient norm {float(grad_norm)}; start a new run with a lower "
                "optimizer.learning_rate, which a resume cannot change"
            )
        self._updates += 1
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._learning_rate(lr_scale)
        self._nodes.once(self._optimizer.step)  # its first call allocates the moments
        if self._average is not None and self._settings.ema_decay:
            self._average.add(self._settings.ema_decay, self._updates)
        return means(sums, self._ranks.sum(batch.totals())) | {"grad_norm": float(grad_norm)}

    def _accumulate(self, batch: MiniBatch) -> Tensor:
        """Compute the gradient of a mini-batch from zero; return the sums over its nodes, shape [S]."""
        settings = self._settings
        self._optimizer.zero_grad(set_to_none=True)
        sums = no_sums(self.model.device)
        coefficient_K = None
        if settings.loss.is_of_responses:
            coefficients, of_responses = response_losses(batch, self._scores.local(batch.trees), settings.loss)
            coefficient_K = self._tensor(coefficients)
            sums = sums + of_responses
        nodes, next_token, entropy = self._nodes.value, settings.next_token, settings.loss.entropy_coefficient > 0
        with self._scores.autocast():
            for chunk in self._scores.forward.chunk_logprobs(
                self.model,
                batch.trees,
                next_token=next_token,
                max_nodes=nodes,
                entropy=entropy,
                recompute_prompts=self._ranks.size > 1,
            ):
                loss, of_chunk = chunk_loss(chunk, batch, settings.loss, settings.kl, coefficient_K)
                loss.backward()
                sums = sums + of_chunk
            self._passes.finish()
        return sums


def _token_mean(trees: Sequence[RolloutTree]) -> float:
    """Mean log-prob of the sampled tokens."""
    total = sum(float((t.count * t.logprob).sum()) for t in trees)
    return total / sum(t.num_sampled_tokens for t in trees)
