"""The sizes of a model that decide its memory and its costs, from its config or from numbers.

The config's model is made on PyTorch's meta device, which takes no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from brorl.errors import UserError
from brorl.format import listed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BF16 = 2
_TEMPORARY_LAYERS = 3
_REQUIRED = ("parameters", "layers", "hidden", "kv_heads", "vocabulary")
_OPTIONAL = ("heads", "head_dim", "active_parameters", "inner")
EXAMPLE = "parameters=1.78e9,layers=28,hidden=1536,heads=12,kv_heads=2,vocabulary=151936"
"""An example of a shape in numbers: the model of the paper's recipe."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM."""

    parameters: int  # all weights
    # weights that a token is multiplied with: without the input embedding (a lookup, unless the output layer shares it)
    # and without the experts that a token does not use
    matmul_parameters: int
    layers: int
    hidden: int
    inner: int  # size inside the MLP
    heads: int
    head_dim: int  # numbers of a head
    kv_size: int  # numbers of the keys and values of one token in all layers
    vocabulary: int
    source: str  # where the sizes come from

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

    def activation_bytes(self, trained_bytes: int = 4, computed_bytes: int = 2, head_size: int | None = None) -> int:
        """Return the bytes of a token's activations in one layer: b * (6 h + 4 m + 7 H D).

        h is the hidden size, m the size inside the MLP, and b the bytes per number, for H heads of D numbers. Where
        activations have fewer bytes than trained weights the 6 h keep those of the weights, and 2 h are added: norms
        are computed in float32 and cast.

        Args:
            trained_bytes: Bytes per number of the trained weights.
            computed_bytes: Bytes per number of the activations.
            head_size: Numbers per head, 4 for each of a key and 3 for each of a value; None for 7 D.
        """
        residual = 6 * self.hidden * trained_bytes
        if computed_bytes < trained_bytes:
            residual += 2 * self.hidden * computed_bytes
        return residual + (4 * self.inner + self.heads * (head_size or 7 * self.head_dim)) * computed_bytes

    def pass_bytes(self, tokens: int, layer_bytes: int, checkpointing: bool, trained_bytes: int = 4) -> int:
        """Return the bytes of the activations of a forward and a backward pass, without logits.

        All layers, and 3 more: gradients, intermediate results, and memory that the allocator keeps.

        Args:
            tokens: Tokens that go through the model together.
            layer_bytes: Bytes of the activations of one layer.
            checkpointing: Whether activations are computed again: a layer then keeps h numbers per token.
            trained_bytes: Bytes per number of the trained weights.
        """
        inputs = self.layers * tokens * self.hidden * trained_bytes
        kept = inputs + layer_bytes if checkpointing else self.layers * layer_bytes
        return kept + _TEMPORARY_LAYERS * layer_bytes

    @classmethod
    def of(cls, config: PreTrainedConfig, source: str) -> ModelShape:
        """Read the sizes of a model from its config, without its weights."""
        import torch
        from transformers import AutoModelForCausalLM

        from brorl.model.kv_shape import shapes_or_guess

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shape = cls.of_model(model, source)
        layers, _ = shapes_or_guess(model)
        return replace(shape, kv_size=sum(layer.size for layer in layers))

    @classmethod
    def of_model(cls, model: Any, source: str) -> ModelShape:
        """Read the sizes of a model, which may be on the meta device; its keys and values are not counted."""
        config: Any = model.config.get_text_config()
        total = sum(p.numel() for p in model.parameters())
        table, output = model.get_input_embeddings(), model.get_output_embeddings()
        tied = output is not None and output.weight is table.weight
        experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        widest = max((max(p.shape) for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n), default=0)
        heads = setting(config, "num_attention_heads") or 1
        return cls(
            parameters=total,
            matmul_parameters=round(
                total - (0 if tied else table.weight.numel()) - experts * (1 - _fraction_of_experts(config))
            ),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=setting(config, "intermediate_size") or widest or 4 * config.hidden_size,
            heads=heads,
            head_dim=setting(config, "head_dim") or config.hidden_size // heads,
            kv_size=0,
            vocabulary=config.vocab_size,
            source=source,
        )

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, float]) -> ModelShape:
        """Make the shape of a model from a few numbers.

        Args:
            numbers: `parameters`, `layers`, `hidden`, `kv_heads` and `vocabulary`; also `heads` and `head_dim` (by
                default heads of 128 numbers), `inner` (by default 4 times `hidden`), and `active_parameters` of a
                mixture of experts. The weights of the output layer count as matrix products, the embedding does not.

        Raises:
            UserError: If a number is missing, unknown or not positive.
        """
        for name, value in numbers.items():
            if name not in (*_REQUIRED, *_OPTIONAL):
                raise UserError(f"--model-shape: {name!r} is not one of {', '.join((*_REQUIRED, *_OPTIONAL))}")
            if not 1 <= value < 1e15:
                raise UserError(f"--model-shape: {name} must be a number of at least 1, got {value:g}")
        if missing := [name for name in _REQUIRED if name not in numbers]:
            raise UserError(f"--model-shape is missing {listed(missing)}; an example: --model-shape {EXAMPLE}")
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
            source="given",
        )


PUBLISHED = {
    "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B": ModelShape(
        parameters=1_777_088_000, matmul_parameters=1_543_714_304, layers=28, hidden=1536, inner=8960, heads=12,
        head_dim=128, kv_size=28 * 2 * 2 * 128, vocabulary=151_936, source="published config.json of the model",
    ),
}  # fmt: skip
"""Shapes of the models of the shipped recipes, for machines that cannot reach the hub."""


def setting(config: Any, name: str) -> Any:
    """Return a setting of a config; None if it has none, or if layers differ in it."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers has an error of its own for settings of layers
        return None


def _fraction_of_experts(config: Any) -> float:
    """Return the fraction of the experts that a token uses; 1 without experts."""
    used = setting(config, "num_experts_per_tok")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((setting(config, name) for name in names if setting(config, name)), None)
    return used / total if used and total else 1.0
