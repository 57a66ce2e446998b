"""Predicts the memory of the learner's passes from the sizes of a model and its batches.

Two kinds of layers differ in what they keep for their backward pass: the modules of transformers, and compiled layers
in packed passes on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brorl.model.chunks import SCORES_PER_TILE
from brorl.model.flex_attention import copied_tokens
from brorl.model.kernels import kernels
from brorl.model.logits import COMPILED_LOGITS_PER_BLOCK, LOGITS_PER_BLOCK, MAX_LOGITS
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.tree_attention import KVShape

_SCORES_IN_TILE = 4  # scores, weights, their gradient, and a cast
_TEMPORARY_LAYERS = 3  # gradients, intermediate results, and memory that the allocator keeps


@dataclass(frozen=True)
class PassMemory:
    """The sizes of a model that determine the memory of its passes."""

    layers: int
    hidden: int  # hidden size, h
    inner: int  # size inside the MLP, m
    heads: int  # query heads, H
    kv: Sequence[KVShape]  # shape of each layer's keys and values
    vocabulary: int
    is_flat: bool  # whether the model takes the flat path
    whole_logits: bool  # whether the model needs whole logits; see `brorl.model.logits`

    def activation_bytes(self, settings: MemorySettings) -> int:
        """Return the bytes of a token's activations in one layer: b * (6 h + 4 m + 7 H D).

        h is the hidden size, m the size inside the MLP, and b the bytes per number. Each of H heads has 7 D numbers: 4
        times its key's size, and 3 times its value's. If activations use fewer bytes per number than trained weights,
        the 6 h use the bytes of the weights, and 2 h are added: norms are computed in float32 and cast.
        """
        trained, computed = settings.trained_bytes, settings.computed_bytes
        head_size = max(4 * kv.key_dim + 3 * kv.value_dim for kv in self.kv)
        residual = 6 * self.hidden * trained + (2 * self.hidden * computed if computed < trained else 0)
        return residual + (4 * self.inner + self.heads * head_size) * computed

    def _compiled_bytes(self, settings: MemorySettings, tokens: int, context: int) -> int:
        """Return the bytes that a compiled layer keeps for its backward pass, which recomputes what is cheap.

        Per token, these are the hidden state between the layers, its two norms and the output of the attention (4 h),
        queries and the heads' outputs in two layouts (3 H D), the gate, what it multiplies, and the product (3 m), and
        keys and values, with their copies. Adapters keep their inputs in the dtype of the adapters.
        """
        number = settings.computed_bytes
        product_input = settings.trained_bytes if settings.lora else number
        keys = max(kv.size for kv in self.kv) * number
        head = max(kv.key_dim * number + kv.value_dim * (number + product_input) for kv in self.kv)
        per_token = self.hidden * (settings.hidden_bytes + number + 2 * product_input)
        per_token += self.heads * head + self.inner * (2 * number + product_input) + keys
        return tokens * per_token + copied_tokens(tokens, context) * keys

    def pass_bytes(self, settings: MemorySettings, tokens: int, context: int, scores_bytes: int = 0) -> int:
        """Return the bytes of the activations of a forward and a backward pass, without logits.

        All layers count, plus a few more. With gradient checkpointing, a layer keeps h numbers per token. `context` is
        the number of tokens of a prompt and its response. `scores_bytes` is the memory of one layer's attention
        weights, if it keeps them.
        """
        if self.is_packed(settings):
            layer = self._compiled_bytes(settings, tokens, context)
        else:
            layer = tokens * self.activation_bytes(settings) + scores_bytes
        inputs = self.layers * tokens * self.hidden * settings.hidden_bytes
        kept = inputs + layer if settings.gradient_checkpointing else self.layers * layer
        return kept + _TEMPORARY_LAYERS * layer

    def learning_bytes(self, settings: MemorySettings, workload: Workload, nodes: int) -> int:
        """Return the bytes of the activations and logits of the largest chunk, with the tokens of its prompts."""
        longest, context = workload.max_new_tokens, workload.prompt_tokens + workload.max_new_tokens
        if workload.num_rows is not None:
            nodes = min(nodes, workload.num_rows * longest)
        prompts = max(nodes, workload.prompt_tokens)  # tokens that go through the model together
        if workload.num_prompts is not None:
            prompts = min(prompts, workload.num_prompts * workload.prompt_tokens)
        if self.is_packed(settings):  # a tree whose responses are long has few others in its chunk
            prompts = min(prompts, (nodes // longest + 1) * workload.prompt_tokens)
        nodes = max(nodes, context if self.is_flat else longest)  # a response is never split
        scores = 0 if self._keeps_no_scores(settings) else nodes * self.heads * (context + nodes)
        tile = _SCORES_IN_TILE * min(scores, SCORES_PER_TILE) * settings.trained_bytes
        flat_scores = 0
        if self.is_flat:  # float32, and bfloat16 for the product
            bytes_per_score = 6 if settings.computed_bytes == 2 else settings.trained_bytes
            flat_scores = nodes * self.heads * context * bytes_per_score
        activations = self.pass_bytes(settings, nodes + prompts, context, flat_scores)
        return max(self._logit_bytes(nodes, settings), tile) + activations

    def is_packed(self, settings: MemorySettings) -> bool:
        """Return whether passes are packed for FlexAttention and compiled."""
        on_cuda = settings.device == "cuda" and settings.attention == "auto"
        return on_cuda and settings.dtype != "float64" and not self.is_flat

    def _keeps_no_scores(self, settings: MemorySettings) -> bool:
        """Return whether scores need no tiles in memory, as with the C kernels, packed passes or the flat path."""
        single = settings.dtype == "float32" and settings.device == "cpu" and settings.attention == "auto"
        with_kernels = single and all(kv.key_dim == kv.value_dim for kv in self.kv) and kernels() is not None
        return with_kernels or self.is_packed(settings) or self.is_flat

    def _logit_bytes(self, rows: int, settings: MemorySettings) -> int:
        """Return the bytes of a chunk's logits and of the gradient that their blocks accumulate."""
        num_logits = rows * self.vocabulary
        trained = settings.trained_bytes
        summed = 0 if settings.lora else 2 * self.vocabulary * self.hidden * trained
        if self.is_packed(settings) and not self.whole_logits:  # the logits and their gradient
            both = 2 * min(num_logits, COMPILED_LOGITS_PER_BLOCK) * settings.computed_bytes
            return both + (summed if num_logits > COMPILED_LOGITS_PER_BLOCK else 0)
        if self.whole_logits or num_logits <= MAX_LOGITS:
            return 3 * num_logits * trained
        return 3 * LOGITS_PER_BLOCK * trained + summed
