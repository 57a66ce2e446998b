"""Reads and checks YAML recipes, builds a `TrainConfig`, and compares it with the config of a run to resume.

An unknown key, a value of the wrong type or a conflict between settings raises a `UserError`: a single line that
states the fix.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, ValidationError

from brorl.config.settings import TrainConfig
from brorl.errors import UserError, nearest, option
from brorl.prompts.settings import CountdownSource, FileSource, GymSource
from brorl.storage import is_file

_NAMES = {  # setting -> what TRL, verl and other trainers call it
    "model": "model_name_or_path model_name pretrain",
    "rollouts_per_prompt": "num_generations n N n_samples_per_prompt group_size",
    "prompts_per_step": "batch_size train_batch_size rollout_batch_size per_device_train_batch_size",
    "steps": "max_steps total_steps total_training_steps epochs num_epochs total_epochs num_train_epochs",
    "checkpoint_every": "save_steps save_freq",
    "keep_checkpoints": "save_total_limit",
    "output_dir": "default_local_dir save_path",
    "dtype": "bf16 fp16 torch_dtype precision",
    "data.sources": "dataset datasets dataset_name train_files prompt_data",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "sampling.max_new_tokens": "max_completion_length max_response_length generate_max_len max_tokens max_length",
    "sampling.stop": "stop_strings stop_sequences stop_words eos_token",
    "dynamic_sampling.enabled": "filter_groups dynamic_filtering",
    "advantage.estimator": "adv_estimator advantage_estimator",
    "loss.kind": "loss_type policy_loss",
    "loss.aggregation": "loss_agg_mode",
    "loss.clip_low": "epsilon eps_clip clip_range clip_ratio clip_ratio_low",
    "loss.clip_high": "epsilon_high clip_ratio_high",
    "loss.dual_clip": "delta clip_ratio_c",
    "loss.entropy_coefficient": "entropy_coef entropy_coeff",
    "loss.mask_truncated": "mask_truncated_completions overlong_filtering",
    "importance.high": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "kl.coefficient": "beta kl_coef kl_loss_coef init_kl_coef",
    "kl.estimator": "kl_loss_type",
    "optimizer.learning_rate": "lr actor_learning_rate",
    "optimizer.mini_batches": "mini_batch_size ppo_mini_batch_size",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.max_grad_norm": "max_norm grad_clip clip_grad gradient_clipping",
    "optimizer.warmup_updates": "warmup_steps lr_warmup_steps",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type",
    "lora.rank": "lora_r",
    "evaluation.every": "eval_steps test_freq",
    "evaluation.sources": "eval_dataset val_files",
    "engine.nodes_per_pass": "micro_batch_size ppo_micro_batch_size_per_gpu gradient_accumulation_steps",
    "tracking.to": "report_to logger use_wandb wandb",
    "tracking.project": "wandb_project project_name",
    "tracking.run_name": "experiment_name wandb_run_name",
}
SETTING_OF = {name: setting for setting, names in _NAMES.items() for name in names.split()}


ConfigOrPath: TypeAlias = str | Path | Mapping[str, Any] | TrainConfig
QUESTION_FILES = (".jsonl", ".parquet", ".csv", ".tsv")
"""Suffixes of files with questions, never a recipe."""


def builtin_recipes() -> list[str]:
    """Return the names of the built-in recipes."""
    root = Path(str(files("brorl.recipes")))
    return sorted(p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.yaml"))


def read_recipe(recipe: str) -> dict[str, Any]:
    """Read a recipe, a built-in name or the path of a YAML file, as nested, unchecked settings."""
    names = builtin_recipes()
    if recipe in names:
        text = files("brorl.recipes").joinpath(f"{recipe}.yaml").read_text("utf-8")
    elif is_file(recipe):
        if Path(recipe).suffix.lower() in QUESTION_FILES:
            raise UserError(f"{recipe} contains questions, not a recipe; write a recipe for it: brorl init {recipe}")
        try:
            text = Path(recipe).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"recipe {recipe} is not readable UTF-8 text ({error}); fix the file, or pass the path to a YAML file"
            ) from error
    else:
        near = nearest(recipe, names) or f"; fix the path (working directory {Path.cwd()})"
        raise UserError(f"recipe {recipe!r} is neither a file nor a built-in recipe ({', '.join(names)}){near}")
    try:
        settings = parse_yaml(text, recipe)
    except UserError as error:
        if Path(recipe).suffix.lower() != ".json":
            raise
        raise UserError(f"{error}; if it contains one question per line, rename it to .jsonl") from error
    if not isinstance(settings, dict):
        advice = "" if settings is None else f"; if it contains questions, run: brorl init {recipe}"
        raise UserError(f"{recipe} has no settings; write lines like `steps: 100`{advice}")
    return settings


def raw_settings(recipe: ConfigOrPath) -> dict[str, Any]:
    """Return the unchecked settings of a recipe: a name, a YAML file, a mapping or a config."""
    if isinstance(recipe, TrainConfig):
        return recipe.model_dump(mode="json")
    if isinstance(recipe, Mapping):
        return dict(recipe)
    if isinstance(recipe, str | Path):
        return read_recipe(str(recipe))
    raise UserError(
        "the first argument should be a recipe name, the path to a YAML file, a mapping of settings or a "
        f"TrainConfig, not {type(recipe).__name__}"
    )


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML 1.2 (where 1e-6 is a number). Errors name the source, line and column."""
    return deepcopy(_parsed(text, source))


@lru_cache(maxsize=256)
def _parsed(text: str, source: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source}{where} is not YAML: {error.problem}") from error
    except YAMLError as error:
        raise UserError(f"{source} is not YAML: {' '.join(str(error).split())}") from error


def dump_yaml(config: TrainConfig) -> str:
    """Return the resolved config as YAML."""
    from ruamel.yaml import YAML

    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def make_config(
    settings: Mapping[str, Any], overrides: Mapping[str, Any], source: str, options: Mapping[str, str] | None = None
) -> TrainConfig:
    """Check settings, nested or dotted, and build a config. `source` names the recipe in error messages.

    `options` maps settings to a command's names for them, which error messages then use.
    Overrides take precedence. Overriding `budget.limit` without `steps` also discards the recipe's `steps`, and
    overriding `phases` also discards its `advantage`.
    """
    kept = flat_settings(_plain(settings))
    replacing = flat_settings(_plain(overrides))
    if replacing.get("budget.limit") is not None and "steps" not in replacing:
        kept.pop("steps", None)
    if replacing.get("phases"):
        kept = {name: value for name, value in kept.items() if not name.startswith("advantage.")}
    try:
        return TrainConfig.model_validate(nested_settings({**kept, **replacing}, source))
    except ValidationError as error:
        problems = error.errors()  # report a mistyped key first: it explains why the intended setting is missing
        first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
        raise UserError(_explain(first, source, replacing, options or {})) from None


def with_settings(config: TrainConfig, overrides: Mapping[str, Any], source: str = "the recipe") -> TrainConfig:
    """Return a copy of the config with the given settings replaced, checked again."""
    return make_config(config.model_dump(mode="json"), overrides, source)


def options_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as command-line options, such as `--sampling.top_k 0`. Values are YAML."""
    texts = {name: v if isinstance(v, str) else json.dumps(v, default=str) for name, v in settings.items()}
    return [word for name, text in texts.items() for word in (f"--{name}", text)]


def _plain(value: Any) -> Any:
    """Return a value as YAML would load it: a path becomes a string, a mapping a dict."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names: {"loss": {"kind": "cispo"}} becomes {"loss.kind": "cispo"}.

    If a setting's value is itself a mapping, it is not flattened.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        is_section = isinstance(value, Mapping) and name in _SECTIONS
        flat |= flat_settings(value, f"{name}.") if is_section else {name: value}
    return flat


def nested_settings(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Nest settings keyed by dotted name. In an integer setting, 1e3 becomes 1000."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, key = name.split(".")
        target: Any = nested
        for depth, section in enumerate(sections, 1):
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UserError(f"{'.'.join(sections[:depth])} in {source} must be a group of settings, got {target!r}")
        is_whole = name in _WHOLE and isinstance(value, float) and value.is_integer()
        target[key] = int(value) if is_whole else value
    return nested


def setting_fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and field of every setting, in order."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from setting_fields(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


_FIELDS = dict(setting_fields(TrainConfig))
_SECTIONS = sorted({".".join(name.split(".")[:depth]) for name in _FIELDS for depth in range(1, name.count(".") + 1)})
_WHOLE = {name for name, info in _FIELDS.items() if int in (info.annotation, *get_args(info.annotation))}


def unknown_setting(name: str, command: str = "train") -> str:
    """Return the message for a setting that does not exist. It may refer to the help of `command`.

    Names that other trainers use are recognized, with or without their sections.
    """
    if name in _SECTIONS:
        return f"{name} is a group of settings; use one of {', '.join(n for n in _FIELDS if n.startswith(f'{name}.'))}"
    first, _, key = name.rpartition(".")
    elsewhere = SETTING_OF.get(key)
    if elsewhere and (first not in _SECTIONS or elsewhere.startswith(f"{first}.")):
        return f"{name} is not a setting; did you mean {elsewhere}?"
    if "." not in name:  # the section may be missing: clip_high instead of loss.clip_high
        same_key = [n for n in _FIELDS if n.rpartition(".")[2] == name]
        if same_key:
            return f"{name} is not a setting; did you mean {same_key[0]}?"
    return f"{name} is not a setting{nearest(name, [*_FIELDS, *_SECTIONS]) or f'; see brorl {command} --help'}"


def _explain(problem: Any, source: str, overrides: Collection[str], options: Mapping[str, str]) -> str:
    """Return a pydantic error as one line. The line names the recipe unless an override is wrong."""
    name, section = _place(problem["loc"])
    if problem["type"] == "value_error":
        where = f"{name}: " if "sources" in problem["loc"] else ""
        concerned = text = f"{where}{problem['ctx']['error']}"
    else:
        shown = option(options[name]) if name in options else name
        concerned, text = name, f"{shown}: {_expectation(problem)}, not {problem['input']!r}"
    if problem["type"] == "extra_forbidden":
        text = unknown_setting(name)
    if problem["type"] == "extra_forbidden" and section is not None:
        fields = section.model_fields
        near = nearest(name.rpartition(".")[2], fields) or f"; the settings are: {', '.join(fields)}"
        text = f"{name} is not a setting{near}"
    is_overridden = any(
        re.search(rf"(?<![\w.]){re.escape(override)}\b", concerned) or override.startswith(f"{concerned}.")
        for override in overrides
    )
    return text if is_overridden else f"{text} (in {source})"


def _expectation(problem: Any) -> str:
    """Describe what pydantic expected instead."""
    plain = {
        "tuple_type": "the value should be a list like [1, 16]",
        "model_type": "the value should be a group of settings",
        "missing": "a value is missing",
        "string_pattern_mismatch": "the value should be auto, cpu, cuda or cuda:N",
        "int_type": "the value should be a whole number",
        "int_from_float": "the value should be a whole number",
        "float_type": "the value should be a number",
        "bool_type": "the value should be true or false",
        "string_type": "the value should be a string",
        "dict_type": "the value should be a mapping like {key: value}",
        "finite_number": "the value should be a finite number",
    }
    wanted: str = problem["msg"][0].lower() + problem["msg"][1:]
    return plain.get(problem["type"], wanted.replace("input should", "the value should"))


def _place(location: tuple[int | str, ...]) -> tuple[str, type[BaseModel] | None]:
    """Return the name of the invalid setting, with its section if it belongs to an entry in a list of sources."""
    sections: dict[str, type[BaseModel]] = {"countdown": CountdownSource, "gym": GymSource, "file": FileSource}
    if "sources" not in location:
        return ".".join(str(key) for key in location if not isinstance(key, int)), None
    start = location.index("sources") + 1
    name = ".".join(map(str, location[:start]))
    rest = list(location[start:])
    section: type[BaseModel] = FileSource
    if rest and isinstance(rest[0], int):
        name += f"[{rest.pop(0)}]"
    if rest and rest[0] in sections:
        section = sections[str(rest.pop(0))]
    return ".".join([name, *map(str, rest)]), section if rest else None


CHANGEABLE_ON_RESUME = (
    "steps", "checkpoint_every", "keep_checkpoints", "store_rollouts_every", "report", "device", "verification.workers",
    "verification.batch_timeout_s", "verification.sandbox", "budget.limit", "budget.eval_points", "budget.pause_at",
    "engine.memory_gib", "engine.nodes_per_pass", "engine.gradient_checkpointing", "engine.attention", "engine.threads",
    "engine.vllm.max_rows", "engine.vllm.placement", "reference.offload", "optimizer.states", "cluster.nodes",
    "cluster.address", "cluster.rollout_workers", "cluster.learner_ranks", "cluster.verifier_workers",
    "cluster.placement", "cluster.gpus_per_rollout_worker", "cluster.gpus_per_learner_rank", "cluster.cpus_per_worker",
    "cluster.task_timeout_s", "cluster.learner_timeout_s", "cluster.join_timeout_s", "cluster.max_restarts",
    "tracking.to", "tracking.project", "tracking.run_name",
)  # fmt: skip


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must not change on resume, by dotted name, as JSON values.

    The run directory and the prompt files may move, because a checkpoint compares prompts by content.
    """
    settings = flat_settings(config.model_dump(mode="json"))
    for name in (*CHANGEABLE_ON_RESUME, "output_dir"):
        del settings[name]
    # "8bit" rounds the optimizer states; "device" and "host" store the same values in different places.
    settings["optimizer.states"] = "8bit" if config.optimizer.states == "8bit" else "device or host"
    for name in ("data.sources", "evaluation.sources"):
        settings[name] = [{key: item for key, item in source.items() if key != "path"} for source in settings[name]]
    return settings


def first_change(before: Mapping[str, Any], config: TrainConfig) -> str | None:
    """Return the dotted name of the first setting that differs from `before`, the run's original `fixed_settings`."""
    return next((name for name, now in fixed_settings(config).items() if before.get(name, now) != now), None)
