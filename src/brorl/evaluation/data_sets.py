"""The datasets of an evaluation or of stored responses: benchmarks, files, puzzles, or the questions of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from brorl.config.reading import builtin_recipes, make_config, parse_yaml, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError, option, source_words
from brorl.evaluation.questions import SourceQuestions, all_questions, build_questions, check_split, read_questions
from brorl.prompts.guess import guess_meaning
from brorl.prompts.prompt import Question
from brorl.prompts.public_data import BENCHMARKS, benchmark_source
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import CountdownSource, FileSource, GymSource, PromptFormat
from brorl.storage import is_file
from brorl.verification.gym.task import BENCHMARKS as GYM_BENCHMARKS

_NO_LIMIT = 2**31
NAMES = (*BENCHMARKS, *GYM_BENCHMARKS)
"""Names of all benchmarks."""
DataSource: TypeAlias = FileSource | GymSource | CountdownSource


@dataclass(frozen=True)
class Request:
    """The model, the data and the settings of an evaluation."""

    # Settings; those of the checkpoint's run if it has one. `evaluation.max_new_tokens` is null if neither the user
    # nor the run sets it.
    config: TrainConfig
    data: tuple[str, ...]  # datasets as the user named them; none for the questions that the run held out
    belongs_to_run: bool  # whether the prompt format is that of a run or of the shipped model's recipe
    own_template: bool  # whether the user set prompt.template or prompt.domain_templates
    limit: int | None = None  # most prompts of each dataset; None for all

    def format_of(self, one: SourceQuestions) -> PromptFormat:
        """Return the prompt format of a dataset.

        A public dataset, or one whose options ask for a letter, has the usual templates of its domains, unless the run
        or the user has templates.
        """
        own = self.config.prompt
        has_options = isinstance(one.source, FileSource) and bool(one.source.options_column)
        if self.belongs_to_run or self.own_template or not (one.published or has_options):
            return own
        domains = sorted({question.domain for question in one.held_out} & TEMPLATES.keys())
        return own.model_copy(update={"domain_templates": {domain: TEMPLATES[domain] for domain in domains}})


def read_sets(request: Request) -> list[SourceQuestions]:
    """Read all datasets; their questions are the held-out ones."""
    limit = _NO_LIMIT if request.limit is None else request.limit
    config = _copy(request.config, evaluation={"num_prompts": limit, "skip_prompts": 0})
    if not request.data:
        if not request.belongs_to_run or not (config.data.held_out_fraction or config.evaluation.sources):
            raise UserError(
                f"{config.model} is not from a run with held-out questions; choose the data to evaluate on: "
                f"{option('data')} {' | '.join(NAMES)} | FILE | HUB_ID | countdown"
            )
        sources = build_questions(config)
        check_split(config, sources)
        return [source for source in sources if source.held_out]
    sets = []
    for text in request.data:
        source = parse_data(text)
        with naming_data(text, source):
            sets.append(read_questions(_as_guessed(text, source, config), config))
    names = [one.name for one in sets]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UserError(
            f"two datasets have the same name, {repeated!r}; rename one: {option('data', '{path: ..., name: ...}')}"
        )
    return sets


def _copy(config: TrainConfig, **sections: Mapping[str, Any]) -> TrainConfig:
    """Return a config with other settings in some of its sections."""
    made = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in sections.items()}
    return config.model_copy(update=made)


def parse_data(text: str) -> DataSource:
    """Return what --data names: a benchmark, `NAME=PATH_OR_HUB_ID`, a puzzle, a file, a hub id, or a YAML mapping."""
    name, equals, path = text.partition("=")
    if text in BENCHMARKS:
        return benchmark_source(text)
    if text in GYM_BENCHMARKS:
        return GYM_BENCHMARKS[text]
    if equals and re.fullmatch(r"\w+", name):
        if name not in BENCHMARKS or not path:
            raise UserError(f"{option('data', text)}: NAME in NAME=PATH must be one of {', '.join(BENCHMARKS)}")
        return benchmark_source(name, path)
    value = parse_yaml(text, option("data")) if text.lstrip().startswith("{") else text
    if isinstance(value, dict) and "benchmark" in value:
        known = ("benchmark", "path", "name", "split", "subset")
        wrong = next((key for key in value if key not in known or not isinstance(value[key], str | None)), None)
        if wrong is not None:
            raise UserError(
                f"{option('data', text)}: key {wrong!r}; use the keys {', '.join(known)}, each with a text value"
            )
        try:
            return benchmark_source(**value)
        except ValueError as error:
            raise UserError(f"{option('data', text)}: {error}") from error
    (source,) = make_config({"data": {"sources": [value]}}, {}, option("data")).data.sources
    return source


def _as_guessed(text: str, source: DataSource, config: TrainConfig) -> DataSource:
    """Return a file that --data names by its path alone with guessed columns and domain, as `brorl init` guesses them.

    Answers that no built-in verifier reads belong to the user's function, if there is one.
    """
    if not isinstance(source, FileSource) or source.layout or text.lstrip().startswith("{"):
        return source
    try:
        return guess_meaning(source.path).source
    except UserError:
        if len(config.verification.functions) != 1:
            raise
        return guess_meaning(source.path, domain=next(iter(config.verification.functions))).source


@contextmanager
def naming_data(text: str, source: DataSource) -> Iterator[None]:
    """Name the option --data, instead of a setting of a recipe, in an error of the dataset of its value `text`."""
    named: list[str] = []  # settings in an error

    def words(key: str, value: object) -> str:
        named.append(key)
        shown = option("data") if key == "path" else key
        return shown if value is None else f"{shown}: {value}"

    try:
        with source_words(words):
            yield
    except (UserError, ValueError) as error:
        message = f"{option('data', text)}: {error}"
        if isinstance(source, FileSource) and any(key.endswith("_column") for key in named):
            message += f", as in {option('data', f'{{path: {source.path}, prompt_column: NAME}}')}"
        if text not in NAMES and (near := get_close_matches(text.lower(), NAMES, 3, 0.7)):
            message += f"; did you mean the benchmark {' or '.join(near)}?"
        raise UserError(message) from error


def read_all_questions(data: str, overrides: Mapping[str, Any]) -> tuple[TrainConfig, list[Question]]:
    """Read all questions of a recipe, a run or a dataset as `parse_data` reads it, with its settings."""
    run = Path(data).expanduser() / "config.yaml"
    recipe = str(run) if is_file(run) else data
    if recipe in builtin_recipes() or Path(recipe).suffix in (".yaml", ".yml"):
        try:
            settings = read_recipe(recipe)
        except UserError as error:
            raise UserError(f"{option('data', recipe)}: {error}") from error
        return _all(make_config(settings, overrides, recipe))
    config = make_config({}, overrides, "the options")
    source = parse_data(data)
    with naming_data(data, source):
        source = _as_guessed(data, source, config)
        return _all(_copy(config, data={"sources": (source,)}))


def _all(config: TrainConfig) -> tuple[TrainConfig, list[Question]]:
    """Return a config, and all questions of its sources."""
    evaluation = {"num_prompts": _NO_LIMIT if config.evaluation.sources else 0, "skip_prompts": 0}
    return config, all_questions(build_questions(_copy(config, data={"held_out_fraction": 0.0}, evaluation=evaluation)))
