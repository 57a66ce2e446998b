"""The vLLM engine: samples N responses to each prompt as separate rows, and returns them as trees.

The seed of response r is derived from its prompt's seed and r. The other rows in a batch affect the last bits of a
row's logits, so a draw close to the boundary between two tokens can change. Results are therefore reproducible in
distribution, and bit for bit only in vLLM's batch-invariant mode. Rows that share a prefix can have log-probs that
differ in the last bits; a tree keeps those of one row. Log-probs are under the distribution that drew the token, like
the learner's.

vLLM finds a stop string late if the string's last token also begins a character that a later token completes. So
`brorl.sampling.StopStrings` truncates each response. In two cases, only vLLM ends a response: the string is complete
within `min_new_tokens`, or the string begins with a space and is at the start of the response. Some tokenizers drop
that space, but vLLM keeps it because it decodes the response after the prompt.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Decoding, Observe, unobserved
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model.device import DTYPES, free_unused, to_host
from brorl.model.load import choose_device
from brorl.model.lora import saved_adapter
from brorl.model.settings import LoraSettings
from brorl.model.source import find_model, read_config
from brorl.rollout.engine import SampleTask, split_prompt_seed
from brorl.rollout.vllm_process import (
    Completion,
    Request,
    VllmProcess,
    VllmSetup,
    Weights,
    check_installed,
)
from brorl.sampling import SamplingParams, StopStrings
from brorl.seeds import derived_seed
from brorl.storage import TemporaryFolder
from brorl.tree import RolloutTree

_SHARED_MEMORY = Path("/dev/shm")
_MAX_SEED = 2**62
_MIN_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this value
_MAX_TEMPERATURE = 2.0  # vLLM rejects higher ones


class VllmEngine:
    """Samples trees with vLLM. If its process dies, an `EngineLostError` ends the run.

    The observer receives a `Decoding` after every call. A response ends with one of `stop_token_ids`, or with a stop
    string in `stop`.
    """

    def __init__(
        self,
        setup: VllmSetup,
        stop_token_ids: Sequence[int],
        observe: Observe = unobserved,
        stop: StopStrings | None = None,
        start: Callable[[VllmSetup], VllmProcess] = VllmProcess,
    ) -> None:
        self.stop_token_ids = tuple(stop_token_ids)
        self.version = 0
        self._setup = replace(setup, stop=stop.texts) if stop else setup
        self._stop = stop
        self._observe = observe
        self._published: Callable[[], object] | None = None  # removes the folder of published weights
        self._waiting: Weights | None = None  # weights that a sleeping engine has yet to load
        self._asleep = False
        free_unused(setup.sleeps)
        self._process = start(self._setup)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights, or only the adapters. The weights have Hugging Face names.

        A sleeping engine loads them when it next samples, since the learner uses its GPU memory until then.
        """
        sent: Weights = weights
        if self._setup.reads_file:
            folder = publish(weights, DTYPES[self._setup.dtype], self._setup.lora)
            self._remove_published()
            self._published = weakref.finalize(self, folder.remove)
            sent = folder.path
        if self._setup.sleeps:
            self._waiting = sent if isinstance(sent, Path) else list(sent)
        else:
            self._process.load(sent)
        self.version = version

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        """Sample N rollouts of each prompt; see `Sampler.sample`."""
        sampling, rollouts_P = task.sampling, task.rollouts_P
        check_sampling(sampling)
        if not task.prompts:
            return []
        greedy = sampling.temperature == 0
        largest = self._setup.responses_per_request
        requests_P = []
        for prompt, count, prompt_seed in zip(task.prompts, rollouts_P, task.seed_P, strict=True):
            seed = derived_seed(*split_prompt_seed(prompt_seed))
            requests_P.append(split_request(prompt, 1 if greedy else count, seed, largest))
        stop_token_ids = [*self.stop_token_ids, *sampling.stop_token_ids]
        self._wake()
        answers = iter(self._process.complete([*chain(*requests_P)], sampling, stop_token_ids))
        trees = []
        for prompt, count, requests in zip(task.prompts, rollouts_P, requests_P, strict=True):
            completions = [self._cut(completion, sampling) for _ in requests for completion in next(answers)]
            if greedy:
                completions *= count
            trees.append(
                RolloutTree.from_responses(
                    prompt,
                    [completion.token_ids for completion in completions],
                    [completion.logprobs for completion in completions],
                    [completion.finished for completion in completions],
                )
            )
        if self._setup.sleeps:
            self._process.sleep()
            self._asleep = True
        total = sum(rollouts_P)
        depth = max(int(tree.length.max()) for tree in trees)
        self._observe(Decoding(total, total, sum(tree.num_unique_tokens for tree in trees), depth))
        return trees

    def _cut(self, completion: Completion, sampling: SamplingParams) -> Completion:
        """Truncate a response after the token that completes its first stop string."""
        length = self._stop.length(completion.token_ids, sampling.min_new_tokens) if self._stop else None
        if length is None:
            return completion
        return Completion(completion.token_ids[:length], completion.logprobs[:length], finished=True)

    def close(self) -> None:
        """End the engine and its process."""
        self._process.close()
        self._remove_published()

    def _remove_published(self) -> None:
        if self._published is not None:
            self._published()

    def _wake(self) -> None:
        """Wake the engine if it is asleep, and load any weights that are waiting."""
        free_unused(self._setup.sleeps)
        if self._asleep:
            self._process.wake()
            self._asleep = False
        if self._waiting is not None:
            self._process.load(self._waiting)
            self._waiting = None


def publish(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, lora: LoraSettings | None = None
) -> TemporaryFolder:
    """Write weights for other processes to a new folder, in shared memory if there is room, and return the folder.

    The weights go to `model.safetensors` in this dtype. With `lora`, only the adapters are written, in peft's format
    and in their own dtype.
    """
    if lora:
        tensors = {name: to_host(tensor) for name, tensor in saved_adapter(weights)}
    else:
        tensors = {name: to_host(tensor, dtype) for name, tensor in weights}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    shared = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    fits = shared and shutil.disk_usage(_SHARED_MEMORY).free > 2 * num_bytes
    folder = TemporaryFolder.new(_SHARED_MEMORY if fits else Path(tempfile.gettempdir()), "brorl-weights-")
    save_file(tensors, folder.path / f"{'adapter_' if lora else ''}model.safetensors", metadata={"format": "pt"})
    if lora:
        described = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": []}
        (folder.path / "adapter_config.json").write_text(json.dumps(described))
    return folder


def check_sampling(sampling: SamplingParams) -> None:
    """Raise a ValueError if vLLM does not support these sampling parameters."""
    if 0 < sampling.temperature < _MIN_TEMPERATURE:
        raise ValueError(
            f"vLLM does not support temperatures between 0 and {_MIN_TEMPERATURE}, but sampling.temperature = "
            f"{sampling.temperature}; set it to 0 for greedy decoding, or to {_MIN_TEMPERATURE} or more"
        )
    if sampling.temperature > _MAX_TEMPERATURE:
        raise ValueError(
            f"vLLM does not support temperatures above {_MAX_TEMPERATURE}, but sampling.temperature = "
            f"{sampling.temperature}; lower it, or set engine.kind: native"
        )


def split_request(prompt: Sequence[int], num_responses: int, seed: int, largest: int) -> list[Request]:
    """Split a prompt's responses into requests for at most `largest` each. Response r has the seed `seed` + r.

    With 7 responses, seed 100 and largest 3, the requests are (3, seed 100), (3, seed 103) and (1, seed 106).
    """
    base = seed % _MAX_SEED
    return [
        Request(tuple(prompt), min(largest, num_responses - start), base + start)
        for start in range(0, num_responses, largest)
    ]


def check_vllm(config: TrainConfig, sampling: SamplingParams | None = None) -> None:
    """Check that vLLM is installed, can run on this machine, and supports the sampling parameters."""
    check_installed()
    if not config.cluster.enabled:
        _check_gpus(config)
    cluster = config.cluster
    on_gpu = cluster.gpus_per_rollout_worker if cluster.enabled else choose_device(config.device).type == "cuda"
    if config.lora.rank and config.dtype == "float32" and on_gpu:
        raise UserError(
            "engine.kind = vllm does not support float32 adapters on a GPU, but dtype = float32; set dtype: bfloat16, "
            "or engine.kind: native"
        )
    if sampling is not None:
        try:
            check_sampling(sampling)
        except ValueError as error:
            raise UserError(str(error)) from error


def _check_gpus(config: TrainConfig) -> None:
    """Check that this machine has the GPUs needed for vLLM's placement and weight transfer."""
    vllm = config.engine.vllm
    if vllm.placement == "colocated":
        return
    if choose_device(config.device).type == "cpu":
        raise UserError(
            "engine.vllm.placement = apart needs the model on a GPU, but it is on the CPU (device = "
            f"{config.device}); set engine.vllm.placement: colocated"
        )
    num_gpus = torch.cuda.device_count()
    if num_gpus < 1 + vllm.tensor_parallel:
        raise UserError(
            f"engine.vllm.placement = apart needs {1 + vllm.tensor_parallel} GPUs, one for the learner and "
            f"engine.vllm.tensor_parallel = {vllm.tensor_parallel} for the engine, but torch finds {num_gpus}; set "
            "engine.vllm.placement: colocated"
        )


def vllm_setup(config: TrainConfig, source: str, context: int) -> VllmSetup:
    """Return the setup of a vLLM engine, in its own process or inside a rollout worker."""
    device = choose_device(config.device)
    vllm = config.engine.vllm
    model = find_model(source)
    return VllmSetup(
        source=model.path,
        revision=model.revision,
        dtype="bfloat16" if config.dtype == "bfloat16" else "float32",
        context=context,
        cache_bytes=config.engine.memory_bytes,
        device="cpu" if device.type == "cpu" else "cuda",
        threads=torch.get_num_threads(),
        max_rows=vllm.max_rows,
        responses_per_request=vllm.responses_per_request,
        tensor_parallel=vllm.tensor_parallel,
        sleeps=device.type != "cpu" and not config.cluster.enabled and vllm.placement == "colocated",
        separate=not config.cluster.enabled,  # a rollout worker is already a process, and is replaced as a whole
        gpus=() if device.type == "cpu" or config.cluster.enabled else _engine_gpus(config, device.index or 0),
        lora=config.adapters,
    )


def _engine_gpus(config: TrainConfig, learner: int) -> tuple[int, ...]:
    """Return the indices of the engine's GPUs."""
    other_gpus = [gpu for gpu in range(torch.cuda.device_count()) if gpu != learner]
    gpus = other_gpus if config.engine.vllm.placement == "apart" else [learner, *other_gpus]
    return tuple(gpus[: config.engine.vllm.tensor_parallel])


def start_vllm(
    setup: VllmSetup, source: str, stop_token_ids: Sequence[int], stop: StopStrings,
    load: Callable[[], PreTrainedModel], observe: Observe = unobserved,
) -> VllmEngine:  # fmt: skip
    """Start vLLM with the model at `source`. `load` returns that model; vLLM itself does not merge its adapters."""
    engine = VllmEngine(setup, stop_token_ids, observe, stop)
    if find_model(source).adapter:  # vLLM has loaded only the base model
        send_adapted(engine, load(), source)
    return engine


def send_adapted(engine: VllmEngine, model: PreTrainedModel, source: str) -> None:
    """Send a model with adapters to vLLM, which has loaded only the base model. Reject a merge that unties layers."""
    base, own = (config.get_text_config() for config in (read_config(find_model(source)), model.config))
    if base.tie_word_embeddings != own.tie_word_embeddings:
        raise UserError(
            f"vLLM ties the embedding and the output layer, like the base of {source}, but merging its adapter unties "
            "them; save the merged model (docs/how-to/upload.md) and set model to it, or set engine.kind: native"
        )
    engine.load_weights(model.named_parameters(), version=0)
