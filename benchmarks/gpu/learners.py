"""The variants of the learner: each is compared with the plain model, and some are timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from gpu.timing import Device
from transformers import PreTrainedModel

from brorl.model import logprobs, row_logits, tiled_attention, tree_batch
from brorl.model.forward import FlatForward, Forward, TreeForward
from brorl.model.gradient_checkpointing import enable_gradient_checkpointing

_SCORES_PER_TILE = 400  # some queries of a short response
_ROWS_PER_BLOCK = 5


@dataclass(frozen=True)
class LearnerVariant:
    """One way to compute log-probs and gradients.

    Attributes:
        name: Its name in the results.
        forward: How trees go through the model.
        checkpointing: Whether activations are computed again.
        small_tiles: Attend in tiles although the responses are short.
        small_blocks: Compute logits in blocks although they are few.
        timed: Whether its step is timed. Long responses need tiles and blocks anyway.
        only_cuda: Whether it needs a CUDA device, and has no float64.
    """

    name: str
    forward: Forward = field(default_factory=TreeForward)
    checkpointing: bool = False
    small_tiles: bool = False
    small_blocks: bool = False
    timed: bool = False
    only_cuda: bool = False

    def runs(self, device: Device, precision: str) -> bool:
        """Return whether the variant runs on a device in a precision."""
        return not self.only_cuda or (not device.is_cpu and precision != "float64")

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        """Compute with small tiles and blocks inside, if the variant has them; checkpointing stays switched on."""
        if self.checkpointing:
            enable_gradient_checkpointing(model)
        with ExitStack() as stack:
            if self.small_tiles:
                stack.enter_context(patch.object(tree_batch, "MAX_CHAIN_SCORES", 0))
                stack.enter_context(patch.object(tiled_attention, "SCORES_PER_TILE", _SCORES_PER_TILE))
            if self.small_blocks:
                logits = _ROWS_PER_BLOCK * model.config.get_text_config().vocab_size
                stack.enter_context(patch.object(row_logits, "MAX_LOGITS", 0))
                stack.enter_context(patch.object(logprobs, "LOGITS_PER_BLOCK", logits))
            yield


FLAT = FlatForward("the benchmark measures it")
VARIANTS = (
    LearnerVariant("tree", timed=True),
    LearnerVariant("tree, tiled attention", small_tiles=True),
    LearnerVariant("tree, blocked logits", small_blocks=True),
    LearnerVariant("tree, checkpointing", checkpointing=True, timed=True),
    LearnerVariant("tree, all three", checkpointing=True, small_tiles=True, small_blocks=True),
    LearnerVariant("flat", FLAT),
    LearnerVariant(
        "tree, FlexAttention", TreeForward(model_pass=logprobs.ModelPass("flex")), timed=True, only_cuda=True
    ),
)
