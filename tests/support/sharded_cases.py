"""What the ranks of a sharded learner do in its tests; one process does the same for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from brorl.algorithms.groups import Group
from brorl.config.reading import make_config
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model import logits as logits_module
from brorl.model import logprobs as logprobs_module
from brorl.model.flat_path import FlatForward
from brorl.model.logits import LOGITS_PER_BLOCK, MAX_LOGITS
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.model.sharding import full_tensor, shard
from brorl.model.tree_attention import enable_gradient_checkpointing
from brorl.runs.step_record import UpdateRecord
from brorl.training.inputs import prepare_run
from brorl.training.learner import TreeLearner
from brorl.training.local_parts import build_rank
from brorl.training.ranks import ALONE, Ranks, load_on_first_rank
from small_models import small_model, use_exact_norms

FLAT = FlatForward("the test says so")


@dataclass(frozen=True)
class Case:
    """A model, and the batches that it is trained on."""

    settings: TrainConfig
    seed: int
    steps: list[tuple[list[Group], list[np.ndarray]]]
    lora: int = 0
    gradient_checkpointing: bool = False
    moved: bool = True  # away from the reference, before the first step
    dtype: torch.dtype = torch.float64
    overrides: dict[str, Any] = field(default_factory=dict)
    logits_per_block: int | None = None  # None for whole logits
    flat: bool = False


@dataclass(frozen=True)
class Result:
    updates: list[UpdateRecord]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def model_of(case: Case) -> PreTrainedModel:
    model = small_model("qwen3", seed=case.seed, num_hidden_layers=2, dtype=case.dtype, **case.overrides)
    if case.lora:
        torch.manual_seed(case.seed)
        add_adapter(model, LoraSettings(rank=case.lora))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.1)
    if case.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def learner_of(case: Case, ranks: Ranks, load: Callable[[Case], PreTrainedModel] = model_of) -> TreeLearner:
    logits_module.MAX_LOGITS = 0 if case.logits_per_block else MAX_LOGITS
    logprobs_module.LOGITS_PER_BLOCK = case.logits_per_block or LOGITS_PER_BLOCK
    if ranks.size == 1:
        return TreeLearner(load(case), case.settings, forward=FLAT if case.flat else None)
    lora = LoraSettings(rank=case.lora) if case.lora else None
    model, weights, _ = load_on_first_rank(ranks, lambda: (load(case), None), lora, case.gradient_checkpointing)
    use_exact_norms(model)
    shard(model, weights, torch.device("cpu"), case.settings.autocasts)
    return TreeLearner(model, case.settings, ranks=ranks, forward=FLAT if case.flat else None)


def move(model: PreTrainedModel, factor: float = 1.05) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(factor)


def train(ranks: Ranks, case: Case) -> Result:
    learner = learner_of(case, ranks)
    if case.moved:
        move(learner.model)
    return result(learner, steps(learner, case))


def steps(learner: TreeLearner, case: Case, first: int = 0) -> list[UpdateRecord]:
    updates = []
    for seed, (groups, advantages) in enumerate(case.steps[first:], first):

        def estimate(penalized: Sequence[Group], groups: Any = groups, advantages: Any = advantages) -> list[Any]:
            shift = [after.reward_L - before.reward_L for before, after in zip(groups, penalized, strict=True)]
            return [a + s for a, s in zip(advantages, shift, strict=True)]

        updates.append(learner.learn(groups, estimate, seed=seed))
    return updates


def result(learner: TreeLearner, updates: list[UpdateRecord]) -> Result:
    gradients = {name: array(full_tensor(p.grad)) for name, p in learner.model.named_parameters() if p.grad is not None}
    return Result(updates, gradients, {name: array(w) for name, w in learner.weights()})


def array(tensor: torch.Tensor) -> np.ndarray:
    exact = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
    return exact.numpy().copy()


def logprobs(ranks: Ranks, case: Case) -> Any:
    learner = learner_of(case, ranks)
    groups = learner.with_old_logprobs(case.steps[0][0])
    return learner.logprobs([g.tree for g in groups]), [g.old_logprob_M for g in groups]


def save(ranks: Ranks, case: Case, folder: Path, resume: Path | None, first: int) -> Result:
    """Continue from a folder, make one step, and save to another folder."""

    def load(case: Case) -> PreTrainedModel:
        model = model_of(case)
        if resume is None:
            return model
        if case.lora:
            saved = load_file(resume / "adapter_model.safetensors")
            own = {n.replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}
            for name, weight in saved.items():
                own[name.removeprefix("base_model.model.")].data.copy_(weight)
        else:
            model.load_state_dict(AutoModelForCausalLM.from_pretrained(resume, dtype=case.dtype).state_dict())
        return model

    learner = learner_of(case, ranks, load)
    if resume is not None:
        state = torch.load(resume / "state.pt", weights_only=True)
        if "shards" in state:
            state["shards"] = str(resume / state["shards"])
        learner.load_state_dict(state)
    one = replace(case, steps=case.steps[: first + 1])
    found = result(learner, steps(learner, one, first))
    learner.save_pretrained(folder)
    if ranks.rank == 0:
        torch.save(learner.state_dict(), folder / "state.pt")
    return found


def weights_after_passes(ranks: Ranks, case: Case, folder: Path) -> tuple[dict[str, np.ndarray], torch.dtype]:
    """Return the weights, and save them, after a step and passes without a gradient."""
    learner = learner_of(case, ranks)
    move(learner.model)
    steps(learner, case)
    learner.logprobs([group.tree for group in case.steps[0][0]])
    found = dict(learner.weights())
    [dtype] = {weight.dtype for weight in found.values()}
    learner.save_pretrained(folder)
    return {name: array(weight) for name, weight in found.items()}, dtype


def reset(ranks: Ranks, case: Case, clear: bool) -> Result:
    learner = learner_of(case, ranks)
    move(learner.model)
    updates = steps(learner, replace(case, steps=case.steps[:1]))
    learner.reset_reference(clear)
    return result(learner, updates + steps(learner, case, 1))


class Full:
    """Memory that holds only so many tokens of a pass; fails on the way forward, in a layer, or on the way back.

    After `times` failures it holds all passes.
    """

    def __init__(self, model: PreTrainedModel, tokens: int, where: str, times: int = 1 << 30) -> None:
        self._tokens, self.failures, self._tokens_now, self._where = tokens, 0, 0, where
        self._times = times
        model.get_input_embeddings().register_forward_hook(self._embedded)
        if where == "layer":
            model.model.layers[1].mlp.register_forward_hook(lambda *_: self._fail())
        if where == "backward":
            model.model.layers[0].mlp.register_forward_hook(self._in_layer)

    def _embedded(self, _module: object, inputs: tuple[torch.Tensor], _output: object) -> None:
        self._tokens_now = inputs[0].numel()
        if self._where == "embedding":
            self._fail()

    def _in_layer(self, _module: object, _inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad and self._tokens_now > self._tokens:
            output.register_hook(self._raise)

    def _fail(self) -> None:
        if self._tokens_now > self._tokens:
            self._raise()

    def _raise(self, *_: object) -> None:
        if self.failures == self._times:
            return
        self.failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory.")


def run_out(
    ranks: Ranks, case: Case, full_rank: int, tokens: int, where: str, times: int = 1 << 30
) -> tuple[Result, int]:
    """Train while one rank has little memory."""
    learner = learner_of(case, ranks)
    move(learner.model)
    full = Full(learner.model, tokens, where, times) if ranks.rank == full_rank else None
    return result(learner, steps(learner, case)), full.failures if full else 0


def run_into(ranks: Ranks, case: Case, full_rank: int | None = None) -> tuple[str, dict[str, np.ndarray]]:
    """Train until an error; return it with the weights."""
    learner = learner_of(case, ranks)
    if full_rank == ranks.rank:
        Full(learner.model, 2, "layer")
    try:
        steps(learner, case)
    except (FloatingPointError, UserError) as error:
        found = f"{type(error).__name__}: {error}"
    return found, {name: array(w) for name, w in learner.weights()}


def take_optimizer(ranks: Ranks, case: Case, state: dict[str, Any]) -> str:
    """Load the optimizer state of another model; return the error."""
    learner = learner_of(case, ranks)
    try:
        learner.load_optimizer_state(state)
    except ValueError as error:
        return str(error)
    return "no error"


def alone(function: Any, *arguments: Any) -> Any:
    return function(ALONE, *arguments)


def built(ranks: Ranks, settings: dict[str, Any], case: Case) -> Result:
    """Train a learner that was made from settings."""
    config = make_config({}, settings, "test")
    torch.manual_seed(0)  # of new adapters
    learner = build_rank(config, prepare_run(config, config.model), ranks)
    return result(learner, steps(learner, case))
