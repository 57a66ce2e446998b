"""What determines a run's memory besides its model: settings of the recipe, and sizes of its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from brorl.model.chunks import AttentionChoice
from brorl.model.cuda_graphs import GraphChoice
from brorl.model.settings import ForwardChoice, LoraSettings, States


@dataclass(frozen=True)
class MemorySettings:
    """The settings that determine a run's memory."""

    dtype: Literal["float32", "float64", "bfloat16"]  # the run's `dtype`
    engine_bytes: int  # the engine's limit, `engine.memory_gib`
    lora: LoraSettings | None = None  # the adapters; None if all weights are trained
    reference: bool = False  # whether a reference policy is in device memory
    offloaded_reference: bool = False  # whether a reference policy is in host memory instead
    average: bool = False  # whether averaged weights are in device memory
    states: States = "device"  # location and bits of AdamW's moments between updates
    nodes_per_pass: int | None = None  # nodes per forward pass of the learner, 1 or more; None for the default
    gradient_checkpointing: bool = False  # whether activations are recomputed
    # how rollouts go through the model; `auto` is the flat path if the attention cannot be hooked
    forward: ForwardChoice = "auto"
    attention: AttentionChoice = "auto"  # how nodes attend on the tree path; `auto` is FlexAttention on CUDA
    device: str = "cpu"  # type of the model's device, such as `cuda`
    # whether the engine is vLLM, which has its own weights, a file of the trained weights in CPU memory, and a cache
    # that is allocated in advance
    separate_engine: bool = False
    engine_apart: bool = False  # whether vLLM has its own GPUs; its memory is then not predicted
    engine_rows: int = 512  # rows that vLLM decodes at the same time
    graphs: GraphChoice = "off"  # `engine.cuda_graphs`

    @property
    def keeps_cache(self) -> bool:
        """Whether the native engine keeps its memory while the learner works, for CUDA graphs."""
        return self.graphs != "off" and self.device == "cuda" and not self.separate_engine

    @property
    def engine_sleeps(self) -> bool:
        """Whether vLLM frees its weights and its cache on a GPU while the learner works."""
        return self.separate_engine and not self.engine_apart and self.device == "cuda"

    @property
    def autocasts(self) -> bool:
        """Whether float32 weights are trained in bfloat16. The native engine then has a copy of them for sampling."""
        return self.dtype == "bfloat16" and self.lora is None

    @property
    def trained_bytes(self) -> int:
        """Bytes per number of the trained weights."""
        return 8 if self.dtype == "float64" else 4

    @property
    def computed_bytes(self) -> int:
        """Bytes per number of activations, frozen weights and the sampling copy."""
        return 2 if self.dtype == "bfloat16" else self.trained_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes per number of the hidden states between two layers."""
        return self.computed_bytes if self.lora else self.trained_bytes


@dataclass(frozen=True)
class Workload:
    """Sizes of a run's batches."""

    prompt_tokens: int = 512  # tokens of the longest prompt
    max_new_tokens: int = 1024  # tokens of the longest response
    num_rows: int | None = None  # maximum rollouts sampled together, prompts times N; None if unknown
    num_prompts: int | None = None  # prompts of a mini-batch; None if unknown
