"""Finds a model by name, and before reading any weights, rejects a model that cannot be trained.

A name is a shipped model, a local folder (including a run's checkpoint or its `best` link) or a hub id, optionally with
a revision: `id@revision`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from brorl.errors import UserError, first_line
from brorl.model.settings import check_folder, shipped_folder
from brorl.storage import exists, split_revision

ADAPTER_CONFIG = "adapter_config.json"
_PROBE_TIMEOUT_S = 4.0
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NOT_CAUSAL = re.compile(
    r"For(MaskedLM|PreTraining|NextSentence|(Image|Audio|Sequence|Token|Video)Classification|QuestionAnswering|"
    r"MultipleChoice|RewardModel)|RewardModel|EncoderModel"
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model is loaded from."""

    name: str  # the name from the settings
    path: str  # an absolute folder with links resolved, or a hub id; valid in any working directory
    local_only: bool  # whether all files are on this machine and none may be downloaded
    adapter: Path | None = None  # folder of its LoRA adapter, or None
    revision: str | None = None  # branch, tag or commit on the hub; None for the main branch, and for a folder

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` besides the path."""
        revision = {} if self.revision is None else {"revision": self.revision}
        return {"local_files_only": self.local_only, **revision}


def find_model(name: str) -> ModelSource:
    """Find a shipped model, a folder or a hub id by name. An adapter's folder means its base with the adapter."""
    shipped = shipped_folder(name)
    if shipped is not None:
        return ModelSource(name, str(shipped), local_only=True)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _find_in(folder.resolve(), name)
    check_folder(name)
    path, revision = split_revision(name)
    return ModelSource(name, path, _is_offline(path, revision), revision=revision)


def read_config(source: ModelSource) -> PreTrainedConfig:
    """Read a model's config, and check that it is a causal LM whose weights can be trained."""
    try:
        raw, _ = PreTrainedConfig.get_config_dict(source.path, **source.options)
    except (OSError, ValueError) as error:
        raise UserError(not_loaded(source.name, "config", error)) from error
    _check_raw(source.name, raw)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.path, trust_remote_code=False, **source.options)
    except Exception as error:  # strict config classes have their own errors
        raise UserError(not_loaded(source.name, "config", error)) from error
    if config.is_encoder_decoder or auto_class(config) is None:
        raise UserError(
            f"the model {source.name!r} is a {config.model_type}, which is not a causal language model; set model to a "
            "decoder (Llama, Qwen, Mistral, ...)"
        )
    return config


def commit_of(source: ModelSource) -> str | None:
    """Return the hub commit from which a model's files were downloaded; None for a folder."""
    from huggingface_hub import try_to_load_from_cache

    if Path(source.path).is_dir():
        return None
    file = try_to_load_from_cache(source.path, "config.json", revision=source.revision)
    return Path(file).parent.name if isinstance(file, str) else None


def check_weights(source: ModelSource) -> None:
    """Check that a local folder has all of its weight files and that none is a Git LFS pointer."""
    folder = Path(source.path)
    if not folder.is_dir():
        return
    files = [folder / name for name in _WEIGHTS if (folder / name).exists()]
    index = next((folder / name for name in _INDICES if (folder / name).exists()), None)
    if not files and index is None:
        raise UserError(f"model folder {source.name} has a config but no weights ({_WEIGHTS[0]}); copy them there")
    if not files and index is not None:
        try:
            files = [
                folder / shard for shard in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            ]
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index} is damaged ({error!r}); copy it again") from error
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise UserError(
            f"model folder {source.name} is missing {len(missing)} of {len(files)} weight files ({missing[0]}, ...); "
            "copy them there"
        )
    for path in files:
        with path.open("rb") as file:
            if file.read(20).startswith(b"version https://git-"):
                raise UserError(f"{path} is a Git LFS pointer, not the weights; run: git lfs pull")


def not_loaded(name: str, what: str, error: Exception) -> str:
    """Return the message for a part of a model that transformers failed to load, such as its `config`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
    return f"could not load the {what} of {name!r}: {reason}"


_BUILDING = RLock()


@contextmanager
def building_model() -> Iterator[None]:
    """Let transformers make a model, in one thread at a time, without progress bars or tables.

    While it does, `PreTrainedModel.tie_weights`, functions of `torch.nn.init` and torch's default dtype are replaced
    for the whole process. Two threads would restore each other's replacements, and leave them in place permanently.
    """
    with _BUILDING:
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)


def _find_in(folder: Path, name: str) -> ModelSource:
    """Return the model, or the adapter with its base model, in a local folder. `name` is as the user wrote it."""
    is_model, is_adapter = (folder / "config.json").exists(), (folder / ADAPTER_CONFIG).exists()
    if is_model and is_adapter:
        raise UserError(f"model folder {name} has both a model and an adapter; move the adapter to a different folder")
    if is_model:
        return ModelSource(name, str(folder), local_only=True)
    if not is_adapter:
        hint = " (it is a run; set model to one of its checkpoints)" if (folder / "checkpoints").is_dir() else ""
        raise UserError(f"model folder {name} has no config.json; it must be a Hugging Face model folder{hint}")
    try:
        adapter = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
        base, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / ADAPTER_CONFIG} does not name the adapter's base model ({error!r})") from error
    try:
        base_source = find_model(f"{base}@{revision}" if revision and not exists(base) else base or "")
    except UserError as error:
        raise UserError(f"the base model of the adapter {name} was not found: {error}") from error
    if base_source.adapter is not None:
        raise UserError(f"the base model of the adapter {name} is itself an adapter ({base}); merge the base first")
    return replace(base_source, name=name, adapter=folder)


def _check_raw(name: str, raw: Mapping[str, Any]) -> None:
    """Check the raw entries of a config."""
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise UserError(
                f"the model {name!r} needs its own code (trust_remote_code), which brorl does not run; choose an "
                "architecture built into transformers"
            )
        raise UserError(
            f"the config.json of {name!r} has model_type {kind!r}, which the installed transformers does not support; "
            "upgrade transformers, or check the file"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "quantized")
        raise UserError(
            f"the weights of {name!r} are quantized ({method}), and quantized weights cannot be trained; set model to "
            "the version in bfloat16 or float32"
        )
    other = [kind for kind in raw.get("architectures") or [] if _NOT_CAUSAL.search(kind)]
    if other:
        raise UserError(
            f"the model {name!r} is a {other[0]}, which does not generate text; set model to a causal language model"
        )


@cache
def _is_offline(name: str, revision: str | None) -> bool:
    """Return whether the hub is unreachable, so the model must come from previously downloaded files."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    refusals: dict[type[Exception], str] = {  # subclasses come before their base classes
        GatedRepoError: (
            f"the model {name!r} is gated; ask for access at {constants.ENDPOINT}/{name}, then run: hf auth login"
        ),
        RepositoryNotFoundError: (
            f"there is no model {name!r}: no such folder here, and no such public model on the hub; fix the name, or, "
            "if it is private, run: hf auth login"
        ),
        RevisionNotFoundError: (
            f"the model {name!r} on the hub has no revision {revision!r}; use one of its branches, tags or commits"
        ),
        EntryNotFoundError: (
            f"the model {name!r} on the hub has no config.json; if it is an adapter, run: hf download {name} "
            "--local-dir FOLDER, and set model to that folder"
        ),
        HFValidationError: f"{name!r} is neither a folder nor a hub id (like Qwen/Qwen3-0.6B); fix the name",
    }
    try:
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=_PROBE_TIMEOUT_S)
    except Exception as error:
        refusal = next((text for kind, text in refusals.items() if isinstance(error, kind)), None)
        if refusal is None:  # no network, no answer, a proxy: HTTP client errors share no base class
            if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
                return True
            reason = f"HTTP {error.response.status_code}" if isinstance(error, HfHubHTTPError) else first_line(error)
            what = "the model" if revision is None else f"its revision {revision!r}"
            refusal = (
                f"there is no folder {name!r}, the hub cannot be reached ({reason}), and {what} was not downloaded "
                "before; set model to a local folder, or quickstart"
            )
        raise UserError(refusal) from error
    return False


_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the transformers auto class that loads a whole checkpoint; None if it is not a text model.

    Some image-text models also have a text-only class, which loads the checkpoints that name it.
    """
    image_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    is_named = image_class in (config.architectures or (image_class,))
    if is_named and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and _has_text_part(config):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None


def text_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of a model's text part by name: all modules if none process images."""
    modules = dict(model.named_modules())
    if not _has_text_part(model.config):
        return modules
    text_roots = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    prefixes = tuple(f"{name}." for name, module in modules.items() if module in text_roots)
    return {name: module for name, module in modules.items() if f"{name}.".startswith(prefixes)}


def freeze_images(model: PreTrainedModel) -> None:
    """Freeze all weights outside a model's text part."""
    text_ids = {id(p) for module in text_modules(model).values() for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in text_ids:
            parameter.requires_grad_(False)


def processor_files(model: PreTrainedModel, may_download: bool = False) -> list[Path]:
    """Return the files next to a model's weights that specify how it reads images. A text model has none.

    `may_download` allows fetching them into the hub's cache.
    """
    if not _has_text_part(model.config):
        return []
    paths = (
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
    return [Path(path) for path in paths if path is not None]


def _has_text_part(config: PreTrainedConfig) -> bool:
    return config.get_text_config(decoder=True) is not config
