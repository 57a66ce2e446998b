"""Code that runs inside vLLM's processes. They import `VllmExtension` by name; nothing else does."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class VllmExtension:
    """Methods that vLLM adds to its own worker class (`worker_extension_cls`)."""

    model_runner: Any
    vllm_config: Any

    def receive_weights(self, weights: str | Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights from a folder with `model.safetensors`, or from named tensors in this process.

        The weights have Hugging Face names. vLLM keeps only this process's part.
        """
        model = self.model_runner.get_model()
        if isinstance(weights, str):
            weights = _read(Path(weights))
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_tied_head(model)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the sender may overwrite its memory afterwards

    def end_with(self, owner: int) -> None:
        """End this engine's processes when their owner ends for any reason. vLLM itself would keep them running."""
        if os.getpid() != owner:
            descriptor = os.pidfd_open(owner)
            Thread(target=_end_after, args=(descriptor, os.getppid(), owner), daemon=True).start()


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _repack_tied_head(model: Any) -> None:
    """Repack the output layer if it shares its weights with the input embedding.

    On a CPU, vLLM computes the output layer with a packed copy of its weights. An update refreshes the packed copies
    only for layers in the checkpoint, which omits a tied output layer.
    """
    text = getattr(model, "language_model", model)  # the text part of a multimodal model
    head = getattr(text, "lm_head", None)
    if head is not None and getattr(text.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


def _end_after(descriptor: int, parent: int, owner: int) -> None:
    """Wait until the owner ends, then end this process, and also its parent if that is the engine core."""
    select.select([descriptor], [], [])
    if parent != owner:
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
