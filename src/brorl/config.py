"""Every setting of a training recipe: typed, documented, checked before any work starts.

In: a YAML recipe (a file or a built-in name) and overrides from the command line. Out: a frozen `TrainConfig`. A key
that does not exist, a value of the wrong type and a combination that cannot work are `UserError`s of one line that
name the fix.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from brorl.errors import UserError

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A group of settings: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataConfig(Section):
    """The prompts."""

    task: Literal["countdown"] = Field(
        "countdown", description="built-in puzzle: reach a target from some numbers with + - * /"
    )
    num_numbers: int = Field(3, ge=2, le=5, description="numbers per puzzle")
    max_number: int = Field(9, ge=2, description="largest number of a puzzle")
    min_target: int = Field(1, ge=0, description="smallest target")
    max_target: int = Field(99, ge=0, description="largest target")
    held_out_share: float = Field(
        0.1, gt=0, lt=1, description="share of number sets kept out of training for evaluation"
    )
    split_seed: int = Field(0, ge=0, lt=2**63, description="which number sets are held out")


class SamplingConfig(Section):
    """How rollouts are drawn."""

    temperature: float = Field(1.0, gt=0, description="divisor of the logits")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass; below 1 the gradient is biased")
    top_k: int = Field(0, ge=0, description="most probable tokens kept, 0 for all; above 0 the gradient is biased")
    max_new_tokens: int = Field(256, ge=1, description="length limit of a response, in tokens")
    scheme: Literal["iid", "systematic"] = Field(
        "iid", description="rollouts of a prompt drawn independently | spread evenly over its tree"
    )


class AdaptiveConfig(Section):
    """How `rollouts_per_prompt: adaptive` spends rollouts; without effect otherwise."""

    pilot_rollouts: int = Field(16, ge=2, description="rollouts that every prompt gets, whatever their outcomes")
    max_rollouts: int = Field(
        512, ge=2, description="rollouts that a prompt without both outcomes is widened to at most, by doubling"
    )
    samples_per_prompt: int = Field(
        64, ge=2, description="budget of a round of prompts, in rollouts per prompt on average, pilots included"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.pilot_rollouts < self.samples_per_prompt <= self.max_rollouts:
            raise ValueError(
                f"adaptive.pilot_rollouts = {self.pilot_rollouts}, adaptive.samples_per_prompt = "
                f"{self.samples_per_prompt} and adaptive.max_rollouts = {self.max_rollouts} must rise in this order, "
                "the last two may be equal"
            )
        return self


class AdvantageConfig(Section):
    """How advantages are estimated from rewards."""

    estimator: Literal["reinforce_pp_baseline", "grpo", "rloo"] = Field(
        "reinforce_pp_baseline",
        description="reward minus group mean, normalised over the batch (the paper's) | GRPO | RLOO",
    )
    normalise_over: Literal["trajectories", "tokens"] = Field(
        "trajectories", description="what the batch statistics of reinforce_pp_baseline count"
    )


class DynamicSamplingConfig(Section):
    """Keeping only groups with correct and incorrect rollouts."""

    enabled: bool = Field(True, description="train only on groups with 0 < number correct < N, and refill")
    max_tries: int = Field(10, ge=1, description="stop the run after this many rounds in a row without a mixed group")


class LossConfig(Section):
    """PPO's clipped loss."""

    clip_low: float = Field(0.2, gt=0, lt=1, description="how far the ratio may fall below 1")
    clip_high: float = Field(0.28, gt=0, description="how far the ratio may rise above 1")


class OptimizerConfig(Section):
    """AdamW and how the batch is used."""

    learning_rate: float = Field(2e-6, gt=0, description="at the reference batch, before the square-root rule")
    reference_batch: int | None = Field(
        None, ge=1, description="rollouts per step that learning_rate was tuned at; the rate in use is "
        "learning_rate * sqrt(rollouts per step / reference_batch); null switches the rule off",
    )  # fmt: skip
    mini_batches: int = Field(4, ge=1, description="updates per step, M")
    betas: Annotated[tuple[DecayRate, DecayRate], Field(strict=False)] = Field(
        (0.9, 0.95), description="AdamW's decay rates"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")
    warmup_updates: int = Field(0, ge=0, description="updates over which the learning rate rises linearly")
    responses_per_verdict: int = Field(
        0, ge=0, description="back-propagate at most this many correct and incorrect distinct responses per group, "
        "weighted without bias; 0 for all",
    )  # fmt: skip
    old_logprobs: Literal["engine", "recompute"] = Field(
        "engine",
        description="log-probs of the old policy: as sampled, or from the learner's own forward pass",
    )


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    every: int = Field(10, ge=1, description="steps between evaluations; the start and the end are always evaluated")
    num_prompts: int = Field(128, ge=0, description="held-out prompts; 0 switches evaluation off")
    num_samples: int = Field(256, ge=1, description="responses per prompt")
    ks: Annotated[tuple[int, ...], Field(strict=False)] = Field((1, 16, 256), description="which pass@k to report")
    temperature: float = Field(1.0, ge=0, description="divisor of the logits; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.ks or min(self.ks) < 1 or max(self.ks) > self.num_samples:
            raise ValueError(
                f"evaluation.ks must lie between 1 and evaluation.num_samples = {self.num_samples}, not {self.ks}"
            )
        return self


class DiagnosticsConfig(Section):
    """What is measured of every step, besides its sampled and unsampled mass, which always is."""

    certificate_every: int = Field(
        25, ge=0, description="steps between held-out certificates of the update; 0 for none"
    )
    held_out_rollouts: int = Field(
        32, ge=2, description="rollouts per prompt that a certificate draws besides those that train"
    )


class EngineConfig(Section):
    """Memory of the built-in engine and learner; none of it changes results beyond rounding."""

    memory_gib: float = Field(4.0, gt=0, description="limit for keys, values and logits while sampling; more rows wait")
    nodes_per_pass: int | None = Field(
        None, ge=16, description="tree nodes per forward pass of the learner; null decides itself"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads; 0 for torch's default")


def _number_or_adaptive(value: Any) -> Any:
    """Refuse what is not N: pydantic would complain of every member of the union by itself."""
    if value == "adaptive" or (type(value) is int and value >= 2):
        return value
    raise ValueError(f"rollouts_per_prompt: the value should be a whole number from 2 on, or adaptive, not {value!r}")


class TrainConfig(Section):
    """A training recipe."""

    model: str = Field(
        "quickstart", description="the shipped model `quickstart`, a local folder, or a Hugging Face hub id"
    )
    rollouts_per_prompt: Annotated[int | Literal["adaptive"], BeforeValidator(_number_or_adaptive)] = Field(
        512, description="N, rollouts of each prompt; adaptive gives more to prompts without both outcomes"
    )
    prompts_per_step: int = Field(16, ge=1, description="groups that a step trains on")
    steps: int = Field(100, ge=1, description="number of steps")
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints; the end is always saved")
    keep_checkpoints: int = Field(3, ge=0, description="checkpoints to keep, 0 for all")
    store_rollouts_every: int = Field(1, ge=0, description="steps between stored rollouts, 0 for none")
    seed: int = Field(0, ge=0, lt=2**63, description="decides everything random in the run")
    output_dir: str | None = Field(None, description="run directory, new or empty; null makes one under runs/")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="numbers computed with; with bfloat16 the trained weights stay float32"
    )
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    adaptive: AdaptiveConfig = AdaptiveConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optimizer.mini_batches > self.prompts_per_step:
            raise ValueError(
                f"optimizer.mini_batches = {self.optimizer.mini_batches} is more than prompts_per_step = "
                f"{self.prompts_per_step}; every mini-batch needs a group"
            )
        if self.data.min_target > self.data.max_target:
            raise ValueError(
                f"data.min_target = {self.data.min_target} is above data.max_target = {self.data.max_target}"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Rollouts that a step trains on, P x N; with adaptive N the mean that the budget allows."""
        n = self.rollouts_per_prompt
        return self.prompts_per_step * (n if isinstance(n, int) else self.adaptive.samples_per_prompt)


def builtin_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in files("brorl.recipes").iterdir() if p.name.endswith(".yaml"))


def read_recipe(recipe: str) -> dict[str, Any]:
    """Read the settings of a recipe, unchecked.

    Args:
        recipe: Name of a built-in recipe, or path of a YAML file.

    Returns:
        Nested settings.

    Raises:
        UserError: If there is no such recipe, or it is not YAML with keys.
    """
    names = builtin_recipes()
    if recipe in names:
        text = files("brorl.recipes").joinpath(f"{recipe}.yaml").read_text("utf-8")
    elif Path(recipe).is_file():
        try:
            text = Path(recipe).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {recipe} cannot be read as UTF-8 text: {error}") from error
    else:
        raise UserError(
            f"recipe {recipe!r} is neither a file nor a built-in name ({', '.join(names)}){_nearest(recipe, names)}"
        )
    settings = parse_yaml(text, recipe)
    if not isinstance(settings, dict):
        raise UserError(f"{recipe} does not hold settings (lines like `steps: 100`)")
    return settings


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML 1.2 (in which 1e-6 is a number).

    Raises:
        UserError: With source, line and column.
    """
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


def make_config(settings: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> TrainConfig:
    """Check settings and make a config.

    Args:
        settings: Nested settings of a recipe.
        overrides: Settings by dotted name (`loss.clip_high`) that take precedence.
        source: Name of the recipe, for messages.

    Returns:
        The config.

    Raises:
        UserError: On the first thing that is wrong.
    """
    merged: dict[str, Any] = {str(k): dict(v) if isinstance(v, dict) else v for k, v in settings.items()}
    dotted = {name: merged.pop(name) for name in list(merged) if "." in name}
    whole = {name for name, info in settings_of(TrainConfig) if int in (info.annotation, *get_args(info.annotation))}
    for name, value in {**dotted, **overrides}.items():
        section, _, key = name.rpartition(".")
        target = merged.setdefault(section, {}) if section else merged
        if not isinstance(target, dict):
            raise UserError(f"{section} in {source} must hold settings, not {target!r}")
        is_whole = name in whole and isinstance(value, float) and value.is_integer()  # such as 1e3
        target[key] = int(value) if is_whole else value
    try:
        return TrainConfig.model_validate(merged)
    except ValidationError as error:
        raise UserError(_explain(error.errors()[0], source)) from None


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the field of every setting, in order."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from settings_of(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def unknown_setting(name: str) -> str:
    """Return the message for a setting that does not exist."""
    names = [n for n, _ in settings_of(TrainConfig)]
    sections = sorted({n.rpartition(".")[0] for n in names} - {""})
    if name in sections:
        return f"{name} is a group of settings; give one of {', '.join(n for n in names if n.startswith(f'{name}.'))}"
    if "." not in name:  # the right key without its section, such as clip_high
        same_key = [n for n in names if n.rpartition(".")[2] == name]
        if same_key:
            return f"{name} is not a setting; did you mean {same_key[0]}?"
    return f"{name} is not a setting{_nearest(name, [*names, *sections])}"


def _nearest(word: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; see brorl train --help"


def _explain(problem: Any, source: str) -> str:
    """Turn pydantic's first complaint into a line of ours."""
    name = ".".join(str(part) for part in problem["loc"] if not isinstance(part, int))
    if problem["type"] == "extra_forbidden":
        return f"{unknown_setting(name)} (in {source})"
    if problem["type"] == "value_error":
        return f"{problem['ctx']['error']} (in {source})"
    plain = {
        "tuple_type": "the value should be a list like [1, 16]",
        "model_type": "settings should stand below it",
        "missing": "a value is missing",
        "string_pattern_mismatch": "the value should be auto, cpu, cuda or cuda:N",
    }
    if problem["type"] in plain:
        return f"{name}: {plain[problem['type']]}, not {problem['input']!r} (in {source})"
    wanted = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{name}: {wanted.replace('input should', 'the value should')}, not {problem['input']!r} (in {source})"
