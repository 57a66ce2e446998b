"""The sizes of a model that decide its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TEMPORARY_LAYERS = 3


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM."""

    parameters: int  # all weights
    layers: int
    hidden: int
    inner: int  # size inside the MLP
    heads: int
    head_dim: int  # numbers of a head
    vocabulary: int

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
    def of_model(cls, model: Any) -> ModelShape:
        """Read the sizes of a model, which may be on the meta device."""
        config: Any = model.config.get_text_config()
        widest = max((max(p.shape) for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n), default=0)
        heads = setting(config, "num_attention_heads") or 1
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=setting(config, "intermediate_size") or widest or 4 * config.hidden_size,
            heads=heads,
            head_dim=setting(config, "head_dim") or config.hidden_size // heads,
            vocabulary=config.vocab_size,
        )


def setting(config: Any, name: str) -> Any:
    """Return a setting of a config; None if it has none, or if layers differ in it."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers has an error of its own for settings of layers
        return None
