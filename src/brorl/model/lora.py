"""Low-rank adapters (LoRA, arXiv 2106.09685): a few trained weights in a model whose own weights are frozen.

They have no dropout, because its noise would enter the ratio of new to old probabilities. They need the extra `peft`.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from brorl.errors import UserError, first_line
from brorl.model.settings import LoraSettings
from brorl.model.source import text_modules

ALL_LINEAR = "all-linear"
_PREFIX = "base_model.model."
ADAPTER = "default"
_NAMED = re.compile(r"(\.lora_[A-Za-z_]+)\.(?!weight$|bias$)[^.]+")  # the adapter name, which some tools include
_FITTING = "set base_model_name_or_path in its adapter_config.json to the model that it was trained on"
_UNSUPPORTED = ("use_dora", "use_rslora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern",
                "layer_replication", "trainable_token_indices", "target_parameters")  # fmt: skip


def require_peft() -> None:
    """Check that peft is installed."""
    # bitsandbytes, which peft imports, warns that an optional kernel is not installed
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(f"LoRA needs the package peft ({error}); run: pip install 'brorl[peft]'") from error


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the config that loads a model in NF4, 4 bits per weight, with products in `dtype`.

    Source: QLoRA (arXiv 2305.14314), with its double quantization.
    """
    try:
        import accelerate  # noqa: F401
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"lora.quantization: nf4 needs the extra qlora ({error}); run: pip install 'brorl[qlora]'"
        ) from error
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def keep_gradients(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from packing NF4 weights while the model samples: its CPU kernel for them has no gradient."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def target_layers(model: PreTrainedModel, target_modules: Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers to adapt, by name: the named ones (`q_proj`, ...), or all text layers except the output."""
    from transformers.pytorch_utils import Conv1D

    modules = text_modules(model)
    linear = {n: m for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and not _is_own(m)}
    adaptable = _adaptable(model, {_own_name(n) for n in linear})
    if tuple(target_modules) == (ALL_LINEAR,):
        return {n: m for n, m in linear.items() if m is not model.get_output_embeddings() and _own_name(n) in adaptable}
    chosen: dict[str, nn.Module] = {
        n: m for n, m in linear.items() if any(n == t or n.endswith(f".{t}") for t in target_modules)
    }
    unused = [t for t in target_modules if not any(n == t or n.endswith(f".{t}") for n in chosen)]
    if unused:
        names = ", ".join(sorted({_own_name(n) for n in linear}))
        raise UserError(
            f"lora.target_modules names {unused[0]!r}, but no linear layer of {type(model).__name__} has this "
            f"name (there are {names}); fix it, or set {ALL_LINEAR}"
        )
    refused = sorted({_own_name(n) for n in chosen} - adaptable)
    if refused:
        raise UserError(
            f"lora.target_modules names {refused[0]!r}, which peft does not adapt in {type(model).__name__} (it adapts "
            f"{', '.join(sorted(adaptable))}); remove it, or set {ALL_LINEAR}"
        )
    return chosen


def _own_name(name: str) -> str:
    return name.rpartition(".")[2]


def _is_own(layer: nn.Module) -> bool:
    """Return whether a layer's class belongs to its model and is not linear, like Llama 4's expert router."""
    if not type(layer).__module__.startswith("transformers.models."):
        return False
    weight: Any = layer.weight
    return not isinstance(layer(weight.new_zeros(1, weight.shape[1])), Tensor)


def _adaptable(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return the names of linear layers that peft adapts in this kind of model, tested on a one-weight layer.

    peft rejects Mamba's `out_proj`, whose kernels read only the weight, and mistakes a `gate_proj` next to experts for
    one of the experts. Without peft, return all names: planning works without it, but training does not.
    """
    try:
        require_peft()
    except UserError:
        return {*names}
    kind: type = type(model.config)
    return {name for name in names if _adapts(kind, name)}


@cache
def _adapts(config_class: type, name: str) -> bool:
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):  # the trial weights are random
        trial = nn.ModuleDict({name: nn.Linear(1, 1)})
        trial.config = config_class()
        with suppress(ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(LoraConfig(target_modules=[name]), trial)
        return hasattr(trial[name], "lora_A")


def adapter_shapes(model: PreTrainedModel, settings: LoraSettings) -> list[tuple[int, int]]:
    """Return the shapes of the adapters' weights: (rank, inputs) and (outputs, rank) for each layer with an adapter."""
    shapes = []
    for layer in target_layers(model, settings.target_modules).values():
        outputs, inputs = layer.get_parameter("weight").shape[:: 1 if isinstance(layer, nn.Linear) else -1]
        shapes += [(settings.rank, inputs), (outputs, settings.rank)]
    return shapes


def add_adapter(model: PreTrainedModel, settings: LoraSettings, revision: str | None = None) -> None:
    """Add new adapters to a model and freeze its other weights. Checkpoints name their base, `model.name_or_path`.

    The adapters' weights are float32 even on a bfloat16 model, to keep small updates, and float64 on a float64 model.
    One matrix is random (torch's generator) and the other is 0, so the model's output does not change.
    """
    require_peft()
    from peft import LoraConfig

    names = list(target_layers(model, settings.target_modules))
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number is valid
        lora_dropout=0.0,
        target_modules=names,
        bias="none",
        task_type="CAUSAL_LM",
        revision=revision,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*tie_word_embeddings")  # about a later merge, which unties layers
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft sets it for GPT-2 and warns about it
            model.add_adapter(config, ADAPTER)
    except (ImportError, ValueError) as error:  # transformers rejects old versions of peft
        raise UserError(
            f"no adapters could be added ({first_line(error)}); to upgrade peft, run: pip install -U 'brorl[peft]'"
        ) from error
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    for name, parameter in model.named_parameters():
        is_adapter = f".{ADAPTER}." in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.to(dtype)


def continue_adapter(model: PreTrainedModel, folder: Path, settings: LoraSettings) -> None:
    """Add saved adapters, from a LoRA run or in peft's format, to a base model to continue their training."""
    config, saved = read_adapter(folder)
    odd = [key for key in _UNSUPPORTED if getattr(config, key, None)]
    if getattr(config.peft_type, "value", config.peft_type) != "LORA" or odd or config.bias != "none":
        what = odd[0] if odd else f"{config.peft_type} with bias {getattr(config, 'bias', None)}"
        raise UserError(
            f"the adapter in {folder} is not a plain LoRA adapter ({what}) and its training cannot continue; set "
            "lora.rank: 0 to merge it into its base and train all weights"
        )
    names = {name for name, _ in model.named_modules()}
    add_adapter(model, settings, config.revision)
    own = [_saved_name(name) for name, p in model.named_parameters() if p.requires_grad]
    ours = _describe(settings.rank, settings.alpha, own)
    theirs = _describe(config.r, config.lora_alpha, saved)
    if ours != theirs and names.issuperset(_modules(saved)):
        raise UserError(
            f"the adapter in {folder} has {theirs}, and this run has {ours}; set lora.rank, lora.alpha and "
            "lora.target_modules to match it, or lora.rank: 0 to merge it into its base and train all weights"
        )
    put_adapter(model, folder, saved)


def read_adapter(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return a saved adapter's config, and its weights by their names in peft's files, without the adapter's name."""
    require_peft()
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    try:
        config = PeftConfig.from_pretrained(str(folder))
        weights = load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"the adapter in {folder} cannot be read ({first_line(error)}); copy it again") from error
    saved = {_PREFIX + _NAMED.sub(r"\1", name.removeprefix(_PREFIX)): tensor for name, tensor in weights.items()}
    if len(saved) < len(weights):
        raise UserError(f"{folder} contains several adapters in one file; save only one of them")
    return config, saved


def put_adapter(model: nn.Module, folder: Path, saved: dict[str, Tensor]) -> None:
    """Copy a saved adapter's weights into a model that has its adapters. Every weight must have a counterpart."""
    from peft import set_peft_model_state_dict

    base = str(model.name_or_path)
    try:
        result: Any = set_peft_model_state_dict(model, saved, ADAPTER)
    except RuntimeError as error:  # torch lists the weights with different shapes below a first line without names
        wrong = (str(error).splitlines()[1:2] or [first_line(error)])[0].strip(" \t.")
        raise UserError(f"the adapter in {folder} does not fit its base {base}: {wrong}; {_FITTING}") from error
    missing = sorted(name for name in result.missing_keys if ADAPTER in name.split("."))
    unused = sorted(result.unexpected_keys)
    if missing or unused:
        problems = [f"no layer for {_some(unused)}"] if unused else []
        problems += [f"no weights for {_some(missing)}"] if missing else []
        raise UserError(f"the adapter in {folder} does not fit its base {base}: {', and '.join(problems)}; {_FITTING}")


def _some(names: Sequence[str]) -> str:
    """Return the first of several weight names, as in peft's files, and their number."""
    first = names[0].removeprefix(_PREFIX).replace(f".{ADAPTER}", "")
    return first if len(names) == 1 else f"{len(names)} weights ({first}, ...)"


def saved_adapter(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Return the adapters among a model's weights, by their names in peft's files."""
    return ((_saved_name(name), tensor) for name, tensor in weights if f".{ADAPTER}." in name)


def _saved_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def _modules(weights: Iterable[str]) -> set[str]:
    """Return the names of the modules to which these adapter weights, named as in peft's files, belong."""
    return {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in weights}


def _describe(rank: int, alpha: float, weights: Iterable[str]) -> str:
    modules = _modules(weights)
    kinds = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
    return f"rank {rank}, alpha {alpha:g} and {len(modules)} target modules ({kinds})"


_NUM_TOKENS = 12
_RELATIVE_ERROR = 1e-3  # largest change in a logit in float32, relative to the largest logit


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a base model with the adapters in a folder merged into its weights, all trainable.

    The base is at least float32: bfloat16 would round small adapters away. An adapter on one of two tied layers unties
    them. The logits of a few tokens are compared before and after the merge.
    """
    config, saved = read_adapter(folder)
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated parts of transformers
            warnings.filterwarnings("ignore", ".*tie_word_embeddings", UserWarning)  # the merge unties them
            adapted = PeftModel(model, config, ADAPTER).eval()
            put_adapter(adapted, folder, saved)
            expected = _few_logits(adapted)
            is_tied = _untie(model)
            merged_model: PreTrainedModel = adapted.merge_and_unload()
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:  # AttributeError: no merge exists
        raise UserError(
            f"the adapter in {folder} cannot be merged into its base {model.name_or_path} ({first_line(error)})"
        ) from error
    if is_tied:
        _tie_equal(merged_model)
    change = float((_few_logits(merged_model) - expected).abs().max())
    if not change <= _RELATIVE_ERROR * float(expected.abs().max()):
        raise UserError(
            f"merging the adapter in {folder} into {model.name_or_path} changes the model: its logits of "
            f"{_NUM_TOKENS} tokens differ by up to {change:.3g}; merge the adapter with the tool that trained it, and "
            "set model to the merged model"
        )
    merged_model.requires_grad_(True)
    return merged_model


def _untie(model: PreTrainedModel) -> bool:
    """Give every layer its own copy of a shared weight, so that each can change. Return whether any was shared."""
    seen: set[int] = set()
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters:
        if id(parameter) in seen:
            module, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module), own_name, nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))
    return len(parameters) > len(seen)


def _tie_equal(model: PreTrainedModel) -> None:
    """Tie the embedding and the output layer again if they are still equal. Record the result in the config."""
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
