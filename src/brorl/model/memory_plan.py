"""How much memory a run will need, before its model is loaded.

In: a model's config and the settings that decide the memory. Out: the bytes of each part at the peak, their sum, and
what the machine has. The model is made on PyTorch's meta device, so that counting its weights costs no memory. `check`
refuses a run whose certain parts do not fit, and names the settings that shrink them.

Weights, gradients, AdamW's moments, the sampling copy and the reference are exact. The engine's line is its limit, or
less where its rows cannot fill it. The learner's line is an estimate for responses as long as they may be:

    layer   = b * (6 h + 4 m + 4 H D + 3 H E) per token of nodes and prompts, and attention weights 4 H (T + S) per node
    total   = layers * layer + 3 * layer (in passing: gradients, temporaries, what the allocator does not give back)
              + 3 * nodes * V * 4 bytes (logits, their softmax, their gradient)

with h the hidden size, m the size inside the MLP, H heads with keys of D and values of E numbers, b bytes a number,
S the longest prompt, T the longest response; with bfloat16 the 6 h stay float32, and 2 h in bfloat16 are added.
Gradient checkpointing keeps h numbers per layer and token, and one layer's activations. docs/how-to/memory.md compares
the prediction with measured peaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from brorl.errors import UserError
from brorl.model.kv_shape import KVShape, kv_shapes
from brorl.model.logprobs import default_max_nodes
from brorl.model.lora import LoraSettings, num_adapter_weights
from brorl.model.tree_attention import HooksError

_PREFILL_TOKENS = 16384  # the engine's
_PASSING_LAYERS = 3
_GIB = 2**30


class MemoryLine(NamedTuple):
    """One part of the memory.

    Attributes:
        name: What it is.
        num_bytes: How much.
        settings: Settings that make it smaller, by dotted name, in the order in which to try them.
    """

    name: str
    num_bytes: int
    settings: str


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run, by part.

    Attributes:
        kept: What lies in memory all the time.
        sampling: What the engine needs besides, while it samples.
        learning: What the learner needs besides, while it learns; an upper estimate.
        available_bytes: What the machine has for it; None if it does not tell.
    """

    kept: tuple[MemoryLine, ...]
    sampling: MemoryLine
    learning: MemoryLine
    available_bytes: int | None = None

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that are needed all the time."""
        return sum(line.num_bytes for line in self.kept)

    @property
    def certain_bytes(self) -> int:
        """Bytes that a run is sure to need, or was granted: what is kept, and the engine's limit."""
        return self.kept_bytes + self.sampling.num_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes at the peak: sampling and learning take turns."""
        return self.kept_bytes + max(self.sampling.num_bytes, self.learning.num_bytes)

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        """All parts that are not empty, the largest first."""
        lines = (line for line in (*self.kept, self.sampling, self.learning) if line.num_bytes)
        return tuple(sorted(lines, key=lambda line: -line.num_bytes))

    @property
    def summary(self) -> str:
        """One line for a person."""
        parts = ", ".join(f"{line.name} {_size(line.num_bytes)}" for line in self.lines)
        there = "" if self.available_bytes is None else f"; {_size(self.available_bytes)} available"
        return f"memory: about {_size(self.total_bytes)} predicted at most ({parts}){there}"


def plan_memory(
    config: PreTrainedConfig,
    *,
    dtype: str,
    lora: LoraSettings | None,
    reference: bool,
    offload_reference: bool,
    engine_bytes: int,
    nodes_per_pass: int | None,
    gradient_checkpointing: bool,
    num_rows: int | None = None,
    num_prompts: int | None = None,
    prompt_tokens: int = 512,
    max_new_tokens: int = 1024,
    available: int | None = None,
) -> MemoryPlan:
    """Predict the memory of a run.

    Args:
        config: The model's config.
        dtype: float32, float64 or bfloat16, as in the settings.
        lora: The adapters, if not all weights are trained.
        reference: Whether there is a reference policy.
        offload_reference: Whether it lies in other memory than that of the device (on a CPU it cannot).
        engine_bytes: The engine's limit.
        nodes_per_pass: Nodes per forward pass of the learner; None for the default.
        gradient_checkpointing: Whether activations are computed again.
        num_rows: Rollouts that are sampled together at most, prompts times N; None if unknown.
        num_prompts: Prompts that are learned from together, those of a mini-batch; None if unknown.
        prompt_tokens: Length of the longest prompt, in tokens.
        max_new_tokens: Length of the longest response, in tokens.
        available: What the machine has, for the summary.

    Returns:
        The plan.

    Raises:
        HooksError: If the model's attention cannot be hooked.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    shape = _Shape.of(model, dtype, lora is not None)
    num_weights = sum(p.numel() for p in model.parameters())
    num_trained = num_adapter_weights(model, lora) if lora else num_weights
    frozen_bytes = num_weights * shape.base_bytes if lora else 0
    trained_bytes = num_trained * shape.trained_bytes
    copies = dtype == "bfloat16" and lora is None
    smaller = "dtype: bfloat16 with lora.rank" if lora is None else "dtype: bfloat16"
    kept = (
        MemoryLine("weights", frozen_bytes + trained_bytes, smaller),
        MemoryLine("gradients", trained_bytes, "lora.rank"),
        MemoryLine("AdamW", 2 * trained_bytes, "lora.rank"),
        MemoryLine("sampling copy", 2 * num_weights if copies else 0, "lora.rank, whose runs have none"),
        MemoryLine("reference", trained_bytes if reference and not offload_reference else 0, "reference.offload"),
    )
    nodes = nodes_per_pass or default_max_nodes(model)
    if num_rows is not None:
        nodes = min(nodes, num_rows * max_new_tokens)
    sampling = shape.sampling_bytes(engine_bytes, num_rows, prompt_tokens, max_new_tokens)
    prompts = max(nodes, prompt_tokens)  # what goes through the model together
    if num_prompts is not None:
        prompts = min(prompts, num_prompts * prompt_tokens)
    context = prompt_tokens + max_new_tokens
    learning = shape.learning_bytes(nodes, prompts, context, max_new_tokens, gradient_checkpointing)
    if copies:
        learning += 2 * num_weights  # autocast keeps its own casts of the weights during a pass
    fewer = (
        "engine.nodes_per_pass" if gradient_checkpointing else "engine.gradient_checkpointing, engine.nodes_per_pass"
    )
    return MemoryPlan(
        kept,
        MemoryLine("sampling", sampling, "engine.memory_gib"),
        MemoryLine("learning", learning, f"{fewer}, sampling.max_new_tokens"),
        available,
    )


def check(plan: MemoryPlan, available: int | None) -> str | None:
    """Refuse a run whose certain parts do not fit into memory.

    Args:
        plan: The prediction.
        available: Bytes that there are; None if the machine does not tell, and then nothing is refused.

    Returns:
        None if everything fits; a warning if only the learner's estimate, for the longest responses, does not.

    Raises:
        UserError: Naming the largest parts and the settings that shrink them.
    """
    if available is None or plan.total_bytes <= available:
        return None
    certain = plan.certain_bytes > available
    lines = [line for line in plan.lines if line != plan.learning or not certain][:3]
    advice = "; ".join(f"{line.name} {_size(line.num_bytes)} (shrinks with {line.settings})" for line in lines)
    if not certain:
        return (
            f"the run may need {_size(plan.total_bytes)} of memory if responses get as long as they may, and there are "
            f"{_size(available)}: {advice}"
        )
    raise UserError(f"the run needs {_size(plan.certain_bytes)} of memory and there are {_size(available)}: {advice}")


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that a process may still take on a device; None where that cannot be told.

    On a CPU under Linux it is what the kernel says is available, or what the limits of its control groups (of
    containers and job schedulers, versions 1 and 2) leave if that is less.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_to_process(Path("/"))


def available_to_process(root: Path) -> int | None:
    """Return the memory that this process may still take, with the kernel's files found below `root`."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    limits = [int(found[1]) * 1024] if found else []
    groups = dict(re.findall(r"^\d+:([^:]*):(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE))
    mount = root / "sys/fs/cgroup"
    if "" in groups:
        limits += _left_in_groups(mount, groups[""], "memory.max", "memory.current", "inactive_file")
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _left_in_groups(mount / "memory", path, *names)
    return max(0, min(limits)) if limits else None


def _left_in_groups(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterable[int]:
    """Yield what each limit from a control group up to the root leaves; a file cache gives way."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        folder = mount.joinpath(*parts[:depth])
        allowed, used = _read(folder / limit).strip(), _read(folder / usage).strip()
        if allowed.isdigit() and used.isdigit():
            cache = re.search(rf"^{reclaimable} (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            yield int(allowed) - int(used) + (int(cache[1]) if cache else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class _Shape(NamedTuple):
    """What a model's activations depend on; sizes in numbers, `*_bytes` in bytes a number."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv: Sequence[KVShape]  # of each layer
    vocabulary: int
    base_bytes: int  # frozen weights, or what is computed with
    trained_bytes: int
    sampled_bytes: int

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: str, lora: bool) -> _Shape:
        kv = _kv_shapes(model)  # refuses a model without attention
        config: Any = model.config.get_text_config()
        heads = config.num_attention_heads
        widest = max((max(p.shape) for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n), default=0)
        inner = getattr(config, "intermediate_size", None) or widest or 4 * config.hidden_size
        trained = 8 if dtype == "float64" else 4
        low = 2 if dtype == "bfloat16" else trained
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=inner,
            heads=heads,
            kv=kv,
            vocabulary=config.vocab_size,
            base_bytes=low if lora else trained,
            trained_bytes=trained,
            sampled_bytes=low,
        )

    def sampling_bytes(self, limit: int, num_rows: int | None, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return the engine's rows within its limit, and the activations of its forward passes."""
        of_token = sum(shape.size for shape in self.kv) * self.sampled_bytes
        of_row = max_new_tokens * of_token + 3 * self.vocabulary * max(4, self.sampled_bytes)
        rows = max(1, limit // of_row)
        cache = limit
        if num_rows is not None:
            rows = min(rows, num_rows)
            cache = min(limit, rows * of_row + num_rows * prompt_tokens * of_token)
        scores = 3 * rows * self.heads * (max_new_tokens + prompt_tokens) * 4
        prefill = _PREFILL_TOKENS if num_rows is None else min(_PREFILL_TOKENS, num_rows * prompt_tokens)
        return cache + max(scores, prefill * self._of_token() // 2)

    def learning_bytes(self, nodes: int, prompts: int, context: int, max_new_tokens: int, checkpointing: bool) -> int:
        """Return activations and logits of the largest chunk, with those of the prompts' tokens that it belongs to."""
        fed = max(nodes, max_new_tokens)  # a response is never cut
        of_score = 4 if self.sampled_bytes != 2 else 6  # float32, and bfloat16 for the product with the values
        scores = fed * self.heads * context * max(of_score, self.sampled_bytes)
        of_layer = (fed + prompts) * self._of_token() + scores
        inputs = self.layers * (fed + prompts) * self.hidden * self.trained_bytes
        logits = 3 * fed * self.vocabulary * max(4, self.trained_bytes)
        return logits + _PASSING_LAYERS * of_layer + (inputs + of_layer if checkpointing else self.layers * of_layer)

    def _of_token(self) -> int:
        residual = 6 * self.hidden * self.trained_bytes
        if self.sampled_bytes < self.trained_bytes:  # norms are computed in float32, and cast for what follows
            residual += 2 * self.hidden * self.sampled_bytes
        head = max(4 * shape.key_dim + 3 * shape.value_dim for shape in self.kv)
        return residual + (4 * self.inner + self.heads * head) * self.sampled_bytes


def _kv_shapes(model: PreTrainedModel) -> Sequence[KVShape]:
    """Return the shapes of the keys and values of a model on the meta device, or a guess where it cannot run there."""
    model.eval()
    try:
        return kv_shapes(model.to(torch.bfloat16))  # type: ignore[arg-type]  # matmuls of experts need it there
    except HooksError:
        raise
    except Exception:  # some routers of experts read numbers, and there are none
        config = model.config.get_text_config()
        heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        return [KVShape(heads, dim, dim)] * config.num_hidden_layers


def _size(num_bytes: int) -> str:
    gib = num_bytes / _GIB
    return f"{gib:.1f} GiB" if gib >= 0.95 else f"{num_bytes / 2**20:.0f} MiB"
