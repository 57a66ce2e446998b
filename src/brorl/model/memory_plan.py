"""Prediction of the memory of a run, before its model is loaded: the bytes of each part at the peak.

The model is made on PyTorch's meta device: to count its weights takes no memory. `check` rejects a run whose certain
parts do not fit. docs/how-to/memory.md has the formula and compares it with measured peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from brorl.errors import UserError
from brorl.model.kernels import kernels
from brorl.model.llama_pass import has_llama_layout, num_joined_weights
from brorl.model.logits import (
    COMPILED_LOGITS_PER_BLOCK,
    LOGITS_PER_BLOCK,
    LOGITS_PER_DRAW,
    MASSES_PER_DRAW,
    MAX_LOGITS,
    embeds_last,
    tokens_per_mass,
)
from brorl.model.logprobs import default_max_nodes
from brorl.model.lora import ALL_LINEAR, adapter_shapes, target_layers
from brorl.model.model_shape import KVShape, ModelShape, shapes_or_guess
from brorl.model.moments import moment_bytes
from brorl.model.settings import ForwardChoice, LoraSettings, States
from brorl.model.source import auto_class, freeze_images
from brorl.model.tree_attention import PREFILL_TOKENS
from brorl.model.tree_batch import SCORES_PER_TILE, AttentionChoice

_BYTES_PER_DRAWN_LOGIT = 24  # scaled, padded, softmax, and a copy in float64
_BYTES_PER_MASS = 16  # gathered, in float64, and their sums
_SCORES_IN_TILE = 4  # scores, weights, their gradient, and a cast
_NF4_BYTES = 0.5 + 0.127 / 8  # per weight: 4 bits, and the doubly quantized scales of blocks of 64 (arXiv 2305.14314)
_BYTES = {"float64": (8, 8), "float32": (4, 4), "bfloat16": (4, 2)}  # per number of trained weights, and computed
_MIN_NODES = 1024  # the default on a CPU; the learner goes below it


@dataclass(frozen=True)
class MemorySettings:
    """The settings of a run that decide its memory."""

    dtype: Literal["float32", "float64", "bfloat16"]  # the run's `dtype`
    engine_bytes: int  # the engine's limit
    lora: LoraSettings | None = None  # the adapters; None if all weights are trained
    reference: bool = False  # whether a reference policy is in the device's memory
    average: bool = False  # whether averaged weights are
    states: States = "device"  # where AdamW's moments are between updates, and in how many bits
    nodes_per_pass: int | None = None  # nodes per forward pass of the learner, 1 or more; None for the default
    gradient_checkpointing: bool = False  # whether activations are computed again
    # how rollouts go through the model; `auto` is the flat path if the attention cannot be hooked
    forward: ForwardChoice = "auto"
    attention: AttentionChoice = "auto"  # how nodes attend on the tree path; `auto` is FlexAttention on CUDA
    device: str = "cpu"  # type of the model's device, such as `cuda`
    # whether the engine is vLLM, which has its own weights, a file in shared memory of those that are trained, and a
    # cache that is allocated in advance
    separate_engine: bool = False
    engine_apart: bool = False  # whether vLLM has GPUs of its own; its memory is then not part of the plan
    keeps_cache: bool = False  # whether the native engine keeps its memory while the learner works, for CUDA graphs

    @property
    def autocasts(self) -> bool:
        """Whether float32 weights are trained in bfloat16: the native engine then has a sampling copy of them."""
        return self.dtype == "bfloat16" and self.lora is None


@dataclass(frozen=True)
class Workload:
    """Sizes of the batches of a run."""

    prompt_tokens: int = 512  # tokens of the longest prompt
    max_new_tokens: int = 1024  # tokens of the longest response
    num_rows: int | None = None  # most rollouts that are sampled together, prompts times N; None if unknown
    num_prompts: int | None = None  # prompts of a mini-batch; None if unknown


class MemoryLine(NamedTuple):
    """One part of the memory."""

    name: str
    num_bytes: int
    settings: str  # settings that make it smaller, by dotted name, in the order in which to try them


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run, by part."""

    kept: tuple[MemoryLine, ...]  # the parts that are always in memory
    sampling: MemoryLine  # the engine's memory while it samples
    learning: MemoryLine  # the learner's memory while it learns; an upper estimate
    available_bytes: int | None = None  # the machine's free memory; None if unknown
    num_weights: int = 0  # weights of the model
    row_bytes: int = 0  # of the engine's memory, for a response of full length; 0 if another engine samples

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of the parts that are always in memory."""
        return sum(line.num_bytes for line in self.kept)

    @property
    def certain_bytes(self) -> int:
        """Bytes that a run needs at least: the kept parts and the engine's limit."""
        return self.kept_bytes + self.sampling.num_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes at the peak; sampling and learning alternate."""
        return self.kept_bytes + max(self.sampling.num_bytes, self.learning.num_bytes)

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        """All parts that are not empty, the largest first."""
        lines = (line for line in (*self.kept, self.sampling, self.learning) if line.num_bytes)
        return tuple(sorted(lines, key=lambda line: -line.num_bytes))

    @property
    def summary(self) -> str:
        """One line for the console."""
        parts = ", ".join(f"{line.name} {size_text(line.num_bytes)}" for line in self.lines)
        available = "" if self.available_bytes is None else f"; {size_text(self.available_bytes)} available"
        return f"memory: about {size_text(self.total_bytes)} predicted at most ({parts}){available}"


def plan_memory(
    config: PreTrainedConfig, settings: MemorySettings, workload: Workload, available: int | None = None
) -> MemoryPlan:
    """Predict the memory of a run; see `ModelMemory`."""
    return ModelMemory(config, settings.forward).plan(settings, workload, available)


class ModelMemory:
    """Predicts the memory of runs of one model.

    Args:
        config: The model's config.
        forward: How rollouts go through the model.

    Raises:
        HooksError: If the model's attention cannot be hooked, and `forward` is `tree`.
    """

    def __init__(self, config: PreTrainedConfig, forward: ForwardChoice = "auto") -> None:
        with torch.device("meta"):
            self._model: PreTrainedModel = auto_class(config).from_config(config)
        freeze_images(self._model)
        self._shape = ModelShape.of_model(self._model)
        self._kv, self._flat = shapes_or_guess(self._model, forward)
        self._whole_logits = not embeds_last(self._model)

    def plan(self, settings: MemorySettings, workload: Workload, available: int | None = None) -> MemoryPlan:
        """Predict the memory of a run.

        Args:
            settings: The settings that decide the memory, with the `forward` of the model.
            workload: The sizes of the batches.
            available: The machine's free memory in bytes, which can halve the nodes per pass; None if unknown.
        """
        of_model = self._shape, self._kv, self._flat, self._whole_logits
        activations = _Activations(*of_model, *_BYTES[settings.dtype])
        num_weights = self._shape.parameters
        kept = _kept_lines(self._model, activations, settings)
        cache, step, prefill = (0, 0, 0) if settings.separate_engine else activations.sampling_bytes(settings, workload)
        sampling = max(step, prefill)
        if settings.keeps_cache and not activations.flat:  # graphs also keep what a step takes while it runs
            kept = (*kept, MemoryLine("sampling cache", cache + step, "engine.memory_gib"))
        else:
            sampling += cache
        nodes = settings.nodes_per_pass or default_max_nodes(
            self._model, whole_logits=self._whole_logits, device=settings.device
        )
        casts = 2 * num_weights if settings.autocasts else 0  # autocast keeps its casts of the weights during a pass
        room = inf if available is None else available - casts - sum(line.num_bytes for line in kept)
        minimum = settings.nodes_per_pass or _MIN_NODES
        while (learning := activations.learning_bytes(settings, workload, nodes)) > room and nodes > minimum:
            nodes //= 2  # as the learner does when memory runs out
        fewer = "" if settings.gradient_checkpointing else "engine.gradient_checkpointing, "
        return MemoryPlan(
            kept,
            MemoryLine("sampling", sampling, "engine.memory_gib"),
            MemoryLine("learning", learning + casts, f"{fewer}engine.nodes_per_pass, sampling.max_new_tokens"),
            available,
            num_weights,
            0 if settings.separate_engine else activations.row_bytes(workload),
        )


def _kept_lines(model: PreTrainedModel, activations: _Activations, settings: MemorySettings) -> tuple[MemoryLine, ...]:
    lora, num_weights = settings.lora, activations.shape.parameters
    of_text = [p for p in model.parameters() if p.requires_grad]
    shapes = adapter_shapes(model, lora) if lora else [tuple(p.shape) for p in of_text]
    trained_bytes = sum(map(prod, shapes)) * activations.trained_bytes
    of_images = num_weights - sum(p.numel() for p in of_text)
    frozen_bytes = num_weights * activations.computed_bytes if lora else of_images * activations.trained_bytes
    if lora and lora.quantization == "nf4":
        layers = target_layers(model, (ALL_LINEAR,)).values()
        quantized = sum(layer.get_parameter("weight").numel() for layer in layers)
        frozen_bytes -= round(quantized * (activations.computed_bytes - _NF4_BYTES))
    has_vllm = settings.separate_engine and not settings.engine_apart
    if settings.separate_engine:
        copies = 1 if lora else 2  # the published adapters are small
        copy_bytes = copies * num_weights * activations.computed_bytes if has_vllm else 0
    else:
        copy_bytes = 2 * num_weights if settings.autocasts else 0
    moments = moment_bytes(shapes, settings.states, activations.trained_bytes, settings.device)
    others = ("host",) * (settings.device != "cpu") + ("8bit",) * (settings.states == "device")
    moments_smaller = ", ".join([*(f"optimizer.states: {one}" for one in others), "lora.rank"])
    joins = settings.device == "cuda" and not (settings.separate_engine or lora or activations.flat)
    joined = num_joined_weights(model) if joins and has_llama_layout(model) else 0
    smaller = "dtype: bfloat16" if lora else "dtype: bfloat16 with lora.rank"
    copy_smaller = "engine.kind: native" if settings.separate_engine else "lora.rank, whose runs have none"
    return (
        MemoryLine("weights", frozen_bytes + trained_bytes, smaller),
        MemoryLine("gradients", trained_bytes, "lora.rank"),
        MemoryLine("AdamW", moments, moments_smaller),
        MemoryLine("sampling copy", copy_bytes, copy_smaller),
        MemoryLine("joined weights", joined * activations.computed_bytes, copy_smaller),
        MemoryLine("sampling cache", settings.engine_bytes if has_vllm else 0, "engine.memory_gib"),
        MemoryLine("reference", trained_bytes if settings.reference else 0, "reference.offload"),
        MemoryLine("averaged weights", trained_bytes if settings.average else 0, "optimizer.ema_decay: null"),
    )


def check(plan: MemoryPlan, available: int | None, fix: Callable[[], str] = lambda: "") -> str | None:
    """Reject a run whose certain parts do not fit into the free memory.

    Args:
        plan: The prediction.
        available: The free memory in bytes; None if unknown.
        fix: Returns the settings with which it fits, for the end of the message.

    Returns:
        None if everything fits; a warning if only the learner's estimate, for the longest responses, does not.

    Raises:
        UserError: With the largest parts and the settings that shrink them.
    """
    if available is None or plan.total_bytes <= available:
        return None
    certain = plan.certain_bytes > available
    lines = [line for line in plan.lines if line != plan.learning or not certain][:3]
    advice = "; ".join(f"{line.name} {size_text(line.num_bytes)} (shrinks with {line.settings})" for line in lines)
    if not certain:
        return (
            f"the run may need {size_text(plan.total_bytes)} of memory if responses reach the length limit, and "
            f"{size_text(available)} are available: {advice}{fix()}"
        )
    raise UserError(
        f"the run needs {size_text(plan.certain_bytes)} of memory, and {size_text(available)} are available: "
        f"{advice}{fix()}"
    )


def size_text(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB if it is small."""
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 0.95 else f"{num_bytes / 2**20:.0f} MiB"


class _Activations(NamedTuple):
    """What decides the memory of a model's activations, in addition to its settings."""

    shape: ModelShape
    kv: Sequence[KVShape]  # of each layer
    flat: bool  # whether each response goes through the model with its own prompt
    whole_logits: bool  # whether logits cannot be computed in blocks
    trained_bytes: int  # per number
    computed_bytes: int  # of activations, frozen weights and the sampling copy

    def row_bytes(self, workload: Workload) -> int:
        """Return the bytes of a row of the engine: keys and values of a response of full length, and logits."""
        row_tokens = workload.max_new_tokens + (workload.prompt_tokens if self.flat else 0)
        return row_tokens * self._kv_bytes() + 3 * self.shape.vocabulary * max(4, self.computed_bytes)

    def _kv_bytes(self) -> int:
        """Return the bytes of a token's keys and values."""
        return sum(kv.size for kv in self.kv) * self.computed_bytes

    def sampling_bytes(self, settings: MemorySettings, workload: Workload) -> tuple[int, int, int]:
        """Return the bytes of the engine's rows within its limit, of what a step takes beside them, and a prefill."""
        limit = settings.engine_bytes
        token_bytes, row_bytes = self._kv_bytes(), self.row_bytes(workload)
        rows = max(1, limit // row_bytes)
        cache, prefill = limit, PREFILL_TOKENS
        if workload.num_rows is not None:
            prompt_tokens = workload.num_rows * workload.prompt_tokens
            rows = min(rows, workload.num_rows)
            cache = min(limit, rows * row_bytes + prompt_tokens * token_bytes)
            prefill = min(prefill, prompt_tokens)
        scores = 3 * rows * self.shape.heads * (workload.max_new_tokens + workload.prompt_tokens) * 4
        vocabulary = self.shape.vocabulary
        masses = tokens_per_mass(vocabulary) + vocabulary // tokens_per_mass(vocabulary) + 1  # of a rollout
        drawn = min(rows * vocabulary, LOGITS_PER_DRAW) * _BYTES_PER_DRAWN_LOGIT
        if workload.num_rows is None:
            drawn += MASSES_PER_DRAW * _BYTES_PER_MASS
        else:
            drawn += min(workload.num_rows * masses, MASSES_PER_DRAW) * _BYTES_PER_MASS
        return cache, max(scores, drawn), prefill * self._token_bytes() // 2

    def learning_bytes(self, settings: MemorySettings, workload: Workload, nodes: int) -> int:
        """Return the bytes of the activations and logits of the largest chunk, with the tokens of its prompts."""
        longest, context = workload.max_new_tokens, workload.prompt_tokens + workload.max_new_tokens
        if workload.num_rows is not None:
            nodes = min(nodes, workload.num_rows * longest)
        prompts = max(nodes, workload.prompt_tokens)  # tokens that go through the model together
        if workload.num_prompts is not None:
            prompts = min(prompts, workload.num_prompts * workload.prompt_tokens)
        nodes = max(nodes, context if self.flat else longest)  # a response is never split
        scores = 0 if self._keeps_no_scores(settings) else nodes * self.shape.heads * (context + nodes)
        tile = _SCORES_IN_TILE * min(scores, SCORES_PER_TILE) * self.trained_bytes
        tokens = nodes + prompts
        layer = tokens * self._token_bytes()
        if self.flat:  # float32, and bfloat16 for the product
            layer += nodes * self.shape.heads * context * (6 if self.computed_bytes == 2 else self.trained_bytes)
        activations = self.shape.pass_bytes(tokens, layer, settings.gradient_checkpointing, self.trained_bytes)
        return max(self._logit_bytes(nodes, settings), tile) + activations

    def _is_packed(self, settings: MemorySettings) -> bool:
        """Return whether passes are packed for FlexAttention and compiled."""
        return (
            settings.device == "cuda" and settings.attention == "auto" and settings.dtype != "float64" and not self.flat
        )

    def _keeps_no_scores(self, settings: MemorySettings) -> bool:
        """Return whether no tile of scores is in memory."""
        kernels = settings.attention == "auto" and self._has_kernels(settings)
        return kernels or self._is_packed(settings) or self.flat

    def _has_kernels(self, settings: MemorySettings) -> bool:
        """Return whether the compiled kernels attend, if this process is the learner."""
        single = (self.trained_bytes, self.computed_bytes) == (4, 4) and settings.device == "cpu" and not self.flat
        return single and all(kv.key_dim == kv.value_dim for kv in self.kv) and kernels() is not None

    def _token_bytes(self) -> int:
        """Return the bytes of a token's activations in one layer."""
        head_size = max(4 * kv.key_dim + 3 * kv.value_dim for kv in self.kv)
        return self.shape.activation_bytes(self.trained_bytes, self.computed_bytes, head_size)

    def _logit_bytes(self, rows: int, settings: MemorySettings) -> int:
        """Return the bytes of the logits of a chunk, and of the gradient that blocks of them sum up."""
        vocabulary = self.shape.vocabulary
        summed = 0 if settings.lora else 2 * vocabulary * self.shape.hidden * self.trained_bytes
        if self._is_packed(settings) and not self.whole_logits:  # the logits and their gradient
            block = COMPILED_LOGITS_PER_BLOCK
            both = 2 * min(rows * vocabulary, block) * self.computed_bytes
            return both + (summed if rows * vocabulary > block else 0)
        if self.whole_logits or rows * vocabulary <= MAX_LOGITS:
            return 3 * rows * vocabulary * self.trained_bytes
        return 3 * LOGITS_PER_BLOCK * self.trained_bytes + summed
