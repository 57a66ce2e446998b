"""The datasets of an evaluation or of stored responses: benchmarks, files, puzzles, or the questions of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from brorl.config.reading import builtin_recipes, make_config, parse_yaml, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.questions import all_questions, build_questions, check_split, dropped_line, read_rows_of
from brorl.paths import is_file
from brorl.prompts.benchmarks import BENCHMARKS, benchmark_source
from brorl.prompts.files import SourceReading
from brorl.prompts.guess import guess_meaning
from brorl.prompts.prompt import Question, split_held_out
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import CountdownSource, FileSource, GymSource, PromptFormat
from brorl.verification.gym.task import BENCHMARKS as GYM_BENCHMARKS
from brorl.wording import option, source_words

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


class QuestionSet(NamedTuple):
    """A dataset."""

    name: str  # its name
    source: str  # its origin, for the record
    questions: Sequence[Question]  # its questions
    style: PromptFormat  # its prompt format
    published: bool  # whether it is a published benchmark, which the user cannot correct
    note: str = ""  # A line about rows that its layout dropped; empty if there are none


def read_sets(request: Request) -> list[QuestionSet]:
    """Read all datasets.

    Raises:
        UserError: If one cannot be read, two have one name, or there is none.
    """
    own = request.config.prompt
    sets = [_read_set(text, request, own) for text in request.data] if request.data else _held_out(request, own)
    names = [data_set.name for data_set in sets]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UserError(
            f"two datasets have the same name, {repeated!r}; rename one: {option('data', '{path: ..., name: ...}')}"
        )
    if request.limit is None:
        return sets
    seed = request.config.data.split_seed
    return [
        data_set._replace(questions=split_held_out(data_set.questions, 1.0, seed).held_out[: request.limit])
        if request.data
        else data_set  # already limited, as in training
        for data_set in sets
    ]


def parse_data(text: str) -> DataSource:
    """Return what --data names: a benchmark, `NAME=PATH_OR_HUB_ID`, a puzzle, a file, a hub id, or a YAML mapping.

    Raises:
        UserError: If it names none.
    """
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


def _read_set(text: str, request: Request, own: PromptFormat) -> QuestionSet:
    source = parse_data(text)
    with naming_data(text, source):
        source = _as_guessed(text, source, request.config)
        match source:
            case CountdownSource():
                evaluation = request.config.evaluation.model_copy(
                    update={"sources": (), "num_prompts": _NO_LIMIT, "skip_prompts": 0}
                )
                data = request.config.data.model_copy(update={"sources": (source,)})
                config = request.config.model_copy(update={"data": data, "evaluation": evaluation})
                (puzzles,) = build_questions(config)
                return QuestionSet(source.label, source.origin, puzzles.held_out, own, published=False)
            case FileSource() | GymSource():
                reading = read_rows_of(source, request.config)
                if isinstance(source, GymSource) or source.layout:
                    return _public_set(source.label, source.origin, reading, request, own)
                if source.options_column:  # the letter of an option is asked for
                    return _public_set(source.label, source.origin, reading, request, own)._replace(published=False)
                return QuestionSet(source.label, source.origin, reading.questions, own, published=False)


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
    """Name the option --data, instead of a setting of a recipe, in an error of the dataset of its value `text`.

    Raises:
        UserError: The error inside, with the option and the names of benchmarks like it.
    """
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


def _public_set(name: str, origin: str, reading: SourceReading, request: Request, own: PromptFormat) -> QuestionSet:
    """Return a public dataset, with the usual templates of its domains unless the run or the user has its own."""
    style = own
    if not (request.belongs_to_run or request.own_template):
        domains = {question.domain for question in reading.questions}
        templates = {domain: TEMPLATES[domain] for domain in sorted(domains) if domain in TEMPLATES}
        if len(domains) == 1 and templates:
            style = own.model_copy(update={"template": next(iter(templates.values()))})
        else:
            style = own.model_copy(update={"domain_templates": templates})
    return QuestionSet(
        name, origin, reading.questions, style, True, dropped_line(name, reading.num_rows, reading.dropped)
    )


def _held_out(request: Request, own: PromptFormat) -> list[QuestionSet]:
    """Return the questions that the run held out, and those of its evaluation sources."""
    config = request.config
    if not request.belongs_to_run or not (config.data.held_out_fraction or config.evaluation.sources):
        raise UserError(
            f"{config.model} is not from a run with held-out questions; choose the data to evaluate on: "
            f"{option('data')} "
            f"{' | '.join(NAMES)} | FILE | HUB_ID | countdown"
        )
    limit = _NO_LIMIT if request.limit is None else request.limit
    evaluation = config.evaluation.model_copy(update={"num_prompts": limit, "skip_prompts": 0})
    config = config.model_copy(update={"evaluation": evaluation})
    sources = build_questions(config)
    check_split(config, sources)
    where = {source.label: source.origin for source in (*config.data.sources, *config.evaluation.sources)}
    return [
        QuestionSet(source.name, where[source.name], source.held_out, own, published=False)
        for source in sources
        if source.held_out
    ]


def read_all_questions(data: str, overrides: Mapping[str, Any]) -> tuple[TrainConfig, list[Question]]:
    """Read all questions of a recipe, a run or a dataset as `parse_data` reads it, with its settings.

    Raises:
        UserError: If it names none, or a row cannot be used.
    """
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
        return _all(config.model_copy(update={"data": config.data.model_copy(update={"sources": (source,)})}))


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
