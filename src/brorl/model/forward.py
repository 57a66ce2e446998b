"""The two ways in which trees go through a model: as trees, or as one row per distinct response.

Tree attention computes every distinct token once. Any causal LM whose attention cannot be hooked takes the flat path:
its own forward pass. Both give the same log-probs and the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import assert_never

import numpy as np
from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers import PreTrainedModel

from brorl.activity import Echo
from brorl.arrays import FloatArray
from brorl.errors import UserError
from brorl.model.context_limit import attention_limit, other_span, position_limit
from brorl.model.flat_path import flat_chunk_logprobs
from brorl.model.hook_check import check_hooks, check_own_cache, check_packed, check_window, is_exact
from brorl.model.llama_pass import has_llama_layout
from brorl.model.logits import embeds_last
from brorl.model.logprobs import DEFAULT_PASS, ChunkLogprobs, ModelPass, chunk_logprobs, default_max_nodes
from brorl.model.settings import ForwardChoice
from brorl.model.tree_attention import HooksError, KVShape
from brorl.model.tree_batch import AttentionChoice
from brorl.tree import RolloutTree


def tree_costs(tree: RolloutTree, cost_per_position: float) -> FloatArray:
    """Return each distinct response's cost in tokens with tree attention, [L]: its tokens that no earlier one has.

    The first response pays for the prompt. `cost_per_position` is that of attending to a token over the other work for
    one.
    """
    prompt = len(tree.prompt_ids)
    before_M = prompt + tree.depth
    up_to_M = np.cumsum(1.0 + cost_per_position * before_M)
    cost_L = np.diff(up_to_M[tree.leaf], prepend=0.0)
    cost_L[0] += prompt + cost_per_position * prompt * (prompt - 1) / 2
    return np.maximum(cost_L, 1e-9)  # two responses can end at one node


def flat_costs(tree: RolloutTree, cost_per_position: float) -> FloatArray:
    """Return each distinct response's cost in tokens on the flat path, shape [L]: its prompt and all of its tokens."""
    length_L = len(tree.prompt_ids) + tree.length
    return length_L + cost_per_position * length_L * (length_L - 1) / 2


@dataclass(frozen=True)
class TreeForward:
    """Tree attention."""

    # for each layer the shape of its keys and values; empty for a model that was not checked
    kv_shapes: Sequence[KVShape] = ()
    model_pass: ModelPass = DEFAULT_PASS  # how chunks go through the model
    llama: bool = False  # whether rows go through `LlamaPass` instead of the model's modules
    # the model's sliding window, if contexts are longer; an engine on a GPU and packed passes compute it
    window: int | None = None
    response_costs = staticmethod(tree_costs)

    def default_max_nodes(self, model: PreTrainedModel) -> int:
        """Return the maximum number of nodes of a chunk, where the settings have none."""
        return default_max_nodes(model, whole_logits=self.model_pass.whole_logits)

    @property
    def chunk_logprobs(self) -> partial[Iterator[ChunkLogprobs]]:
        """`chunk_logprobs` with the attention and the logits of this forward pass."""
        return partial(chunk_logprobs, model_pass=self.model_pass)

    def cost_line(self, trees: Sequence[RolloutTree]) -> None:
        """Return a line about the cost of a pass over some trees: None, as it computes each distinct token once."""


@dataclass(frozen=True)
class FlatForward:
    """The model's own forward pass."""

    reason: str  # why the tree path is not taken
    whole_logits: bool = False  # whether the model needs whole logits; see `brorl.model.logits`
    response_costs = staticmethod(flat_costs)

    def default_max_nodes(self, model: PreTrainedModel) -> int:
        """Return the maximum number of tokens of a forward pass, where the settings have none."""
        return default_max_nodes(model, whole_logits=self.whole_logits)

    @property
    def chunk_logprobs(self) -> partial[Iterator[ChunkLogprobs]]:
        """`flat_chunk_logprobs` with the logits that the model needs."""
        return partial(flat_chunk_logprobs, whole_logits=self.whole_logits)

    def cost_line(self, trees: Sequence[RolloutTree]) -> str:
        """Return a line about the tokens of a pass, and about those of a pass with tree attention."""
        tokens, distinct = num_flat_tokens(trees), num_tree_tokens(trees)
        return (
            f"flat path: a pass over the responses of this step has {tokens:,} tokens; with tree attention it would "
            f"have {distinct:,} ({tokens / distinct:.1f} times fewer)"
        )


Forward = TreeForward | FlatForward


def num_flat_tokens(trees: Sequence[RolloutTree]) -> int:
    """Return the tokens of a flat pass over some trees: a row per distinct response, padding excluded."""
    return sum(int((len(tree.prompt_ids) + tree.length - 1).sum()) for tree in trees)


def num_tree_tokens(trees: Sequence[RolloutTree]) -> int:
    """Return the tokens of a pass with tree attention: the prompts, and the nodes that have children."""
    return sum(len(tree.prompt_ids) + np.unique(tree.parent[tree.parent >= 0]).size for tree in trees)


def choose_forward(
    model: PreTrainedModel, choice: ForwardChoice = "auto", context: int = 0, attention: AttentionChoice = "auto"
) -> Forward:
    """Return how trees go through a model, after a check on a small example.

    `context` counts the tokens of the longest prompt and response together. A shorter span of attention needs the flat
    path, but for a sliding window on a GPU.

    Raises:
        UserError: If the model's positions in a context depend on the other rows of a batch.
        HooksError: If tree attention is required, and the model's attention cannot be hooked.
        CacheError: If the model cannot take the flat path.
    """
    limit = position_limit(model.config)
    if limit is not None and context > limit.tokens:
        raise UserError(
            f"{type(model).__name__} scales its positions ({limit.name}) by the longest row of a batch beyond "
            f"{limit.tokens:,} tokens, and a context has up to {context:,}; lower sampling.max_new_tokens or "
            "data.max_prompt_tokens"
        )
    match choice:
        case "tree":
            return _tree(model, attention)
        case "flat":
            return _flat(model, context, "engine.forward: flat")
        case "auto":
            span, other = attention_limit(model.config), other_span(model.config)
            window = None
            if span is not None and span.tokens < context:
                if model.device.type == "cpu" or (other is not None and other.tokens < context):
                    return _flat(
                        model, context, f"its {span.name} has {span.tokens:,} tokens, and a context {context:,}"
                    )
                window = span.tokens
            try:
                if window is not None:
                    check_window(model)
                return replace(_tree(model, attention), window=window)
            except HooksError as error:
                return _flat(model, context, str(error).partition(";")[0])
        case _:
            assert_never(choice)


def without_windows(model: PreTrainedModel, forward: Forward) -> Forward:
    """Return the flat path where contexts are longer than a sliding window; for a learner without packed passes."""
    if isinstance(forward, FlatForward) or forward.window is None:
        return forward
    reason = f"its sliding window has {forward.window:,} tokens, and contexts are longer"
    return _flat(model, forward.window + 1, reason)


def with_packed_passes(
    model: PreTrainedModel,
    forward: Forward,
    echo: Echo,
    *,
    autocast: bool = False,
    failed_anywhere: Callable[[bool], bool] = bool,
) -> Forward:
    """Return packed passes of the learner if they compile and agree with the model's own; else what is given.

    `failed_anywhere` tells whether a check failed on any rank; it is collective if the model is sharded.
    """
    start = perf_counter()
    reasons = []
    for compiled in (True, False):
        model_pass = ModelPass(packed=True, compiled=compiled, whole_logits=not embeds_last(model))
        reason = None
        try:
            check_packed(model, model_pass, autocast)
        except HooksError as error:
            reason = str(error)
        if failed_anywhere(reason is not None):
            reasons.append(reason or "a check fails on another rank")
            continue
        if compiled:
            folder = cache_dir()
            echo(
                f"the decoder layers are compiled, in {perf_counter() - start:.0f} s; later runs find the kernels in "
                f"{folder}"
            )
        else:
            echo(f"FlexAttention without compiled layers: {reasons[0]}")
        return replace(forward if isinstance(forward, TreeForward) else TreeForward(), model_pass=model_pass)
    plain = "attention in tiles" if isinstance(forward, TreeForward) else "the flat path"
    echo(f"{plain}, without FlexAttention: {reasons[-1]}")
    return forward


def _tree(model: PreTrainedModel, attention: AttentionChoice) -> TreeForward:
    shapes = check_hooks(model)
    llama = has_llama_layout(model) and is_exact(model, ModelPass(attention, llama=True))
    on_cpu = model.device.type == "cpu"
    model_pass = ModelPass(attention, whole_logits=not embeds_last(model), llama=llama and on_cpu)
    return TreeForward(shapes, model_pass, llama)


def _flat(model: PreTrainedModel, context: int, reason: str) -> FlatForward:
    check_own_cache(model, context)
    return FlatForward(reason, whole_logits=not embeds_last(model))
