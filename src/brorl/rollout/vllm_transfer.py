"""The transfer of new weights to a vLLM engine, by vLLM's four calls: init, start, update, finish.

Afterwards every worker of the engine has the weights, and no keys and values of older ones. A backend carries the
bytes:

- `host`: a file in shared memory, or the tensors themselves if the engine runs in this process. The receiver is
  `vllm_worker.HostTransfer`. It needs no GPU.
- `ipc`: CUDA memory of this process, which an engine on the same GPU maps. Sender and receiver are vLLM's.
- `nccl`: a broadcast to the GPUs of the engine. Sender and receiver are vLLM's. This process is rank 0.

The tests run `host`. They check the calls and the payloads of `ipc` and `nccl` against vLLM's classes on the CPU;
neither backend has run on a GPU.
"""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch
from torch import Tensor

from brorl.errors import UserError, first_line

TransferBackend = Literal["host", "ipc", "nccl"]
Weights = Path | Iterable[tuple[str, Tensor]]

HOST_BACKEND = "brorl_host"
"""Name of `HostTransfer` among vLLM's backends."""
_MIN_PACKED_BYTES = 256 << 20
_GRACE_S = 10.0  # in which a sender ends after its engine has failed
_THIS_MACHINE = "127.0.0.1"


class TransferError(UserError):
    """The weights did not reach the engine."""

    exit_code = 1


class WeightCalls:
    """The four calls on one engine, in the form of vLLM's protocol `VLLMWeightSyncClient`.

    The scheduler is paused from `start` to `finish`. No request is in progress then: `LLM.generate` returns when all of
    its requests are done. The pause mode is `keep`: a request that an interrupted call has left computes its keys and
    values again and continues with the new weights.

    Args:
        llm: The `vllm.LLM`.

    Attributes:
        failure: Gets the exception of a failed call `update`; vLLM's sender can wait forever before it raises this.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.failure: Future[None] = Future()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the workers with the sender."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Pause the scheduler and prepare the workers for new weights."""
        self._llm.sleep(level=0, mode="keep")
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive weights."""
        try:
            self._llm.update_weights({"update_info": _sendable(update_info)})
        except Exception as error:
            _fail(self.failure, error)
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Complete the update, clear the prefix cache, and resume the scheduler.

        Raises:
            RuntimeError: If vLLM kept keys and values of the old weights.
        """
        self._llm.finish_weight_update(weight_version)
        self._llm.collective_rpc("repack_tied_head")
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not clear its prefix cache after a weight update")
        self._llm.wake_up(tags=["scheduling"])


def _fail(future: Future[None], error: Exception) -> None:
    with suppress(InvalidStateError):  # it has an outcome already
        future.set_exception(error)


def _sendable(update_info: dict[str, Any]) -> dict[str, Any]:
    """Return an update that vLLM can send to its process: CUDA handles become text."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return update_info
    text = base64.b64encode(pickle.dumps(handles)).decode()
    return {**update_info, "ipc_handles": None, "ipc_handles_pickled": text}


class WeightStream:
    """Named tensors in the number format of the engine, in the form of vLLM's `WeightSource`.

    Args:
        dtype: Number format of the engine; tensors of other types than floats keep theirs.

    Attributes:
        weights: The weights of the next update.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.weights: Sequence[tuple[str, Tensor]] = ()
        self._dtype = dtype

    def metadata(self) -> list[Any]:
        """Return vLLM's `ParamMeta` of each tensor, in the order of the iteration."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, self._dtype_of(tensor), tuple(tensor.shape)) for name, tensor in self.weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Convert one tensor after another; those that have the engine's format are not copied."""
        for name, tensor in self.weights:
            yield name, tensor.detach().to(self._dtype_of(tensor))

    def packed_bytes(self) -> int:
        """Return the size of a buffer that holds every single tensor, and small ones together."""
        sizes = (tensor.numel() * self._dtype_of(tensor).itemsize for _, tensor in self.weights)
        return max(_MIN_PACKED_BYTES, *sizes)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype


class WeightTransfer:
    """Sends weights to one engine. The first update connects the two sides.

    Args:
        llm: The `vllm.LLM`.
        backend: How the bytes travel.
        dtype: Number format of the engine.
        num_workers: GPUs of the engine.
        died: The exception that vLLM raises when its process has died.
    """

    def __init__(
        self, llm: Any, backend: TransferBackend, dtype: torch.dtype, num_workers: int, died: type[Exception]
    ) -> None:
        self._calls = WeightCalls(llm)
        self._backend, self._num_workers, self._died = backend, num_workers, died
        self._stream = WeightStream(dtype)
        self._connected = False
        self._sender: Any = None  # vLLM's trainer engine

    def send(self, weights: Weights) -> None:
        """Replace the weights of the engine, and clear its prefix cache.

        Args:
            weights: A folder with `model.safetensors`, for `host`. Or the weights by their names in Hugging Face
                format; `host` needs an engine in this process for them.

        Raises:
            TransferError: If `ipc` or `nccl` fails.
            Exception: The exception of a dead engine, which a new engine can follow.
        """
        if self._backend == "host":
            self._send_on_host(weights)
            return
        assert not isinstance(weights, Path)
        self._stream.weights = list(weights)
        try:
            self._send_watched(self._backend)
        except (self._died, TransferError):
            raise
        except Exception as error:
            raise TransferError(
                f"engine.vllm.weight_transfer = {self._backend} did not deliver the weights to vLLM: "
                f"{first_line(error)}; set engine.vllm.weight_transfer: host"
            ) from error
        finally:
            self._stream.weights = ()

    def _send_watched(self, backend: Literal["ipc", "nccl"]) -> None:
        """Send from a thread: an NCCL broadcast to an engine that has died never ends, and nothing can interrupt it."""
        outcome = self._calls.failure = Future()

        def send() -> None:
            try:
                with _on_device_of(self._stream.weights):
                    if self._sender is None:
                        self._sender = self._connect(backend)
                    self._sender.send_weights()
            except Exception as error:
                _fail(outcome, error)
            else:
                outcome.set_result(None)

        thread = Thread(target=send, name="brorl-weights", daemon=True)
        thread.start()
        try:
            outcome.result()
        except Exception as error:
            thread.join(_GRACE_S)
            if thread.is_alive():
                raise TransferError(
                    f"vLLM failed during a broadcast of the weights ({first_line(error)}), which cannot be stopped; "
                    "resume the run, with engine.vllm.weight_transfer: host if this happens again"
                ) from error
            raise

    def _send_on_host(self, weights: Weights) -> None:
        if not self._connected:
            self._calls.init_weight_transfer_engine({})
            self._connected = True
        self._calls.start_weight_update()
        self._calls.update_weights({"weights": str(weights) if isinstance(weights, Path) else weights})
        self._calls.finish_weight_update()

    def _connect(self, backend: Literal["ipc", "nccl"]) -> Any:
        """Make vLLM's sender; it makes the call init."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        packed_bytes = self._stream.packed_bytes()
        match backend:
            case "ipc":
                from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

                info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=packed_bytes)
            case "nccl":
                from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

                info = NCCLTrainerInitInfo(
                    rank=0,
                    master_address=_THIS_MACHINE,
                    master_port=_free_port(),
                    world_size=1 + self._num_workers,
                    packed=True,
                    packed_buffer_size_bytes=packed_bytes,
                )
        return WeightTransferTrainerFactory.trainer_init(info, client=self._calls, source=self._stream)


def _on_device_of(weights: Sequence[tuple[str, Tensor]]) -> AbstractContextManager[Any]:
    """Make the GPU of the weights the current one: vLLM's senders use the current GPU."""
    device = weights[0][1].device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_THIS_MACHINE, 0))
        port: int = listener.getsockname()[1]
        return port
