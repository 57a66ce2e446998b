"""From a config to the job of a cluster plan: the work of a step, the model's shape, the unit costs.

Values of the recipe and of options are "given", those of a run "measured here", and the rest "assumed". No weights are
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model.model_shape import EXAMPLE, PUBLISHED, ModelShape
from brorl.planning.cluster.hardware import Engine, Gpu, Origin, UnitCosts
from brorl.planning.cluster.phases import Job
from brorl.planning.cluster.step_work import ResponseLengths, StepWork
from brorl.planning.cluster.step_work import distinct_fraction as assumed_distinct_fraction
from brorl.prompts.settings import CountdownSource, FileSource

_DOMAINS = ("code", "countdown", "gym", "ifeval", "math", "science")
_PROMPT_TOKENS = 512.0
_MEAN_FRACTION = 0.5  # of the length limit
_KEPT_FRACTION = 0.62  # the paper's, at N = 512
_LAST_STEPS = 20  # of a run


def build_job(
    config: TrainConfig,
    gpu: Gpu,
    shape: ModelShape,
    *,
    engine: Engine | None = None,
    mean_length: float | None = None,
    distinct_fraction: float | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
) -> Job:
    """Build the job of a cluster plan.

    Args:
        config: The recipe.
        gpu: The figures of the GPU.
        shape: The sizes of the model.
        engine: The engine that samples; None for `engine.kind`.
        mean_length: Tokens of a response; None for a measured or an assumed number.
        distinct_fraction: Distinct tokens over sampled tokens; None for a measured or an assumed number.
        metrics: Lines of a run's metrics; empty without a run.

    Raises:
        UserError: If an option is out of range.
    """
    kind: Engine = engine or config.engine.kind
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"kind": kind})})
    gpus = max(config.cluster.needed_gpus, 1)
    workers = config.cluster.verifier_workers * config.verification.workers
    return Job(
        model=shape,
        work=_build_work(config, mean_length, distinct_fraction, metrics),
        gpu=gpu,
        costs=UnitCosts.of(gpu, kind, _domain_fractions(config), workers / gpus if workers else None),
        engine=kind,
        reference=config.kl.coefficient > 0 and not config.reference.offload,
        average=config.optimizer.ema_decay is not None,
        gradient_checkpointing=config.engine.gradient_checkpointing,
        lora_rank=config.lora.rank,
        nodes_per_pass=config.engine.nodes_per_pass,
    )


def build_shape(name: str, numbers: Mapping[str, float] | None) -> ModelShape:
    """Return the shape of a model: from numbers, or from its config, which may be a folder without weights.

    Raises:
        UserError: If the config cannot be read.
    """
    if numbers is not None:
        return ModelShape.from_numbers(numbers)
    from brorl.model.source import find_model, read_config

    path = Path(name).expanduser()
    folder = str(path.parent) if path.is_file() and path.name == "config.json" else name
    try:
        source = find_model(folder)
        return ModelShape.of(read_config(source), f"config.json of {name}")
    except UserError as error:
        if name in PUBLISHED:
            return PUBLISHED[name]
        raise UserError(
            f"{error}. A plan needs only the model's sizes: set model to a folder with its config.json, or give them: "
            f"--model-shape {EXAMPLE}"
        ) from error


def _build_work(
    config: TrainConfig,
    mean_length: float | None,
    distinct_fraction: float | None,
    metrics: Sequence[Mapping[str, Any]],
) -> StepWork:
    """Return the work of a step."""
    limit = float(config.sampling.max_new_tokens)
    measured = _measured(metrics)
    mean, mean_origin = _first(mean_length, measured.get("mean_length"), _MEAN_FRACTION * limit)
    if not 1 <= mean <= 0.999 * limit and mean != limit:
        raise UserError(f"--response-tokens must be between 1 and sampling.max_new_tokens = {limit:,.0f}, got {mean:g}")
    fraction, fraction_origin = _first(
        distinct_fraction,
        measured.get("distinct_fraction"),
        assumed_distinct_fraction(config.rollouts_per_prompt, mean),
    )
    if not 0 < fraction <= 1:
        raise UserError(f"--distinct-fraction must be in (0, 1], got {fraction:g}")
    assumed_kept = _KEPT_FRACTION if config.dynamic_sampling.enabled else 1.0
    kept, kept_origin = _first(None, measured.get("kept_fraction"), assumed_kept)
    responses, response_origin = _first(None, measured.get("response_fraction"), 1.0)
    prompt_limit = float(config.data.max_prompt_tokens or _PROMPT_TOKENS)
    passes = 3 + config.engine.gradient_checkpointing + (config.kl.coefficient > 0)
    return StepWork(
        prompts=config.prompts_per_step,
        rollouts=config.rollouts_per_prompt,
        prompt_tokens=min(_PROMPT_TOKENS, prompt_limit),
        lengths=ResponseLengths(mean, limit) if mean < limit else ResponseLengths(mean, limit, 0.0),
        distinct_fraction=fraction,
        response_fraction=responses,
        kept_fraction=kept if config.dynamic_sampling.enabled else 1.0,
        mini_batches=config.optimizer.mini_batches,
        passes=passes + config.recompute_old_logprobs,
        origins={
            "prompt_tokens": "assumed",
            "mean_length": mean_origin,
            "distinct_fraction": fraction_origin,
            "response_fraction": response_origin,
            "kept_fraction": "published" if kept_origin == "assumed" and kept == _KEPT_FRACTION else kept_origin,
        },
    )


def _first(given: float | None, measured: float | None, assumed: float) -> tuple[float, Origin]:
    """Return an option, else a measurement, else an assumption, with its origin."""
    if given is not None:
        return given, "given"
    return (assumed, "assumed") if measured is None else (measured, "measured here")


def _measured(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of the last steps of a run, those that the metrics have."""
    steps = [line["sampling"] for line in metrics if line.get("sampling")][-_LAST_STEPS:]
    if not steps:
        return {}

    def total(name: str) -> float:
        return float(sum(step.get(name) or 0 for step in steps))

    ratios = {
        "mean_length": (total("sampled_tokens"), total("samples")),
        "distinct_fraction": (total("unique_tokens"), total("sampled_tokens")),
        "response_fraction": (total("distinct_responses"), total("samples")),
        "kept_fraction": (total("groups_mixed"), total("groups")),
    }
    return {name: a / b for name, (a, b) in ratios.items() if a > 0 and b > 0 and isfinite(a / b)}


def _domain_fractions(config: TrainConfig) -> dict[str, float]:
    """Return the weights of the training prompts by domain."""
    fractions: dict[str, float] = {}
    for source in config.data.sources:
        if isinstance(source, CountdownSource):
            domain = "countdown"
        elif isinstance(source, FileSource):
            domain = source.label if source.label in _DOMAINS else source.domain
        else:
            domain = "gym"
        fractions[domain] = fractions.get(domain, 0.0) + source.weight
    return fractions
