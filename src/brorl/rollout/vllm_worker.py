"""A method for the workers of vLLM, which import this class by its name; vLLM is not imported here."""

from __future__ import annotations

from typing import Any


class WeightUpdates:
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
