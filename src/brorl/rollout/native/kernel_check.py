"""A decoding of two tokens with the kernels in Triton, compared with the same one by the operations of PyTorch."""

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

MAX_ROWS, MAX_TOKENS = 3, 3
_PROMPTS = ((1,), (2, 3, 1))


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
    """Return the logits after two tokens of three rows, and the log-probs of tokens that are drawn from the last."""
    prompt_R, number_R = np.array([0, 1, 1]), np.arange(MAX_ROWS)
    rows = Rows(1, prompt_R, number_R, number_R + 1, prompt_R, number_R, number_R)
    with gpu_kernels(use), decoder.attention():
        decoder.start(_PROMPTS)
        found = []
        for depth in (1, 2):
            rows = Rows(depth, prompt_R, number_R, number_R + depth, prompt_R if depth == 1 else number_R, number_R,
                        number_R)  # fmt: skip
            found.append(decoder.feed(decoder.place(rows, prompt_R)))
        # The same logits for both ways: a draw may fall between two roundings.
        fixed_RV = torch.linspace(-4, 4, 3 * found[0].shape[1], device=found[0].device).view(3, -1).to(found[0].dtype)
        token_R, logprob_R = draw_tokens(fixed_RV, number_R, np.array([0.1, 0.5, 0.9]), SamplingParams())
    return torch.cat(found), torch.cat([logprob_R.double(), token_R.double()])
