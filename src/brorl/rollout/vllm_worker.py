"""Methods for the workers of vLLM, which import this class by its name; vLLM is not imported here."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from threading import Thread
from typing import Any


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


def _end_after(descriptor: int, parent: int, owner: int) -> None:
    """Wait for the end of the owner; then end this process, and the core of the engine if it is between the two."""
    select.select([descriptor], [], [])
    if parent != owner:
        with suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
