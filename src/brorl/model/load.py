"""Loads a Hugging Face causal LM and its tokenizer, and says plainly what is missing.

In: the name of the shipped model, a local folder or a hub id. Out: a model on a device, with dropout off, and its
tokenizer. It refuses a tokenizer without an end-of-sequence token, since no response could ever finish.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from brorl.errors import UserError

QUICKSTART = "quickstart"


class LoadedModel(NamedTuple):
    """A model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def choose_device(name: str) -> torch.device:
    """Return the device of a config's name.

    Raises:
        UserError: If CUDA was asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {name} was asked for, but torch sees no CUDA device; set device: cpu")
    return torch.device(name)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer and check that it has an end-of-sequence token.

    Raises:
        UserError: If it cannot be loaded or has no end token.
    """
    source = _source(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(_not_loaded(name, "tokenizer", error)) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {name} has no end-of-sequence token, so no response could finish; set eos_token in its "
            "tokenizer_config.json"
        )
    return tokenizer


def load_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal LM with its dropout switched off.

    Raises:
        UserError: If it cannot be loaded.
    """
    source = _source(name)
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(_not_loaded(name, "model", error)) from error
    model: PreTrainedModel
    model, info = loaded
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"the model {name!r} lacks weights ({missing}); its folder is incomplete or of another model")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # modules that call the dropout function themselves
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    model.to(device)  # type: ignore[arg-type]
    return model


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's, and those of the model's generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    extra = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({tokenizer.eos_token_id, *(t for t in extra if t is not None)}))


def _source(name: str) -> str:
    if name == QUICKSTART and not Path(name).exists():
        return str(files("brorl").joinpath("quickstart_model"))
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"model folder {name} does not exist; set model to a folder, a hub id, or {QUICKSTART}")
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise UserError(f"model folder {name} has no config.json; it must be a Hugging Face model folder")
    return name


def _not_loaded(name: str, what: str, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    return f"could not load the {what} of {name!r}: {reason} (offline? set model to a local folder)"
