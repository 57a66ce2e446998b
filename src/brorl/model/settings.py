"""Settings of the model's adapters, and of the moments of its weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from brorl.section import Names, Section

ForwardChoice = Literal["auto", "tree", "flat"]  # how rollouts go through the model
States = Literal["device", "host", "8bit"]  # where AdamW's moments are: on the device, on the CPU, in 8 bits


class LoraSettings(Section):
    """Train low-rank adapters instead of all weights (needs the extra `peft`)."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0 trains all weights instead")
    alpha: float = Field(32.0, gt=0, description="the adapters are scaled by alpha / rank")
    quantization: Literal["none", "nf4"] = Field(
        "none", description="format of the frozen weights: none, or nf4, 4 bits (QLoRA; needs the extra qlora)"
    )
    target_modules: Names = Field(("all-linear",), min_length=1, description="names of the layers that get an adapter")
