"""Chooses FlexAttention's kernel options by a short trial on this GPU, and remembers the choice.

PyTorch has one set of tiles per kind of GPU, head size and dtype. The trial runs the attention of one layer in a
representative packed pass. It skips options that do not compile, and those whose output or gradients differ from the
results with PyTorch's own options by more than rounding. Later runs find the choice in the user's cache folder. The
trial has no sliding window and no soft-capping.

Sources of the options: the lists for `max_autotune` in torch/_inductor/template_heuristics/triton.py, and the fastest
ones in allenai/OLMo-core#877, pytorch/torchtitan#1437, meta-pytorch/attention-gym#169 and, for float32,
pytorch/pytorch#185759. Tiles of 128 have crashed a GPU with heads of 192 (triton-lang/triton#8475), so they are not
tried for heads above 128.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from brorl.activity import Echo
from brorl.arrays import IntArray
from brorl.errors import UserError
from brorl.model.device import to_device
from brorl.model.flex_attention import BLOCK, FlexContext, FlexLayout, padded_tokens
from brorl.model.tree_attention import KVShape
from brorl.storage import cache_folder, read_json_file, replace_file

# The options to try, by the largest head size that they are for, in order. Tiles divide blocks of 128 tokens. The
# keys of a tile, N1, are a multiple of its queries M1, and M2 of N2.
_FORWARD = ("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_warps", "fwd_num_stages")
_FORWARD_16_BIT = {
    64: [(128, 64, 4, 3), (64, 64, 4, 3)],
    128: [(64, 64, 4, 3), (128, 128, 8, 2)],
    256: [(64, 64, 4, 2)],
}
_BACKWARD = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_warps", "bwd_num_stages")
_BACKWARD_16_BIT = {
    64: [(32, 64, 64, 32, 4, 3), (32, 128, 128, 32, 8, 3), (64, 64, 64, 64, 4, 3)],
    128: [(32, 128, 128, 32, 8, 3), (32, 64, 64, 32, 4, 3), (64, 64, 64, 64, 4, 2)],
    256: [(32, 64, 64, 32, 4, 2), (32, 32, 32, 32, 4, 2)],
}
_BACKWARD_FLOAT32 = {  # PyTorch's own tiles have 16 tokens
    128: [(64, 64, 64, 64, 4, 1), (32, 32, 32, 32, 4, 1)],
    256: [(32, 32, 32, 32, 4, 1)],
}
_PROMPT_TOKENS, _RESPONSES = 256, 32  # of each tree in the trial
_LIMIT_S = 10.0
_NOISE = 0.03  # options are chosen if they save more than this fraction of the time
_ERROR = 0.03  # the largest error of correct options, relative to the length of a block of vectors
_FILE = "flex_options.json"


class LayerAttention(NamedTuple):
    """The attention of one layer in packed passes."""

    heads: int  # query heads
    kv: KVShape
    dtype: torch.dtype
    num_tokens: int  # tokens of a pass
    response_tokens: int  # maximum length of a response

    @property
    def key(self) -> str:
        """What the choice depends on, besides the device and the version of PyTorch."""
        sizes = f"heads of {self.kv.key_dim} and {self.kv.value_dim}, {self.heads // self.kv.num_heads} per key head"
        length = 1 << (self.response_tokens - 1).bit_length()
        return f"{sizes}, {self.dtype}, {self.num_tokens} tokens, responses up to {length}"

    def options(self) -> tuple[list[str], list[str]]:
        """Return the options to try for the backward pass, and those for the forward pass."""
        is_16_bit = self.dtype.itemsize == 2
        size = max(self.kv.key_dim, self.kv.value_dim)
        backward = _options(_BACKWARD, _BACKWARD_16_BIT if is_16_bit else _BACKWARD_FLOAT32, size)
        return backward, _options(_FORWARD, _FORWARD_16_BIT if is_16_bit else {}, size)

    def tokens(self) -> tuple[IntArray, IntArray]:
        """Return positions and ends of subtrees in a representative pass: trees whose responses share an eighth."""
        shared, rest = _PROMPT_TOKENS + self.response_tokens // 8, self.response_tokens - self.response_tokens // 8
        responses = shared + rest * np.arange(1, _RESPONSES + 1)  # their ends
        tree_end = np.concatenate([np.full(shared, responses[-1]), np.repeat(responses, rest)])
        tree_position = np.concatenate([np.arange(shared), np.tile(shared + np.arange(rest), _RESPONSES)])
        token = np.arange(padded_tokens(self.num_tokens))
        number, place = np.divmod(token, tree_end.size)  # the tree repeats
        end_T = np.minimum(number * tree_end.size + tree_end[place], token.size)
        return tree_position[place], end_T


def _options(names: Sequence[str], table: dict[int, list[Any]], size: int) -> list[str]:
    rows = next((rows for largest, rows in table.items() if size <= largest), [])
    return [" ".join(f"{name}={number}" for name, number in zip(names, row, strict=True)) for row in rows]


class FlexChoice(NamedTuple):
    """The fastest options, and the time of a layer's forward and backward pass."""

    options: str  # empty for PyTorch's own
    milliseconds: float
    default_milliseconds: float  # with PyTorch's own options
    is_final: bool = True  # False if there was no time to try all options

    @property
    def line(self) -> str:
        """A line for the console."""
        attention = f"attention of a layer, forward and backward: {self.milliseconds:.3g} ms"
        if not self.options:
            return f"{attention} with PyTorch's own kernel options for FlexAttention, the fastest of those tried"
        return f"{attention} with {self.options}, {self.default_milliseconds:.3g} ms with PyTorch's own kernel options"


class _Trial:
    """The attention of one layer in a representative pass, with random inputs."""

    def __init__(self, attention: LayerAttention, device: torch.device) -> None:
        self._layout = FlexLayout.of(*attention.tokens(), None)
        self._tensors = [to_device(array, device) for array in self._layout.arrays]
        random = torch.Generator(device).manual_seed(0)

        def draw(heads: int, size: int) -> Tensor:
            shape = 1, padded_tokens(attention.num_tokens), heads, size
            return torch.randn(shape, generator=random, device=device, dtype=attention.dtype).transpose(1, 2)

        kv = attention.kv
        self._query = draw(attention.heads, kv.key_dim).requires_grad_()
        self._key = draw(kv.num_heads, kv.key_dim).requires_grad_()
        self._value = draw(kv.num_heads, kv.value_dim).requires_grad_()
        self._gradient = draw(attention.heads, kv.value_dim)
        self._scale = float(kv.key_dim) ** -0.5

    def with_options(self, options: str) -> Callable[[], list[Tensor]]:
        """Return a function that returns the output, and the gradients of queries, keys and values."""
        context = FlexContext(self._layout, *self._tensors, options=options)
        inputs = self._query, self._key, self._value

        def run() -> list[Tensor]:
            output = context.of_heads(nn.Identity(), *inputs, self._scale, None, None).transpose(1, 2)
            return [output.detach(), *torch.autograd.grad(output, inputs, self._gradient)]

        return run


def _agrees(got: Tensor, expected: Tensor) -> bool:
    """Return whether two results [1, H, T, D] differ by rounding only, in each block of tokens of each head."""
    # The error of bfloat16 is about 0.003 of a block's length; that of a single token can be many times its length.
    error, length = (x.float().unflatten(2, (-1, BLOCK)).norm(dim=(-2, -1)) for x in (got - expected, expected))
    typical = length.square().mean().sqrt()
    return bool((error <= _ERROR * (length + typical)).all())  # false for a NaN


_CALLS, _REPEATS = 4, 3
_PAUSE_CYCLES = 50_000_000  # about 30 ms: longer than the host needs to start the calls


def device_milliseconds(work: Callable[[], object]) -> float:
    """Return the time of a call on the GPU. The host's own work is not included: it is done during a pause."""
    durations = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_PAUSE_CYCLES)
        start.record()
        for _ in range(_CALLS):
            work()
        end.record()
        end.synchronize()
        durations.append(float(start.elapsed_time(end)) / _CALLS)
    return median(durations)


def fastest_options(
    attention: LayerAttention,
    device: torch.device,
    milliseconds: Callable[[Callable[[], object]], float] = device_milliseconds,
    seconds: Callable[[], float] = perf_counter,
) -> FlexChoice | None:
    """Try options for about 10 s at most, including compilation. Return None if PyTorch's own do not work.

    Compiled kernels are kept, so a later call has time for more options.

    `milliseconds` returns the time of a call on the device, and `seconds` is a clock.
    """
    start = seconds()
    try:
        trial = _Trial(attention, device)
        run = trial.with_options("")
        expected, default = run(), milliseconds(run)
    except Exception:  # a compiler can raise anything; `check_packed` reports why FlexAttention does not work
        return None

    def duration(options: str) -> float:
        with suppress(Exception):
            run = trial.with_options(options)
            if all(map(_agrees, run(), expected)):
                return milliseconds(run)
        return float("inf")

    best = FlexChoice("", default, default)
    took = 0.0
    for stage in attention.options():
        before = best.options
        for added in stage:
            begin = seconds()
            if begin + took > start + _LIMIT_S:
                return best._replace(is_final=False)
            options = f"{before} {added}".strip()
            time = duration(options)
            if time < min(best.milliseconds, (1 - _NOISE) * default):
                best = best._replace(options=options, milliseconds=time)
            took = seconds() - begin
    return best


def choose_flex_options(
    model: PreTrainedModel,
    kv_shapes: Sequence[KVShape],
    workload: tuple[torch.dtype, int, int],
    echo: Echo,
    measure: Callable[[LayerAttention, torch.device], FlexChoice | None] = fastest_options,
) -> str:
    """Return the fastest kernel options for a model's packed passes, such as `bwd_BLOCK_M1=32 bwd_BLOCK_N1=64`.

    The result is empty for PyTorch's own options, off CUDA, and for layers with different shapes.

    Args:
        model: The model.
        kv_shapes: Shape of each layer's keys and values.
        workload: The dtype of the computation, the tokens of a pass, and the maximum tokens of a response.
        echo: Receives a line about the choice.
        measure: Chooses the options for an attention on a device, if no earlier run has.
    """
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if model.device.type != "cuda" or len(set(kv_shapes)) != 1 or not isinstance(heads, int):
        return ""
    attention = LayerAttention(heads, kv_shapes[0], *workload)
    key = f"{torch.cuda.get_device_name(model.device)}, torch {torch.__version__}, {attention.key}"
    choice = _valid_choice(_stored_choices().get(key), attention)
    if choice is None:
        choice = measure(attention, model.device)
        if choice is None:
            return ""
        if choice.is_final:
            _store({**_stored_choices(), key: choice._asdict()})  # other processes may have added choices meanwhile
    echo(choice.line)
    return choice.options


def _stored_choices() -> dict[str, Any]:
    """Return the choices of earlier runs, none if the file is missing or damaged."""
    choices = None
    with suppress(OSError, RuntimeError, UserError):
        choices = read_json_file(cache_folder() / _FILE, "delete it")
    return choices if isinstance(choices, dict) else {}


def _valid_choice(choice: Any, attention: LayerAttention) -> FlexChoice | None:
    """Return a stored choice, or None if it is damaged or its options would not be tried."""
    backward, forward = attention.options()
    with suppress(TypeError, ValueError):
        stored = FlexChoice(**choice)
        if stored.options in {f"{first} {second}".strip() for first in ("", *backward) for second in ("", *forward)}:
            return FlexChoice(stored.options, float(stored.milliseconds), float(stored.default_milliseconds))
    return None


def _store(choices: dict[str, Any]) -> None:
    with suppress(OSError, RuntimeError):  # without a cache folder, the next run tries the options again
        cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(cache_folder() / _FILE, json.dumps(choices, indent=1).encode(), is_shared=True)
