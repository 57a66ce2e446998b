"""The blueprint of a loaded model, from which another process makes the same model without weights.

In: a causal LM with its weights. Out: its config, the shapes and types of its parameters, and its buffers, small enough
to be sent. The model that is made from it has its parameters on the meta device, which takes no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from brorl.model.load import model_without_weights
from brorl.model.settings import LoraSettings


@dataclass(frozen=True)
class Blueprint:
    """A model without the values of its parameters."""

    config: PreTrainedConfig
    lora: LoraSettings | None  # its adapters; None if all weights are trained
    gradient_checkpointing: bool  # whether the backward pass computes activations again
    # parameters on the meta device by name; tied parameters are one object under several names
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]  # buffers by name, with their values. Weight files do not have all of them

    @classmethod
    def of(
        cls, model: PreTrainedModel, lora: LoraSettings | None = None, gradient_checkpointing: bool = False
    ) -> Blueprint:
        """Return the blueprint of a model."""
        empty = {
            p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)  # contiguous for FSDP
            for p in model.parameters()
        }
        parameters = {name: empty[p] for name, p in model.named_parameters(remove_duplicate=False)}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return cls(model.config, lora, gradient_checkpointing, parameters, buffers)

    def build(self) -> PreTrainedModel:
        """Return the model with its parameters on the meta device."""
        model = model_without_weights(self.config, self.lora, self.gradient_checkpointing)
        self._put_into(model)
        return model

    def take_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the weights of the model of this blueprint by name, and leave its parameters on the meta device.

        Nothing else refers to the model's weights afterwards.
        """
        weights = {name: p.detach() for name, p in model.named_parameters()}
        self._put_into(model)
        return weights

    def _put_into(self, model: PreTrainedModel) -> None:
        """Replace all parameters and buffers of a model."""
        for name, tensor in {**self.parameters, **self.buffers}.items():
            module, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module), own_name, tensor)
