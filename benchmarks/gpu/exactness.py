"""Exactness on a device: the learner's variants and the engine against the plain forward pass of transformers.

The reference is the model in float64 on the same device, with its own attention, on one padded row per distinct
response. In float64 and float32 the largest error has a fixed bound. In bfloat16 the error is compared with that of the
plain forward pass in bfloat16 on the same responses: it may be three times as large. Long responses, with a large
vocabulary and the learner's own tiles and blocks, are compared with the flat path in float32, which is the model's own
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from gpu.device import Device
from gpu.models import (
    FLAT,
    NO_END_TOKEN,
    STATE_SPACE,
    VARIANTS,
    LearnerVariant,
    copy_of,
    small_model,
    speed_config,
    speed_model,
)
from harness import Check, Findings
from torch import Tensor
from transformers import PreTrainedModel

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings
from brorl.config.settings import TrainConfig
from brorl.model.kernels import use_kernels
from brorl.model.logprobs import PLAIN
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.rollout.settings import EngineSettings
from brorl.sampling import SamplingParams
from brorl.training.learner import TreeLearner
from brorl.training.settings import OptimizerSettings
from brorl.tree import RolloutTree

Precision = Literal["float64", "float32", "bfloat16"]
_NODES = 40  # of a chunk: several chunks
_LEARNING_RATE = 1e-3


class Bounds(NamedTuple):
    """Bounds in one precision."""

    logprob: float  # of the largest error of a log-prob, in nats
    gradient: float  # of the largest relative error of a parameter's gradient
    # of the relative error of the changed weights. AdamW divides each gradient by its size, so rounding decides the
    # direction where a gradient is nearly 0
    update: float
    # of the fraction of responses that another batch samples differently, because a uniform number falls between two
    # roundings of a cumulative probability
    other_responses: float


BOUNDS = {
    "float64": Bounds(1e-9, 1e-9, 1e-6, 0.0),
    "float32": Bounds(1e-4, 1e-4, 2e-2, 0.02),
}
_STATE_SPACE_BOUNDS = Bounds(2e-3, 2e-3, 0.1, 0.02)  # their states are float32 in every precision
_TIMES_PLAIN = 3.0  # in bfloat16: the permitted error, as a multiple of that of the plain forward pass
_LOGPROB_FLOOR, _GRADIENT_FLOOR = 2e-3, 1e-2  # and added to it
_LONG_SCALE = 4.0  # of the logits; a uniform distribution would hide errors
_LONG_LOGPROB, _LONG_GRADIENT = 5e-4, 2e-3  # in float32


class Errors(NamedTuple):
    """Errors against the reference: of log-probs (largest, root mean square; nats) and of gradients (relative)."""

    logprob: float
    logprob_rms: float
    gradient: float


class Computed(NamedTuple):
    """The log-probs of each tree's nodes, and the gradient of their weighted sum by parameter."""

    logprobs: list[Tensor]
    gradient: dict[str, Tensor]


def computed_plainly(model: PreTrainedModel, trees: Sequence[RolloutTree], weights: Sequence[Tensor]) -> Computed:
    """Compute log-probs and gradient with the model's own attention."""
    model.zero_grad()
    found = []
    for tree, weight_M in zip(trees, weights, strict=True):
        logprob_M = plain_logprobs(model, tree)
        (weight_M.to(logprob_M.dtype) * logprob_M).sum().backward()
        found.append(logprob_M.detach())
    return Computed(found, gradient_of(model))


def plain_logprobs(model: PreTrainedModel, tree: RolloutTree) -> Tensor:
    """Return the log-prob of each node's token, shape [M]."""
    return best_and_own(model, tree)[1]


def best_and_own(model: PreTrainedModel, tree: RolloutTree) -> tuple[Tensor, Tensor]:
    """Return the log-prob of the best token at each node, and of the node's token, shape [M] each.

    The distinct responses are rows, padded on the right, which a causal model never reads.
    """
    before, paths = len(tree.prompt_ids), [tree.path(int(leaf)) for leaf in tree.leaf]
    rows = np.zeros((len(paths), before + int(tree.length.max())), np.int64)
    rows[:, :before] = tree.prompt_ids
    row_M = np.empty(tree.num_unique_tokens, np.int64)
    for row, path in enumerate(paths):
        rows[row, before : before + path.size] = tree.token[path]
        row_M[path] = row
    logits = model(input_ids=torch.from_numpy(rows).to(model.device), use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprob_RSV = wide.log_softmax(-1)
    index = (torch.from_numpy(array).to(model.device) for array in (row_M, before - 1 + tree.depth))
    logprob_MV = logprob_RSV[tuple(index)]
    token_M = torch.from_numpy(tree.token.copy()).to(model.device)
    return logprob_MV.max(1).values, logprob_MV.gather(1, token_M[:, None])[:, 0]


def gradient_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradient of each parameter in float64; zeros where there is none."""
    zero = {name: p for name, p in model.named_parameters() if p.grad is None}
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: torch.zeros_like(p, dtype=torch.float64) for name, p in zero.items()}


def errors_of(found: Computed, expected: Computed) -> Errors:
    """Return the errors; that of a small gradient is relative to a hundredth of the norm of all."""
    total = float(torch.stack([g.norm() for g in expected.gradient.values()]).norm())
    relative = [
        float((found.gradient[name].to(g.device) - g).norm() / max(float(g.norm()), 1e-2 * total))
        for name, g in expected.gradient.items()
    ]
    return Errors(*logprob_errors(found.logprobs, expected.logprobs), max(relative))


def logprob_errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest and the root mean square difference."""
    difference_M = torch.cat(list(found)).double().cpu() - torch.cat(list(expected)).double().cpu()
    return float(difference_M.abs().max()), float(difference_M.square().mean().sqrt())


@dataclass(frozen=True)
class Trial:
    """The sampled responses of a comparison."""

    num_rollouts: int  # rollouts of each prompt
    max_new_tokens: int  # their tokens
    seed: int  # seed of weights, prompts and draws

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of three lengths."""
        rng = np.random.default_rng(self.seed)
        return [rng.integers(1, 61, size).tolist() for size in (5, 2, 22)]

    def sampled(self, model: PreTrainedModel, *, flat: bool) -> list[RolloutTree]:
        """Sample with the native engine."""
        engine = NativeEngine(model, NO_END_TOKEN, forward=FLAT if flat else None)
        sampling = SamplingParams(max_new_tokens=self.max_new_tokens)
        return engine.sample(SampleTask(self.prompts, self.num_rollouts, sampling, self.seed))


def learner_part(kind: str, precision: Precision, device: Device, trial: Trial) -> Findings:
    """Compare log-probs, gradients and one update of all variants of the learner with the plain forward pass."""
    base, state_space = small_model(kind, trial.seed), kind in STATE_SPACE
    reference = copy_of(base, device, torch.float64)
    trees = trial.sampled(reference, flat=state_space)
    rng = np.random.default_rng(trial.seed)
    weights = [torch.from_numpy(rng.normal(size=tree.num_unique_tokens)).to(device.name) for tree in trees]
    expected = computed_plainly(reference, trees, weights)
    groups = _parity_groups(trees)
    exact_update = _update(copy_of(base, device, torch.float64), LearnerVariant("reference", FLAT), groups, "float64")

    def fresh() -> PreTrainedModel:
        dtype = torch.float64 if precision == "float64" else torch.float32
        return copy_of(base, device, dtype, exact_norms=precision != "bfloat16").train()

    with autocast(precision, device):
        plain = errors_of(computed_plainly(fresh(), trees, weights), expected)
    checks: list[Check] = []
    for variant in [LearnerVariant("flat", FLAT)] if state_space else VARIANTS:
        if not variant.runs(device, precision):
            continue
        model = fresh()
        with autocast(precision, device):
            errors = errors_of(computed_by(variant, model, trees, weights, _NODES), expected)
        checks += _checks(variant.name, errors, plain, precision, state_space)
        change, norm = _update(fresh(), variant, groups, precision)
        difference = abs(norm - exact_update[1]) / exact_update[1]
        if precision == "bfloat16":
            bound = _TIMES_PLAIN * plain.gradient + _GRADIENT_FLOOR
            checks.append(Check(f"{variant.name}: gradient norm", difference, bound))
        else:
            bounds = _STATE_SPACE_BOUNDS if state_space else BOUNDS[precision]
            relative = float((change - exact_update[0]).norm() / exact_update[0].norm())
            checks += [
                Check(f"{variant.name}: gradient norm", difference, bounds.gradient),
                Check(f"{variant.name}: update", relative, bounds.update),
            ]
    return Findings(checks, {"plain": plain._asdict(), "nodes": sum(tree.num_unique_tokens for tree in trees)})


def engine_part(kind: str, precision: Precision, device: Device, trial: Trial) -> Findings:
    """Compare sampled log-probs with the plain forward pass, ways to batch with each other, greedy with `generate`."""
    state_space = kind in STATE_SPACE
    sampler = copy_of(
        small_model(kind, trial.seed), device, getattr(torch, precision), exact_norms=precision != "bfloat16"
    )
    reference = copy_of(sampler, device, torch.float64)
    trees = trial.sampled(sampler, flat=state_space)
    with torch.no_grad():
        expected = [plain_logprobs(reference, tree) for tree in trees]
        plain = logprob_errors([plain_logprobs(sampler, tree) for tree in trees], expected)
    got = [torch.tensor(tree.logprob) for tree in trees]
    errors = logprob_errors(got, expected)
    checks = _checks("engine", Errors(*errors, 0.0), Errors(*plain, 0.0), precision, state_space)[:1]
    facts: dict[str, object] = {"largest error": errors[0], "of the plain forward pass": plain[0]}
    sampling = SamplingParams(max_new_tokens=trial.max_new_tokens)
    little = 40_000 * sampler.dtype.itemsize  # bytes for some of the rows: the others wait
    forward = FLAT if state_space else None
    engines = {
        "again": NativeEngine(sampler, NO_END_TOKEN, forward=forward),
        "a row per rollout": NativeEngine(sampler, NO_END_TOKEN, share_prefixes=False, forward=forward),
        "little memory": NativeEngine(sampler, NO_END_TOKEN, little, forward=forward),
        "own cache": NativeEngine(sampler, NO_END_TOKEN, forward=FLAT),
    }
    if not state_space:
        engines["without kernels"] = NativeEngine(sampler, NO_END_TOKEN)
    for name, engine in engines.items():
        use_kernels("off" if name == "without kernels" else "auto")
        others = engine.sample(SampleTask(trial.prompts, trial.num_rollouts, sampling, trial.seed))
        got = [torch.tensor(tree.logprob) for tree in others]
        with torch.no_grad():
            errors = logprob_errors(got, [plain_logprobs(reference, tree) for tree in others])
        checks += _checks(name, Errors(*errors, 0.0), Errors(*plain, 0.0), precision, state_space)[:1]
        fraction = _fraction_of_other_responses(trees, others)
        if precision == "bfloat16":
            facts[f"other responses, {name}"] = fraction
        else:
            bounds = _STATE_SPACE_BOUNDS if state_space else BOUNDS[precision]
            checks.append(Check(f"other responses, {name}", fraction, bounds.other_responses))
    use_kernels("auto")
    checks += _greedy(sampler, reference, trial, precision, plain[0], flat=state_space)
    return Findings(checks, facts)


def device_part(kind: str, device: Device, trial: Trial) -> Findings:
    """Compare the reference itself with the CPU: the plain forward pass in float64 on both."""
    base, cpu = small_model(kind, trial.seed), Device("cpu")
    reference = copy_of(base, cpu, torch.float64)
    trees = trial.sampled(reference, flat=kind in STATE_SPACE)
    weights = [torch.ones(tree.num_unique_tokens, dtype=torch.float64) for tree in trees]
    expected = computed_plainly(reference, trees, weights)
    found = computed_plainly(
        copy_of(base, device, torch.float64), trees, [weight.to(device.name) for weight in weights]
    )
    errors = errors_of(found, expected)
    # Rotations, states and scans are float32 in every precision.
    return Findings([Check("log-prob", errors.logprob, 2e-3), Check("gradient", errors.gradient, 2e-3)])


def _greedy(
    sampler: PreTrainedModel,
    reference: PreTrainedModel,
    trial: Trial,
    precision: Precision,
    plain: float,
    *,
    flat: bool,
) -> list[Check]:
    """Compare greedy decoding with `generate`; in bfloat16 compare each token with the reference's best."""
    tokens, device = trial.max_new_tokens, sampler.device
    engine = NativeEngine(sampler, NO_END_TOKEN, forward=FLAT if flat else None)
    trees = engine.sample(
        SampleTask(trial.prompts, 2, SamplingParams(temperature=0, max_new_tokens=tokens), trial.seed)
    )
    if precision == "bfloat16":
        gaps = []
        for tree in trees:
            with torch.no_grad():
                best_M, logprob_M = best_and_own(reference, tree)
            gaps.append(float((best_M - logprob_M).max()))
        bound = 2 * (_TIMES_PLAIN * plain + _LOGPROB_FLOOR)  # two log-probs, each with an error
        return [Check("greedy: below the best token, nats", max(gaps), bound)]
    others = 0
    for prompt, tree in zip(trial.prompts, trees, strict=True):
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            generated = sampler.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                eos_token_id=NO_END_TOKEN, pad_token_id=NO_END_TOKEN,
            )  # fmt: skip
        others += tree.responses() != [(tuple(generated[0, len(prompt) :].tolist()), 2)]
    return [Check("greedy: prompts that differ from generate", others, 0)]


def computed_by(
    variant: LearnerVariant,
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    weights: Sequence[Tensor],
    max_nodes: int,
) -> Computed:
    """Compute log-probs and gradient with a variant of the learner, in chunks of nodes."""
    weight_M = torch.cat(list(weights))
    logprob_M = torch.full_like(weight_M, float("nan"))
    with variant.applied(model) as forward:
        for _ in range(variant.num_passes):
            model.zero_grad()
            for chunk in forward.chunk_logprobs(model, trees, next_token=PLAIN, max_nodes=max_nodes, entropy=False):
                logprob_M[chunk.index] = chunk.logprob.detach().to(logprob_M.dtype)
                (weight_M[chunk.index].to(chunk.logprob.dtype) * chunk.logprob).sum().backward()
    return Computed(list(logprob_M.split([tree.num_unique_tokens for tree in trees])), gradient_of(model))


def _update(
    model: PreTrainedModel, variant: LearnerVariant, groups: list[Group], precision: Precision
) -> tuple[Tensor, float]:
    """Make one update; return the change of all weights in float64, and the norm of the gradient."""
    before = _flat_weights(model)
    optimizer = OptimizerSettings(learning_rate=_LEARNING_RATE, mini_batches=1, old_logprobs="recompute")
    config = TrainConfig(
        dtype=precision, optimizer=optimizer, engine=EngineSettings(nodes_per_pass=_NODES, attention="tiled")
    )
    with variant.applied(model) as forward:
        update = TreeLearner(model, config, forward=forward).learn(
            groups, advantage_estimator(AdvantageSettings()), seed=0
        )
    return _flat_weights(model) - before, update.grad_norm


def parity(tree: RolloutTree) -> Group:
    """Call a response correct if its token ids sum to an even number."""
    correct_L = np.array([sum(tokens) % 2 == 0 for tokens, _ in tree.responses()])
    prompt = Prompt("parity", "parity", tree.prompt_ids, "even", "parity")
    return Group(prompt, tree, correct_L, correct_L.astype(np.float64))


def _parity_groups(trees: Sequence[RolloutTree]) -> list[Group]:
    return [parity(tree) for tree in trees]


def _flat_weights(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def _checks(name: str, errors: Errors, plain: Errors, precision: Precision, state_space: bool) -> list[Check]:
    """Return the checks of log-probs and gradients."""
    if precision == "bfloat16":
        return checks_in_bfloat16(name, errors, plain)
    bounds = _STATE_SPACE_BOUNDS if state_space else BOUNDS[precision]
    return [
        Check(f"{name}: log-prob", errors.logprob, bounds.logprob),
        Check(f"{name}: gradient", errors.gradient, bounds.gradient),
    ]


def checks_in_bfloat16(name: str, errors: Errors, plain: Errors) -> list[Check]:
    """Return the checks of log-probs and gradients against the errors of the plain forward pass in bfloat16."""
    return [
        Check(f"{name}: log-prob, RMS", errors.logprob_rms, _TIMES_PLAIN * plain.logprob_rms + _LOGPROB_FLOOR),
        Check(f"{name}: gradient", errors.gradient, _TIMES_PLAIN * plain.gradient + _GRADIENT_FLOOR),
    ]


def _fraction_of_other_responses(trees: Sequence[RolloutTree], others: Sequence[RolloutTree]) -> float:
    """Return the fraction of rollouts whose responses the other trees do not have as often."""
    different = sum(
        sum(max(0, count - dict(other.responses()).get(tokens, 0)) for tokens, count in tree.responses())
        for tree, other in zip(trees, others, strict=True)
    )
    return different / sum(tree.num_rollouts for tree in trees)


def autocast(precision: Precision, device: Device) -> torch.autocast | nullcontext[None]:
    """Return the context in which the learner computes."""
    return torch.autocast(device.torch.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


@dataclass(frozen=True)
class LongTrial:
    """The sampled responses."""

    size: str  # name of the model's size
    num_rollouts: int  # rollouts of the prompt
    prompt_tokens: int  # tokens of the prompt
    max_new_tokens: int  # tokens of a response
    nodes: int  # nodes per forward pass
    seed: int  # seed of the weights, the prompt and the draws


def long_part(device: Device, trial: LongTrial) -> Findings:
    """Compare the timed variants of the learner, and the engine, with the flat path in float32."""
    config = speed_config(trial.size, trial.prompt_tokens + trial.max_new_tokens)
    model = speed_model(config, device, _LONG_SCALE, trial.seed)
    rng = np.random.default_rng(trial.seed)
    prompt = rng.integers(0, config.vocab_size, trial.prompt_tokens).tolist()
    sampling = SamplingParams(max_new_tokens=trial.max_new_tokens)
    trees = NativeEngine(model, NO_END_TOKEN).sample(SampleTask([prompt], trial.num_rollouts, sampling, trial.seed))
    weights = [torch.from_numpy(rng.normal(size=tree.num_unique_tokens)).to(device.name) for tree in trees]
    model.train()

    def errors(variant: LearnerVariant, precision: str) -> Errors:
        with autocast("bfloat16" if precision == "bfloat16" else "float32", device):
            return errors_of(computed_by(variant, model, trees, weights, trial.nodes), expected)

    flat = LearnerVariant("flat", FLAT)
    expected = computed_by(flat, model, trees, weights, trial.nodes)
    plain = errors(flat, "bfloat16")
    sampled = torch.cat([torch.tensor(tree.logprob) for tree in trees])
    difference = float((sampled - torch.cat(expected.logprobs).cpu()).abs().max())
    checks = [Check("engine float32: log-prob", difference, _LONG_LOGPROB)]
    for variant in VARIANTS:
        if variant.timed and variant.runs(device, "float32"):
            exact = errors(variant, "float32")
            checks += [
                Check(f"{variant.name} float32: log-prob", exact.logprob, _LONG_LOGPROB),
                Check(f"{variant.name} float32: gradient", exact.gradient, _LONG_GRADIENT),
                *checks_in_bfloat16(f"{variant.name} bfloat16", errors(variant, "bfloat16"), plain),
            ]
    nodes = sum(tree.num_unique_tokens for tree in trees)
    return Findings(checks, {"plain bfloat16": plain._asdict(), "nodes": nodes})
