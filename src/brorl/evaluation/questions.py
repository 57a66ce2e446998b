"""The questions of a run, to train on and held out, before any model is loaded, and the check of their references.

A question that is evaluated on is removed from the training questions of every source. Bad rows are errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from brorl.config.settings import TrainConfig
from brorl.errors import UserError, of_source
from brorl.format import counted
from brorl.prompts.countdown import countdown_puzzles, countdown_questions, split_countdown
from brorl.prompts.file_questions import check_first_row, read_source
from brorl.prompts.prompt import Question, drop_asked, split_held_out
from brorl.prompts.public_data import reasons
from brorl.prompts.settings import CountdownSource, FileSource, GymSource
from brorl.verification.gym.questions import read_gym
from brorl.verification.trial import check_references, unreadable_references
from brorl.verification.verifier import Verifier


@dataclass(frozen=True)
class SourceQuestions:
    """The questions of one source."""

    source: CountdownSource | GymSource | FileSource
    weight: float  # its fraction of the training prompts, relative to other sources; 0 if it is only evaluated on
    train: Sequence[Question]  # questions to train on
    held_out: Sequence[Question]  # questions to evaluate on, in a seeded order; at most `evaluation.num_prompts`
    num_held_out: int = 0  # number of questions held out, evaluated on or not
    asked: int = 0  # number of training questions that were dropped because another source evaluates on them
    num_rows: int = 0  # rows read; 0 if the questions were generated
    num_repeated: int = 0  # rows that repeat a question with the same answer
    dropped: Mapping[str, int] = field(default_factory=dict)  # rows that the layout dropped, by reason

    @property
    def name(self) -> str:
        """Its name."""
        return self.source.label

    @property
    def published(self) -> bool:
        """Whether it is a public dataset, whose rows the user cannot correct."""
        return isinstance(self.source, GymSource) or (
            isinstance(self.source, FileSource) and self.source.layout is not None
        )


def check_first_rows(config: TrainConfig) -> None:
    """Check the first row of each file on this machine, before anything large is imported or read."""
    for source in (*config.data.sources, *(config.evaluation.sources if _last_evaluated(config) else ())):
        if isinstance(source, FileSource):
            check_first_row(source)


def build_questions(config: TrainConfig) -> list[SourceQuestions]:
    """Read all sources."""
    sources = [read_questions(one, config, config.data.held_out_fraction, one.weight) for one in config.data.sources]
    if _last_evaluated(config):
        sources += [read_questions(only, config) for only in config.evaluation.sources]
    names = [source.name for source in sources]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UserError(f"two sources have the same name, {repeated!r}; set a different `name` for one of them")
    asked = [question for source in sources for question in source.held_out]
    kept = [drop_asked(source.train, asked) for source in sources]
    return [
        replace(source, train=train, held_out=source.held_out[config.evaluation.skip_prompts :], asked=asked)
        for source, (train, asked) in zip(sources, kept, strict=True)
    ]


def read_questions(
    source: CountdownSource | GymSource | FileSource, config: TrainConfig, held_out: float = 1.0, weight: float = 0.0
) -> SourceQuestions:
    """Read a source, and hold out a fraction of its questions; of puzzles, the fraction of the config."""
    data, last = config.data, _last_evaluated(config)
    if isinstance(source, CountdownSource):
        targets = range(source.min_target, source.max_target + 1)
        puzzles = countdown_puzzles(source.num_numbers, source.max_number, targets)
        parts = split_countdown(puzzles, data.held_out_fraction, data.split_seed)
        train, kept = (countdown_questions(part, source.label) for part in parts)
        return SourceQuestions(source, weight, train, kept[:last], len(kept))
    if isinstance(source, GymSource):
        groups = {"data.sources": data.sources, "evaluation.sources": config.evaluation.sources}
        places = [f"{name}[{at}]" for name, group in groups.items() for at, item in enumerate(group) if item is source]
        reading = read_gym(source, config.verification.workers or None, *places[:1])
    else:
        reading = read_source(source, data.split_seed)
    train, kept = split_held_out(reading.questions, held_out, data.split_seed)
    counts = reading.num_rows, reading.num_repeated, reading.dropped
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
    """Reject settings for domains that the data of the recipe does not have."""
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


def removed_lines(num_too_long: int, num_asked: int, config: TrainConfig) -> list[str]:
    """Return lines about prompts that are too long, and about training questions that are also evaluated on."""
    lines = []
    if num_too_long:
        maximum = counted(config.data.max_prompt_tokens or 0, "token")
        lines.append(f"dropped: {counted(num_too_long, 'prompt')} of more than {maximum} (data.max_prompt_tokens)")
    if num_asked:
        lines.append(f"removed from training: {counted(num_asked, 'question')} of the evaluation data")
    return lines


def dropped_line(name: str, num_rows: int, dropped: Mapping[str, int]) -> str:
    """Return a line about the rows of a source that its layout dropped; empty if there are none."""
    number = sum(dropped.values())
    return f"{name}: {number:,} of {num_rows:,} rows were dropped ({reasons(dropped)})" if number else ""


def _last_evaluated(config: TrainConfig) -> int:
    """Return the number of a source's held-out questions that are skipped or evaluated; 0 without evaluation."""
    evaluation = config.evaluation
    return evaluation.skip_prompts + evaluation.num_prompts if evaluation.num_prompts else 0


def all_questions(sources: Sequence[SourceQuestions]) -> list[Question]:
    """Return the questions of all sources, to train and to evaluate on."""
    return [question for source in sources for part in (source.train, source.held_out) for question in part]


def check_left(config: TrainConfig, sources: Sequence[SourceQuestions], verifiers: Mapping[str, Verifier]) -> None:
    """Do `check_split`; an unreadable reference answer is reported first: it is the more basic fault of a file."""
    try:
        check_split(config, sources)
    except UserError:
        find_unreadable(verifiers, sources)
        raise


def find_unreadable(
    verifiers: Mapping[str, Verifier], sources: Sequence[SourceQuestions]
) -> dict[str, list[tuple[Question, str]]]:
    """Return the questions of public datasets whose reference no response can match, with the problem, by source.

    The first one in the user's own data is an error.
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
