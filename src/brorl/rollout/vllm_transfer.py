"""The way of new weights to a vLLM engine: as a file in shared memory, or as CUDA memory that the engine maps (IPC).

`vllm_worker` receives them. Adapters are always a file, in peft's format: vLLM adds them to its own copy of the base.
CUDA IPC has not run on a GPU; the tests share memory of the CPU between the two processes by the same code.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from brorl.errors import first_line
from brorl.model.device import to_host
from brorl.model.lora import saved_adapter
from brorl.model.settings import LoraSettings
from brorl.storage import TemporaryFolder

Transfer = Literal["host", "ipc"]
Weights = Path | Iterable[tuple[str, Tensor]]  # a folder that `publish` has written, or the tensors themselves

_SHARED_MEMORY = Path("/dev/shm")
_TRIED_NUMBERS = 1000


def publish(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, lora: LoraSettings | None = None
) -> TemporaryFolder:
    """Return a folder with weights for other processes to read, in shared memory where it has room.

    Args:
        weights: The weights by their names in the learner's model.
        dtype: Number format of `model.safetensors`.
        lora: If given, the adapters among the weights are written alone, in peft's format and their own number format.
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


def shared_handles(weights: Iterable[tuple[str, Tensor]]) -> bytes:
    """Return handles by which another process maps tensors; they must not change or end before it has read them."""
    handles, gpus = [], dict[torch.device, str]()
    for name, tensor in weights:
        rebuild, arguments = reduce_tensor(tensor.detach())
        if tensor.is_cuda and tensor.device not in gpus:
            gpus[tensor.device] = str(torch.cuda.get_device_properties(tensor.device).uuid)
        handles.append((name, gpus.get(tensor.device), rebuild, arguments))
    for gpu in gpus:
        torch.cuda.synchronize(gpu)  # the numbers are there
    return bytes(ForkingPickler.dumps(handles))


def mapped(handles: bytes) -> Iterable[tuple[str, Tensor]]:
    """Map tensors of another process; its GPU can have another number here.

    Raises:
        RuntimeError: If this process does not see the GPU.
    """
    for name, gpu, rebuild, arguments in pickle.loads(handles):
        if rebuild is rebuild_cuda_tensor:
            arguments = (*arguments[:6], _number_of(gpu), *arguments[7:])  # 6: the number of the device
        yield name, rebuild(*arguments)


def _number_of(gpu: str) -> int:
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == gpu:
            return number
    raise RuntimeError(f"the engine does not see the learner's GPU {gpu}")


def try_ipc(values_of: Callable[[bytes], Any], device: torch.device) -> str | None:
    """Send random numbers to the engine by IPC; return None if they arrive, and what went wrong otherwise.

    Args:
        values_of: Returns the numbers that each process of the engine reads from handles.
        device: Device of the learner.
    """
    sent = torch.rand(_TRIED_NUMBERS, device=device)
    try:
        seen = values_of(shared_handles([("tried", sent)]))
    except Exception as error:  # whatever CUDA, torch or vLLM raise: the file is the other way
        return first_line(error)
    return None if seen and all(values == sent.tolist() for values in seen) else "the engine read other numbers"
