"""Read the questions of a recipe's sources before any model is loaded, and check their reference answers.

Training and evaluation read a source identically. Bad rows are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.format import counted
from brorl.prompts.countdown import countdown_puzzles, countdown_questions, split_countdown
from brorl.prompts.question import MATH_DOMAIN, SCIENCE_DOMAIN, Question
from brorl.prompts.settings import CountdownSource, GymSource, Source
from brorl.prompts.source_questions import SourceQuestions, reasons, split_held_out
from brorl.verification.verifier import Verifier, check_references, unreadable_references

_BUILT_IN = frozenset({MATH_DOMAIN, SCIENCE_DOMAIN})  # their verifiers read numbers


def read_sources(config: TrainConfig) -> list[SourceQuestions]:
    """Read the sources of a recipe: first those to train on, with a fraction held out, then evaluation-only sources."""
    sources = [read_questions(one, config, config.data.held_out_fraction, one.weight) for one in config.data.sources]
    if config.evaluation.num_prompts:
        sources += [read_questions(only, config) for only in config.evaluation.sources]
    if repeated := first_repeated([source.name for source in sources]):
        raise UserError(f"two sources have the same name, {repeated!r}; set a different `name` for one of them")
    return sources


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs twice."""
    return next((name for name in names if names.count(name) > 1), None)


def read_questions(source: Source, config: TrainConfig, held_out: float = 1.0, weight: float = 0.0) -> SourceQuestions:
    """Read a source, and hold out a fraction of its questions. Puzzles always use `data.held_out_fraction`."""
    data, last = config.data, _last_evaluated(config)
    if isinstance(source, CountdownSource):
        targets = range(source.min_target, source.max_target + 1)
        puzzles = countdown_puzzles(source.num_numbers, source.max_number, targets)
        parts = split_countdown(puzzles, data.held_out_fraction, data.split_seed)
        train, kept = (countdown_questions(part, source.label) for part in parts)
        return SourceQuestions(source, train, kept[:last], weight, num_held_out=len(kept))
    if isinstance(source, GymSource):
        from brorl.verification.gym.task import read_gym  # only the readers of a recipe's sources are imported

        groups = {"data.sources": data.sources, "evaluation.sources": config.evaluation.sources}
        places = [f"{name}[{at}]" for name, group in groups.items() for at, item in enumerate(group) if item is source]
        found = read_gym(source, config.verification.workers or None, *places[:1])
    else:
        from brorl.prompts.file_questions import read_commas, read_source

        found = read_source(source, data.split_seed)
        if source.layout is None:
            found = read_commas(found, _BUILT_IN - {*config.verification.functions})
    train, kept = split_held_out(found.train, held_out, data.split_seed)
    return replace(found, train=train, held_out=kept[:last], weight=weight, num_held_out=len(kept))


def check_held_out(config: TrainConfig, sources: Sequence[SourceQuestions]) -> None:
    """Check that there are questions to evaluate on, unless evaluation is off."""
    if config.evaluation.num_prompts and not any(source.held_out for source in sources):
        skip = config.evaluation.skip_prompts
        lower = f", lower evaluation.skip_prompts = {skip}" if skip else ""
        raise UserError(
            "there are no held-out questions for evaluation; raise data.held_out_fraction, set evaluation.sources"
            f"{lower}, or set evaluation.num_prompts: 0"
        )


def reading_lines(sources: Sequence[SourceQuestions]) -> list[str]:
    """Return a line for each source whose layout dropped rows, and for each with commas in numbers."""
    return comma_lines(sources) + [
        f"{one.name}: {sum(one.dropped.values()):,} of {one.num_rows:,} rows were dropped ({reasons(one.dropped)})"
        for one in sources
        if any(one.dropped.values())
    ]


def comma_lines(sources: Sequence[SourceQuestions]) -> list[str]:
    """Return a line for each source whose answers have commas in numbers."""
    return [f"{one.name}: {one.commas}" for one in sources if one.commas]


def all_questions(sources: Sequence[SourceQuestions]) -> list[Question]:
    """Return the training and held-out questions of all sources."""
    return [question for source in sources for question in source.questions]


def find_unreadable(
    verifiers: Mapping[str, Verifier], sources: Sequence[SourceQuestions]
) -> dict[str, list[tuple[Question, str]]]:
    """Find questions whose reference answer no response can match.

    In the user's own data such a question is an error. For public datasets, return it with the problem, by source.
    """
    check_references(verifiers, all_questions([source for source in sources if not source.published]))
    public = {one.name: unreadable_references(verifiers, all_questions([one])) for one in sources if one.published}
    return {name: found for name, found in public.items() if found}


def unreadable_lines(unreadable: Mapping[str, Sequence[tuple[Question, str]]]) -> list[str]:
    """Return a warning for the unreadable reference answers of each public dataset."""
    return [
        f"warning: {name}: the verifier cannot read {counted(len(found), 'reference answer')}, such as "
        f"{found[0][0].reference[:60]!r} of {found[0][0].name}, which {found[0][1]}; only an identical response counts "
        "as correct"
        for name, found in unreadable.items()
    ]


def _last_evaluated(config: TrainConfig) -> int:
    """Return the number of a source's held-out questions that are skipped or evaluated; 0 without evaluation."""
    evaluation = config.evaluation
    return evaluation.skip_prompts + evaluation.num_prompts if evaluation.num_prompts else 0
