"""Decoding with a model's own cache, for any causal LM of transformers with a cache.

The rows of the cache are chosen by index between two steps: a row that continues in several ways is repeated.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from brorl.errors import UserError

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # `cache` from transformers 5.24


class CacheError(UserError):
    """A model cannot decode with its own cache."""

    @classmethod
    def of(cls, model: PreTrainedModel, reason: str) -> CacheError:
        """Return the error for an architecture, with the reason."""
        return cls(f"{type(model).__name__} cannot take the flat path: {reason}; choose another model")


class OwnCache:
    """The cache of a model after P prompts of one length, from their token ids, shape [P, S].

    Attributes:
        logits_RV: Logits after the last token of each row, shape [R, V]; first a row is a prompt.

    Raises:
        CacheError: If the model returns no cache.
    """

    def __init__(self, model: PreTrainedModel, prompt_PS: Tensor) -> None:
        parameters = signature(model.forward).parameters
        self._model = model
        self._argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._cache: Cache | None = None
        self.logits_RV = self._forward(prompt_PS)

    def take(self, row_R: Tensor) -> None:
        """Keep some rows, in the given order; a row can be repeated."""
        assert self._cache is not None
        self._cache.reorder_cache(row_R.long())  # type: ignore[arg-type]

    def feed(self, token_R: Tensor) -> Tensor:
        """Feed one token per row; return the logits after it, shape [R, V]."""
        self.logits_RV = self._forward(token_R[:, None])
        return self.logits_RV

    @property
    def num_bytes(self) -> int:
        """Memory of the cache."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self._cache))

    def _forward(self, token_RT: Tensor) -> Tensor:
        if self._argument is None:
            raise CacheError.of(self._model, "its forward pass takes no cache")
        cache = {} if self._cache is None else {self._argument: self._cache}
        output = self._model(input_ids=token_RT, use_cache=True, **cache, **self._last)
        self._cache = getattr(output, self._argument, None)
        if not isinstance(self._cache, Cache):
            raise CacheError.of(self._model, "its forward pass returns no cache")
        logits: Tensor = output.logits[:, -1]
        return logits


def _tensors(part: Any) -> list[Tensor]:
    """Return the tensors of a cache and of its layers."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, dict):
        return [tensor for value in part.values() for tensor in _tensors(value)]
    if isinstance(part, list | tuple):
        return [tensor for value in part for tensor in _tensors(value)]
    return _tensors(vars(part)) if type(part).__module__.startswith("transformers.cache") else []
