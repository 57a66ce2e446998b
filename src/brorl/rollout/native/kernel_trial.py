"""A trial of the Triton kernels: decodes briefly with and without them, and compares the results.

Dimensions: R rows, T tokens per row, V compared tokens of the vocabulary, K draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.errors import first_line
from brorl.model.device import to_device
from brorl.model.flat_path import last_logits
from brorl.model.kernels import using_triton
from brorl.model.rounding import agrees
from brorl.model.tree_attention import KVShape
from brorl.rollout.native.decoder import RowMemory, Rows
from brorl.rollout.native.draw import draw_tokens
from brorl.rollout.native.slot_decoder import SlotDecoder
from brorl.sampling import SamplingParams

_MAX_ROWS, _MAX_TOKENS = 48, 20  # rows and tokens in the trial, more than a single kernel program reads at a time
_PROMPT_TOKENS = (1, 3, 160)
_MAX_COMPARED = 4096  # logits compared per row: a large vocabulary would take gigabytes
_TIMES_PLAIN = 3.0  # permitted error, as a multiple of the forward pass's own error
_FLOORS = {torch.float32: 1e-3}  # added to that, relative to the spread of the logits
_FLOOR = 1e-2  # the same for other dtypes


def why_kernels_differ(model: PreTrainedModel, new_decoder: Callable[[], SlotDecoder]) -> str | None:
    """Return why the Triton kernels cannot decode `_MAX_ROWS` rows of `_MAX_TOKENS` tokens; None if they can.

    Some models amplify bfloat16 rounding from layer to layer. So the kernels' logits may differ from those of
    PyTorch's operations by a small multiple of how far the latter differ from the model's own forward pass.
    """
    rng = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [rng.integers(vocabulary, size=length) for length in _PROMPT_TOKENS]
    token_RT = rng.integers(vocabulary, size=(_MAX_ROWS, _MAX_TOKENS))
    try:
        logits_RTV, logprob_R = _decoded(new_decoder(), prompts, token_RT, use=True)
    except Exception as error:  # the import, the compiler or the driver can fail
        return f"{type(error).__name__}: {first_line(error)}"
    expected_RTV, expected_R = _decoded(new_decoder(), prompts, token_RT, use=False)
    floor = _FLOORS.get(expected_RTV.dtype, _FLOOR) * float(expected_RTV.float().std())
    plain = _rms(_plain_logits(model, prompts, token_RT) - expected_RTV)
    if not _rms(logits_RTV - expected_RTV) <= _TIMES_PLAIN * plain + floor:
        return "logits change"
    return None if agrees(logprob_R, expected_R.to(logprob_R.dtype)) else "draws change"


def trial_memory(model: PreTrainedModel, shapes: Sequence[KVShape]) -> RowMemory:
    """Return a memory limit that fits the trial's rows."""
    return RowMemory.of(model, shapes, 1 << 40, _MAX_ROWS, _MAX_TOKENS)


def _rms(difference: Tensor) -> float:
    return float(difference.float().square().mean().sqrt())


def _decoded(decoder: SlotDecoder, prompts: list[IntArray], token_RT: IntArray, *, use: bool) -> tuple[Tensor, Tensor]:
    """Return the logits after each token of every row, [R, T, V], and drawn tokens with their log-probs."""
    index_R = np.arange(_MAX_ROWS)
    prompt_R = slot_R = index_R // (_MAX_ROWS // len(prompts))
    logits = []
    with using_triton(use), decoder.attention():
        decoder.start([tuple(prompt.tolist()) for prompt in prompts])
        for depth, token_R in enumerate(token_RT.T, 1):
            rows = Rows(depth, prompt_R, index_R, token_R, slot_R, index_R, index_R)
            logits.append(decoder.feed(decoder.place(rows, prompt_R))[:, :_MAX_COMPARED].clone())
            slot_R = index_R
        # Draw from fixed logits: the kernels may round logits differently, which could change a draw.
        like = logits[0]
        fixed_RV = torch.linspace(-4, 4, 3 * like.shape[1], device=like.device).view(3, -1).to(like.dtype)
        token_K, logprob_K = draw_tokens(fixed_RV, np.arange(3), np.array([0.1, 0.5, 0.9]), SamplingParams())
    return torch.stack(logits, 1), torch.cat([logprob_K.double(), token_K.double()])


def _plain_logits(model: PreTrainedModel, prompts: list[IntArray], token_RT: IntArray) -> Tensor:
    """Return the logits after each token of every row from the model's own forward pass, [R, T, V]."""
    num_tokens = token_RT.shape[1]
    logits = []
    for prompt, own_RT in zip(prompts, np.split(token_RT, len(prompts)), strict=True):
        row_RT = np.concatenate([np.broadcast_to(prompt, (len(own_RT), prompt.size)), own_RT], 1)
        output = model(input_ids=to_device(row_RT, model.device), use_cache=False, **last_logits(model, num_tokens))
        logits.append(output.logits[:, -num_tokens:, :_MAX_COMPARED].clone())
    return torch.cat(logits)
