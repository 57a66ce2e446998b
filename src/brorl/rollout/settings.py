"""Settings of the engine that samples, and of the memory and the threads of a run."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time
from typing import Literal

from pydantic import Field

from brorl.section import Section

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM can reserve memory; an adapter may have a lower rank."""


class VllmEngineSettings(Section):
    """The vLLM engine (needs the extra `vllm`); no effect with engine.kind = native."""

    max_rows: int = Field(
        512, ge=1, description="responses that are decoded together; the others wait (vLLM's max_num_seqs)"
    )
    responses_per_request: int = Field(
        512, ge=1, description="a prompt's rollouts are split into requests of at most this many responses"
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share the engine")
    placement: Literal["colocated", "apart"] = Field(
        "colocated", description="GPUs of the engine in a run of one process: colocated, the learner's GPU, in turn | "
        "apart, other GPUs. A cluster has cluster.placement",
    )  # fmt: skip


class EngineSettings(Section):
    """Engine, memory, threads, clock; only `kind` and `dtype` change results beyond rounding, or budgets in seconds."""

    kind: Literal["native", "vllm"] = Field(
        "native", description="engine that samples: native, the training model itself | vllm, which needs the extra "
        "`vllm` (docs/how-to/vllm.md)",
    )  # fmt: skip
    forward: Literal["auto", "tree", "flat"] = Field(
        "auto", description="how rollouts go through the model: tree, each distinct token once | flat, each distinct "
        "response once, with any causal LM | auto, the tree wherever it is exact"
    )  # fmt: skip
    attention: Literal["auto", "tiled"] = Field(
        "auto", description="attention of the learner on the tree path: auto, on CUDA compiled layers with "
        "FlexAttention if a check at the start passes, on a CPU the kernels of engine.compile, otherwise in tiles | "
        "tiled, always in tiles (docs/how-to/memory.md)",
    )  # fmt: skip
    dtype: Literal["auto", "bfloat16"] = Field(
        "auto", description="weights that the native engine samples with: auto, in dtype | bfloat16, a rounded "
        "copy, on a CPU; old log-probs are then recomputed (docs/how-to/models.md)",
    )  # fmt: skip
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="kernels in C for float32 on a CPU, compiled once per processor in a few seconds: auto, "
        "where a C compiler is present | on, with an error without one | off, PyTorch's. On a GPU the native engine "
        "samples with kernels in Triton: auto, if a trial at the first call passes | on, with an error if not | off, "
        "PyTorch's (docs/how-to/gpu.md)",
    )  # fmt: skip
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="CUDA graphs of the native engine's steps, on the tree path: auto, where they can be made "
        "and give the same logits | on, with an error where not | off, each kernel is started by the host "
        "(docs/how-to/gpu.md)",
    )  # fmt: skip
    memory_gib: float = Field(
        4.0, gt=0, description="memory for the KV cache and logits while sampling, in GiB; more rows wait for space. "
        "vllm allocates a KV cache of this size at the start",
    )  # fmt: skip
    nodes_per_pass: int | None = Field(
        None,
        ge=16,
        description="tree nodes per forward pass of the learner; null: 1,024, on CUDA 16,384, fewer for some "
        "models with a large vocabulary; halved when memory runs out",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    threads: int = Field(
        0, ge=0, le=1024, description="number of CPU threads; 0 chooses: 1 for a model of less than 10 million weights "
        "on the CPU, else the default of torch. A run stores the number and resumes with it",
    )  # fmt: skip
    clock: Literal["wall", "cpu"] = Field(
        "wall", description="clock for all times: wall time | CPU time of this process, which other programs do not "
        "lengthen; for a model on the CPU with one thread, without verifiers in worker processes",
    )  # fmt: skip
    vllm: VllmEngineSettings = VllmEngineSettings()

    @property
    def now(self) -> Callable[[], float]:
        """The function that reads the chosen clock, in seconds."""
        return process_time if self.clock == "cpu" else perf_counter
