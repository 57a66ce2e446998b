"""The learner of one process: it updates a model with the exact gradient of the tree.

Each step makes M mini-batch updates of AdamW. The trees go through the model in chunks, so memory does not depend on N.
If memory runs out, a mini-batch starts again with smaller chunks. A loss that is not finite stops the run before the
weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Observe, Updating, unobserved
from brorl.algorithms.groups import Group
from brorl.algorithms.importance import Mismatch, masked_share, mismatch
from brorl.algorithms.kl import KLPenalty, penalised_group
from brorl.algorithms.learning_rate import warmed_up
from brorl.errors import DivergedError
from brorl.model.logprobs import prompt_groups
from brorl.training.chunk_loss import LossSums, chunk_loss, response_losses
from brorl.training.chunk_size import ChunkSize
from brorl.training.learner import FloatArray, LearnerSettings, Update
from brorl.training.mini_batch import MiniBatch, TrainedResponses, assemble, choose_trained
from brorl.training.optimizer_state import with_moments_of
from brorl.training.reference import ReferencePolicy
from brorl.tree import RolloutTree

_Logprobs = list[list[FloatArray]]  # of each tree of each mini-batch


class _Scored(NamedTuple):
    """A tree and the log-probs of its nodes before the step, shape [M]; holding the tree keeps its id unique."""

    tree: RolloutTree
    old_logprob_M: FloatArray
    reference_logprob_M: FloatArray


@dataclass(frozen=True)
class _UpdateMeans:
    """One update, or the mean of several; see `Update` for the attributes."""

    loss: float
    grad_norm: float
    clip_share: float
    clip_low_share: float
    clip_high_share: float
    old_policy_kl: float
    reference_kl: float
    entropy: float

    @classmethod
    def of(cls, sums: LossSums, grad_norm: Tensor, batch: MiniBatch) -> _UpdateMeans:
        """Divide the sums of a mini-batch by its weights and tokens."""
        weight = (batch.positive_K - batch.negative_K).sum().clamp(min=1e-30)
        sampled = batch.sampled_K.sum().clamp(min=1)
        means = (
            sums.policy_loss,
            grad_norm.double(),
            sums.clipped / weight,
            sums.clipped_low / weight,
            sums.clipped_high / weight,
            sums.old_policy_kl / batch.count_K.sum().clamp(min=1),
            sums.reference_kl / sampled,
            sums.entropy / sampled,
        )
        return cls(*torch.stack(means).tolist())

    @classmethod
    def mean(cls, updates: Sequence[_UpdateMeans]) -> _UpdateMeans:
        """Return the mean over updates."""
        return cls(*(sum(values) / len(updates) for values in zip(*map(astuple, updates), strict=True)))


class TreeLearner:
    """Trains a model in place, in one process.

    Args:
        model: The model; its current weights become the reference, if there is one.
        settings: How the model is updated.
        say: Receives a line when memory runs out and smaller chunks are tried, and the cost of the flat path.
        observe: Receives an `Updating` before each update.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings,
        say: Callable[[str], None] = lambda _: None,
        observe: Observe = unobserved,
    ) -> None:
        self.model = model
        self._observe = observe
        self._say = say
        self._cost_line_said = False
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
        self._nodes = ChunkSize(settings.max_nodes or settings.forward.default_max_nodes(model), say)
        self._reference = ReferencePolicy(model, settings.offload_reference) if settings.kl else None
        self._scored: dict[int, _Scored] = {}

    def step(
        self, groups: Sequence[Group], advantages: Sequence[FloatArray], seed: int, rate_factor: float = 1.0
    ) -> Update:
        """Make the M mini-batch updates of one step.

        Args:
            groups: The batch, at least M groups.
            advantages: For each group the advantage of each distinct response, shape [L].
            seed: Decides which groups go to which mini-batch, and which responses are back-propagated if not all are.
            rate_factor: Factor of the learning rate in this step.

        Returns:
            The means over the updates, for the metrics.

        Raises:
            DivergedError: If the loss or the gradient is not finite. The weights are then those before that update.
            OutOfMemoryError: If memory is too small for the smallest chunks.
        """
        settings = self._settings
        if len(groups) < settings.mini_batches:
            raise ValueError(f"{settings.mini_batches} mini-batches need as many groups, got {len(groups)}")
        self.model.train()
        if not self._cost_line_said:
            self._cost_line_said = True
            if line := settings.forward.cost_line([group.tree for group in groups]):
                self._say(line)
        batches, apart, masked = self._mini_batches(groups, advantages, np.random.default_rng(seed))
        done: list[_UpdateMeans] = []
        for batch in batches:
            self._observe(Updating(len(done), len(batches)))
            done.append(self._update(batch, rate_factor))
        means = _UpdateMeans.mean(done)
        self._scored.clear()
        retries, self._nodes.retries = self._nodes.retries, 0
        return Update(
            loss=means.loss,
            grad_norm=means.grad_norm,
            clip_share=means.clip_share,
            old_policy_kl=means.old_policy_kl,
            entropy=-_token_mean([g.tree for g in groups]),
            learning_rate=self._learning_rate(rate_factor),
            trained_nodes=sum(t.num_unique_tokens for batch in batches for t in batch.trees),
            clip_low_share=means.clip_low_share,
            clip_high_share=means.clip_high_share,
            reference_kl=means.reference_kl if self.has_reference else None,
            bonus_entropy=means.entropy if settings.loss.entropy_coefficient else None,
            mismatch_mean=apart.mean if apart else None,
            mismatch_max=apart.max if apart else None,
            mismatch_kl=apart.kl if apart else None,
            masked_share=masked,
            nodes_per_pass=self._nodes.value,
            out_of_memory_retries=retries,
        )

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups that wait for a later step, with the old log-probs that the later step needs.

        The updates of this step move the weights away from those that sampled the groups. The clip of a later step
        measures the distance from these log-probs.

        Args:
            groups: Groups that this step does not train on, before its first update.

        Returns:
            The groups, in order. Groups with old log-probs keep them. If the old log-probs are the engine's, the groups
            are returned unchanged.
        """
        if not self._settings.recompute_old_logprobs:
            return list(groups)
        old = self._old_logprobs([g.tree for g in groups], [g.old_logprob_M for g in groups])
        return [replace(g, old_logprob_M=old_M) for g, old_M in zip(groups, old, strict=True)]

    def penalised(self, groups: Sequence[Group]) -> list[Group]:
        """Subtract the KL penalty from the rewards, if the penalty is placed there.

        Args:
            groups: The groups of the next step, before their advantages are estimated. The step reuses the log-probs
                that are computed here.

        Returns:
            The groups, in order.
        """
        penalty = self._settings.kl
        if penalty is None:
            return list(groups)
        match penalty.placement:
            case "loss":
                return list(groups)
            case "reward":
                return self._penalised(groups, penalty)
            case _:
                assert_never(penalty.placement)

    def _penalised(self, groups: Sequence[Group], penalty: KLPenalty) -> list[Group]:
        trees = [g.tree for g in groups]
        old = self._old_logprobs(trees, [g.old_logprob_M for g in groups])
        [reference] = self._reference_logprobs([trees])
        self._scored = {id(t): _Scored(t, o, r) for t, o, r in zip(trees, old, reference, strict=True)}
        return [penalised_group(g, o, r, penalty) for g, o, r in zip(groups, old, reference, strict=True)]

    @torch.no_grad()
    def logprobs(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-prob (nats) of every node under the current weights, at the sampling temperature.

        Args:
            trees: P trees.

        Returns:
            For each tree the log-probs, shape [M].
        """

        def work() -> list[FloatArray]:
            found: list[FloatArray] = []
            forward, next_token = self._settings.forward, self._settings.next_token
            nodes = self._nodes.value
            with self._autocast():
                for start, stop in prompt_groups(trees, nodes):  # prompts take memory too
                    some = trees[start:stop]
                    logprobs = forward.logprobs(self.model, some, next_token=next_token, max_nodes=nodes)
                    found += [lp.double().cpu().numpy() for lp in logprobs]
            return found

        was_training = self.model.training
        self.model.eval()
        try:
            return self._nodes.run(work)
        finally:
            self.model.train(was_training)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the current weights by name."""
        return self.model.named_parameters()

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of the model's parameters.

        Args:
            only_trainable: Count only those that are trained.
        """
        return sum(p.numel() for p in (self._parameters if only_trainable else self.model.parameters()))

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights and the model's config in Hugging Face format.

        Args:
            folder: An existing folder.
        """
        self.model.save_pretrained(folder)

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference policy."""
        return self._reference is not None

    def reset_reference(self, clear_optimizer: bool) -> None:
        """Take the current weights as the reference.

        Args:
            clear_optimizer: Forget the optimizer's moments too (ProRL v1). The warm-up is not repeated.

        Raises:
            ValueError: If there is no reference.
        """
        if self._reference is None:
            raise ValueError("there is no reference policy to reset; set kl.coefficient above 0")
        self._reference.reset()
        self._scored.clear()
        if clear_optimizer:
            self._optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the number of updates, the nodes per pass and the weights of a reference."""
        state = {
            "optimizer": self._optimizer.state_dict(),
            "updates": self._updates,
            "max_nodes": self._nodes.value,
        }
        return state if self._reference is None else state | {"reference": self._reference.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`.

        Raises:
            ValueError: If there is a reference here and none in the state, or one of another model.
        """
        if self._reference is not None:
            if "reference" not in state:
                raise ValueError(
                    "the state holds no reference policy, and kl.coefficient is above 0; resume with the settings that "
                    "the run started with, or start a new run from its weights"
                )
            self._reference.load_state_dict(state["reference"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
        self._nodes.restrict(state.get("max_nodes", self._nodes.value))  # earlier versions did not keep it
        self._scored.clear()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the moments of another run's optimizer; learning rate, warm-up and updates stay those of this run.

        Args:
            state: The state of the other run's learner.

        Raises:
            ValueError: If the moments are of another model.
        """
        own = self._optimizer.state_dict()
        self._optimizer.load_state_dict(with_moments_of(state["optimizer"], own, self._parameters))

    def _learning_rate(self, factor: float) -> float:
        return factor * warmed_up(self._settings.learning_rate, self._updates, self._settings.warmup_updates)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.model.device.type, torch.bfloat16) if self._settings.autocast else nullcontext()

    def _mini_batches(
        self, groups: Sequence[Group], advantages: Sequence[FloatArray], generator: np.random.Generator
    ) -> tuple[list[MiniBatch], Mismatch | None, float]:
        """Split the groups into mini-batches, and compute everything that is needed before the first update.

        Returns:
            The mini-batches, how far old policy and sampler are apart, and the share of tokens that a mask set to 0.
        """
        settings = self._settings
        parts = np.array_split(generator.permutation(len(groups)), settings.mini_batches)
        size = settings.responses_per_verdict
        finished_only = settings.loss.mask_truncated
        chosen = [
            [choose_trained(groups[i], advantages[i], size, finished_only, generator) for i in part] for part in parts
        ]
        trained = [[x for x in part if x] for part in chosen]
        old, reference = self._before_update(trained)
        loss, importance = settings.loss, settings.importance
        batches = []
        for part, mine, its_old, its_reference in zip(parts, trained, old, reference, strict=True):
            trees = [groups[i].tree for i in part]
            share = len(part) * len(parts) / len(groups)
            batches.append(assemble(trees, mine, its_old, its_reference, loss, importance, share, self._tensor))
        every, every_old = list(chain(*trained)), list(chain(*old))
        masked = masked_share([x.tree for x in every], every_old, importance)
        return batches, self._mismatch(every, every_old), masked

    def _before_update(self, trained: list[list[TrainedResponses]]) -> tuple[_Logprobs, _Logprobs | list[None]]:
        """Return old and reference log-probs of each mini-batch's trained, at the weights before the first update."""
        known = self._scored
        if known and all(id(x.whole) in known for part in trained for x in part):
            old = [[x.of_whole(known[id(x.whole)].old_logprob_M) for x in part] for part in trained]
            return old, [[x.of_whole(known[id(x.whole)].reference_logprob_M) for x in part] for part in trained]
        batches = [[x.tree for x in part] for part in trained]
        old = [self._old_logprobs([x.tree for x in part], [x.old_logprob_M for x in part]) for part in trained]
        return old, self._reference_logprobs(batches) if self.has_reference else [None] * len(batches)

    def _old_logprobs(self, trees: Sequence[RolloutTree], known: Sequence[FloatArray | None]) -> list[FloatArray]:
        """Return the old log-probs: the engine's, the known ones, or those of the current weights."""
        if not self._settings.recompute_old_logprobs:
            return [t.logprob for t in trees]
        fresh = iter(self.logprobs([t for t, known_M in zip(trees, known, strict=True) if known_M is None]))
        return [next(fresh) if known_M is None else known_M for known_M in known]

    def _reference_logprobs(self, batches: list[list[RolloutTree]]) -> _Logprobs:
        """Return the reference's log-probs of lists of trees; its weights are loaded once."""

        def work() -> _Logprobs:
            assert self._reference is not None  # callers check it
            self._optimizer.zero_grad(set_to_none=True)  # the last update's gradients make room
            with self._reference.in_place():
                return [self.logprobs(trees) for trees in batches]

        return self._nodes.run(work)

    def _mismatch(self, trained: Sequence[TrainedResponses], old_logprobs: Sequence[FloatArray]) -> Mismatch | None:
        """Compare the old policy with the sampler on fresh rollouts, where both are known."""
        pairs = [(x.tree, old) for x, old in zip(trained, old_logprobs, strict=True) if x.old_logprob_M is None]
        unknown = any(np.isnan(tree.logprob).any() for tree, _ in pairs)
        if not self._settings.recompute_old_logprobs or not pairs or unknown:
            return None
        return mismatch([tree for tree, _ in pairs], [old for _, old in pairs])

    def _update(self, batch: MiniBatch, rate_factor: float) -> _UpdateMeans:
        """Accumulate the gradient of one mini-batch and apply it."""
        sums = self._nodes.run(lambda: self._accumulate(batch))
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        if not (torch.isfinite(grad_norm) and torch.isfinite(sums.vector()).all()):
            raise DivergedError(
                f"loss {float(sums.policy_loss)} with gradient norm {float(grad_norm)}; lower optimizer.learning_rate"
            )
        self._updates += 1
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._learning_rate(rate_factor)
        self._nodes.once(self._optimizer.step)  # its first call allocates the moments
        return _UpdateMeans.of(sums, grad_norm, batch)

    def _accumulate(self, batch: MiniBatch) -> LossSums:
        """Compute the gradient of a mini-batch from zero; return the sums over its nodes."""
        settings = self._settings
        self._optimizer.zero_grad(set_to_none=True)
        sums = LossSums.zero(self.model.device)
        coefficient_K = None
        if settings.loss.is_of_responses:
            coefficients, of_responses = response_losses(batch, self.logprobs(batch.trees), settings.loss)
            coefficient_K = self._tensor(coefficients)
            sums = sums + of_responses
        nodes, next_token, entropy = self._nodes.value, settings.next_token, settings.loss.entropy_coefficient > 0
        with self._autocast():
            for chunk in settings.forward.chunk_logprobs(
                self.model, batch.trees, next_token=next_token, max_nodes=nodes, entropy=entropy
            ):
                loss, of_chunk = chunk_loss(chunk, batch, settings.loss, settings.kl, coefficient_K)
                loss.backward()
                sums = sums + of_chunk
        return sums

    def _tensor(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        return torch.from_numpy(np.concatenate([np.empty(0), *arrays])).to(self.model.device, dtype)


def _token_mean(trees: Sequence[RolloutTree]) -> float:
    """Mean log-prob of the sampled tokens."""
    total = sum(float((t.count * t.logprob).sum()) for t in trees)
    return total / sum(t.num_sampled_tokens for t in trees)
