"""Whether a model can read prompts, and has room for them and their responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from brorl.prompts.prompt import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


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


def model_positions(model_config: PreTrainedConfig) -> int | None:
    """Return the number of positions of a model; None if its configuration has none."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
