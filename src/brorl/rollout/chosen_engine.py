"""Chooses the engine and the CPU threads for a run, an evaluation, a plan or a rollout worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias, assert_never

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brorl.activity import Echo, Observe, unobserved
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model.device import DTYPES
from brorl.model.flat_path import FlatForward
from brorl.model.forward import choose_forward
from brorl.model.kernels import use_kernels
from brorl.model.load import choose_device, end_tokens, load_model
from brorl.model.tree_path import TreeForward
from brorl.rollout.engine import Engine
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams, StopStrings

OnEnd: TypeAlias = Callable[[Callable[[], object]], object]  # receives functions to call after the work


def check_engine(config: TrainConfig, sampling: SamplingParams | None = None) -> None:
    """Check that the engine is installed, can run on this machine, and supports the sampling parameters."""
    if config.engine.kind == "vllm":
        from brorl.rollout.vllm_engine import check_vllm

        check_vllm(config, sampling)


def check_cache(config: TrainConfig, row_bytes: int) -> None:
    """Check that vLLM's cache can hold a prompt and a response of full length; without that, vLLM does not start."""
    engine = config.engine
    needed = row_bytes / engine.vllm.tensor_parallel
    if engine.kind == "vllm" and engine.memory_bytes < needed:
        raise UserError(
            f"engine.memory_gib = {engine.memory_gib:g} is too small for vLLM: a prompt and a response of full length "
            f"need {needed / 2**30:.2g} GiB; raise it, or lower sampling.max_new_tokens"
        )


def build_engine(
    config: TrainConfig,
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forward: TreeForward | FlatForward,
    context: int,
    observe: Observe = unobserved,
    echo: Echo = lambda _: None,
) -> Engine:
    """Build the engine for a model loaded from `source`.

    `context` is the maximum number of tokens in a prompt plus its response. The native engine samples with the model
    itself, or with a bfloat16 copy if the model computes in bfloat16 but keeps float32 weights.
    """
    stop = StopStrings(tokenizer, config.sampling.stop)
    stop_token_ids = end_tokens(model, tokenizer, config.sampling.stop)
    match config.engine.kind:
        case "vllm":
            from brorl.rollout.vllm_engine import start_vllm, vllm_setup

            return start_vllm(vllm_setup(config, source, context), source, stop_token_ids, stop, lambda: model, observe)
        case "native":
            use_kernels(config.engine.compile)  # this process may be a rollout worker
            has_copy = config.dtype == "bfloat16" and model.dtype != torch.bfloat16
            sampler = load_model(source, choose_device(config.device), torch.bfloat16) if has_copy else model
            rounded = config.engine.dtype == "bfloat16"
            if rounded and not (isinstance(forward, TreeForward) and forward.llama_chunks):
                raise UserError(
                    f"engine.dtype = bfloat16 needs the Llama pass, which does not support {type(model).__name__} here "
                    "(it runs Llama, Mistral, Qwen2 and Qwen3 on a CPU, without adapters or sliding windows); set "
                    "engine.dtype: auto"
                )
            return NativeEngine(
                sampler,
                stop_token_ids,
                config.engine.memory_bytes,
                observe=observe,
                forward=forward,
                dtype=torch.bfloat16 if rounded else None,
                stop=stop,
                graphs=config.engine.cuda_graphs,
                echo=echo,
            )
        case _:
            assert_never(config.engine.kind)


def load_engine(
    config: TrainConfig,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    observe: Observe = unobserved,
    echo: Echo = lambda _: None,
) -> tuple[PreTrainedModel, Engine]:
    """Load a model for sampling only, and build its engine; see `build_engine` for the arguments."""
    model = build_sampling_model(config, source)
    forward = choose_forward(model, config.engine.forward, context)
    return model, build_engine(config, source, model, tokenizer, forward, context, observe, echo)


def build_sampling_model(config: TrainConfig, source: str) -> PreTrainedModel:
    """Load a model for sampling only, in the compute dtype. A learner may publish new weights to it."""
    return load_model(source, choose_device(config.device), DTYPES[config.dtype], config.adapters)


_SMALL = 10_000_000  # weights; in smaller models, threads on shared cores spend more time waiting than working
_AT_START = torch.get_num_threads()


def set_threads_and_kernels(config: TrainConfig, num_weights: int) -> None:
    """Set torch's threads to `engine.threads`, or to a number that suits the model size. Select the kernels."""
    use_kernels(config.engine.compile)
    chosen = 1 if _computes_here(config) and num_weights < _SMALL else _all_threads()
    torch.set_num_threads(config.engine.threads or chosen)


def numbers_of_threads(config: TrainConfig) -> list[int]:
    """Return the thread counts to compare: 1 and all, or none if the model runs elsewhere or there is only one core."""
    return [1, _all_threads()] if _computes_here(config) and _all_threads() > 1 else []


def _computes_here(config: TrainConfig) -> bool:
    """Return whether the model runs on the CPU in this process."""
    return not config.cluster.enabled and choose_device(config.device).type == "cpu"


def _all_threads() -> int:
    """Return torch's default number of threads, limited to the number of cores that this process may use."""
    return min(_AT_START, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else _AT_START
