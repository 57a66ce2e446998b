"""The learner: groups and advantages in, an updated model out, with the exact gradient of the tree.

Each step makes M mini-batch updates of AdamW. Parts of the trees go through the model one after the other, so memory
does not depend on N; where it runs out all the same, a mini-batch starts again with smaller parts. It refuses nothing
silently: a loss that is not finite stops the run before the weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Observe, Updating, unobserved
from brorl.algorithms.groups import Group
from brorl.algorithms.importance import ImportanceCorrection, Mismatch, masked_share, mismatch
from brorl.algorithms.kl import KLPenalty, penalised_group
from brorl.algorithms.learning_rate import warmed_up
from brorl.algorithms.policy_loss import PolicyLossSettings
from brorl.errors import DivergedError
from brorl.model.logprobs import chunk_logprobs, default_max_nodes, prompt_groups, tree_logprobs
from brorl.model.next_token import NextToken
from brorl.training.chunk_loss import NUM_SUMS, chunk_loss, response_losses
from brorl.training.chunk_size import ChunkSize
from brorl.training.learner import Update
from brorl.training.mini_batch import MiniBatch, TrainedResponses, assemble, choose_trained
from brorl.training.optimizer_state import with_moments_of
from brorl.training.reference import ReferencePolicy
from brorl.tree import RolloutTree

FloatArray = NDArray[np.float64]
_Logprobs = list[list[FloatArray]]  # of each tree of each mini-batch


@dataclass(frozen=True)
class LearnerSettings:
    """How the learner updates.

    Attributes:
        learning_rate: Full learning rate of AdamW, already scaled for the batch.
        mini_batches: Updates per step, M; groups are dealt out to them at random.
        next_token: From logits to the distribution that the rollouts are drawn from.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Gradients are scaled down to this global norm.
        warmup_updates: Updates over which the learning rate rises linearly.
        responses_per_verdict: Back-propagate at most this many correct and this many incorrect distinct responses per
            group, weighted so that the gradient stays unbiased; 0 for all.
        recompute_old_logprobs: Take the old log-probs from the learner's own forward pass instead of the engine's.
        max_nodes: Nodes per forward pass; None for the default. Sets memory, not results.
        autocast: Compute in bfloat16 where that is safe; the weights stay as they are.
        loss: Kind, bounds and aggregation of the policy loss.
        kl: Penalty against a reference policy; None has no reference.
        importance: Correction for the policy that sampled; needs `recompute_old_logprobs`.
        offload_reference: Keep the reference in the memory of the CPU between its uses.
    """

    learning_rate: float
    mini_batches: int = 1
    next_token: NextToken = field(default_factory=NextToken)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_updates: int = 0
    responses_per_verdict: int = 0
    recompute_old_logprobs: bool = False
    max_nodes: int | None = None
    autocast: bool = False
    loss: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    kl: KLPenalty | None = None
    importance: ImportanceCorrection = field(default_factory=ImportanceCorrection)
    offload_reference: bool = False

    def __post_init__(self) -> None:
        if self.importance.mode != "none" and not self.recompute_old_logprobs:
            raise ValueError(
                f"the importance correction '{self.importance.mode}' compares the engine's log-probs with the "
                "learner's, and old log-probs are the engine's; set optimizer.old_logprobs: recompute, or "
                "importance.correction: none"
            )


class _Scored(NamedTuple):
    """A tree, kept so that its identity stays its own, and the log-probs of its nodes before the step, shape [M]."""

    tree: RolloutTree
    old_logprob_M: FloatArray
    reference_logprob_M: FloatArray


class TreeLearner:
    """Trains a model in place, in one process.

    Args:
        model: The model; its current weights become the reference, if there is one.
        settings: How it is updated.
        say: Gets a line when memory runs out and smaller parts are tried.
        observe: Gets an `Updating` before each update.
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
        self._nodes = ChunkSize(settings.max_nodes or default_max_nodes(model), say)
        self._reference = ReferencePolicy(model, settings.offload_reference) if settings.kl else None
        self._scored: dict[int, _Scored] = {}

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
            OutOfMemoryError: If memory does not suffice for the smallest passes.
        """
        settings = self._settings
        if len(groups) < settings.mini_batches:
            raise ValueError(f"{settings.mini_batches} mini-batches need as many groups, got {len(groups)}")
        self.model.train()
        batches, apart, masked = self._mini_batches(groups, advantages, np.random.default_rng(seed))
        sums = np.zeros(NUM_SUMS + 1)
        for done, batch in enumerate(batches):
            self._observe(Updating(done, len(batches)))
            sums += self._update(batch)
        loss, grad_norm, clip_share, kl, clip_low, clip_high, reference_kl, entropy = (sums / len(batches)).tolist()
        self._scored.clear()
        retries, self._nodes.retries = self._nodes.retries, 0
        return Update(
            loss=loss,
            grad_norm=grad_norm,
            clip_share=clip_share,
            old_policy_kl=kl,
            entropy=-_token_mean([g.tree for g in groups]),
            learning_rate=self._learning_rate(),
            trained_nodes=sum(t.num_unique_tokens for batch in batches for t in batch.trees),
            clip_low_share=clip_low,
            clip_high_share=clip_high,
            reference_kl=reference_kl if self.has_reference else None,
            bonus_entropy=entropy if settings.loss.entropy_coefficient else None,
            mismatch_mean=apart.mean if apart else None,
            mismatch_max=apart.max if apart else None,
            mismatch_kl=apart.kl if apart else None,
            masked_share=masked,
            nodes_per_pass=self._nodes.value,
            out_of_memory_retries=retries,
        )

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups that wait for a later step, with the old log-probs that they will need there.

        This step's updates move the weights away from those that sampled the groups. Later, only these log-probs let
        the clip see how far.

        Args:
            groups: Groups that this step does not train on, before its first update.

        Returns:
            The groups, in order. Those that waited before keep what they have. All stay as they are where old log-probs
            are the engine's.
        """
        if not self._settings.recompute_old_logprobs:
            return list(groups)
        old = self._old_logprobs([g.tree for g in groups], [g.old_logprob_M for g in groups])
        return [replace(g, old_logprob_M=old_M) for g, old_M in zip(groups, old, strict=True)]

    def penalised(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the KL penalty taken off their rewards, where it is placed there, else as they are.

        Args:
            groups: What the next step trains on, before advantages are estimated. The step then takes the log-probs
                that were computed here.

        Returns:
            The groups, in order.
        """
        penalty = self._settings.kl
        if penalty is None or penalty.placement != "reward":
            return list(groups)
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
            next_token, nodes = self._settings.next_token, self._nodes.value
            with self._autocast():
                for start, stop in prompt_groups(trees, nodes):  # prompts take memory too
                    some = trees[start:stop]
                    logprobs = tree_logprobs(self.model, some, next_token=next_token, max_nodes=nodes)
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
        """Restore what `state_dict` returned.

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
        """Take over the moments of another run's optimizer; learning rate, warm-up and updates are those of this run.

        Args:
            state: What the other run's `state_dict` returned.

        Raises:
            ValueError: If the moments are of another model.
        """
        own = self._optimizer.state_dict()
        self._optimizer.load_state_dict(with_moments_of(state["optimizer"], own, self._parameters))

    def _learning_rate(self) -> float:
        return warmed_up(self._settings.learning_rate, self._updates, self._settings.warmup_updates)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.model.device.type, torch.bfloat16) if self._settings.autocast else nullcontext()

    def _mini_batches(
        self, groups: Sequence[Group], advantages: Sequence[FloatArray], generator: np.random.Generator
    ) -> tuple[list[MiniBatch], Mismatch | None, float]:
        """Deal the groups out, and compute all that is needed before the first update.

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
        """Return the log-probs of the weights that sampled: the engine's, those known, or those of the present ones."""
        if not self._settings.recompute_old_logprobs:
            return [t.logprob for t in trees]
        fresh = iter(self.logprobs([t for t, known_M in zip(trees, known, strict=True) if known_M is None]))
        return [next(fresh) if known_M is None else known_M for known_M in known]

    def _reference_logprobs(self, batches: list[list[RolloutTree]]) -> _Logprobs:
        """Return the reference's log-probs of lists of trees, with its weights brought in once."""

        def work() -> _Logprobs:
            assert self._reference is not None  # who calls has looked
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

    def _update(self, batch: MiniBatch) -> FloatArray:
        """Accumulate the gradient of one mini-batch and apply it; return what `Update` is the mean of."""
        sums = self._nodes.run(lambda: self._accumulate(batch))
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        if not (torch.isfinite(grad_norm) and torch.isfinite(sums).all()):
            raise DivergedError(
                f"loss {float(sums[0])} with gradient norm {float(grad_norm)}; lower optimizer.learning_rate"
            )
        self._updates += 1
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._learning_rate()
        self._nodes.once(self._optimizer.step)  # its first call allocates the moments
        weight = (batch.positive_K - batch.negative_K).sum().clamp(min=1e-30)
        sampled = batch.sampled_K.sum().clamp(min=1)
        loss, clipped, kl, low, high, reference_kl, entropy = sums
        kl = kl / batch.count_K.sum().clamp(min=1)
        shares = [clipped / weight, kl, low / weight, high / weight, reference_kl / sampled, entropy / sampled]
        return torch.stack([loss, grad_norm.double(), *shares]).cpu().numpy()

    def _accumulate(self, batch: MiniBatch) -> Tensor:
        """Compute the gradient of a mini-batch from zero; return the sums of `ChunkLoss`."""
        settings = self._settings
        self._optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=self.model.device)
        coefficient_K = None
        if settings.loss.kind == "gspo":
            coefficients, of_responses = response_losses(batch, self.logprobs(batch.trees), settings.loss)
            coefficient_K = self._tensor(coefficients)
            sums += of_responses
        nodes, next_token, entropy = self._nodes.value, settings.next_token, settings.loss.entropy_coefficient > 0
        with self._autocast():
            for chunk in chunk_logprobs(
                self.model, batch.trees, next_token=next_token, max_nodes=nodes, entropy=entropy
            ):
                loss, of_chunk = chunk_loss(chunk, batch, settings.loss, settings.kl, coefficient_K)
                loss.backward()
                sums += of_chunk
        return sums

    def _tensor(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        return torch.from_numpy(np.concatenate([np.empty(0), *arrays])).to(self.model.device, dtype)


def _token_mean(trees: Sequence[RolloutTree]) -> float:
    """Mean log-prob of the sampled tokens."""
    total = sum(float((t.count * t.logprob).sum()) for t in trees)
    return total / sum(t.num_sampled_tokens for t in trees)
