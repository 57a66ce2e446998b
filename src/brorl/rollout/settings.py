"""Settings for the sampling engine, and for a run's memory, threads and clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time
from typing import Literal

from pydantic import Field

from brorl.section import Section

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can reserve memory for; an adapter's rank may be lower."""


class VllmEngineSettings(Section):
    """The vLLM engine (needs the extra `vllm`); no effect with engine.kind = native."""

    max_rows: int = Field(
        512, ge=1, description="responses decoded at the same time; the rest wait (vLLM's max_num_seqs)"
    )
    responses_per_request: int = Field(
        512, ge=1, description="maximum responses per request; a prompt with more rollouts takes several requests"
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share the engine")
    placement: Literal["colocated", "apart"] = Field(
        "colocated", description="the engine's GPUs in a single-process run: colocated, the learner's GPU, in turns | "
        "apart, different GPUs. A cluster uses cluster.placement instead",
    )  # fmt: skip


class EngineSettings(Section):
    """Engine, memory, threads, clock. Only `kind` and `dtype` change results beyond rounding and budgets in seconds."""

    kind: Literal["native", "vllm"] = Field(
        "native", description="sampling engine: native, the training model itself | vllm, which needs the extra "
        "`vllm` (docs/how-to/vllm.md)",
    )  # fmt: skip
    forward: Literal["auto", "tree", "flat"] = Field(
        "auto", description="how rollouts pass through the model: tree, each distinct token once | flat, each distinct "
        "response once, for any causal LM | auto, tree wherever it is exact"
    )  # fmt: skip
    attention: Literal["auto", "tiled"] = Field(
        "auto", description="the learner's attention on the tree path: auto, compiled FlexAttention layers on CUDA if "
        "a startup check passes, the engine.compile kernels on a CPU, tiles otherwise | tiled, always in tiles "
        "(docs/how-to/memory.md)",
    )  # fmt: skip
    dtype: Literal["auto", "bfloat16"] = Field(
        "auto", description="weights that the native engine samples with: auto, in the run's dtype | bfloat16, a "
        "rounded copy, on a CPU; old log-probs are then recomputed (docs/how-to/models.md)",
    )  # fmt: skip
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="C kernels for float32 on a CPU, compiled once per processor in a few seconds: auto, if a "
        "C compiler is present | on, or fail without one | off, use PyTorch's. On a GPU, Triton kernels for sampling "
        "with the native engine: auto, if a trial at the first call passes | on, or fail if it does not | off, use "
        "PyTorch's (docs/how-to/gpu.md)",
    )  # fmt: skip
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="CUDA graphs for the native engine's steps on the tree path, and for packed passes of a "
        "learner on one GPU: auto, if they can be recorded, give the same numbers, and fit in memory | on, or fail if "
        "they cannot be recorded | off, the host launches each kernel (docs/how-to/gpu.md)",
    )  # fmt: skip
    memory_gib: float = Field(
        4.0, gt=0, description="memory for the KV cache and logits while sampling, in GiB; rows that do not fit wait. "
        "vllm allocates a KV cache of this size at startup",
    )  # fmt: skip
    nodes_per_pass: int | None = Field(
        None,
        ge=16,
        description="tree nodes per learner forward pass; null: 1,024, or 16,384 on CUDA, fewer for some models with a "
        "large vocabulary; halved when memory runs out",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    threads: int = Field(
        0, ge=0, le=1024, description="number of CPU threads; 0 chooses 1 for models under 10 million weights "
        "on the CPU, and otherwise torch's default. A run stores the number and resumes with it",
    )  # fmt: skip
    clock: Literal["wall", "cpu"] = Field(
        "wall", description="clock for all times: wall | cpu, the CPU time of this process, which other programs do "
        "not affect; for a model on the CPU with one thread and no verifiers in worker processes",
    )  # fmt: skip
    vllm: VllmEngineSettings = VllmEngineSettings()

    @property
    def memory_bytes(self) -> int:
        """Value of `memory_gib` in bytes."""
        return int(self.memory_gib * 2**30)

    @property
    def now(self) -> Callable[[], float]:
        """Function that reads the chosen clock, in seconds."""
        return process_time if self.clock == "cpu" else perf_counter
