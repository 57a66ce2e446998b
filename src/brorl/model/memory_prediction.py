"""Predicts a run's memory before its model is loaded: the bytes of each part at the peak.

The model is built on PyTorch's meta device, where its weights take no memory. `check_prediction` rejects a run whose
certain parts do not fit. docs/how-to/memory.md has the formula and compares it with measured peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from brorl.errors import UserError
from brorl.model.chunks import default_max_nodes
from brorl.model.llama_pass import has_llama_layout, num_copied_weights
from brorl.model.logits import LOGITS_PER_DRAW, MASSES_PER_DRAW, embeds_last, logit_bytes_per_row, tokens_per_mass
from brorl.model.lora import ALL_LINEAR, adapter_shapes, target_layers
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.moments import moment_bytes
from brorl.model.pass_memory import PassMemory
from brorl.model.settings import ForwardChoice, LoraSettings, States
from brorl.model.source import auto_class, building_model, freeze_images
from brorl.model.tree_attention import PREFILL_TOKENS, HooksError, KVShape, kv_shapes

_BYTES_PER_DRAWN_LOGIT = 24  # scaled, padded, softmax, and a copy in float64
_BYTES_PER_MASS = 16  # a mass and its running sum, both in float64
_BYTES_PER_VLLM_LOGIT = 18  # itself, then in float32: its cast, log-prob, probability, and a random number
_VLLM_TOKENS = 8192  # of a forward pass of vLLM, or one context if it is longer
_VLLM_PROCESS_BYTES = 1 << 30  # a guess: its CUDA context and graphs, which it also keeps while it sleeps
_NF4_BYTES = 0.5 + 0.127 / 8  # per weight: 4 bits, and the doubly quantized scales of blocks of 64 (arXiv 2305.14314)
_MIN_NODES = 1024  # the prediction halves nodes only down to the CPU default; the learner can go lower


class MemoryLine(NamedTuple):
    """One part of the predicted memory."""

    name: str
    num_bytes: int
    settings: str  # settings that reduce it, by dotted name, in the order to try them


@dataclass(frozen=True)
class MemoryPrediction:
    """A run's memory, by part."""

    kept: tuple[MemoryLine, ...]  # the parts that are always in memory
    sampling: MemoryLine  # the engine's memory while it samples
    learning: MemoryLine  # the learner's memory while it learns; an upper estimate
    available_bytes: int | None = None  # the machine's free memory; None if unknown
    num_weights: int = 0  # weights of the model
    row_bytes: int = 0  # engine memory per response of full length
    checkpoint_bytes: int = 0  # a checkpoint on disk, without its tokenizer and carried groups
    recorded_bytes: int = 0  # the memory that the learner's passes keep as CUDA graphs; 0 if they are not recorded

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of the parts that are always in memory."""
        return sum(line.num_bytes for line in self.kept)

    @property
    def certain_bytes(self) -> int:
        """Minimum bytes that a run needs: the kept parts and the engine's limit."""
        return self.kept_bytes + self.sampling.num_bytes

    @property
    def total_bytes(self) -> int:
        """Peak bytes: sampling and learning alternate, so only the larger counts."""
        return self.kept_bytes + self.recorded_bytes + max(self.sampling.num_bytes, self.learning.num_bytes)

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        """All nonempty parts, largest first."""
        recorded = MemoryLine("recorded passes", self.recorded_bytes, "engine.cuda_graphs: off")
        lines = (line for line in (*self.kept, self.sampling, self.learning, recorded) if line.num_bytes)
        return tuple(sorted(lines, key=lambda line: -line.num_bytes))

    @property
    def summary(self) -> str:
        """One line for the console."""
        parts = ", ".join(f"{line.name} {size_text(line.num_bytes)}" for line in self.lines)
        available = "" if self.available_bytes is None else f"; {size_text(self.available_bytes)} available"
        return f"memory: about {size_text(self.total_bytes)} predicted at most ({parts}){available}"


def predict_memory(
    config: PreTrainedConfig, settings: MemorySettings, workload: Workload, available: int | None = None
) -> MemoryPrediction:
    """Predict a run's memory; see `ModelMemory`."""
    return ModelMemory.of(config, settings.forward).predict(settings, workload, available)


class ModelMemory:
    """Predicts the memory of one model's runs from its config.

    Raises a `HooksError` if `forward` is `tree` and the model's attention cannot be hooked.
    """

    _made: ClassVar[dict[tuple[type, str, ForwardChoice], ModelMemory]] = {}

    @classmethod
    def of(cls, config: PreTrainedConfig, forward: ForwardChoice) -> ModelMemory:
        """Return the cached prediction for a config: a command predicts several runs of one model."""
        key = type(config), config.to_json_string(use_diff=False), forward
        if key not in cls._made:
            cls._made[key] = cls(config, forward)
        return cls._made[key]

    def __init__(self, config: PreTrainedConfig, forward: ForwardChoice = "auto") -> None:
        with building_model(), torch.device("meta"):
            self._model: PreTrainedModel = auto_class(config).from_config(config)
        freeze_images(self._model)
        parameters = dict(self._model.named_parameters())
        sizes: Any = config.get_text_config()
        self.num_weights: int = sum(p.numel() for p in parameters.values())
        hidden: int = sizes.hidden_size
        widest = max((max(p.shape) for n, p in parameters.items() if p.dim() == 2 and ".layers." in n), default=0)
        kv, is_flat = self._shapes(sizes, forward)
        self.passes = PassMemory(
            layers=sizes.num_hidden_layers,
            hidden=hidden,
            inner=_setting(sizes, "intermediate_size") or widest or 4 * hidden,
            heads=_setting(sizes, "num_attention_heads") or 1,
            kv=kv,
            vocabulary=sizes.vocab_size,
            is_flat=is_flat,
            whole_logits=not embeds_last(self._model),
        )

    def _shapes(self, sizes: Any, forward: ForwardChoice) -> tuple[Sequence[KVShape], bool]:
        """Return the shapes of each layer's keys and values, and whether the model takes the flat path.

        The shapes come from a pass on the meta device. For the flat path, or if that pass fails, they are estimated
        from the key-value heads in the config.
        """
        heads = _setting(sizes, "num_attention_heads") or 1
        head_dim = _setting(sizes, "head_dim") or sizes.hidden_size // heads
        guess = KVShape(_setting(sizes, "num_key_value_heads") or heads, head_dim, head_dim)
        guessed = [guess] * sizes.num_hidden_layers
        if forward == "flat":
            return guessed, True
        try:
            return kv_shapes(self._model.eval().to(torch.bfloat16)), False  # expert matmuls need bfloat16
        except HooksError:
            if forward == "tree":
                raise
            return guessed, True
        except Exception:  # some expert routers read values, which the meta device lacks
            return guessed, False

    def predict(self, settings: MemorySettings, workload: Workload, available: int | None = None) -> MemoryPrediction:
        """Predict a run's memory. If too few bytes are `available`, the nodes per pass are halved."""
        kept = self._kept_lines(settings)
        sizes = self._vllm_bytes if settings.separate_engine else self._sampling_bytes
        cache, step, prefill = sizes(settings, workload)
        sampling = max(step, prefill)
        if settings.keeps_cache and not self.passes.is_flat:  # graphs also keep the memory that a running step uses
            kept = (*kept, MemoryLine("sampling cache", cache + step, "engine.memory_gib"))
        else:
            sampling += cache
        if settings.device == "cpu":  # on a CPU, the copy exists only while the engine samples
            sampling += self._copied_bytes(settings)
        nodes = settings.nodes_per_pass or default_max_nodes(
            self._model, whole_logits=self.passes.whole_logits, device=settings.device
        )
        # autocast keeps its casts of the weights during a pass
        casts = 2 * self.num_weights if settings.autocasts else 0
        room = inf if available is None else available - casts - sum(line.num_bytes for line in kept)
        minimum = settings.nodes_per_pass or _MIN_NODES
        while (learning := self.passes.learning_bytes(settings, workload, nodes)) > room and nodes > minimum:
            nodes //= 2  # the learner also halves them when memory runs out
        learning += casts
        records = settings.graphs == "on"
        if settings.graphs == "auto" and available is not None:  # a pass that is not recorded needs its own memory
            records = sum(line.num_bytes for line in kept) + learning + max(sampling, learning) <= available
        rows = ", engine.vllm.max_rows" if settings.separate_engine else ""
        fewer = "" if settings.gradient_checkpointing else "engine.gradient_checkpointing, "
        return MemoryPrediction(
            kept,
            MemoryLine("sampling", sampling, f"engine.memory_gib{rows}"),
            MemoryLine("learning", learning, f"{fewer}engine.nodes_per_pass, sampling.max_new_tokens"),
            available,
            self.num_weights,
            self._row_bytes(settings, workload),
            self._checkpoint_bytes(settings),
            learning if records and self.passes.is_packed(settings) else 0,
        )

    def _trained_shapes(self, lora: LoraSettings | None) -> Sequence[tuple[int, ...]]:
        """Return the shapes of the trained weights: the adapters, or all layers that read text."""
        if lora:
            return adapter_shapes(self._model, lora)
        return [tuple(p.shape) for p in self._model.parameters() if p.requires_grad]

    def _checkpoint_bytes(self, settings: MemorySettings) -> int:
        """Return the bytes of a checkpoint: the model (only the adapters if they are trained) and the trainer's state.

        The state has both moments, wherever they are between updates, and the trained weights of the reference and of
        the average. The averaged model is also saved next to the model.
        """
        shapes = self._trained_shapes(settings.lora)
        trained = sum(map(prod, shapes)) * settings.trained_bytes
        model = trained if settings.lora else self.num_weights * settings.trained_bytes
        has_reference = settings.reference or settings.offloaded_reference
        bits: States = "8bit" if settings.states == "8bit" else "device"
        moments = moment_bytes(shapes, bits, settings.trained_bytes, settings.device)
        return model * (1 + settings.average) + trained * (has_reference + settings.average) + moments

    def _copied_bytes(self, settings: MemorySettings) -> int:
        """Return the bytes of the weights that the engine's Llama pass copies for sampling."""
        if settings.separate_engine or settings.lora or self.passes.is_flat or not has_llama_layout(self._model):
            return 0
        return num_copied_weights(self._model, settings.device) * settings.computed_bytes

    def _kept_lines(self, settings: MemorySettings) -> tuple[MemoryLine, ...]:
        """Return the parts that are always in memory, such as the weights and the states of the optimizer."""
        shapes = self._trained_shapes(settings.lora)
        trained_bytes = sum(map(prod, shapes)) * settings.trained_bytes
        moments = moment_bytes(shapes, settings.states, settings.trained_bytes, settings.device)
        joined = self._copied_bytes(settings) if settings.device == "cuda" else 0
        has_cache = settings.separate_engine and not settings.engine_apart and not settings.engine_sleeps

        smaller = "dtype: bfloat16" if settings.lora else "dtype: bfloat16 with lora.rank"
        copy_smaller = "engine.kind: native" if settings.separate_engine else "lora.rank, whose runs have none"
        moments_smaller = ["lora.rank"]
        if settings.states == "device":
            moments_smaller.insert(0, "optimizer.states: 8bit")
        if settings.device != "cpu":
            moments_smaller.insert(0, "optimizer.states: host")
        return (
            MemoryLine("weights", self._frozen_bytes(settings) + trained_bytes, smaller),
            MemoryLine("gradients", trained_bytes, "lora.rank"),
            MemoryLine("AdamW", moments, ", ".join(moments_smaller)),
            MemoryLine("sampling copy", self._sampling_copy_bytes(settings), copy_smaller),
            MemoryLine("joined weights", joined, copy_smaller),
            MemoryLine("sampling cache", settings.engine_bytes if has_cache else 0, "engine.memory_gib"),
            MemoryLine("vLLM's process", _VLLM_PROCESS_BYTES if settings.engine_sleeps else 0, "engine.kind: native"),
            MemoryLine("reference", trained_bytes if settings.reference else 0, "reference.offload"),
            MemoryLine("averaged weights", trained_bytes if settings.average else 0, "optimizer.ema_decay: null"),
        )

    def _frozen_bytes(self, settings: MemorySettings) -> int:
        """Return the bytes of the weights that are not trained: those below adapters, or those that read images."""
        lora = settings.lora
        if lora is None:
            num_frozen: int = sum(p.numel() for p in self._model.parameters() if not p.requires_grad)
            return num_frozen * settings.trained_bytes
        frozen_bytes = self.num_weights * settings.computed_bytes
        if lora.quantization == "nf4":
            layers = target_layers(self._model, (ALL_LINEAR,)).values()
            quantized: int = sum(layer.get_parameter("weight").numel() for layer in layers)
            frozen_bytes -= round(quantized * (settings.computed_bytes - _NF4_BYTES))
        return frozen_bytes

    def _sampling_copy_bytes(self, settings: MemorySettings) -> int:
        """Return the bytes of the engine's own weights: vLLM's, unless it sleeps, or the native engine's copy."""
        if not settings.separate_engine:
            return 2 * self.num_weights if settings.autocasts else 0
        if settings.engine_apart or settings.engine_sleeps:
            return 0
        copies = 1 if settings.lora else 2  # its own and the file of the weights; a file of adapters is small
        return copies * self.num_weights * settings.computed_bytes

    def _row_bytes(self, settings: MemorySettings, workload: Workload) -> int:
        """Return the bytes of an engine row: the keys and values of a full-length response, and logits.

        vLLM's row has its prompt, and its logits are not in the cache.
        """
        if settings.separate_engine:
            return (workload.prompt_tokens + workload.max_new_tokens) * self._kv_bytes(settings)
        row_tokens = workload.max_new_tokens + (workload.prompt_tokens if self.passes.is_flat else 0)
        logit_bytes = logit_bytes_per_row(self.passes.vocabulary, settings.computed_bytes)
        return row_tokens * self._kv_bytes(settings) + logit_bytes

    def _kv_bytes(self, settings: MemorySettings) -> int:
        """Return the bytes of a token's keys and values."""
        return sum(kv.size for kv in self.passes.kv) * settings.computed_bytes

    def _vllm_bytes(self, settings: MemorySettings, workload: Workload) -> tuple[int, int, int]:
        """Return the bytes of vLLM while it is awake, beside those that are kept; see `_sampling_bytes`."""
        if settings.engine_apart:
            return 0, 0, 0
        awake = settings.engine_bytes + self.num_weights * settings.computed_bytes if settings.engine_sleeps else 0
        rows = settings.engine_rows if workload.num_rows is None else min(settings.engine_rows, workload.num_rows)
        prefill = max(_VLLM_TOKENS, workload.prompt_tokens + workload.max_new_tokens)
        logits = rows * self.passes.vocabulary * _BYTES_PER_VLLM_LOGIT
        return awake, logits, prefill * self.passes.activation_bytes(settings) // 2

    def _sampling_bytes(self, settings: MemorySettings, workload: Workload) -> tuple[int, int, int]:
        """Return the bytes of the engine's rows (within its limit), of a step on top of them, and of a prefill."""
        limit = settings.engine_bytes
        row_bytes = self._row_bytes(settings, workload)
        rows = max(1, limit // row_bytes)
        cache = limit
        prefill = PREFILL_TOKENS
        if workload.num_rows is not None:
            prompt_tokens = workload.num_rows * workload.prompt_tokens
            rows = min(rows, workload.num_rows)
            cache = min(limit, rows * row_bytes + prompt_tokens * self._kv_bytes(settings))
            prefill = min(prefill, prompt_tokens)
        scores = 3 * rows * self.passes.heads * (workload.max_new_tokens + workload.prompt_tokens) * 4
        vocabulary = self.passes.vocabulary
        masses = tokens_per_mass(vocabulary) + vocabulary // tokens_per_mass(vocabulary) + 1
        masses_of_rollouts = MASSES_PER_DRAW if workload.num_rows is None else workload.num_rows * masses
        drawn = min(rows * vocabulary, LOGITS_PER_DRAW) * _BYTES_PER_DRAWN_LOGIT
        drawn += min(masses_of_rollouts, MASSES_PER_DRAW) * _BYTES_PER_MASS
        return cache, max(scores, drawn), prefill * self.passes.activation_bytes(settings) // 2


def _setting(config: Any, name: str) -> Any:
    """Return a setting of a config, or None if it is missing or differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers has its own error for settings that differ between layers
        return None


def check_prediction(
    prediction: MemoryPrediction, available: int | None, fix: Callable[[], str] = lambda: ""
) -> str | None:
    """Reject a run whose certain parts do not fit in the available bytes, naming the largest parts and a fix.

    Return a warning if only the learner's estimate for the longest responses does not fit. `fix` returns the end of the
    message: the settings that make the run fit.
    """
    if available is None or prediction.total_bytes <= available:
        return None
    certain = prediction.certain_bytes > available
    lines = [line for line in prediction.lines if line != prediction.learning or not certain][:3]
    advice = "; ".join(f"{line.name} {size_text(line.num_bytes)} (shrinks with {line.settings})" for line in lines)
    if not certain:
        return (
            f"the run may need {size_text(prediction.total_bytes)} of memory if responses reach the length limit, but "
            f"{size_text(available)} are available: {advice}{fix()}"
        )
    raise UserError(
        f"the run needs {size_text(prediction.certain_bytes)} of memory, but {size_text(available)} are available: "
        f"{advice}{fix()}"
    )


def size_text(num_bytes: int) -> str:
    """Format a size as `1.5 GiB`, or as `512 MiB` if it is small; `format.memory_size` rounds 0.97 GiB differently."""
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 0.95 else f"{num_bytes / 2**20:.0f} MiB"
