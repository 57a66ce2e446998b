"""Reads the questions of a run or of an evaluation, before any model is loaded, and checks their references.

A question to evaluate on is removed from the training questions of every source. Bad rows are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from brorl.config.reading import builtin_recipes, make_config, parse_yaml, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError, of_source, option
from brorl.format import counted
from brorl.prompts.countdown import countdown_puzzles, countdown_questions, split_countdown
from brorl.prompts.decimal_commas import ColumnReading, comma_line
from brorl.prompts.prompt import MATH_DOMAIN, SCIENCE_DOMAIN, Question, drop_evaluated, split_held_out
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import CountdownSource, FileSource, GymSource, PromptFormat
from brorl.storage import is_file
from brorl.verification.verifier import Verifier, check_references, unreadable_references

_BUILT_IN = frozenset({MATH_DOMAIN, SCIENCE_DOMAIN})  # their verifiers read numbers


@dataclass(frozen=True)
class SourceQuestions:
    """The questions of one source."""

    source: CountdownSource | GymSource | FileSource
    weight: float  # share in training, relative to other sources; 0 for evaluation only
    train: Sequence[Question]  # questions to train on
    held_out: Sequence[Question]  # questions to evaluate on, in a seeded order; at most `evaluation.num_prompts`
    num_held_out: int = 0  # number of questions held out, evaluated on or not
    num_evaluated_on: int = 0  # training questions dropped because another source evaluates on them
    num_rows: int = 0  # rows read; 0 if the questions were generated
    num_repeated: int = 0  # rows that repeat a question with the same answer
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> number of rows that the layout dropped
    commas: ColumnReading | None = None  # how commas in numbers were read; None if there are none

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.label

    @property
    def published(self) -> bool:
        """Whether the source is a public dataset, whose rows the user cannot correct."""
        return isinstance(self.source, GymSource) or (
            isinstance(self.source, FileSource) and self.source.layout is not None
        )


def check_first_rows(config: TrainConfig) -> None:
    """Check the first row of each local file, before anything large is imported or read."""
    for source in (*config.data.sources, *(config.evaluation.sources if _last_evaluated(config) else ())):
        if isinstance(source, FileSource):
            from brorl.prompts.file_questions import check_first_row  # puzzles need no reader of files

            check_first_row(source)


def build_questions(config: TrainConfig) -> list[SourceQuestions]:
    """Read all sources, and drop training questions that any source evaluates on."""
    sources = [read_questions(one, config, config.data.held_out_fraction, one.weight) for one in config.data.sources]
    if _last_evaluated(config):
        sources += [read_questions(only, config) for only in config.evaluation.sources]
    if repeated := _first_repeated([source.name for source in sources]):
        raise UserError(f"two sources have the same name, {repeated!r}; set a different `name` for one of them")
    evaluated = [question for source in sources for question in source.held_out]
    kept = [drop_evaluated(source.train, evaluated) for source in sources]
    first = config.evaluation.skip_prompts
    return [
        replace(source, train=train, held_out=source.held_out[first:], num_evaluated_on=number)
        for source, (train, number) in zip(sources, kept, strict=True)
    ]


def _first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs twice."""
    return next((name for name in names if names.count(name) > 1), None)


def read_questions(
    source: CountdownSource | GymSource | FileSource, config: TrainConfig, held_out: float = 1.0, weight: float = 0.0
) -> SourceQuestions:
    """Read a source, and hold out a fraction of its questions. Puzzles always use `data.held_out_fraction`."""
    data, last = config.data, _last_evaluated(config)
    if isinstance(source, CountdownSource):
        targets = range(source.min_target, source.max_target + 1)
        puzzles = countdown_puzzles(source.num_numbers, source.max_number, targets)
        parts = split_countdown(puzzles, data.held_out_fraction, data.split_seed)
        train, kept = (countdown_questions(part, source.label) for part in parts)
        return SourceQuestions(source, weight, train, kept[:last], len(kept))
    if isinstance(source, GymSource):
        from brorl.verification.gym.task import read_gym

        groups = {"data.sources": data.sources, "evaluation.sources": config.evaluation.sources}
        places = [f"{name}[{at}]" for name, group in groups.items() for at, item in enumerate(group) if item is source]
        reading = read_gym(source, config.verification.workers or None, *places[:1])
    else:
        from brorl.prompts.file_questions import read_commas, read_source

        reading = read_source(source, data.split_seed)
        if source.layout is None:
            reading = read_commas(reading, _BUILT_IN - {*config.verification.functions})
    train, kept = split_held_out(reading.questions, held_out, data.split_seed)
    counts = reading.num_rows, reading.num_repeated, reading.dropped, reading.commas
    return SourceQuestions(source, weight, train, kept[:last], len(kept), 0, *counts)


def check_split(config: TrainConfig, sources: Sequence[SourceQuestions]) -> None:
    """Check that questions are left to train on and to evaluate on."""
    if config.evaluation.num_prompts and not any(source.held_out for source in sources):
        skip = config.evaluation.skip_prompts
        lower = f", lower evaluation.skip_prompts = {skip}" if skip else ""
        raise UserError(
            "there is no held-out question for evaluation; raise data.held_out_fraction, set evaluation.sources"
            f"{lower}, or set evaluation.num_prompts: 0"
        )
    for source in sources:
        if not source.train and source.weight:
            raise UserError(
                f"data.sources: {source.name} has no question left for training; "
                "lower data.held_out_fraction, or add rows"
            )


def check_domain_names(config: TrainConfig, domains: Iterable[str]) -> None:
    """Reject settings for domains that are not in the data."""
    known = sorted({*domains})
    for setting, named in (
        ("rewards.domain_weights", config.rewards.domain_weights),
        ("verification.functions", config.verification.functions),
        ("prompt.domain_templates", config.prompt.domain_templates),
    ):
        unused = next((name for name in named if name not in known), None)
        if unused is not None:
            raise UserError(
                f"{setting} names the domain {unused!r}, but the domains of the data are {', '.join(known)}; "
                f"fix the name, or set {of_source('domain')}"
            )


def removed_lines(num_too_long: int, num_evaluated_on: int, config: TrainConfig) -> list[str]:
    """Return lines about dropped prompts that are too long, and about training questions that are evaluated on."""
    lines = []
    if num_too_long:
        maximum = counted(config.data.max_prompt_tokens or 0, "token")
        lines.append(f"dropped: {counted(num_too_long, 'prompt')} of more than {maximum} (data.max_prompt_tokens)")
    if num_evaluated_on:
        lines.append(f"removed from training: {counted(num_evaluated_on, 'question')} of the evaluation data")
    return lines


def reading_lines(sources: Sequence[SourceQuestions]) -> list[str]:
    """Return a line about each source with rows that its layout dropped, and about commas that were read."""
    lines = comma_lines(sources)
    if reduced := [one for one in sources if any(one.dropped.values())]:
        from brorl.prompts.public_data import reasons  # loads all layouts

        lines += [
            f"{one.name}: {sum(one.dropped.values()):,} of {one.num_rows:,} rows were dropped ({reasons(one.dropped)})"
            for one in reduced
        ]
    return lines


def comma_lines(sources: Sequence[SourceQuestions]) -> list[str]:
    """Return a line about each source whose answers have commas in numbers."""
    return [f"{one.name}: {comma_line(one.commas)}" for one in sources if one.commas is not None]


def _last_evaluated(config: TrainConfig) -> int:
    """Return how many held-out questions of a source are skipped or evaluated; 0 without evaluation."""
    evaluation = config.evaluation
    return evaluation.skip_prompts + evaluation.num_prompts if evaluation.num_prompts else 0


def all_questions(sources: Sequence[SourceQuestions]) -> list[Question]:
    """Return the training and held-out questions of all sources."""
    return [question for source in sources for part in (source.train, source.held_out) for question in part]


def find_unreadable(
    verifiers: Mapping[str, Verifier], sources: Sequence[SourceQuestions]
) -> dict[str, list[tuple[Question, str]]]:
    """Find questions whose reference answer no response can match.

    In the user's own data such a question is an error. For public datasets, return them with the problem, by source.
    """
    check_references(verifiers, all_questions([source for source in sources if not source.published]))
    public = {one.name: unreadable_references(verifiers, all_questions([one])) for one in sources if one.published}
    return {name: found for name, found in public.items() if found}


def unreadable_lines(unreadable: Mapping[str, Sequence[tuple[Question, str]]]) -> list[str]:
    """Return a warning for the unreadable reference answers of each public dataset."""
    return [
        f"warning: {name}: the verifier cannot read {counted(len(found), 'reference answer')}, such as "
        f"{found[0][0].reference[:60]!r} of {found[0][0].name}, which {found[0][1]}; at most a response with the same "
        "text counts as correct"
        for name, found in unreadable.items()
    ]


NO_LIMIT = 2**31
"""`evaluation.num_prompts` of an evaluation on all prompts."""
DataSource: TypeAlias = FileSource | GymSource | CountdownSource


@dataclass(frozen=True)
class EvaluationRequest:
    """The model, the data and the settings of an evaluation."""

    # the settings of the checkpoint's run, if it has one; `evaluation.max_new_tokens` is None if neither the user nor
    # the run sets it
    config: TrainConfig
    data: tuple[str, ...]  # datasets as the user named them; empty means the run's held-out questions
    belongs_to_run: bool  # whether a run or the shipped model's recipe sets the prompt format
    own_template: bool  # whether the user set prompt.template or prompt.domain_templates

    def format_of(self, one: SourceQuestions) -> PromptFormat:
        """Return the prompt format of a dataset.

        If neither the run nor the user has templates, the usual templates of its domains apply to a public dataset, and
        to one with multiple-choice options.
        """
        own = self.config.prompt
        has_options = isinstance(one.source, FileSource) and bool(one.source.options_column)
        if self.belongs_to_run or self.own_template or not (one.published or has_options):
            return own
        domains = sorted({question.domain for question in one.held_out} & TEMPLATES.keys())
        return own.model_copy(update={"domain_templates": {domain: TEMPLATES[domain] for domain in domains}})


def read_datasets(request: EvaluationRequest) -> list[SourceQuestions]:
    """Read all datasets. Puzzles and the data of a run also have questions to train on, which the caller leaves out."""
    config = request.config
    if not request.data:
        if not request.belongs_to_run or not (config.data.held_out_fraction or config.evaluation.sources):
            raise UserError(
                f"{config.model} is not from a run with held-out questions; choose the data to evaluate on: "
                f"{option('data')} {' | '.join(_names())} | FILE | HUB_ID | countdown"
            )
        sources = build_questions(config)
        check_split(config, sources)
        return [source for source in sources if source.held_out]
    datasets = []
    for text in request.data:
        source = parse_data(text)
        with naming_data(text, source):
            datasets.append(read_questions(_as_guessed(text, source, config), config))
    if repeated := _first_repeated([one.name for one in datasets]):
        raise UserError(
            f"two datasets have the same name, {repeated!r}; rename one: {option('data', '{path: ..., name: ...}')}"
        )
    return datasets


def _names() -> tuple[str, ...]:
    """Return the names of all benchmarks."""
    from brorl.prompts.public_data import BENCHMARKS
    from brorl.verification.gym.task import BENCHMARKS as GYM_BENCHMARKS

    return (*BENCHMARKS, *GYM_BENCHMARKS)


def parse_data(text: str) -> DataSource:
    """Return what --data names: a benchmark, `NAME=PATH_OR_HUB_ID`, a puzzle, a file, a hub id, or a YAML mapping."""
    from brorl.prompts.public_data import BENCHMARKS, benchmark_source
    from brorl.verification.gym.task import BENCHMARKS as GYM_BENCHMARKS

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


def _as_guessed(text: str, source: DataSource, config: TrainConfig) -> DataSource:
    """Guess the columns and the domain, as `brorl init` does, if --data gives only the path of a file.

    If no built-in verifier reads the answers, the user's function does, if there is one.
    """
    if not isinstance(source, FileSource) or source.layout or text.lstrip().startswith("{"):
        return source

    from brorl.prompts.guess import guess_meaning

    try:
        return guess_meaning(source.path).source
    except UserError:
        if len(config.verification.functions) != 1:
            raise
        return guess_meaning(source.path, domain=next(iter(config.verification.functions))).source


@contextmanager
def naming_data(text: str, source: DataSource) -> Iterator[None]:
    """Within the block, let errors about a dataset begin with the argument that gave it."""
    try:
        yield
    except (UserError, ValueError) as error:
        message = f"{option('data', text)}: {error}"
        if isinstance(source, FileSource) and "_column" in str(error):
            message += f", as in {option('data', f'{{path: {source.path}, prompt_column: NAME}}')}"
        if text not in _names() and (near := get_close_matches(text.lower(), _names(), 3, 0.7)):
            message += f"; did you mean the benchmark {' or '.join(near)}?"
        raise UserError(message) from error


def read_all_questions(data: str, overrides: Mapping[str, Any]) -> tuple[TrainConfig, list[Question]]:
    """Read all questions of a recipe, a run, or a dataset that `parse_data` reads; return them with the settings."""
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
        return config, all_questions(build_questions(config))
    config = make_config({}, every, "the options")
    source = parse_data(data)
    with naming_data(data, source):
        sources = (_as_guessed(data, source, config),)
        config = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
        return config, all_questions(build_questions(config))
