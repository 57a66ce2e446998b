"""Merges adapters into the weights of their base, and compares the logits before and after."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from brorl.errors import UserError, first_line
from brorl.model.lora import require_peft

_NUM_TOKENS = 12
_RELATIVE_ERROR = 1e-3  # in float32: of the largest logit


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a base model with the adapters of a folder added to its weights, all trainable.

    The base is at least in float32: bfloat16 would round small adapters away. Adapters of one of two tied layers untie
    them. The logits of a few tokens are compared with those before the merge.

    Raises:
        UserError: If peft is missing, the adapter does not fit, or the merged model is another one.
    """
    require_peft()
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated parts of transformers
            warnings.filterwarnings("ignore", ".*tie_word_embeddings", UserWarning)  # the merge unties them
            adapted = PeftModel.from_pretrained(model, str(folder)).eval()
            expected = _few_logits(adapted)
            is_tied = _untie(model)
            whole: PreTrainedModel = adapted.merge_and_unload()
    except (OSError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise UserError(
            f"the adapter in {folder} cannot be merged into its base {model.name_or_path} ({first_line(error)})"
        ) from error
    if is_tied:
        _tie_equal(whole)
    _check_same(_few_logits(whole), expected, f"merging the adapter in {folder} into {model.name_or_path}")
    whole.requires_grad_(True)
    return whole


def _untie(model: PreTrainedModel) -> bool:
    """Give every layer its own copy of a weight that several share, so that one can change; return whether any did."""
    seen: set[int] = set()
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters:
        if id(parameter) in seen:
            module, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module), own_name, nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))
    return len(parameters) > len(seen)


def _tie_equal(model: PreTrainedModel) -> None:
    """Tie the embedding and the output layer again if they are still equal; the config says whether they are."""
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    is_equal = torch.equal(embedding.weight, output.weight)
    if is_equal:
        output.weight = embedding.weight
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = is_equal


@torch.no_grad()
def _few_logits(model: nn.Module) -> Tensor:
    """Return the logits of a causal LM for a few tokens, shape [1, T, V]."""
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    token_1T = torch.arange(_NUM_TOKENS)[None] * 7 % vocabulary
    logits: Tensor = model(input_ids=token_1T.to(model.device), use_cache=False).logits
    return logits.cpu()


def _check_same(got: Tensor, expected: Tensor, conversion: str) -> None:
    """Check that a conversion kept the logits of a model.

    Raises:
        UserError: If it did not; it names the conversion.
    """
    error = float((got - expected).abs().max())
    if not error <= _RELATIVE_ERROR * float(expected.abs().max()):
        raise UserError(
            f"{conversion} gives another model: its logits of {_NUM_TOKENS} tokens differ by up to {error:.3g}; merge "
            "the adapter with the tool that trained it, and set model to the merged model"
        )
