"""The prompts of a run: its questions, encoded for its model.

Prompts that the tokenizer cannot encode or that do not fit into the model are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.questions import SourceQuestions
from brorl.prompts.prompt import Prompt
from brorl.prompts.rendering import drop_long, model_positions, prompt_problems, render
from brorl.prompts.stream import PromptStream

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run."""

    train: PromptStream  # training prompts in their order
    held_out: Sequence[Prompt]  # prompts to evaluate on
    longest: int  # tokens of the longest prompt
    dropped: int  # number of prompts that `data.max_prompt_tokens` dropped
    asked: int  # number of training questions that were dropped because another source evaluates on them


def build_prompts(
    config: TrainConfig,
    sources: Sequence[SourceQuestions],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
) -> Prompts:
    """Turn questions into prompts; one that cannot be encoded or does not fit into the model is a UserError."""
    limits = config.response_limits
    maximum = config.data.max_prompt_tokens
    train_prompts: list[Prompt] = []
    weights: dict[str, float] = {}
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
            train_prompts += train
            weights[source.name] = source.weight
    if config.evaluation.num_prompts and not held_out:
        raise UserError(no_held_out_prompt(held_out_tokens, config, positions))
    try:
        stream = PromptStream(train_prompts, config.seed, weights)
    except ValueError as error:
        raise UserError(f"data.sources: {error}") from error
    longest = max(len(prompt.token_ids) for prompt in (*train_prompts, *held_out))
    return Prompts(stream, held_out, longest, dropped, sum(source.asked for source in sources))


def no_train_prompt(name: str, lengths: Sequence[int], config: TrainConfig, positions: int | None) -> str:
    """Return the error on a source whose training prompts are all too long, from their lengths in tokens.

    `positions` are those of the model; None if they are unknown.
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
    setting, response = max(config.response_limits.items(), key=lambda item: item[1])
    if not positions or shortest + response <= positions:
        return f"raise it to {shortest} or more, the tokens of the shortest one"
    room = f"the shortest one has {shortest} tokens, and {config.model} has {positions} positions for a prompt and"
    if shortest < positions:
        return f"{room} {setting} = {response}: lower {setting} to {positions - shortest}, and raise the former"
    return f"{room} its response: choose a model with more positions, or shorten the questions or prompt.template"
