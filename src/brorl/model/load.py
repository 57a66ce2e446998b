"""Loads a Hugging Face causal LM, with dropout off, and its tokenizer; compares saved models with the original."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from brorl.errors import UserError
from brorl.model.lora import (
    ADAPTER,
    add_adapter,
    continue_adapter,
    keep_gradients,
    merged,
    nf4_config,
    require_peft,
    saved_adapter,
)
from brorl.model.settings import LoraSettings
from brorl.model.source import (
    ADAPTER_CONFIG,
    ModelSource,
    auto_class,
    building_model,
    check_weights,
    commit_of,
    find_model,
    freeze_images,
    not_loaded,
    processor_files,
    read_config,
)
from brorl.model.tree_attention import enable_gradient_checkpointing
from brorl.sampling import check_stop, special_token, stop_tokens

_log = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes, as torch aligns new tensors on a CPU
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def choose_device(name: str) -> torch.device:
    """Return the device named in the settings. Raise an error if this machine lacks it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"device {name} needs CUDA, but torch finds no CUDA device; set device: cpu, or run `brorl doctor`"
        )
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise UserError(
            f"device {name} needs {device.index + 1} CUDA devices, but torch finds {torch.cuda.device_count()}; set "
            "device: cuda"
        )
    return device


def load_tokenizer(name: str, stop: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Load a tokenizer, and check that responses can end, including with each string in `stop`.

    If a tokenizer has no end token, the first special token in `stop` becomes its end token. An adapter's tokenizer can
    be in the adapter's folder or its base model's.
    """
    source = find_model(name)
    beside = source.adapter is not None and (source.adapter / "tokenizer_config.json").exists()
    path = str(source.adapter) if beside else source.path
    if Path(path).is_dir() and not any((Path(path) / file).exists() for file in _TOKENIZER_FILES):
        raise UserError(
            f"model folder {name} has no tokenizer ({_TOKENIZER_FILES[0]}); copy the model's tokenizer there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **source.options)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(not_loaded(name, "tokenizer", error)) from error
    check_stop(name, tokenizer, stop)
    if tokenizer.eos_token_id is None:
        special = ", ".join(t for t in tokenizer.all_special_tokens if t != tokenizer.unk_token) or "none"
        if not stop:
            raise UserError(
                f"the tokenizer of {name} has no end-of-sequence token, so no response could finish; set sampling.stop "
                f"to texts that end a response (special tokens: {special}), or eos_token in its "
                "tokenizer_config.json"
            )
        tokenizer.eos_token = next((text for text in stop if special_token(tokenizer, text) is not None), None)
    return tokenizer


def check_vocabulary(name: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model's embedding has a row for every token in a tokenizer."""
    rows = int(config.get_text_config().vocab_size)
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= rows:
        raise UserError(
            f"the tokenizer of {name} has token {token!r} with id {largest}, but the model's embedding has {rows} "
            "rows (vocab_size in its config.json); copy the model's own tokenizer into its folder, or add "
            "embedding rows for new tokens (resize_token_embeddings in transformers)"
        )


def load_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    lora: LoraSettings | None = None,
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """Load a causal LM without dropout. `requires_grad` marks the trained weights, which belong to the text part.

    `name` is a shipped model, a folder or a hub id, with or without `@revision`. With `lora`, a saved adapter is
    trained further; without, it is merged. The weights have `dtype`, but with `lora`, only the frozen weights do:
    adapters have at least float32.
    """
    source = find_model(name)
    if lora or source.adapter:
        require_peft()  # fail before the weights are read
    if source.adapter and not lora:  # merge in float32: bfloat16 would round the adapters away
        exact = torch.promote_types(dtype, torch.float32)
        model = merged(_load(source, exact), source.adapter)
        for parameter in model.parameters():  # not buffers: rotation frequencies stay exact
            parameter.data = parameter.data.to(dtype)
    else:
        model = _load(source, dtype, quantized_on=device if lora and lora.quantization == "nf4" else None)
    _check_finite(model, source.name)
    keep_gradients(model)
    freeze_images(model)
    _switch_dropout_off(model)
    model.name_or_path = source.path  # adapter checkpoints name it as their base
    processor_files(model, may_download=not source.local_only)
    model.to(device)  # type: ignore[arg-type]
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if lora and source.adapter:
        continue_adapter(model, Path(source.adapter), lora)
    elif lora:
        add_adapter(model, lora, commit_of(source))
    _align(model)
    return model


def end_tokens(
    model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase, stop: Iterable[str] = ()
) -> tuple[int, ...]:
    """Return the tokens that end a response, from the tokenizer, the model's generation config, and `stop`.

    `model` can also be a name, as in `load_model`; the model is then not loaded.
    """
    if isinstance(model, str):
        source = find_model(model)
        try:
            generation = GenerationConfig.from_pretrained(source.path, **source.options)
        except OSError:  # the model has no generation config
            generation = GenerationConfig.from_model_config(read_config(source))
    else:
        generation = model.generation_config
    configured = getattr(generation, "eos_token_id", None)
    extra = configured if isinstance(configured, list) else [configured]
    tokens = {tokenizer.eos_token_id, *extra, *stop_tokens(tokenizer, stop)}
    return tuple(sorted(token for token in tokens if token is not None))


def _load(source: ModelSource, dtype: torch.dtype, quantized_on: torch.device | None = None) -> PreTrainedModel:
    """Load a source's model without its adapter; in 4 bits on the device `quantized_on` if given."""
    config = read_config(source)
    check_weights(source)
    quantized: dict[str, Any] = {}
    if quantized_on is not None:
        quantized = {"quantization_config": nf4_config(dtype), "device_map": {"": quantized_on}}
    try:
        with building_model():
            loaded: Any = auto_class(config).from_pretrained(
                source.path,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # an error below names the weight
                trust_remote_code=False,
                **source.options,
                **quantized,
            )
    except SafetensorError as error:
        raise UserError(f"the weights of {source.name!r} are damaged ({error}); copy or download them again") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(not_loaded(source.name, "model", error)) from error
    model: PreTrainedModel
    model, info = loaded
    if info["mismatched_keys"]:
        weight, shape, expected = sorted(info["mismatched_keys"])[0]
        raise UserError(
            f"the weights of {source.name!r} do not fit its config.json: {weight} has shape {tuple(shape)}, and the "
            f"config needs {tuple(expected)}; copy both from the same model"
        )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(
            f"the model {source.name!r} is missing weights ({missing}); its folder is incomplete or "
            "belongs to a different model"
        )
    if info["unexpected_keys"]:
        unused = ", ".join(sorted(info["unexpected_keys"])[:3])
        _log.warning("%s contains weights that %s does not use (%s, ...)", source.name, type(model).__name__, unused)
    return model


def _check_finite(model: PreTrainedModel, name: str) -> None:
    """Reject non-finite weights, which come from a diverged run or a damaged file."""
    for layer, weight in model.named_parameters():
        if weight.is_floating_point() and not all(map(isfinite, torch.aminmax(weight.detach()))):
            count = int((~torch.isfinite(weight)).sum())
            raise UserError(
                f"{count:,} of {weight.numel():,} numbers of {layer} in the model {name!r} are not finite; its file is "
                "damaged, or its training diverged; choose another checkpoint"
            )


def _align(model: PreTrainedModel) -> None:
    """Copy misaligned weights, which torch reads in place from a file: rounding in products depends on alignment."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def _switch_dropout_off(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # for modules that call the dropout function
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@dataclass(frozen=True)
class Blueprint:
    """Everything in a model except the values of its parameters."""

    config: PreTrainedConfig
    lora: LoraSettings | None  # the adapters; None if all weights are trained
    revision: str | None  # hub revision of the adapters' base
    gradient_checkpointing: bool  # whether the backward pass recomputes activations
    # parameters on the meta device by name; tied parameters are one object under several names
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]  # buffers by name, with their values. Weight files do not contain all of them

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
        adapters: Any = model.peft_config if lora else {}
        revision = adapters[ADAPTER].revision if lora else None
        return cls(model.config, lora, revision, gradient_checkpointing, parameters, buffers)

    def build(self) -> PreTrainedModel:
        """Return the model with its parameters on the meta device."""
        with building_model(), torch.device("meta"):
            model: PreTrainedModel = auto_class(self.config).from_config(self.config).eval()
            _switch_dropout_off(model)
            if self.gradient_checkpointing:
                enable_gradient_checkpointing(model)
            if self.lora:
                add_adapter(model, self.lora, self.revision)
        self._put_into(model)
        return model

    def take_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the model's weights by name, and leave the model on the meta device without them."""
        weights = {name: p.detach() for name, p in model.named_parameters()}
        self._put_into(model)
        return weights

    def _put_into(self, model: PreTrainedModel) -> None:
        """Replace all parameters and buffers of a model."""
        for name, tensor in {**self.parameters, **self.buffers}.items():
            module, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module), own_name, tensor)


_NOT_OF_THE_MODEL = ("_name_or_path", "dtype", "transformers_version")


def check_saved(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Check that a folder contains the model or adapters that were saved there, weight by weight and bit by bit.

    A whole model is loaded by transformers, with the folder's config; the weights stay in their file. `weights` holds
    the saved, unsharded parameters by name. The parameters of `model` may be sharded.
    """
    if is_adapter := (folder / ADAPTER_CONFIG).exists():
        saved = load_file(folder / "adapter_model.safetensors")
        weights = dict(saved_adapter(weights.items()))
        wrong = []
    else:
        # some models draw random numbers while loading, and the random state is part of the checkpoint
        with building_model(), torch.random.fork_rng(devices=()):
            reloaded: Any = auto_class(model.config).from_pretrained(
                folder, dtype=model.dtype, local_files_only=True, trust_remote_code=False
            )
        saved = dict(reloaded.named_parameters())
        wrong = [f"{key} of its config" for key in _differing(_plain(model.config), _plain(reloaded.config))]
    wrong += sorted(saved.keys() ^ weights.keys())
    wrong += [n for n, weight in weights.items() if n in saved and not torch.equal(saved[n].to(weight), weight)]
    if wrong:
        what = "adapter" if is_adapter else "model"
        raise UserError(
            f"the saved {what} differs from the trained {type(model).__name__} ({wrong[0]}, "
            f"{len(wrong)} differences); {'change lora.target_modules' if is_adapter else 'train adapters (lora.rank)'}"
            ", or install a different version of transformers"
        )


def _plain(config: PreTrainedConfig) -> Any:
    """Return the entries of a config that define the model, as read back from JSON."""

    def defining(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if key not in _NOT_OF_THE_MODEL}

    return json.loads(json.dumps(config.to_dict(), default=str), object_hook=defining)


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
