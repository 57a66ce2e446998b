"""Settings of the model: the folder of a shipped model, the adapters, and the location of AdamW's moments.

Nothing here imports transformers.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field

from brorl.errors import UserError
from brorl.section import Names, Section
from brorl.storage import split_revision

ForwardChoice = Literal["auto", "tree", "flat"]  # how rollouts go through the model
States = Literal["device", "host", "8bit"]  # AdamW's moments are on the device, on the CPU, or in 8 bits


class LoraSettings(Section):
    """Train low-rank adapters instead of all weights (needs the extra `peft`)."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0 trains all weights instead")
    alpha: float = Field(32.0, gt=0, description="the adapters are scaled by alpha / rank")
    quantization: Literal["none", "nf4"] = Field(
        "none", description="format of the frozen weights: none, or nf4, 4 bits (QLoRA; needs the extra qlora)"
    )
    target_modules: Names = Field(("all-linear",), min_length=1, description="names of the layers that get an adapter")


SHIPPED = {  # name -> folder in the package
    "quickstart": "quickstart_model", "plateau": "plateau_model", "calculator": "calculator_model",
}  # fmt: skip


def shipped_folder(name: str) -> Path | None:
    """Return the folder of a shipped model; None for other names, or if a folder with that name exists."""
    return Path(str(files("brorl").joinpath(SHIPPED[name]))) if name in SHIPPED and not Path(name).exists() else None


def check_folder(name: str) -> None:
    """Check that a model's folder exists, if its name cannot be a hub id."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return
    if folder.exists():
        raise UserError(f"model {name} is a file; set model to the Hugging Face folder that contains it")
    if name.startswith((".", "/", "~")) or split_revision(name)[0].count("/") > 1:
        raise UserError(f"model folder {name} does not exist; set model to a folder, a hub id, or quickstart")
