"""Random models for exactness (small, several architectures) and speed (Qwen3-type), and variants of the learner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, cast
from unittest.mock import patch

import torch
from build_workload import workload_of
from gpu.device import Device
from measurement import Workload
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from brorl.model import chunks, logits, logprobs
from brorl.model.flat_path import FlatForward
from brorl.model.forward import Forward, with_recorded_passes
from brorl.model.tree_attention import enable_gradient_checkpointing
from brorl.model.tree_path import TreeForward

_SCORES_PER_TILE = 4000  # some queries of a short response
_ROWS_PER_BLOCK = 5
NO_END_TOKEN = 10**9  # outside of every vocabulary: no response ends early
_SMALL_ENTROPY_NATS = 1.0  # of the small models, so that their rollouts share prefixes
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GROUPED = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
HOOKED = {"llama": _GROUPED, "qwen2": _GROUPED, "qwen3": _GROUPED, "mistral": _GROUPED | {"sliding_window": None}}
STATE_SPACE = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1,
        "expand": 2, "chunk_size": 8,
    },
}  # fmt: skip
_QWEN3 = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936}
SIZES = {  # of Qwen3-type models; 135M is that of SmolLM2, whose type is llama, and 1.5B that of Qwen2.5
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256,
    },
    "135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
    },
    "300M": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 10},
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936,
    },
}  # fmt: skip


def small_model(kind: str, seed: int) -> PreTrainedModel:
    """Make a small random float32 model on the CPU, with a sharpened head and a vocabulary of 61 tokens."""
    torch.manual_seed(seed)
    settings = (HOOKED | STATE_SPACE)[kind]
    config = AutoConfig.for_model(kind, vocab_size=61, **_NO_IDS, **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # initialized with ones or zeros, which hide errors
                parameter.add_(0.1 * torch.randn_like(parameter))
        head = model.get_output_embeddings()
        if head.weight is model.get_input_embeddings().weight:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
            model.config.tie_word_embeddings = False
        logits_TV = model(torch.randint(1, 61, (1, 64))).logits[0]
        head.weight *= _scale_for(logits_TV, _SMALL_ENTROPY_NATS)
    return model.eval()


def copy_of(model: PreTrainedModel, device: Device, dtype: torch.dtype, *, exact_norms: bool = True) -> PreTrainedModel:
    """Return a copy of a small model."""
    copy: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(device=device.name, dtype=dtype).eval()
    if exact_norms:
        for module in copy.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(_exact_rms_norm, module)
    return cast(PreTrainedModel, copy)


def _exact_rms_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def speed_config(size: str, max_tokens: int) -> PreTrainedConfig:
    """Return the config of a random model with tied embeddings."""
    kind = {"135M": "llama", "1.5B": "qwen2"}.get(size, "qwen3")
    return AutoConfig.for_model(
        kind, **SIZES[size], **_NO_IDS, tie_word_embeddings=True, max_position_embeddings=max_tokens
    )


def speed_model(config: PreTrainedConfig, device: Device, scale: float, seed: int) -> PreTrainedModel:
    """Make a random float32 model on the device."""
    torch.manual_seed(seed)
    with torch.device(device.name):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_decoder().norm.weight *= scale
    return model


@dataclass(frozen=True)
class TimedModel:
    """A model whose speed is measured."""

    name: str  # a size of `SIZES`, or the name of a pretrained model
    folder: str = ""  # of the pretrained model; empty for random weights

    def config(self, max_tokens: int) -> PreTrainedConfig:
        """Return its config, with positions for so many tokens if its weights are random."""
        config: PreTrainedConfig = (
            AutoConfig.from_pretrained(self.folder) if self.folder else speed_config(self.name, max_tokens)
        )
        return config

    def load(self, device: Device, max_tokens: int, seed: int) -> PreTrainedModel:
        """Return it in float32 on the device."""
        if not self.folder:
            return speed_model(self.config(max_tokens), device, 1.0, seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return model.eval().to(device.name)  # type: ignore[arg-type]


def _scale_for(logits_TV: Tensor, target_nats: float) -> float:
    """Return the factor of the logits that gives their distributions a mean entropy, by bisection."""
    low, high = 0.0, math.log(1e4)
    for _ in range(30):
        middle = (low + high) / 2
        logprob_TV = (logits_TV * math.exp(middle)).log_softmax(-1)
        entropy = float(-(logprob_TV.exp() * logprob_TV).sum(-1).mean())
        low, high = (middle, high) if entropy > target_nats else (low, middle)
    return math.exp(middle)


def fixed_workload(model: PreTrainedModel, setting: str, max_new_tokens: int) -> Workload:
    """Return the workload of responses of one length, with which the arithmetic of a model is counted."""
    return workload_of(
        model, setting, folder="", domain="parity", prompts=[], max_new_tokens=max_new_tokens,
        eos_token_id=NO_END_TOKEN, fixed_length=True, entropy_nats=math.nan, head_scale=1.0,
    )  # fmt: skip


@dataclass(frozen=True)
class LearnerVariant:
    """One way to compute log-probs and gradients."""

    name: str  # its name in the results
    forward: Forward = field(default_factory=TreeForward)  # how trees go through the model
    checkpointing: bool = False  # whether activations are computed again
    small_tiles: bool = False  # attend in many tiles although the responses are short
    small_blocks: bool = False  # compute logits in blocks although they are few
    records: bool = False  # whether its passes are CUDA graphs
    nodes_per_pass: int | None = None  # nodes per pass of the timed step; None for the default
    timed: bool = False  # whether its step is timed. Long responses need tiles and blocks anyway
    only_cuda: bool = False  # whether it needs a CUDA device, and has no float64

    def runs(self, device: Device, precision: str) -> bool:
        """Return whether the variant runs on a device in a precision."""
        return not self.only_cuda or (not device.is_cpu and precision != "float64")

    @property
    def num_passes(self) -> int:
        """The number of times that a pass must occur before its numbers are those of the variant."""
        return 2 if self.records else 1

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Forward]:
        """Compute with small tiles and blocks inside, if the variant has them; checkpointing stays switched on.

        Yield the path. Passes that should be recorded and cannot be are an error.
        """
        if self.checkpointing:
            enable_gradient_checkpointing(model)
        with ExitStack() as stack:
            if self.small_tiles:
                stack.enter_context(patch.object(chunks, "SCORES_PER_TILE", _SCORES_PER_TILE))
            if self.small_blocks:
                block = _ROWS_PER_BLOCK * model.config.get_text_config().vocab_size
                stack.enter_context(patch.object(logits, "MAX_LOGITS", 0))
                stack.enter_context(patch.object(logprobs, "LOGITS_PER_BLOCK", block))
            if self.records:
                autocast = torch.is_autocast_enabled(model.device.type)
                yield with_recorded_passes(model, self.forward, print, "on", autocast=autocast)
            else:
                yield self.forward


FLAT = FlatForward("the benchmark measures it")
_COMPILED = TreeForward(packed=True, compiled=True)
VARIANTS = (
    LearnerVariant("tree", timed=True),
    LearnerVariant("tree, small tiles", small_tiles=True),
    LearnerVariant("tree, blocked logits", small_blocks=True),
    LearnerVariant("tree, checkpointing", checkpointing=True, timed=True),
    LearnerVariant("tree, all three", checkpointing=True, small_tiles=True, small_blocks=True),
    LearnerVariant("flat", FLAT),
    LearnerVariant("packed", TreeForward(packed=True), timed=True, only_cuda=True),
    LearnerVariant("packed, compiled", _COMPILED, timed=True, only_cuda=True),
    LearnerVariant("packed, recorded", _COMPILED, records=True, timed=True, only_cuda=True),
)
LARGE_PASSES = tuple(  # timed alone
    LearnerVariant(
        f"packed, {'recorded' if records else 'compiled'}, {nodes:,} nodes", _COMPILED, records=records,
        nodes_per_pass=nodes, timed=True, only_cuda=True,
    )
    for nodes in (32_768, 65_536)
    for records in (False, True)
)  # fmt: skip
