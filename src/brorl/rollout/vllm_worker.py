"""Code that runs in the workers of vLLM: they import `WorkerMethods` by its name, and nothing else imports this module.

The import registers `HostTransfer` with vLLM's factory of weight transfer engines. vLLM imports the module before it
makes the engine of a worker.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from brorl.rollout.vllm_transfer import HOST_BACKEND


class WorkerMethods:
    """Added to vLLM's worker class (`worker_extension_cls`)."""

    model_runner: Any

    def repack_tied_head(self) -> None:
        """Pack the output layer again after a weight update, if it shares its weights with the input embedding.

        On a CPU vLLM 0.32 computes the output layer with a packed copy of its weights. A weight update renews the
        packed copies of the layers in the checkpoint only, and a tied output layer is not in the checkpoint.
        """
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        if head is not None and getattr(model.config, "tie_word_embeddings", False):
            head.quant_method.process_weights_after_loading(head)

    def end_with(self, owner: int) -> None:
        """End the processes of this engine when its owner ends, however it ends; vLLM 0.32 lets them live on.

        Args:
            owner: The process that started the engine.
        """
        if os.getpid() != owner:
            descriptor = os.pidfd_open(owner)
            Thread(target=_end_after, args=(descriptor, os.getppid(), owner), daemon=True).start()


@dataclass
class HostInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The call init of `HostTransfer`; there is no connection to make."""


@dataclass
class HostUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The call update of `HostTransfer`."""

    # folder of `model.safetensors`, or the named tensors if the worker runs in the process of the caller
    weights: str | Iterable[tuple[str, Tensor]]


class HostTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Receives weights in the memory of the host, in Hugging Face format."""

    init_info_cls = HostInit
    update_info_cls = HostUpdate

    def init_transfer_engine(self, init_info: HostInit) -> None:
        """Do nothing: the file or the tensors come with each update."""

    def start_weight_update(self) -> None:
        """Prepare the layers for weights in Hugging Face format."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one update; without a GPU there is none to wait for, and vLLM's own method fails."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostUpdate) -> None:
        """Load the weights of an update into the model; vLLM keeps the fraction of this worker."""
        weights = update_info.weights
        self.model.load_weights(_read(Path(weights)) if isinstance(weights, str) else weights)

    def finish_weight_update(self) -> None:
        """Bring the layers into the form that vLLM computes with."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: no connection is open."""


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _end_after(descriptor: int, parent: int, owner: int) -> None:
    """Wait for the end of the owner; then end this process, and the core of the engine if it is between the two."""
    select.select([descriptor], [], [])
    if parent != owner:
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


WeightTransferEngineFactory.register_engine(HOST_BACKEND, HostTransfer)
