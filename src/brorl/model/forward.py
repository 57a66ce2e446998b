"""The two ways in which trees go through a model: as trees, or as one row per distinct response.

Tree attention computes every distinct token once. Any causal LM whose attention cannot be hooked takes the flat path:
its own forward pass. Both give the same log-probs and the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import assert_never

from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers import PreTrainedModel

from brorl.activity import Echo
from brorl.errors import UserError
from brorl.model.context_limit import attention_limit, other_span, position_limit
from brorl.model.flat_path import FlatForward
from brorl.model.hook_check import check_hooks, check_own_cache, check_packed, check_window, is_exact
from brorl.model.llama_pass import has_llama_layout
from brorl.model.logits import embeds_last
from brorl.model.logprobs import TreeForward
from brorl.model.settings import ForwardChoice
from brorl.model.tree_attention import HooksError
from brorl.model.tree_batch import AttentionChoice

Forward = TreeForward | FlatForward


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
    unpacked = forward if isinstance(forward, TreeForward) else TreeForward(whole_logits=forward.whole_logits)
    for compiled in (True, False):
        packed = replace(unpacked, packed=True, compiled=compiled, llama=False)
        reason = None
        try:
            check_packed(model, packed, autocast)
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
        return packed
    plain = "attention in tiles" if isinstance(forward, TreeForward) else "the flat path"
    echo(f"{plain}, without FlexAttention: {reasons[-1]}")
    return forward


def _tree(model: PreTrainedModel, attention: AttentionChoice) -> TreeForward:
    shapes = check_hooks(model)
    llama = has_llama_layout(model) and is_exact(model, TreeForward(attention, llama=True))
    on_cpu = model.device.type == "cpu"
    return TreeForward(
        attention, whole_logits=not embeds_last(model), llama=llama and on_cpu, kv_shapes=shapes, llama_rows=llama
    )


def _flat(model: PreTrainedModel, context: int, reason: str) -> FlatForward:
    check_own_cache(model, context)
    return FlatForward(reason, whole_logits=not embeds_last(model))
