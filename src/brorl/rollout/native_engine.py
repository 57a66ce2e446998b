"""The native engine: samples N rollouts of each prompt as a tree, on any Hugging Face decoder, on CPU or GPU.

The decoding batch has one row per distinct live prefix, regardless of N: if 64 rollouts draw 3 different first tokens,
the next step feeds 3 rows. A row with count c draws for all of its c rollouts in one step. A model whose attention
cannot be hooked decodes with its own cache. Memory stays within the limit: rows that do not fit wait; later, they are
decoded from their prefixes with the same uniform numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Echo, Observe, unobserved
from brorl.errors import UserError
from brorl.model.cuda_graphs import GraphChoice
from brorl.model.flat_path import FlatForward
from brorl.model.forward import choose_forward
from brorl.model.kernels import TRITON_DEVICES, KernelsError, kernels_choice, kernels_of, using_triton
from brorl.model.llama_pass import LlamaPass
from brorl.model.tree_attention import ModelPass
from brorl.model.tree_path import TreeForward
from brorl.rollout.engine import SampleTask
from brorl.rollout.native.decoder import Decoder, ModelCacheDecoder, RowMemory
from brorl.rollout.native.draw import Uniforms
from brorl.rollout.native.graphs import graphs_on
from brorl.rollout.native.growth import Growth
from brorl.rollout.native.paged_decoder import PagedCache, PagedDecoder
from brorl.rollout.native.slot_attention import SlotCache
from brorl.rollout.native.slot_decoder import SlotDecoder
from brorl.sampling import SamplingParams, StopStrings
from brorl.tree import RolloutTree


def draws_on(device: torch.device) -> bool:
    """Return whether the device draws the tokens of single-rollout rows itself, instead of waiting for the host."""
    return device.type == "cuda"


class NativeEngine:
    """Samples trees with the model itself.

    The memory limit determines which rows are computed together, and thus how their logits are rounded. If a draw is
    close to the boundary between two tokens, rounding can change the token. The tree is then a different sample from
    the same distribution, and its log-probs match its own tokens, up to rounding.

    Args:
        model: A Hugging Face causal LM. It is not copied: the engine samples with the model's current weights.
        eos_token_id: Tokens that end a response. May be empty only if there are stop strings.
        memory_bytes: Limit on the keys, values and logits of one batch of rows.
        share_prefixes: False decodes every rollout as a separate row, for tests and for measuring the tree's savings.
        observe: Receives a `Decoding` after every position.
        forward: How rows pass through the model; None for tree attention.
        dtype: Dtype to round the matrices to, which needs a Llama pass; None samples in the model's dtype.
        stop: Strings that also end a response, or None.
        graphs: Whether to run decoding steps as CUDA graphs: `auto` if possible, `on` or fail, `off` never.
        echo: Receives a line if CUDA graphs or Triton kernels cannot be used.

    Raises:
        UserError: If graphs are required but the model does not decode with tree attention on a CUDA device.
        HooksError: If the model's attention cannot be hooked and `forward` is not given.
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
        self._echo = echo
        on_cuda = model.device.type == "cuda" and isinstance(self._forward, TreeForward)
        if graphs == "on" and not on_cuda:
            raise UserError(
                "engine.cuda_graphs = on needs tree attention on a CUDA device, but the model is on "
                f"{model.device.type}, with the {'tree' if isinstance(self._forward, TreeForward) else 'flat'} path; "
                "set engine.cuda_graphs: auto"
            )
        self._graphs = graphs_on(model.device, graphs, echo) if isinstance(self._forward, TreeForward) else None
        self._use_kernels: bool | None = None  # whether to use the Triton kernels; None before their trial
        # kept between calls, together with the tensors that graphs read and write
        self._reusable_decoder: SlotDecoder | None = None

    def _cache(self, forward: TreeForward, max_rows: int, max_tokens: int) -> SlotCache | PagedCache:
        """Return an empty cache: blocks for the C kernels if they can decode the model, slots otherwise."""
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
        if self._reusable_decoder is not None and self._reusable_decoder.reuse_for(cache.memory, sampling):
            return self._reusable_decoder
        # Copy the weights in every call: they may have changed since the last call.
        model_pass = LlamaPass(self.model, self._dtype) if self._forward.llama_rows else ModelPass(self.model)
        if isinstance(cache, PagedCache):
            return PagedDecoder(self.model, model_pass, cache)
        decoder = SlotDecoder(self.model, model_pass, cache, sampling, self._graphs, draws=draws_on(self.model.device))
        self._reusable_decoder = None if self._graphs is None else decoder
        return decoder

    def _uses_kernels(self, decoder: Decoder) -> bool:
        """Return whether to use the Triton kernels. The first call runs their trial."""
        model = self.model
        forward = self._forward
        if self._use_kernels is not None:
            return self._use_kernels
        self._use_kernels = False
        wanted = model.device.type in TRITON_DEVICES and kernels_choice() != "off"
        if wanted and isinstance(decoder, SlotDecoder) and isinstance(forward, TreeForward):
            from brorl.rollout.native.kernel_trial import trial_memory, why_kernels_differ  # not on a CPU

            def new_decoder() -> SlotDecoder:
                cache = SlotCache(model, forward.kv_shapes, trial_memory(model, forward.kv_shapes))
                return SlotDecoder(model, decoder.model_pass, cache, decoder.sampling, graphs=None, draws=False)

            reason = why_kernels_differ(model, new_decoder)
            if reason and kernels_choice() == "on":
                raise KernelsError(
                    f"engine.compile = on, but the Triton kernels cannot decode: {reason}; set engine.compile: auto"
                )
            if reason:
                self._echo(f"decoding with PyTorch's operations instead of Triton kernels: {reason}")
            self._use_kernels = reason is None
        return self._use_kernels

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the engine's model, except those that it shares with the learner."""
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            if own[name] is not tensor:
                own[name].copy_(tensor)
        self.version = version

    def close(self) -> None:
        """Do nothing: this engine samples in its caller's process."""

    @torch.no_grad()
    def sample(self, task: SampleTask) -> list[RolloutTree]:
        """Sample N rollouts of each prompt; see `Sampler.sample`.

        A rollout's uniform numbers depend only on its prompt's seed, N and its index, not on other prompts.
        Non-finite logits are an error, and so is a memory limit too small for a single row.
        """
        if not task.prompts:
            return []
        sampling, rollouts_P = task.sampling, task.rollouts_P
        sampling = replace(sampling, stop_token_ids=(*self.stop_token_ids, *sampling.stop_token_ids))
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            decoder = self._decoder(sum(rollouts_P), sampling)
            growth = Growth(
                task.prompts, rollouts_P, decoder, sampling, Uniforms(task.seed_P, rollouts_P),
                stop=self._stop, shares_prefixes=self._share_prefixes, observe=self._observe,
            )  # fmt: skip
            with using_triton(self._uses_kernels(decoder)):
                return growth.grow()
        except BaseException:
            self._reusable_decoder = None  # the decoder may contain non-finite numbers
            raise
        finally:
            if self._graphs is not None and not self._graphs.enabled:
                self._graphs = self._reusable_decoder = None  # graphs no longer need the memory
            if was_training:
                self.model.train()
