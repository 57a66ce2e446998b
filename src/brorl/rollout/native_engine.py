"""The native engine: samples N rollouts of each prompt as a tree, on any Hugging Face decoder, on CPU or GPU.

The decoding batch has one row per distinct live prefix, whatever N is: if 64 rollouts draw 3 different first tokens,
the next step feeds 3 rows. A row with count c draws for its c rollouts at once. A model whose attention cannot be
hooked decodes with its own cache. Memory stays within the limit: rows that do not fit wait, and are decoded later from
their prefixes with the same uniform numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Echo, Observe, unobserved
from brorl.errors import UserError, first_line
from brorl.model.flat_path import FlatForward
from brorl.model.forward import agrees, choose_forward
from brorl.model.kernels import TRITON_DEVICES, KernelsError, kernels_of, required, using_triton
from brorl.model.llama_pass import LlamaPass
from brorl.model.tree_attention import ModelPass
from brorl.model.tree_path import TreeForward
from brorl.rollout.engine import rollouts_of_prompts
from brorl.rollout.native.decoder import Decoder, ModelCacheDecoder, RowMemory, Rows
from brorl.rollout.native.draw import Uniforms, draw_tokens
from brorl.rollout.native.graphs import GraphChoice, graphs_on
from brorl.rollout.native.growth import Growth
from brorl.rollout.native.paged_decoder import PagedCache, PagedDecoder
from brorl.rollout.native.slot_attention import SlotCache
from brorl.rollout.native.slot_decoder import SlotDecoder
from brorl.sampling import SamplingParams, StopStrings
from brorl.tree import RolloutTree

_MAX_ROWS, _MAX_TOKENS = 48, 20  # rows and tokens of the kernels' trial: more than one program reads at once
_PROMPTS = ((1,), (2, 3, 1), (3, 1, 2, 1) * 40)


def why_kernels_differ(new_decoder: Callable[[], SlotDecoder]) -> str | None:
    """Return why the kernels in Triton cannot decode `_MAX_ROWS` rows of `_MAX_TOKENS`; None if they can."""
    try:
        logits_RV, logprob_R = _decoded(new_decoder(), use=True)
    except Exception as error:  # from the compiler, the driver or the import
        return f"{type(error).__name__}: {first_line(error)}"
    expected_RV, expected_R = _decoded(new_decoder(), use=False)
    if not agrees(logits_RV, expected_RV):
        return "logits change"
    return None if agrees(logprob_R, expected_R.to(logprob_R.dtype)) else "draws change"


def _decoded(decoder: SlotDecoder, *, use: bool) -> tuple[Tensor, Tensor]:
    """Return the logits of all rows at all positions, and drawn tokens with their log-probs."""
    number_R = np.arange(_MAX_ROWS)
    prompt_R = slot_R = number_R // (_MAX_ROWS // len(_PROMPTS))
    found = []
    with using_triton(use), decoder.attention():
        vocabulary = decoder.start(_PROMPTS).shape[1]
        for depth in range(1, _MAX_TOKENS):
            rows = Rows(depth, prompt_R, number_R, (number_R + depth) % vocabulary, slot_R, number_R, number_R)
            found.append(decoder.feed(decoder.place(rows, prompt_R)))
            slot_R = number_R
        # Draw from fixed logits: the kernels may round their logits differently, and a draw from those may differ.
        fixed_RV = torch.linspace(-4, 4, 3 * vocabulary, device=found[0].device).view(3, -1).to(found[0].dtype)
        token_K, logprob_K = draw_tokens(fixed_RV, np.arange(3), np.array([0.1, 0.5, 0.9]), SamplingParams())
    return torch.cat(found), torch.cat([logprob_K.double(), token_K.double()])


def draws_on(device: torch.device) -> bool:
    """Return whether a device itself draws the tokens of rows with one rollout, instead of waiting for the host."""
    return device.type == "cuda"


class NativeEngine:
    """Samples trees with the model itself.

    The memory limit decides which rows are computed together, and thus how their logits are rounded. A draw close to
    the border between two tokens can then give the other token. The tree is then another sample of the same
    distribution, and its log-probs belong to its own tokens, up to rounding.

    Args:
        model: A Hugging Face causal LM, which is not copied: the engine samples with its current weights.
        eos_token_id: Tokens that end a response. Only with stop strings may there be none.
        memory_bytes: Limit for the keys, values and logits of the rows of one batch.
        share_prefixes: False decodes every rollout as a separate row, for tests and for measuring the savings of the
            tree.
        observe: Receives a `Decoding` after every position.
        forward: How rows go through the model; None for tree attention.
        dtype: Round the matrices to this dtype, which needs a Llama pass; None samples in the dtype of the model.
        stop: Texts that also end a response, or None.
        graphs: Whether decoding steps are CUDA graphs: `auto` where possible, `on` or an error, `off` never.
        echo: Receives a line if `auto` cannot make graphs.

    Raises:
        UserError: If graphs are required, and the model does not decode with tree attention on a CUDA device.
        HooksError: If the model's attention cannot be hooked, and `forward` is not given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_id: int | Sequence[int],
        memory_bytes: int = 4 << 30,
        share_prefixes: bool = True,
        observe: Observe = unobserved,
        forward: TreeForward | FlatForward | None = None,
        dtype: torch.dtype | None = None,
        stop: StopStrings | None = None,
        graphs: GraphChoice = "auto",
        echo: Echo = lambda _: None,
    ) -> None:
        self._forward = forward or choose_forward(model, "tree")
        self.model = model
        self.stop_token_ids = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
        self.version = 0
        self._memory_bytes = memory_bytes
        self._share_prefixes = share_prefixes
        self._observe = observe
        self._dtype = dtype or model.dtype
        self._stop = stop
        on_cuda = model.device.type == "cuda" and isinstance(self._forward, TreeForward)
        if graphs == "on" and not on_cuda:
            raise UserError(
                "engine.cuda_graphs = on needs tree attention on a CUDA device, and the model is on "
                f"{model.device.type}, with the {'tree' if isinstance(self._forward, TreeForward) else 'flat'} path; "
                "set engine.cuda_graphs: auto"
            )
        self._graphs = graphs_on(model.device, graphs, echo) if isinstance(self._forward, TreeForward) else None
        self._use_kernels: bool | None = None  # whether the kernels in Triton are used; None before their trial
        self._kept: SlotDecoder | None = None  # stays between calls with the tensors that graphs read and write

    def _cache(self, forward: TreeForward, max_rows: int, max_tokens: int) -> SlotCache | PagedCache:
        """Return an empty cache: blocks for the kernels in C if they can decode the model, and otherwise slots."""
        shapes = forward.kv_shapes
        memory = RowMemory.of(self.model, shapes, self._memory_bytes, max_rows, max_tokens)
        kernels = kernels_of(torch.empty(0, dtype=self.model.dtype, device=self.model.device))
        if kernels is not None and all(shape.key_dim == shape.value_dim for shape in shapes):
            return PagedCache(kernels, shapes, memory)
        return SlotCache(self.model, shapes, memory)

    def _decoder(self, max_rows: int, sampling: SamplingParams) -> Decoder:
        if isinstance(self._forward, FlatForward):
            return ModelCacheDecoder(self.model, self._memory_bytes)
        cache = self._cache(self._forward, max_rows, sampling.max_new_tokens)
        if self._kept is not None and self._kept.take_on(cache.memory, sampling):
            return self._kept
        # Every call copies the weights: they may have changed since the last call.
        model_pass = LlamaPass(self.model, self._dtype) if self._forward.llama_rows else ModelPass(self.model)
        if isinstance(cache, PagedCache):
            return PagedDecoder(self.model, model_pass, cache)
        decoder = SlotDecoder(self.model, model_pass, cache, sampling, self._graphs, draws=draws_on(self.model.device))
        self._kept = None if self._graphs is None else decoder
        return decoder

    def _uses_kernels(self, decoder: Decoder) -> bool:
        """Return whether the kernels in Triton are used; try them at the first call if they are required."""
        model, forward = self.model, self._forward
        if self._use_kernels is not None:
            return self._use_kernels
        self._use_kernels = False
        wanted = model.device.type in TRITON_DEVICES and required()
        if wanted and isinstance(decoder, SlotDecoder) and isinstance(forward, TreeForward):

            def new_decoder() -> SlotDecoder:
                memory = RowMemory.of(model, forward.kv_shapes, 1 << 40, _MAX_ROWS, _MAX_TOKENS)
                cache = SlotCache(model, forward.kv_shapes, memory)
                return SlotDecoder(model, decoder.model_pass, cache, decoder.sampling, graphs=None, draws=False)

            if reason := why_kernels_differ(new_decoder):
                raise KernelsError(
                    f"engine.compile = on, and kernels in Triton cannot decode: {reason}; set engine.compile: auto"
                )
            self._use_kernels = True
        return self._use_kernels

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the engine's model, except weights that it shares with the learner."""
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            if own[name] is not tensor:
                own[name].copy_(tensor)
        self.version = version

    def close(self) -> None:
        """Do nothing: this engine samples in the process of its caller."""

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int | Sequence[int],
        sampling: SamplingParams,
        seed: int,
        first: int = 0,
    ) -> list[RolloutTree]:
        """Sample N rollouts of each prompt; see `Sampler.sample`.

        The uniform numbers of a rollout depend only on the seed, N, the number of its prompt and its own number. Other
        prompts do not matter. Logits that are not finite are an error, and so is memory for less than one row.
        """
        rollouts_P = rollouts_of_prompts(num_rollouts, len(prompts))
        if min(rollouts_P, default=1) < 1 or not all(len(p) for p in prompts):
            raise ValueError("every prompt needs at least one token and num_rollouts must be >= 1")
        if not prompts:
            return []
        sampling = replace(sampling, stop_token_ids=(*self.stop_token_ids, *sampling.stop_token_ids))
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            decoder = self._decoder(sum(rollouts_P), sampling)
            growth = Growth(
                prompts, rollouts_P, decoder, sampling, Uniforms(seed, rollouts_P, first),
                stop=self._stop, shares_prefixes=self._share_prefixes, observe=self._observe,
            )  # fmt: skip
            with using_triton(self._uses_kernels(decoder)):
                return growth.grow()
        except BaseException:
            self._kept = None  # the decoder may hold numbers that are not finite
            raise
        finally:
            if self._graphs is not None and not self._graphs.enabled:
                self._graphs = self._kept = None  # no graph needs the memory
            if was_training:
                self.model.train()
