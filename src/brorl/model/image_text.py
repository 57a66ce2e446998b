"""Models of images and text: which class loads them, and which of their weights are of text.

A checkpoint of images and text is loaded by its own class, so it is saved in the layout that it came in. Prompts are
text. The weights that read images stay as they are, and a checkpoint has them too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils.hub import cached_file

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class of transformers that loads a checkpoint whole; None if it is no model of text.

    Some models of images and text have a class for their text alone. It loads what a checkpoint names it for.
    """
    of_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    is_named = of_images in (config.architectures or (of_images,))
    if is_named and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and _has_text_part(config):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None


def text_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of a model's text part by name: all, unless it has others for images."""
    modules = dict(model.named_modules())
    if not _has_text_part(model.config):
        return modules
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    prefixes = tuple(f"{name}." for name, module in modules.items() if module in parts)
    return {name: module for name, module in modules.items() if f"{name}.".startswith(prefixes)}


def freeze_images(model: PreTrainedModel) -> None:
    """Freeze the weights of a model that are not of its text part."""
    of_text = {id(p) for module in text_modules(model).values() for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in of_text:
            parameter.requires_grad_(False)


def processor_files(model: PreTrainedModel, may_download: bool = False) -> list[Path]:
    """Return the files beside a model's weights that say how it reads images; none for a model of text.

    `may_download` fetches them into the cache of the hub.
    """
    if not _has_text_part(model.config):
        return []
    found = (
        cached_file(
            str(model.name_or_path),
            name,
            revision=getattr(model.config, "_commit_hash", None),
            local_files_only=not may_download,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for name in _PROCESSOR_FILES
    )
    return [Path(path) for path in found if path is not None]


def _has_text_part(config: PreTrainedConfig) -> bool:
    return config.get_text_config(decoder=True) is not config
