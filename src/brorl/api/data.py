"""`brorl.data`: count and check the questions of a recipe's sources. Loads no weights and writes nothing.

A reference answer that no response can match is an error, as in training. Lengths are in tokens if the model's
tokenizer can be loaded. Each skipped check is reported in a note.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.text import Text

from brorl.activity import Observe, Stage, unobserved
from brorl.api.arguments import resolve_config
from brorl.config.reading import ConfigOrPath
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.errors import UserError, option
from brorl.evaluation.questions import (
    all_questions,
    build_questions,
    check_domain_names,
    check_first_rows,
    check_split,
    comma_lines,
    find_unreadable,
    removed_lines,
    unreadable_lines,
)
from brorl.format import counted, listed, visible_text
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Question
from brorl.prompts.source_questions import SourceQuestions
from brorl.storage import is_file
from brorl.table import Result, Table
from brorl.tools.setup import load_tools, load_tools_and_verifiers, make_toolbox
from brorl.verification.domains.verifiers import untrusted_domains
from brorl.verification.sandbox.level import choose_level
from brorl.verification.sandbox.pool import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from brorl.training.inputs import SourcePrompts

    _Model = tuple[PreTrainedTokenizerBase, PreTrainedConfig]

_PROMPT, _REFERENCE = 2_000, 200  # show at most this many characters


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths, in tokens, or in characters without a tokenizer."""

    median: float
    p95: int  # 95% of the prompts are at most this long
    longest: int


@dataclass(frozen=True)
class SourceSummary:
    """Counts for one source."""

    name: str
    kind: str  # a layout, `columns`, or the name of a generator
    num_rows: int | None  # rows read; None if the questions are generated
    num_train: int  # training questions, not counting prompts that are too long
    num_held_out: int  # questions held out from training
    num_repeated: int  # rows that repeat a question
    dropped: Mapping[str, int]  # rows that the layout dropped: reason -> count
    num_evaluated_on: int  # training questions removed because another source evaluates on them
    # Training and held-out prompts longer than `data.max_prompt_tokens`; 0 if lengths are in characters.
    num_too_long: int
    # Domain -> number of training questions, or of held-out questions if the source is used only for evaluation.
    # Prompts that are too long are not counted.
    domains: Mapping[str, int]
    fraction: float  # share of all training prompts, 0 to 1
    # Lengths of the training prompts, including those that are too long, or of the held-out prompts if there are none.
    lengths: Lengths


def prompt_lines(prompt: Prompt, unit: str = "tokens", whole: bool = False) -> list[Text]:
    """Return lines with a prompt's id, length in `unit`, reference, and text (shortened unless `whole`)."""
    length = len(prompt.text) if whole else _PROMPT
    cut = visible_text(prompt.text[:length])
    more = len(prompt.text) - length
    lines = [*cut.split("\n"), *([f"... {counted(more, 'more character')}"] if more > 0 else [])]
    reference = visible_text(prompt.reference[:_REFERENCE], one_line=True)
    if len(prompt.reference) > _REFERENCE:
        reference += f"... ({len(prompt.reference):,} characters)"
    return [
        Text(f"\n{prompt.id} ({prompt.domain}, {len(prompt.token_ids):,} {unit}), reference: {reference}"),
        *(Text(f"  | {line}", style="cyan") for line in lines),
    ]


@dataclass(frozen=True, eq=False, repr=False)
class DataResult(Result):
    """Counts and example prompts for a recipe's sources."""

    sources: tuple[SourceSummary, ...]
    prompts: tuple[Prompt, ...]  # examples; without a tokenizer, they have no chat template and one token per character
    unit: str  # unit of lengths: `tokens`, or `characters` without a tokenizer
    notes: tuple[str, ...]  # lines for the user
    problem: str | None = None  # the error that would stop a run; None if the checks found none

    @property
    def tables(self) -> list[Table]:
        """Tables of counts and lengths per source, of domains, and of dropped rows."""
        counts = []
        lengths = []
        dropped = list[tuple[str, ...]]()
        domain_count = Counter[str]()
        domain_share = defaultdict[str, float](float)
        for source in self.sources:
            question_counts = (source.num_train, source.num_held_out, source.num_repeated, sum(source.dropped.values()))
            rows = "-" if source.num_rows is None else f"{source.num_rows:,}"
            counts.append((source.name, source.kind, rows, *map("{:,}".format, question_counts)))
            share = f"{source.fraction:.1%}" if source.fraction else "-"
            longest = (source.lengths.p95, source.lengths.longest, source.num_too_long)
            lengths.append((source.name, share, f"{source.lengths.median:,g}", *map("{:,}".format, longest)))
            reasons = sorted(source.dropped.items(), key=lambda item: (-item[1], item[0]))
            dropped += [(source.name, reason, f"{count:,}") for reason, count in reasons]
            for domain, count in source.domains.items() if source.fraction else ():
                domain_count[domain] += count
                domain_share[domain] += source.fraction * count / source.num_train
        columns = ("source", "kind", "rows", "training", "held out", "repeated", "dropped")
        tables = [Table("rows and questions", columns, tuple(counts), words=frozenset({0, 1}))]
        length_columns = ("source", "share", "median", "95%", "longest", "too long")
        tables.append(Table(f"training prompts, lengths in {self.unit}", length_columns, tuple(lengths)))
        domains = tuple((name, f"{domain_count[name]:,}", f"{share:.1%}") for name, share in domain_share.items())
        if domains:
            tables.append(Table("domains", ("domain", "training", "share"), domains))
        if dropped:
            tables.append(Table("dropped rows", ("source", "reason", "rows"), tuple(dropped), words=frozenset({0, 1})))
        return tables

    def parts(self) -> Iterator[str | Text | Table]:
        """Yield the tables, the notes and the prompts."""
        for table in self.tables:
            yield from (table, "")
        yield from self.notes
        for prompt in self.prompts:
            yield from prompt_lines(prompt, self.unit)

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return 0 if self.problem is None else UserError.exit_code

    def __repr__(self) -> str:
        train, held_out = (sum(getattr(s, name) for s in self.sources) for name in ("num_train", "num_held_out"))
        problem = "" if self.problem is None else f"; {self.problem}"
        sources = counted(len(self.sources), "source")
        return f"DataResult({sources}: {train:,} training questions, {held_out:,} held out{problem})"


def data(recipe: ConfigOrPath = "quickstart", *, show: int = 10, progress: bool = True, **overrides: Any) -> DataResult:
    """Read and check the sources of a recipe, and count their questions, lengths, domains and dropped rows.

    Examples:
        >>> brorl.data("mine.yaml", show=3)

    Args:
        recipe: Built-in recipe, YAML file or run directory; from Python also nested settings or a config.
        show: Number of prompts in the result, 0 or more, spread over the sources.
        progress: Show the current work.
        overrides: Settings that replace those of the recipe, nested or by dotted name.

    Returns:
        The counts and the prompts. Lengths are in tokens if the tokenizer of the recipe's model can be loaded, and in
        characters otherwise.

    Raises:
        UserError: If a setting is wrong, a source cannot be read, a domain has no verifier, or no response can match a
            reference answer.
    """
    if show < 0:
        raise UserError(f"{option('show')}: expected a number of at least 0, not {show}")
    if isinstance(recipe, str | Path) and is_file(Path(recipe) / "config.yaml"):
        recipe = Path(recipe) / "config.yaml"  # it is a run directory
    with Screen(silent=not progress) as screen:
        config = resolve_config(recipe, overrides)
        check_first_rows(config)
        return describe_data(config, show, screen.observe)


def describe_data(config: TrainConfig, show: int, observe: Observe = unobserved) -> DataResult:
    """Read the sources of a recipe, and check them as training does."""
    from brorl.training.inputs import SourcePrompts, build_prompts, render_sources

    observe(Stage("reading", "data"))
    sources = build_questions(config)
    observe(Stage("checking", "reference answers"))
    notes = _check(config, sources)
    observe(Stage("encoding", "prompts"))
    model = _load(config, notes)
    problem = None
    if model is None:
        rendered = [
            SourcePrompts(source, _spelled(source.train, config), _spelled(source.held_out, config))
            for source in sources
        ]
        kept = rendered
    else:
        with Workers.from_settings(config.verification) as workers:
            toolbox = make_toolbox(config, config.model, model[0], load_tools(config, workers))
            rendered = render_sources(config, sources, model[0], toolbox)
        kept = [source.short(config.data.max_prompt_tokens) for source in rendered]
        try:
            build_prompts(config, rendered, *model)
        except UserError as error:
            problem = str(error)
    total = sum(source.weight for source in sources if source.train)
    summaries = [_summary(before, after, total) for before, after in zip(rendered, kept, strict=True)]
    shown: list[Prompt] = []
    for index, (before, after) in enumerate(zip(rendered, kept, strict=True)):
        examples = after.train or after.held_out or before.train or before.held_out
        most = min(show // len(sources) + (index < show % len(sources)), len(examples))
        shown += [examples[i * len(examples) // most] for i in range(most)]  # evenly spaced
    if evaluated := sum(len(source.held_out) for source in kept):
        notes.append(f"evaluated on: {counted(evaluated, 'held-out question')} (evaluation.num_prompts per source)")
    too_long = sum(summary.num_too_long for summary in summaries)
    num_evaluated_on = sum(summary.num_evaluated_on for summary in summaries)
    notes += removed_lines(too_long, num_evaluated_on, config)
    if problem is not None:
        notes.append(f"a run would stop with an error: {problem}")
    return DataResult(tuple(summaries), tuple(shown), "tokens" if model else "characters", tuple(notes), problem)


def _summary(rendered: SourcePrompts, kept: SourcePrompts, total_weight: float) -> SourceSummary:
    """Count a source's questions, given its prompts with and without those that are too long."""
    source = rendered.source
    lengths = sorted(len(prompt.token_ids) for prompt in rendered.train or rendered.held_out) or [0]
    num_kept = len(kept.train) + len(kept.held_out)
    return SourceSummary(
        name=source.name,
        kind=source.source.kind,
        num_rows=source.num_rows or None,
        num_train=len(kept.train),
        num_held_out=source.num_held_out,
        num_repeated=source.num_repeated,
        dropped=source.dropped,
        num_evaluated_on=source.num_evaluated_on,
        num_too_long=len(rendered.train) + len(rendered.held_out) - num_kept,
        domains=Counter(prompt.domain for prompt in (kept.train if source.train else kept.held_out)),
        fraction=source.weight / total_weight if kept.train else 0.0,
        lengths=Lengths(median(lengths), lengths[ceil(0.95 * len(lengths)) - 1], lengths[-1]),
    )


def _check(config: TrainConfig, sources: Sequence[SourceQuestions]) -> list[str]:
    """Check domains and reference answers as training does; return lines about public datasets and skipped checks."""
    notes = []
    domains = {question.domain for question in all_questions(sources)}
    checked = {*domains}
    if untrusted := untrusted_domains(config.verification, domains):
        try:
            choose_level(config.verification.sandbox)
        except UserError as error:
            notes.append(f"not checked: the reference answers of {listed(untrusted)}: {error}")
            checked -= {*untrusted}
    with Workers.from_settings(config.verification) as workers:
        _, verifiers = load_tools_and_verifiers(config, checked, workers)
        check_domain_names(config, domains)
        check_split(config, sources)
        return notes + comma_lines(sources) + unreadable_lines(find_unreadable(verifiers, sources))


def _load(config: TrainConfig, notes: list[str]) -> _Model | None:
    """Load the model's tokenizer and configuration; on failure, add a note and return None."""
    from brorl.model.load import load_tokenizer
    from brorl.model.source import find_model, read_config

    try:
        return load_tokenizer(config.model, config.sampling.stop), read_config(find_model(config.model))
    except UserError as error:
        notes.append(
            "not checked: whether the model can read the prompts; lengths are in characters, and prompts have no chat "
            f"template: {error}"
        )
        return None


def _spelled(questions: Sequence[Question], config: TrainConfig) -> list[Prompt]:
    """Return prompts without a chat template, with one token per character."""
    prompts = []
    for q in questions:
        text = "\n\n".join(message.content for message in config.prompt.messages_of(q))
        prompts.append(Prompt(q.id, text, tuple(map(ord, text)), q.reference, q.domain, q.source, q.last_turn))
    return prompts
