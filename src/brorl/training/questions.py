"""The questions of a run. Questions that any source evaluates on are removed from the training data of all sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from brorl.config.settings import TrainConfig
from brorl.errors import UserError, of_source
from brorl.evaluation.questions import check_held_out, read_sources
from brorl.format import counted
from brorl.prompts.settings import FileSource
from brorl.prompts.source_questions import SourceQuestions, drop_evaluated


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
        replace(source, train=train, held_out=source.held_out[first:], num_evaluated_on=number)
        for source, (train, number) in zip(sources, kept, strict=True)
    ]


def check_split(config: TrainConfig, sources: Sequence[SourceQuestions]) -> None:
    """Check that there are questions left to train and evaluate on."""
    check_held_out(config, sources)
    for source in sources:
        if not source.train and source.weight:
            raise UserError(
                f"data.sources: {source.name} has no questions left for training; "
                "lower data.held_out_fraction, or add rows"
            )


def check_domain_names(config: TrainConfig, domains: Iterable[str]) -> None:
    """Reject settings that name domains not in the data."""
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
    """Return lines about prompts dropped as too long, and about training questions in the evaluation data."""
    lines = []
    if num_too_long:
        maximum = counted(config.data.max_prompt_tokens or 0, "token")
        lines.append(f"dropped: {counted(num_too_long, 'prompt')} of more than {maximum} (data.max_prompt_tokens)")
    if num_evaluated_on:
        lines.append(f"removed from training: {counted(num_evaluated_on, 'question')} in the evaluation data")
    return lines
