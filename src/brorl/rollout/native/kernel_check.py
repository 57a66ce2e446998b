"""A short decoding with the kernels in Triton, compared with the same one by the operations of PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from brorl.errors import first_line
from brorl.model.gpu_kernels import gpu_kernels
from brorl.model.hook_check import agrees
from brorl.rollout.native.draw import draw_tokens
from brorl.rollout.native.rows import Rows
from brorl.rollout.native.slots import SlotDecoder
from brorl.sampling import SamplingParams

MAX_ROWS, MAX_TOKENS = 48, 20  # more than a program of the kernels reads at once
_PROMPTS = ((1,), (2, 3, 1), (3, 1, 2, 1) * 40)


def why_not(new_decoder: Callable[[], SlotDecoder]) -> str | None:
    """Return why the kernels cannot decode; None if they agree with the operations of PyTorch.

    Args:
        new_decoder: Returns a decoder for `MAX_ROWS` and `MAX_TOKENS`, without graphs.
    """
    try:
        logits_RV, logprob_R = _decoded(new_decoder(), use=True)
    except Exception as error:  # of the compiler, the driver or the import
        return f"{type(error).__name__}: {first_line(error)}"
    expected_RV, expected_R = _decoded(new_decoder(), use=False)
    if not agrees(logits_RV, expected_RV):
        return "logits change"
    return None if agrees(logprob_R, expected_R.to(logprob_R.dtype)) else "draws change"


def _decoded(decoder: SlotDecoder, *, use: bool) -> tuple[Tensor, Tensor]:
    """Return the logits of all rows at all positions, and tokens that are drawn with their log-probs."""
    prompt_R, number_R = np.arange(MAX_ROWS) // (MAX_ROWS // len(_PROMPTS)), np.arange(MAX_ROWS)
    slot_R, found = prompt_R, []
    with gpu_kernels(use), decoder.attention():
        vocabulary = decoder.start(_PROMPTS).shape[1]
        for depth in range(1, MAX_TOKENS):
            rows = Rows(depth, prompt_R, number_R, (number_R + depth) % vocabulary, slot_R, number_R, number_R)
            found.append(decoder.feed(decoder.place(rows, prompt_R)))
            slot_R = number_R
        # The same logits for both ways: a draw may fall between two roundings.
        fixed_RV = torch.linspace(-4, 4, 3 * vocabulary, device=found[0].device).view(3, -1).to(found[0].dtype)
        token_K, logprob_K = draw_tokens(fixed_RV, np.arange(3), np.array([0.1, 0.5, 0.9]), SamplingParams())
    return torch.cat(found), torch.cat([logprob_K.double(), token_K.double()])
