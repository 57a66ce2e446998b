"""The questions that stored responses belong to, and their verifiers.

In: a recipe, or a data set as `brorl eval --data` names it, and settings of the verification. Out: all its questions,
those to train and those to evaluate on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brorl.assemble.data import all_questions, build_questions
from brorl.assemble.evaluation_data import naming_data, parse_data
from brorl.config.reading import builtin_recipes, make_config, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.paths import is_file
from brorl.prompts.benchmarks import BenchmarkSource, read_benchmark
from brorl.prompts.question import Question

_NO_LIMIT = 2**31


def read_all_questions(data: str, overrides: Mapping[str, Any]) -> tuple[TrainConfig, list[Question]]:
    """Read all questions of a recipe or a data set.

    Args:
        data: Name of a built-in recipe, path of a YAML file or a run directory, or a data set: a benchmark, a file, a
            hub id, a puzzle, or a YAML mapping.
        overrides: Settings of the verification by dotted name.

    Returns:
        The settings, and the questions with distinct ids.

    Raises:
        UserError: If it names none, or a row cannot be used.
    """
    recipe = _recipe(data)
    if recipe is not None:
        return _all(make_config(_read_recipe(recipe), overrides, recipe))
    config = make_config({}, overrides, "the options")
    source = parse_data(data)
    with naming_data(data, source):
        if isinstance(source, BenchmarkSource):
            return config, list(read_benchmark(source, config.data.split_seed).questions)
        return _all(config.model_copy(update={"data": config.data.model_copy(update={"sources": (source,)})}))


def _read_recipe(recipe: str) -> dict[str, Any]:
    try:
        return read_recipe(recipe)
    except UserError as error:
        raise UserError(f"--data {recipe}: {error}") from error


def _all(config: TrainConfig) -> tuple[TrainConfig, list[Question]]:
    """Return a config, and all questions of its sources."""
    evaluation = {"num_prompts": _NO_LIMIT if config.evaluation.sources else 0, "skip_prompts": 0}
    everything = config.model_copy(
        update={
            "data": config.data.model_copy(update={"held_out_fraction": 0.0}),
            "evaluation": config.evaluation.model_copy(update=evaluation),
        }
    )
    return config, all_questions(build_questions(everything))


def _recipe(data: str) -> str | None:
    """Return the recipe that a text names; None if it names a data set."""
    local = Path(data).expanduser()
    if is_file(local / "config.yaml"):
        return str(local / "config.yaml")
    return data if data in builtin_recipes() or local.suffix in (".yaml", ".yml") else None
