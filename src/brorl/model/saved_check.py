"""Compares saved weights with the model that was trained, before anything relies on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from brorl.errors import UserError
from brorl.model.image_text import auto_class
from brorl.model.lora import saved_adapter
from brorl.model.source import ADAPTER_CONFIG, quiet_transformers

_NOT_OF_THE_MODEL = ("_name_or_path", "dtype", "transformers_version")


def check_saved(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Check that a folder holds the model or the adapters that were saved there, weight by weight and bit by bit.

    A whole model is loaded by transformers, with the folder's config; the weights stay in their file.

    Args:
        model: The model; its parameters may be sharded.
        weights: The parameters that were saved, whole, by name.
        folder: The folder.

    Raises:
        UserError: If it holds another model; it names what differs.
    """
    if is_adapter := (folder / ADAPTER_CONFIG).exists():
        saved = load_file(folder / "adapter_model.safetensors")
        weights = dict(saved_adapter(weights.items()))
        wrong = []
    else:
        # some models draw random numbers while they load, and the random state is part of the checkpoint
        with quiet_transformers(), torch.random.fork_rng(devices=()):
            again: Any = auto_class(model.config).from_pretrained(
                folder, dtype=model.dtype, local_files_only=True, trust_remote_code=False
            )
        saved = dict(again.named_parameters())
        wrong = [f"{key} of its config" for key in _differing(_plain(model.config), _plain(again.config))]
    wrong += sorted(saved.keys() ^ weights.keys())
    wrong += [n for n, weight in weights.items() if n in saved and not torch.equal(saved[n].to(weight), weight)]
    if wrong:
        what = "adapters" if is_adapter else "model"
        raise UserError(
            f"the {what} that was saved differs from the {type(model).__name__} that was trained ({wrong[0]}, "
            f"{len(wrong)} differences); {'change lora.target_modules' if is_adapter else 'train adapters (lora.rank)'}"
            ", or install another version of transformers"
        )


def _plain(config: PreTrainedConfig) -> Any:
    """Return the entries of a config that define the model, as JSON reads them."""

    def defining(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if key not in _NOT_OF_THE_MODEL}

    return json.loads(json.dumps(config.to_dict(), default=str), object_hook=defining)


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
