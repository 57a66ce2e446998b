"""Questions to prompts: the words around a question, the chat template, and the tokens.

In: questions, a `PromptFormat`, and a tokenizer, which is passed in. Out: prompts as the model reads them, without an
end token. What a chat template cannot show, or would leave out in silence, is a `UserError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from brorl.errors import UserError, first_line
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Message, Question, contents

_PLACEHOLDER = "{prompt}"
_OWN_OPTIONS = frozenset(
    (
        "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
        "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs", "strftime_now",
    )
)  # fmt: skip
_DATE = {
    "%Y": "2026", "%y": "26", "%m": "01", "%d": "01", "%e": " 1", "%j": "001", "%b": "Jan", "%B": "January",
    "%a": "Thu", "%A": "Thursday", "%H": "00", "%I": "12", "%M": "00", "%S": "00", "%p": "AM",
}  # fmt: skip
# Variables reach a chat template as plain data, so a function has to be defined inside it.
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{%- set found = namespace(text=format) -%}"
    + "".join(f"{{%- set found.text = found.text | replace('{key}', '{value}') -%}}" for key, value in _DATE.items())
    + "{{- found.text -}}{%- endmacro -%}{{ '' }}"
)
_QUESTIONS_AT_ONCE = 1024


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer; those of transformers are such."""

    chat_template: Any
    eos_token_id: Any

    def get_chat_template(self) -> str:
        """Return the chat template in use."""
        ...

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Any:
        """Return a mapping whose `input_ids` holds token ids for each text."""
        ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Return the text of a conversation."""
        ...


@dataclass(frozen=True)
class PromptFormat:
    """From a question to what the model reads.

    Args:
        template: Text around the question; `{prompt}`, exactly once, is where it goes. Every other brace is a brace.
        system_prompt: What the model is told before every question; None for nothing.
        chat: Use the tokenizer's chat template: if it has one, or always (an error without), or never.
        chat_template_options: Variables for the chat template, such as `enable_thinking`.

    Raises:
        ValueError: If the template has no place for the question or several, the system prompt is blank, or an option
            is without effect or not the user's to set.
    """

    template: str = _PLACEHOLDER
    system_prompt: str | None = None
    chat: Literal["auto", "always", "never"] = "auto"
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.template.count(_PLACEHOLDER)
        if count != 1:
            raise ValueError(
                f"prompt.template must hold {_PLACEHOLDER} once, where the question goes, not {count} times "
                f"({self.template!r})"
            )
        if self.system_prompt is not None and not self.system_prompt.strip():
            raise ValueError("prompt.system_prompt is blank; give it words, or null for none")
        if self.chat not in ("auto", "always", "never"):
            raise ValueError(f"prompt.chat must be auto, always or never, got {self.chat!r}")
        if self.chat == "never" and self.chat_template_options:
            raise ValueError("prompt.chat_template_options is without effect at prompt.chat: never; drop one of them")
        own = sorted(_OWN_OPTIONS.intersection(self.chat_template_options))
        if own:
            raise ValueError(f"prompt.chat_template_options: {own[0]} is not a variable of a chat template; drop it")

    def fill(self, text: str) -> str:
        """Return a question's text with the template around it."""
        before, _, after = self.template.partition(_PLACEHOLDER)
        return before + text + after

    def messages_of(self, question: Question) -> tuple[Message, ...]:
        """Return the conversation: the system prompt, then the question, whose last message is in the template.

        Raises:
            UserError: If both the question and the format have a system prompt.
        """
        *before, last = question.messages or (Message("user", question.text),)
        if self.system_prompt is not None:
            if any(message.role == "system" for message in before):
                raise UserError(
                    f"question {question.id} has a system message of its own; set prompt.system_prompt: null, "
                    "or take the system messages out of the data"
                )
            before = [Message("system", self.system_prompt), *before]
        return (*before, replace(last, content=self.fill(last.content)))


def render(questions: Sequence[Question], format: PromptFormat, tokenizer: Tokenizer) -> list[Prompt]:  # noqa: A002
    """Turn questions into prompts, in order.

    With a chat template, the text is the template's, up to where the answer begins, and nothing is added to its tokens.
    Without one, the text is the question in `format.template`, after the system prompt and a blank line, and the
    tokenizer adds what it puts at the beginning of every text; a token that it appends at the end is taken off again,
    since the answer follows there. A template that writes today's date writes 1 January 2026, on every day, so that a
    run can be resumed exactly.

    Args:
        questions: The questions.
        format: What is around them.
        tokenizer: The model's tokenizer.

    Returns:
        One prompt a question.

    Raises:
        UserError: If a question cannot be shown in this format, or has no tokens.
    """
    template = _chat_template(format, tokenizer)
    chat = template is not None
    drop_end = not chat and _appends_end(tokenizer)
    prompts: list[Prompt] = []
    for start in range(0, len(questions), _QUESTIONS_AT_ONCE):
        batch = questions[start : start + _QUESTIONS_AT_ONCE]
        texts = [
            _plain_text(q, format) if template is None else _chat_text(q, format, tokenizer, template) for q in batch
        ]
        ids = tokenizer(texts, add_special_tokens=not chat)["input_ids"]
        for q, text, token_ids in zip(batch, texts, ids, strict=True):
            kept = tuple(token_ids[:-1] if drop_end else token_ids)
            if not kept:
                raise UserError(
                    f"the tokenizer makes no token of question {q.id} ({text[:60]!r}); fix or delete the row"
                )
            prompts.append(Prompt(q.id, text, kept, q.reference, q.domain, q.source, q.last_turn))
    return prompts


def drop_long(prompts: Sequence[Prompt], max_tokens: int) -> tuple[list[Prompt], int]:
    """Leave out prompts of more than `max_tokens` tokens.

    Args:
        prompts: The prompts.
        max_tokens: Most tokens of a prompt, 1 or more.

    Returns:
        Those that are short enough, in order, and how many were left out.

    Raises:
        ValueError: If `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be 1 or more, got {max_tokens}")
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_tokens]
    return kept, len(prompts) - len(kept)


def _chat_template(format: PromptFormat, tokenizer: Tokenizer) -> str | None:  # noqa: A002
    """Return the chat template, None if none is used, and refuse options that it does not know."""
    if format.chat == "never":
        return None
    if not tokenizer.chat_template:
        if format.chat == "always":
            raise UserError(
                "the tokenizer has no chat template; set prompt.chat: never, and write what the model needs around the "
                "question into prompt.template"
            )
        if format.chat_template_options:
            raise UserError(
                "the tokenizer has no chat template for prompt.chat_template_options; drop them, or choose a chat model"
            )
        return None
    template = tokenizer.get_chat_template()
    for name in format.chat_template_options:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(
                f"the tokenizer's chat template has no variable {name!r}; fix it in prompt.chat_template_options"
            )
    return _FIXED_DATE + template if "strftime_now" in template else template


def _chat_text(question: Question, format: PromptFormat, tokenizer: Tokenizer, template: str) -> str:  # noqa: A002
    messages = format.messages_of(question)

    def apply(shown: Sequence[Message]) -> str:
        return str(
            tokenizer.apply_chat_template(
                contents(shown),
                tokenize=False,
                add_generation_prompt=True,
                chat_template=template,
                **format.chat_template_options,
            )
        )

    systems = [message.content for message in messages if message.role == "system"]
    where = "prompt.system_prompt" if format.system_prompt is not None else f"question {question.id}"
    advice = f"take it out of {where} and write it into prompt.template"
    try:
        text = apply(messages)
    except Exception as error:  # a chat template is a program of the model's and fails as it likes
        if systems and _works(apply, [message for message in messages if message.role != "system"]):
            raise UserError(
                f"the tokenizer's chat template takes no system prompt ({first_line(error)}); {advice}"
            ) from error
        raise UserError(
            f"the tokenizer's chat template cannot show question {question.id} ({first_line(error)}); "
            "set prompt.chat: never, or fix the row's messages"
        ) from error
    if any(content.strip() not in text for content in systems):
        raise UserError(f"the tokenizer's chat template leaves out the system prompt; {advice}")
    return text


def _works(apply: Any, messages: Sequence[Message]) -> bool:
    try:
        apply(messages)
    except Exception:  # as above
        return False
    return True


def _plain_text(question: Question, format: PromptFormat) -> str:  # noqa: A002
    messages = format.messages_of(question)
    roles = [message.role for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise UserError(
            f"question {question.id} is a conversation ({', '.join(roles)}), which needs a chat template; "
            "choose a chat model and leave prompt.chat at auto, or make the row's prompt one text"
        )
    return "\n\n".join(message.content for message in messages)


def _appends_end(tokenizer: Tokenizer) -> bool:
    """Say whether the tokenizer puts its end token behind every text."""
    (with_special,) = tokenizer(["1"], add_special_tokens=True)["input_ids"]
    (without,) = tokenizer(["1"], add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return end is not None and list(with_special[-1:]) == [end] and list(without[-1:]) != [end]
