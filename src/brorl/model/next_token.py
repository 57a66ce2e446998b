"""The distribution of the next token, from a model's logits.

In: logits, and the number of tokens that each response has so far. Out: logits of the trained policy. This policy also
samples (`brorl.rollout.native.draw`), before any top-p or top-k truncation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NextToken:
    """Turns a model's logits into the distribution that tokens are drawn from.

    Attributes:
        temperature: Divisor of the logits, above 0; the temperature of the rollouts.
        min_new_tokens: Tokens that a response has before it can have a stop token, 0 or more.
        stop_token_ids: The stop tokens; required if `min_new_tokens` is above 0.
    """

    temperature: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.min_new_tokens and not self.stop_token_ids:
            raise ValueError("min_new_tokens forbids stop tokens at first; give stop_token_ids")

    def logits(self, logits_RV: Tensor, length_R: Tensor) -> Tensor:
        """Return the logits of the distribution, in float32 at least, -inf for a token that cannot be drawn.

        Args:
            logits_RV: The model's logits, shape [R, V].
            length_R: Tokens that each row's response has so far, shape [R].
        """
        if logits_RV.dtype in (torch.bfloat16, torch.float16):
            logits_RV = logits_RV.float()
        if self.temperature != 1.0:
            logits_RV = logits_RV / self.temperature
        if not self.min_new_tokens:
            return logits_RV
        forbidden_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
        forbidden_RV[:, list(self.stop_token_ids)] = (length_R < self.min_new_tokens)[:, None]
        return logits_RV.masked_fill(forbidden_RV, float("-inf"))


PLAIN = NextToken()  # temperature 1, and any token at any time
