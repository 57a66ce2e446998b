"""Chooses the path that trees take through a model, and checks on small examples that it reproduces the model.

The tree path computes every distinct token once. The flat path computes a row for every distinct response, for models
whose attention cannot be hooked. Both give the same log-probs and the same gradient. They use:

| path | chunks of the learner | rows of the native engine |
|---|---|---|
| `TreeForward` on a CPU | `TreeContext`: C kernels for float32, else tiles | `PagedDecoder`, else `SlotDecoder` |
| `TreeForward` on a GPU | packed: `FlexContext` and compiled layers; else tiles | `SlotDecoder`, as CUDA graphs |
| `FlatForward` | `flat_chunk_logprobs`: the model itself | `ModelCacheDecoder` |

On the tree path, the model's own modules compute the layers (`ModelPass`). If the model has Llama's layout, `LlamaPass`
computes them for chunks on a CPU, and for rows on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import assert_never

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers import PreTrainedModel

from brorl.activity import Echo
from brorl.errors import UserError
from brorl.model.chunks import AttentionChoice
from brorl.model.context_limit import attention_limit, carries_state, other_span, position_limit, smallest_window
from brorl.model.cuda_graphs import Capture, CudaCapture, GraphChoice, GraphStore
from brorl.model.flat_path import CacheError, FlatForward, ModelCache, flat_chunk_logprobs, last_logits
from brorl.model.llama_pass import has_llama_layout
from brorl.model.logits import embeds_last
from brorl.model.logprobs import ChunkLogprobs, by_tree
from brorl.model.pass_graphs import MAX_PASSES, PassGraphs, RecordedPass
from brorl.model.rounding import agrees
from brorl.model.settings import ForwardChoice
from brorl.model.sharding import local_tensor
from brorl.model.tree_attention import HooksError, KVShape, ModelPass, kv_shapes, prefill, tree_attention
from brorl.model.tree_path import TREE, TreeForward, tree_logprobs
from brorl.tree import RolloutTree

Forward = TreeForward | FlatForward


def choose_forward(
    model: PreTrainedModel, choice: ForwardChoice = "auto", context: int = 0, attention: AttentionChoice = "auto"
) -> Forward:
    """Return how trees go through a model, after a check on a small example.

    `context` is the maximum number of tokens in a prompt plus its response. A shorter attention span requires the flat
    path, except for a sliding window on a GPU.

    Raises:
        UserError: If the model's positions within the context depend on the other rows of a batch.
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
            return _tree_forward(model, attention)
        case "flat":
            return _flat_forward(model, context, "engine.forward: flat")
        case "auto":
            span, other = attention_limit(model.config), other_span(model.config)
            window = None
            if span is not None and span.tokens < context:
                if model.device.type == "cpu" or (other is not None and other.tokens < context):
                    return _flat_forward(
                        model, context, f"its {span.name} has {span.tokens:,} tokens, and a context {context:,}"
                    )
                window = span.tokens
            try:
                if window is not None:
                    check_sliding_window(model)
                return replace(_tree_forward(model, attention), window=window)
            except HooksError as error:
                return _flat_forward(model, context, str(error).partition(";")[0])
        case _:
            assert_never(choice)


def without_windows(model: PreTrainedModel, forward: Forward) -> Forward:
    """Return the path of a learner without packed passes: the flat path if contexts exceed a sliding window."""
    if isinstance(forward, FlatForward) or forward.window is None:
        return forward
    reason = f"its sliding window has {forward.window:,} tokens, and contexts are longer"
    return _flat_forward(model, forward.window + 1, reason)


def with_packed_passes(
    model: PreTrainedModel,
    forward: Forward,
    echo: Echo,
    *,
    autocast: bool = False,
    flex_options: str = "",
    failed_anywhere: Callable[[bool], bool] = bool,
) -> Forward:
    """Return packed passes for the learner if they compile and agree with the model, and otherwise the given path.

    `flex_options` are tried before PyTorch's own kernel options for FlexAttention. They must be the same on all ranks.
    `failed_anywhere` returns whether a check failed on any rank. It is collective if the model is sharded.
    """
    start = perf_counter()
    reasons = []
    unpacked = forward if isinstance(forward, TreeForward) else TreeForward(whole_logits=forward.whole_logits)
    for compiled, options in dict.fromkeys(product((True, False), (flex_options, ""))):
        packed = replace(unpacked, packed=True, compiled=compiled, flex_options=options, llama_chunks=False)
        reason = None
        try:
            check_packed(model, packed, autocast)
        except HooksError as error:
            reason = str(error)
        if failed_anywhere(reason is not None):
            reasons.append(reason or "a check fails on another rank")
            continue
        if options != flex_options:
            echo(f"FlexAttention without the options {flex_options}: {reasons[-1]}")
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


def with_recorded_passes(
    model: PreTrainedModel,
    forward: Forward,
    echo: Echo,
    choice: GraphChoice = "auto",
    *,
    autocast: bool = False,
    new_capture: Callable[[torch.device, bool], Capture] = CudaCapture,
) -> Forward:
    """Return packed passes that are recorded as CUDA graphs, if a trial agrees with the model; else the given path.

    Args:
        model: The model, on one CUDA device.
        forward: The path. Only packed passes are recorded.
        echo: Receives a line if passes cannot be recorded.
        choice: `on` requires recordings.
        autocast: Whether passes compute in bfloat16.
        new_capture: Returns what records graphs on a device, given whether a step that makes the host wait is an error.

    Raises:
        UserError: If recordings are required, but the trial fails.
    """
    if not isinstance(forward, TreeForward) or not forward.packed or choice == "off":
        return forward

    def recorded(forbids_waits: bool) -> tuple[TreeForward, GraphStore[RecordedPass]]:
        capture = partial(new_capture, model.device, forbids_waits)
        store: GraphStore[RecordedPass] = GraphStore("learning", choice, echo, capture, MAX_PASSES)
        return replace(forward, graphs=PassGraphs(model, store)), store

    trial, store = recorded(forbids_waits=True)  # nothing else uses the device yet
    if store.passes_trial(model.device):
        try:
            for _ in range(2):  # passes are recorded the second time
                check_packed(model, trial, autocast)
        except HooksError as error:
            store.refuse(str(error))
    return recorded(forbids_waits=False)[0] if store.enabled else forward


def _tree_forward(model: PreTrainedModel, attention: AttentionChoice) -> TreeForward:
    shapes = check_hooks(model)
    llama = has_llama_layout(model) and is_exact(model, TreeForward(attention, llama_chunks=True))
    on_cpu = model.device.type == "cpu"
    return TreeForward(
        attention,
        whole_logits=not embeds_last(model),
        llama_chunks=llama and on_cpu,
        llama_rows=llama,
        kv_shapes=shapes,
    )


def _flat_forward(model: PreTrainedModel, context: int, reason: str) -> FlatForward:
    check_model_cache(model, context)
    return FlatForward(reason, whole_logits=not embeds_last(model))


_ROW_TOKENS = 10
_PROMPT_TOKENS = (4, 6)  # a prompt and the longest path have 12 tokens, which fit in very small sliding windows
_SHARED_TOKENS = 2  # the responses to a prompt share this many initial tokens
_BLOCK_RESPONSES = 96  # responses to a prompt: enough to fill several blocks of FlexAttention
_MAX_WINDOW = 8192  # longer windows are not checked: the plain pass has rows of this length
_CACHED_PROMPT = 5
_MAX_CACHED_LENGTH = 1024


def check_hooks(model: PreTrainedModel) -> Sequence[KVShape]:
    """Check that tree attention reproduces a model's forward pass and return each layer's shape of keys and values."""
    trees = _example_trees(model.config.get_text_config().vocab_size)
    with _trial(model, HooksError), torch.no_grad():
        shapes = kv_shapes(model)
        got = torch.cat(tree_logprobs(model, trees))
        expected = torch.cat(by_tree(list(flat_chunk_logprobs(model, trees)), trees))
    _check_finite(model, expected)
    if not agrees(got, expected, model.dtype):
        raise HooksError.of(model, "its log-probs change under tree attention")
    return shapes


def check_sliding_window(model: PreTrainedModel) -> None:
    """Check that a prompt longer than a sliding window gets the same logits as with the model's own attention."""
    window = smallest_window(model.config)
    if window is None or window > _MAX_WINDOW:
        return
    row = [7 * i % model.config.get_text_config().vocab_size for i in range(window + _ROW_TOKENS)]
    with _trial(model, HooksError), torch.no_grad():
        ids = torch.tensor([row], device=model.device)
        expected_V = model(input_ids=ids, use_cache=False).logits[0, -1]
        with tree_attention(model):
            got_V = prefill(ModelPass(model), [row])[1][0]
    if not agrees(got_V, expected_V, model.dtype):
        raise HooksError.of(model, "its logits change beyond its sliding window")


@torch.no_grad()
def is_exact(model: PreTrainedModel, forward: TreeForward) -> bool:
    """Return whether `forward` gives the same log-probs as the plain tree path, which passed `check_hooks`."""
    trees = _example_trees(model.config.get_text_config().vocab_size)
    got, expected = (torch.cat(tree_logprobs(model, trees, forward=way)) for way in (forward, TREE))
    return agrees(got, expected, model.dtype)


def check_model_cache(model: PreTrainedModel, context: int = 0) -> None:
    """Check that decoding with a model's own cache reproduces its forward pass.

    If an attention span is shorter than both `context` and 1,024 tokens, also check a prompt longer than the span, and
    a response that crosses it.
    """
    span = attention_limit(model.config)
    lengths = [_CACHED_PROMPT]
    if span is not None and span.tokens < min(context, _MAX_CACHED_LENGTH):
        lengths += [max(1, span.tokens - 2), span.tokens + 2]
    vocabulary = model.config.get_text_config().vocab_size
    for length in lengths:  # two prompts with two responses each
        total = length + 4
        compared = 5  # only a few positions: all logits of a large vocabulary take gigabytes
        row_LT = torch.arange(4 * total, device=model.device).reshape(4, total) * 7 % vocabulary
        row_LT[:2, :length] = row_LT[0, :length]
        row_LT[2:, :length] = row_LT[2, :length]
        with _trial(model, CacheError), torch.no_grad():
            output = model(input_ids=row_LT, use_cache=False, **last_logits(model, compared))
            expected_LTV = output.logits[:, -compared:]
            cache = ModelCache(model, row_LT[[0, 2], :length])
            logits = [cache.logits_RV[[0, 0, 1, 1]]]
            cache.take(torch.tensor([0, 0, 1, 1], device=model.device))
            logits += [cache.feed(row_LT[:, index]) for index in range(length, total)]
        _check_finite(model, expected_LTV)
        if not agrees(torch.stack(logits, 1), expected_LTV, model.dtype):
            raise CacheError.of(model, f"its logits change when it decodes with its cache after {length} tokens")


def check_packed(model: PreTrainedModel, forward: TreeForward, autocast: bool = False) -> None:
    """Check that packed passes reproduce the log-probs and gradient of the model's own forward pass; collective.

    On CUDA, the first call compiles the kernels, with and without a gradient. With `autocast`, compute in bfloat16.
    """
    span = other_span(model.config)
    if span is not None:
        raise HooksError(f"{type(model).__name__} has a {span.name} of {span.tokens:,} tokens")
    if carries_state(model.config):
        raise HooksError(f"layers of {type(model).__name__} carry a state from token to token")
    trees = _example_trees_of_many_blocks(model)
    flat = partial(flat_chunk_logprobs, whole_logits=forward.whole_logits)
    was_training = model.training
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            expected = _logprobs_and_gradients(model, flat, trees)
            got = _logprobs_and_gradients(model, forward.chunk_logprobs, trees)
            with torch.no_grad():
                again = _log_probs(model.eval(), forward.chunk_logprobs, trees)
    except Exception as error:  # a compiler can raise anything, on many lines
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise HooksError(" ".join([f"{type(error).__name__}:", *lines[:2]])) from error
    finally:
        model.train(was_training)
    dtype = torch.bfloat16 if autocast else model.dtype
    names = ("log-probs", "gradients", "gradients", "log-probs")
    for name, got_part, expected_part in zip(names, (*got, again), (*expected, expected[0]), strict=True):
        if not agrees(got_part, expected_part, dtype):
            raise HooksError(f"the {name} of {type(model).__name__} change")


@contextmanager
def _trial(model: PreTrainedModel, error_type: type[HooksError | CacheError]) -> Iterator[None]:
    """Run a block in evaluation mode. Turn any error of the forward pass into one that names the architecture."""
    was_training = model.training
    model.eval()
    try:
        yield
    except error_type:
        raise
    except Exception as error:
        raise error_type.of(model, f"{type(error).__name__}: {error}") from error
    finally:
        model.train(was_training)


def _check_finite(model: PreTrainedModel, logits: Tensor) -> None:
    """Reject a model whose logits are not finite, although its weights are."""
    if not torch.isfinite(logits).all():
        raise UserError(
            f"{type(model).__name__} gives logits that are not finite in {str(model.dtype).partition('.')[2]}; "
            "choose another model, or dtype: float32"
        )


def _log_probs(
    model: PreTrainedModel, chunks: Callable[..., Iterator[ChunkLogprobs]], trees: Sequence[RolloutTree]
) -> Tensor:
    """Return the log-probs of all nodes. If gradients are enabled, accumulate the gradient of their sum."""
    results = []
    for chunk in chunks(model, trees):
        if chunk.logprob.requires_grad:
            chunk.logprob.sum().backward()  # also fills `grad` of shards, unlike torch.autograd.grad
        results.append(replace(chunk, logprob=chunk.logprob.detach()))
    return torch.cat(by_tree(results, trees))


def _logprobs_and_gradients(
    model: PreTrainedModel, chunks: Callable[..., Iterator[ChunkLogprobs]], trees: Sequence[RolloutTree]
) -> list[Tensor]:
    """Return the log-probs of trees, and the gradients of their sum for this rank's part of two trained weights.

    Two are needed because the first matrix of a new adapter has no gradient while the second is 0.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        logprob_M = _log_probs(model.train(), chunks, trees)
    gradients = [local_tensor(torch.zeros_like(p) if p.grad is None else p.grad).clone() for p in trained[:2]]
    for parameter in trained:
        parameter.grad = None
    return [logprob_M, *gradients]


def _example_trees(vocabulary: int, num_responses: int = 2) -> list[RolloutTree]:
    """Return a tree for each prompt length. Its responses branch, and all rows have the same length."""
    trees = []
    for length in _PROMPT_TOKENS:
        row = [7 * (length + i) % vocabulary for i in range(_ROW_TOKENS)]
        prompt, shared, rest = row[:length], row[length:][:_SHARED_TOKENS], row[length:][_SHARED_TOKENS:]
        continuations = [[(token + i) % vocabulary for token in rest] for i in range(num_responses)]
        trees.append(RolloutTree.from_responses(prompt, [shared + continuation for continuation in continuations]))
    return trees


def _example_trees_of_many_blocks(model: PreTrainedModel) -> list[RolloutTree]:
    """Return trees that fill several FlexAttention blocks, some skipped, and one longer than a sliding window."""
    vocabulary = model.config.get_text_config().vocab_size
    trees = _example_trees(vocabulary, _BLOCK_RESPONSES)
    window = smallest_window(model.config)
    if window is not None and window <= _MAX_WINDOW:
        rows = [[(7 * i + first) % vocabulary for i in range(window + _BLOCK_RESPONSES)] for first in (0, 1)]
        trees.append(RolloutTree.from_responses([1, 2], rows))
    return trees
