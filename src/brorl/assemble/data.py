"""The data of a run: settings to questions, before any model is loaded, and questions to prompts.

Bad rows are errors, and so are prompts that the tokenizer cannot encode or that do not fit into the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.format import counted
from brorl.prompts.countdown import countdown_puzzles, countdown_questions, split_countdown
from brorl.prompts.files import SourceReading, check_first_row, read_source
from brorl.prompts.layouts.table import reasons
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Question, drop_asked, split_held_out
from brorl.prompts.rendering import drop_long, render
from brorl.prompts.settings import CountdownSource, FileSource, GymSource
from brorl.prompts.stream import PromptMixture, PromptStream, PromptSupply
from brorl.verification.gym.questions import read_gym

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class SourceQuestions:
    """The questions of one source."""

    name: str  # its name
    weight: float  # its fraction of the training prompts, relative to other sources; 0 if it is only evaluated on
    train: Sequence[Question]  # questions to train on
    held_out: Sequence[Question]  # questions to evaluate on, in a seeded order; at most `evaluation.num_prompts`
    num_held_out: int = 0  # number of questions held out, evaluated on or not
    asked: int = 0  # number of training questions that were dropped because another source evaluates on them
    num_rows: int = 0  # rows read; 0 if the questions were generated
    num_repeated: int = 0  # rows that repeat a question with the same answer
    dropped: Mapping[str, int] = field(default_factory=dict)  # rows that the layout dropped, by reason
    published: bool = False  # whether it is in the layout of a public dataset, whose rows the user cannot correct


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run."""

    train: PromptSupply  # training prompts in their order
    held_out: Sequence[Prompt]  # prompts to evaluate on
    longest: int  # tokens of the longest prompt
    dropped: int  # number of prompts that `data.max_prompt_tokens` dropped
    asked: int  # number of training questions that were dropped because another source evaluates on them


def check_first_rows(config: TrainConfig) -> None:
    """Check the first row of each file on this machine, before anything large is imported or read.

    Raises:
        UserError: If there is no such file, or its first row is not a question with an answer.
    """
    for source in (*config.data.sources, *(config.evaluation.sources if _last_evaluated(config) else ())):
        if isinstance(source, FileSource):
            check_first_row(source)


def build_questions(config: TrainConfig) -> list[SourceQuestions]:
    """Read all sources.

    Raises:
        UserError: If a row cannot be used, or two sources have one name.
    """
    sources = [_split(source, config) for source in config.data.sources]
    if _last_evaluated(config):
        sources += [_questions(only, config, held_out_fraction=1.0) for only in config.evaluation.sources]
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


def check_split(config: TrainConfig, sources: Sequence[SourceQuestions]) -> None:
    """Check that questions are left to train on and to evaluate on.

    Raises:
        UserError: If a source has no training question, or an evaluation has no question.
    """
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


def build_prompts(
    config: TrainConfig,
    sources: Sequence[SourceQuestions],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
) -> Prompts:
    """Turn questions into prompts.

    Raises:
        UserError: If a prompt cannot be encoded or does not fit into the model.
    """
    limits = response_limits(config)
    maximum = config.data.max_prompt_tokens
    train_of: list[tuple[SourceQuestions, list[Prompt]]] = []
    held_out: list[Prompt] = []
    held_out_tokens: list[int] = []
    positions, dropped = model_positions(model_config), 0
    for source in sources:
        train, kept = (render(part, config.prompt, tokenizer) for part in (source.train, source.held_out))
        lengths = [len(prompt.token_ids) for prompt in train]
        held_out_tokens += [len(prompt.token_ids) for prompt in kept]
        if maximum:
            (train, long_train), (kept, long_kept) = drop_long(train, maximum), drop_long(kept, maximum)
            dropped += long_train + long_kept
        otherwise = ", or set data.max_prompt_tokens"
        problems = prompt_problems(config.model, [*train, *kept], limits, tokenizer, model_config, otherwise)
        if problem := next(problems, None):
            raise UserError(problem)
        if source.train and not train:
            raise UserError(no_train_prompt(source.name, lengths, config, positions))
        held_out += kept
        if train:
            train_of.append((source, train))
    if config.evaluation.num_prompts and not held_out:
        raise UserError(no_held_out_prompt(held_out_tokens, config, positions))
    supply = _supply(train_of, config.seed)
    longest = max(len(prompt.token_ids) for prompt in (*supply.prompts, *held_out))
    return Prompts(supply, held_out, longest, dropped, sum(source.asked for source in sources))


def no_train_prompt(name: str, lengths: Sequence[int], config: TrainConfig, positions: int | None) -> str:
    """Return the error on a source whose training prompts are all too long.

    Args:
        name: Name of the source.
        lengths: Tokens of its prompts, at least one.
        config: The settings.
        positions: Positions of the model; None if they are unknown.
    """
    maximum, fix = config.data.max_prompt_tokens, _room(min(lengths), config, positions)
    return f"every prompt of {name} has more than data.max_prompt_tokens = {maximum} tokens; {fix}"


def no_held_out_prompt(lengths: Sequence[int], config: TrainConfig, positions: int | None) -> str:
    """Return the error on held-out prompts that are all too long; the arguments are those of `no_train_prompt`."""
    maximum = config.data.max_prompt_tokens
    fix = _room(min(lengths), config, positions) if lengths else "raise it"
    return (
        f"every held-out prompt has more than data.max_prompt_tokens = {maximum} tokens; {fix}, or set "
        "evaluation.num_prompts: 0"
    )


def _room(shortest: int, config: TrainConfig, positions: int | None) -> str:
    """Return the fix of prompts that are too long: not to raise the limit where the model has no more positions."""
    setting, response = max(response_limits(config).items(), key=lambda item: item[1])
    if not positions or shortest + response <= positions:
        return f"raise it to {shortest} or more, the tokens of the shortest one"
    room = f"the shortest one has {shortest} tokens, and {config.model} has {positions} positions for a prompt and"
    if shortest < positions:
        return f"{room} {setting} = {response}: lower {setting} to {positions - shortest}, and raise the former"
    return f"{room} its response: choose a model with more positions, or shorten the questions or prompt.template"


def model_positions(model_config: PreTrainedConfig) -> int | None:
    """Return the number of positions of a model; None if its configuration has none."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)


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


def _supply(train_of: Sequence[tuple[SourceQuestions, Sequence[Prompt]]], seed: int) -> PromptSupply:
    """Return the training prompts of all sources in their order."""
    streams = [PromptStream(train, seed, source=number) for number, (_, train) in enumerate(train_of)]
    try:
        return streams[0] if len(streams) == 1 else PromptMixture(streams, [source.weight for source, _ in train_of])
    except ValueError as error:
        raise UserError(f"data.sources: {error}") from error


def _split(source: CountdownSource | GymSource | FileSource, config: TrainConfig) -> SourceQuestions:
    data = config.data
    if not isinstance(source, CountdownSource):
        return replace(_questions(source, config, data.held_out_fraction), weight=source.weight)
    targets = range(source.min_target, source.max_target + 1)
    puzzles = countdown_puzzles(source.num_numbers, source.max_number, targets)
    train, held_out = (
        countdown_questions(part, source.label)
        for part in split_countdown(puzzles, data.held_out_fraction, data.split_seed)
    )
    return SourceQuestions(source.label, source.weight, train, held_out[: _last_evaluated(config)], len(held_out))


def _questions(source: FileSource | GymSource, config: TrainConfig, held_out_fraction: float) -> SourceQuestions:
    """Read a source. One for evaluation only has weight 0, unless the caller gives it one."""
    reading = read_rows_of(source, config)
    train, held_out = split_held_out(reading.questions, held_out_fraction, config.data.split_seed)
    return SourceQuestions(
        source.label,
        0.0,
        train,
        held_out[: _last_evaluated(config)],
        len(held_out),
        num_rows=reading.num_rows,
        num_repeated=reading.num_repeated,
        dropped=reading.dropped,
        published=isinstance(source, GymSource) or source.layout is not None,
    )


def read_rows_of(source: FileSource | GymSource, config: TrainConfig) -> SourceReading:
    """Read or generate the questions of a source.

    Raises:
        UserError: If a setting is wrong or a row cannot be used.
    """
    if isinstance(source, GymSource):
        groups = {"data.sources": config.data.sources, "evaluation.sources": config.evaluation.sources}
        places = [f"{name}[{at}]" for name, group in groups.items() for at, item in enumerate(group) if item is source]
        return read_gym(source, config.verification.workers or None, *places[:1])
    return read_source(source, config.data.split_seed)


def _last_evaluated(config: TrainConfig) -> int:
    """Return the number of a source's held-out questions that are skipped or evaluated; 0 without evaluation."""
    evaluation = config.evaluation
    return evaluation.skip_prompts + evaluation.num_prompts if evaluation.num_prompts else 0


def response_limits(config: TrainConfig) -> dict[str, int]:
    """Return the maximum tokens of a response, by the name of the setting."""
    return {
        "sampling.max_new_tokens": config.sampling.max_new_tokens,
        "evaluation.max_new_tokens": config.evaluation.max_new_tokens or 0,
    }


def prompt_problems(
    model: str,
    prompts: Sequence[Prompt],
    limits: Mapping[str, int],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    otherwise: str = "",
) -> Iterator[str]:
    """Yield the problem of each prompt that the tokenizer cannot encode, or that leaves no room for a response.

    Args:
        model: Name of the model.
        prompts: The prompts.
        limits: Maximum tokens of a response, by the name of the setting.
        tokenizer: The model's tokenizer.
        model_config: Its configuration, for its vocabulary and its positions.
        otherwise: Another fix than to lower the limit.
    """
    text_config = model_config.get_text_config()
    longest = model_positions(model_config)
    setting, response = max(limits.items(), key=lambda item: item[1])
    for prompt in prompts:
        unknown = tokenizer.unk_token_id is not None and tokenizer.unk_token_id in prompt.token_ids
        if unknown or max(prompt.token_ids) >= text_config.vocab_size:
            yield (
                f"the tokenizer of {model} cannot encode the prompt {_short(prompt.text)} ({prompt.id}); choose "
                "another model or other data"
            )
        elif longest and len(prompt.token_ids) + response > longest:
            has_room = len(prompt.token_ids) < longest
            fix = f"lower {setting}" if has_room else "choose a model with more positions, shorten the prompt"
            yield (
                f"prompt {prompt.id} ({len(prompt.token_ids)} tokens) and {setting} = {response} exceed the {longest} "
                f"positions of {model}; {fix}{otherwise}"
            )


def all_questions(sources: Sequence[SourceQuestions]) -> list[Question]:
    """Return the questions of all sources, to train and to evaluate on."""
    return [question for source in sources for part in (source.train, source.held_out) for question in part]


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
