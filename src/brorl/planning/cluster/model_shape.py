"""The sizes of a model that decide its costs on a GPU.

In: a model's config, or numbers. Out: a `ModelShape`: weights, operations per token, bytes of keys and values per
token. The config's model is made on PyTorch's meta device, which takes no memory and needs no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brorl.errors import UserError
from brorl.format import listed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BF16 = 2
_REQUIRED = ("parameters", "layers", "hidden", "kv_heads", "vocabulary")
_OPTIONAL = ("heads", "head_dim", "active_parameters", "inner")
EXAMPLE = "parameters=1.78e9,layers=28,hidden=1536,heads=12,kv_heads=2,vocabulary=151936"
"""An example of a shape in numbers: the model of the paper's recipe."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM.

    Attributes:
        parameters: All weights.
        matmul_parameters: Weights that a token is multiplied with: without the input embedding (a lookup, unless the
            output layer shares it) and without the experts that a token does not use.
        layers: Layers.
        hidden: Hidden size.
        inner: Size inside the MLP.
        heads: Attention heads.
        head_dim: Numbers of a head.
        kv_size: Numbers of the keys and values of one token in all layers.
        vocabulary: Tokens of the vocabulary.
        source: Where the sizes come from.
    """

    parameters: int
    matmul_parameters: int
    layers: int
    hidden: int
    inner: int
    heads: int
    head_dim: int
    kv_size: int
    vocabulary: int
    source: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in bfloat16."""
        return self.kv_size * _BF16

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in bfloat16."""
        return self.parameters * _BF16

    @property
    def matmul_flops(self) -> float:
        """Operations of the matrix products of one token in a forward pass, without attention: 2 per weight."""
        return 2.0 * self.matmul_parameters

    @property
    def attention_flops(self) -> float:
        """Operations of one token's attention in a forward pass per token of its context.

        Scores and weighted values: 2 operations each for every number of every head.
        """
        return 4.0 * self.layers * self.heads * self.head_dim

    @classmethod
    def of(cls, config: PreTrainedConfig, source: str) -> ModelShape:
        """Read the sizes of a model from its config, without its weights.

        Args:
            config: The model's config.
            source: Where the config comes from.
        """
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text: Any = config.get_text_config()
        total = sum(p.numel() for p in model.parameters())
        table = model.get_input_embeddings().weight
        tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is table
        experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        heads = getattr(text, "num_attention_heads", None) or 1
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            parameters=total,
            matmul_parameters=round(
                total - (0 if tied else table.numel()) - experts * (1 - _fraction_of_experts(text))
            ),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            head_dim=head_dim,
            kv_size=_kv_size(model, text.num_hidden_layers * 2 * head_dim),
            vocabulary=text.vocab_size,
            source=source,
        )

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float], source: str = "given") -> ModelShape:
        """Make the shape of a model from a few numbers.

        Args:
            numbers: `parameters`, `layers`, `hidden`, `kv_heads` and `vocabulary`; also `heads` and `head_dim` (by
                default heads of 128 numbers), `inner` (by default 4 times `hidden`), and `active_parameters` of a
                mixture of experts. The weights of the output layer count as matrix products, the embedding does not.
            source: Where the numbers come from.

        Raises:
            UserError: If a number is missing, unknown or not positive.
        """
        unknown = [name for name in numbers if name not in (*_REQUIRED, *_OPTIONAL)]
        if unknown:
            raise UserError(f"--model-shape: {unknown[0]!r} is not one of {', '.join((*_REQUIRED, *_OPTIONAL))}")
        missing = [name for name in _REQUIRED if name not in numbers]
        if missing:
            raise UserError(f"--model-shape lacks {listed(missing)}; an example: --model-shape {EXAMPLE}")
        wrong = [name for name, value in numbers.items() if not 1 <= value < 1e15]
        if wrong:
            raise UserError(f"--model-shape: {wrong[0]} must be a number of at least 1, not {numbers[wrong[0]]:g}")
        layers, hidden = int(numbers["layers"]), int(numbers["hidden"])
        vocabulary, total = int(numbers["vocabulary"]), int(numbers["parameters"])
        head_dim = int(numbers.get("head_dim") or (hidden // numbers["heads"] if "heads" in numbers else 128))
        heads = int(numbers.get("heads") or max(1, hidden // head_dim))
        active = int(numbers.get("active_parameters", total))
        return cls(
            parameters=total,
            matmul_parameters=max(1, active - vocabulary * hidden),
            layers=layers,
            hidden=hidden,
            inner=int(numbers.get("inner", 4 * hidden)),
            heads=heads,
            head_dim=head_dim,
            kv_size=layers * 2 * int(numbers["kv_heads"]) * head_dim,
            vocabulary=vocabulary,
            source=source,
        )


PUBLISHED = {
    "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B": ModelShape(
        parameters=1_777_088_000, matmul_parameters=1_543_714_304, layers=28, hidden=1536, inner=8960, heads=12,
        head_dim=128, kv_size=28 * 2 * 2 * 128, vocabulary=151_936, source="published config.json of the model",
    ),
}  # fmt: skip
"""Shapes of the models of the shipped recipes, for machines that cannot reach the hub."""


def _fraction_of_experts(config: Any) -> float:
    """Return the fraction of the experts that a token uses; 1 without experts."""
    used = getattr(config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return used / total if used and total else 1.0


def _kv_size(model: Any, size_of_a_head: int) -> int:
    """Return the numbers of a token's keys and values in all layers; from the config if the model has no tree path."""
    import torch

    from brorl.model.kv_shape import kv_shapes

    model.eval()
    try:
        return sum(shape.size for shape in kv_shapes(model.to(torch.bfloat16)))
    except Exception:  # models of the flat path, and routers that read values, which the meta device does not have
        config = model.config.get_text_config()
        return size_of_a_head * int(
            getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None) or 1
        )
