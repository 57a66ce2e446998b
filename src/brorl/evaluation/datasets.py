"""Reads the datasets that a user names: benchmarks, files, hub ids, puzzles, recipes, runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from brorl.config.reading import builtin_recipes, make_config, parse_yaml, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError, option
from brorl.evaluation.questions import all_questions, check_held_out, first_repeated, read_questions, read_sources
from brorl.prompts.guess import guess_meaning
from brorl.prompts.public_data import BENCHMARKS, benchmark_source
from brorl.prompts.question import Question
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import FileSource, PromptFormat, Source
from brorl.prompts.source_questions import SourceQuestions
from brorl.storage import is_file
from brorl.verification.gym.task import BENCHMARKS as GYM_BENCHMARKS

_NAMES = (*BENCHMARKS, *GYM_BENCHMARKS)  # of all benchmarks
NO_LIMIT = 2**31
"""Value of `evaluation.num_prompts` that evaluates on all prompts."""


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation's model, data and settings."""

    # the settings of the run that wrote the checkpoint, if any; `evaluation.max_new_tokens` is None if neither the user
    # nor the run sets it
    config: TrainConfig
    data: tuple[str, ...]  # datasets as the user named them; empty means the run's held-out questions
    belongs_to_run: bool  # whether a run, or the recipe of the shipped model, sets the prompt format
    own_template: bool  # whether the user set prompt.template or prompt.domain_templates

    def format_of(self, source: SourceQuestions) -> PromptFormat:
        """Return a dataset's prompt format.

        If neither the run nor the user sets templates, public and multiple-choice datasets use their domains' default
        templates.
        """
        own = self.config.prompt
        has_options = isinstance(source.source, FileSource) and bool(source.source.options_column)
        if self.belongs_to_run or self.own_template or not (source.published or has_options):
            return own
        domains = sorted({question.domain for question in source.held_out} & TEMPLATES.keys())
        return own.model_copy(update={"domain_templates": {domain: TEMPLATES[domain] for domain in domains}})


def read_datasets(request: EvaluationRequest) -> list[SourceQuestions]:
    """Read the questions to evaluate on, and drop any training questions."""
    config = request.config
    if not request.data:
        if not request.belongs_to_run or not (config.data.held_out_fraction or config.evaluation.sources):
            raise UserError(
                f"{config.model} is not from a run with held-out questions; choose the data to evaluate on: "
                f"{option('data')} {' | '.join(_NAMES)} | FILE | HUB_ID | countdown"
            )
        sources = read_sources(config)
        check_held_out(config, sources)
        return [replace(source, train=()) for source in sources if source.held_out]
    datasets = []
    for text in request.data:
        source = parse_data(text)
        with naming_data(text, source):
            datasets.append(replace(read_questions(_as_guessed(text, source, config), config), train=()))
    if repeated := first_repeated([dataset.name for dataset in datasets]):
        raise UserError(
            f"two datasets have the same name, {repeated!r}; rename one: {option('data', '{path: ..., name: ...}')}"
        )
    return datasets


def parse_data(text: str) -> Source:
    """Parse --data: a benchmark, `NAME=PATH_OR_HUB_ID`, a puzzle, a file, a hub id, or a YAML mapping."""
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
    (source,) = make_config({"data": {"sources": [value]}}, {}, option("data")).data.sources
    return source


def _as_guessed(text: str, source: Source, config: TrainConfig) -> Source:
    """If --data is just a file path, guess the columns and the domain as `brorl init` does.

    If no built-in verifier can read the answers, use the domain of the user's verifier function, if any.
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
def naming_data(text: str, source: Source) -> Iterator[None]:
    """Prefix errors about a dataset with the --data argument that named it."""
    try:
        yield
    except (UserError, ValueError) as error:
        message = f"{option('data', text)}: {error}"
        if isinstance(source, FileSource) and "_column" in str(error):
            message += f", as in {option('data', f'{{path: {source.path}, prompt_column: NAME}}')}"
        if text not in _NAMES and (near := get_close_matches(text.lower(), _NAMES, 3, 0.7)):
            message += f"; did you mean the benchmark {' or '.join(near)}?"
        raise UserError(message) from error


def read_all_questions(data: str, overrides: Mapping[str, Any]) -> tuple[TrainConfig, list[Question]]:
    """Return all questions of a recipe, a run, or a dataset that `parse_data` accepts, and the settings."""
    run = Path(data).expanduser() / "config.yaml"
    recipe = str(run) if is_file(run) else data
    every = {
        **overrides, "data.held_out_fraction": 0.0, "evaluation.num_prompts": NO_LIMIT, "evaluation.skip_prompts": 0
    }  # fmt: skip
    if recipe in builtin_recipes() or Path(recipe).suffix in (".yaml", ".yml"):
        try:
            settings = read_recipe(recipe)
        except UserError as error:
            raise UserError(f"{option('data', recipe)}: {error}") from error
        config = make_config(settings, every, recipe)
        return config, all_questions(read_sources(config))
    config = make_config({}, every, "the options")
    source = parse_data(data)
    with naming_data(data, source):
        sources = (_as_guessed(data, source, config),)
        config = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
        return config, all_questions(read_sources(config))
