"""Reads the questions of a recipe's sources before any model is loaded, and checks their reference answers.

Training and evaluation read a source in the same way. Bad rows are errors. If any source evaluates on a question, it is
removed from the training data of all sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from brorl.config.settings import TrainConfig
from brorl.errors import UserError, source_setting
from brorl.format import counted
from brorl.prompts.countdown import countdown_puzzles, countdown_questions, split_countdown
from brorl.prompts.question import MATH_DOMAIN, SCIENCE_DOMAIN, Question
from brorl.prompts.settings import CountdownSource, FileSource, GymSource, Source
from brorl.prompts.source_questions import SourceQuestions, drop_evaluated, reasons, split_held_out
from brorl.verification.verifier import Verifier, check_references, unreadable_references

_BUILT_IN = frozenset({MATH_DOMAIN, SCIENCE_DOMAIN})  # their verifiers read numbers


def check_first_rows(config: TrainConfig) -> None:
    """Check the first row of each local file before anything large is imported or read."""
    evaluated = config.evaluation.sources if config.evaluation.num_prompts else ()
    for source in (*config.data.sources, *evaluated):
        if isinstance(source, FileSource):
            from brorl.prompts.file_questions import check_first_row  # puzzles need no file reader

            check_first_row(source)


def build_questions(config: TrainConfig) -> list[SourceQuestions]:
    """Read all sources, and drop training questions that any source evaluates on or skips."""
    sources = read_sources(config)
    evaluated = [question for source in sources for question in source.held_out]
    kept = [drop_evaluated(source.train, evaluated) for source in sources]
    first = config.evaluation.skip_prompts
    return [
        replace(source, train=train, held_out=source.held_out[first:], num_evaluated_on=num_evaluated_on)
        for source, (train, num_evaluated_on) in zip(sources, kept, strict=True)
    ]


def read_sources(config: TrainConfig) -> list[SourceQuestions]:
    """Read a recipe's sources: first training sources, with a fraction held out, then evaluation-only sources."""
    fraction = config.data.held_out_fraction
    sources = [read_questions(source, config, fraction, source.weight) for source in config.data.sources]
    if config.evaluation.num_prompts:
        sources += [read_questions(source, config) for source in config.evaluation.sources]
    if repeated := first_repeated([source.name for source in sources]):
        raise UserError(f"two sources have the same name, {repeated!r}; set a different `name` for one of them")
    return sources


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs twice."""
    return next((name for name in names if names.count(name) > 1), None)


def read_questions(source: Source, config: TrainConfig, held_out: float = 1.0, weight: float = 0.0) -> SourceQuestions:
    """Read a source and hold out a fraction of its questions. For puzzles, it is always `data.held_out_fraction`."""
    data = config.data
    last = _last_evaluated(config)
    if isinstance(source, CountdownSource):
        targets = range(source.min_target, source.max_target + 1)
        puzzles = countdown_puzzles(source.num_numbers, source.max_number, targets)
        split = split_countdown(puzzles, data.held_out_fraction, data.split_seed)
        train, kept = (countdown_questions(side, source.label) for side in split)
        return SourceQuestions(source, train, kept[:last], weight, num_held_out=len(kept))
    if isinstance(source, GymSource):
        from brorl.verification.gym.task import read_gym  # import only the readers that the recipe's sources need

        settings = {"data.sources": data.sources, "evaluation.sources": config.evaluation.sources}
        places = [f"{name}[{i}]" for name, items in settings.items() for i, item in enumerate(items) if item is source]
        questions = read_gym(source, config.verification.workers or None, *places[:1])
    else:
        from brorl.prompts.file_questions import read_commas, read_source

        questions = read_source(source, data.split_seed)
        if source.layout is None:
            questions = read_commas(questions, _BUILT_IN - {*config.verification.functions})
    train, kept = split_held_out(questions.train, held_out, data.split_seed)
    return replace(questions, train=train, held_out=kept[:last], weight=weight, num_held_out=len(kept))


def _last_evaluated(config: TrainConfig) -> int:
    """Return how many held-out questions per source are skipped or evaluated on; 0 without evaluation."""
    evaluation = config.evaluation
    return evaluation.skip_prompts + evaluation.num_prompts if evaluation.num_prompts else 0


def check_split(config: TrainConfig, sources: Sequence[SourceQuestions]) -> None:
    """Check that there are questions left to train and evaluate on."""
    check_held_out(config, sources)
    for source in sources:
        if not source.train and source.weight:
            raise UserError(
                f"data.sources: {source.name} has no questions left for training; "
                "lower data.held_out_fraction, or add rows"
            )


def check_held_out(config: TrainConfig, sources: Sequence[SourceQuestions]) -> None:
    """Check that there are questions to evaluate on, unless evaluation is off."""
    if config.evaluation.num_prompts and not any(source.held_out for source in sources):
        skip = config.evaluation.skip_prompts
        lower = f", lower evaluation.skip_prompts = {skip}" if skip else ""
        raise UserError(
            "there are no held-out questions for evaluation; raise data.held_out_fraction, set evaluation.sources"
            f"{lower}, or set evaluation.num_prompts: 0"
        )


def check_domain_names(config: TrainConfig, domains: Iterable[str]) -> None:
    """Reject settings that name domains missing from the data."""
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
                f"fix the name, or set {source_setting('domain')}"
            )


def reading_lines(sources: Sequence[SourceQuestions]) -> list[str]:
    """Return a line for each source whose layout dropped rows, and for each source with commas in numbers."""
    return comma_lines(sources) + [
        f"{source.name}: {sum(source.dropped.values()):,} of {source.num_rows:,} rows were dropped "
        f"({reasons(source.dropped)})"
        for source in sources
        if any(source.dropped.values())
    ]


def comma_lines(sources: Sequence[SourceQuestions]) -> list[str]:
    """Return a line for each source whose answers have commas in numbers."""
    return [f"{source.name}: {source.commas}" for source in sources if source.commas]


def removed_lines(num_too_long: int, num_evaluated_on: int, config: TrainConfig) -> list[str]:
    """Return lines about dropped prompts that are too long, and training questions that are in the evaluation data."""
    lines = []
    if num_too_long:
        maximum = counted(config.data.max_prompt_tokens or 0, "token")
        lines.append(f"dropped: {counted(num_too_long, 'prompt')} of more than {maximum} (data.max_prompt_tokens)")
    if num_evaluated_on:
        lines.append(f"removed from training: {counted(num_evaluated_on, 'question')} in the evaluation data")
    return lines


def all_questions(sources: Sequence[SourceQuestions]) -> list[Question]:
    """Return the training and held-out questions of all sources."""
    return [question for source in sources for question in source.questions]


def find_unreadable(
    verifiers: Mapping[str, Verifier], sources: Sequence[SourceQuestions]
) -> dict[str, list[tuple[Question, str]]]:
    """Find questions whose reference answer no response can match.

    In the user's data, such a question is an error. For public datasets, return the questions and problems by source.
    """
    check_references(verifiers, all_questions([source for source in sources if not source.published]))
    unreadable = {
        source.name: unreadable_references(verifiers, source.questions) for source in sources if source.published
    }
    return {name: questions for name, questions in unreadable.items() if questions}


def unreadable_lines(unreadable: Mapping[str, Sequence[tuple[Question, str]]]) -> list[str]:
    """Return a warning for the unreadable reference answers of each public dataset."""
    return [
        f"warning: {name}: the verifier cannot read {counted(1 + len(more), 'reference answer')}, such as "
        f"{question.reference[:60]!r} of {question.name}, which {problem}; only an identical response counts as correct"
        for name, ((question, problem), *more) in unreadable.items()
    ]
