"""Renders questions as `Prompt`s, and checks that the model can read them and has room to answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from string import ascii_letters
from typing import TYPE_CHECKING, Any, Literal

from brorl.errors import UserError, first_line
from brorl.format import short_repr
from brorl.prompts.prompt import Prompt, PromptIds
from brorl.prompts.question import ENVIRONMENT_DOMAIN, Message, Question
from brorl.prompts.settings import PromptFormat

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


TEMPLATES: Mapping[str, str] = {
    "math": "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "science": (
        "{prompt}\n\nPlease reason step by step, and put your final answer (the letter, if there are options) within "
        "\\boxed{}."
    ),
    "gym": "{prompt}\n\nPlease reason step by step, and put your final answer between <answer> and </answer>.",
    "code": "{prompt}",  # layouts describe the form of the program in the question
    "ifeval": "{prompt}",  # the question contains all instructions
}
"""The usual text around a question, by domain; it asks for an answer in the form that the verifier reads."""

_DATE = datetime(2026, 1, 1)
_DATE_PART = re.compile(r"%([-_0^#+:]*\d*[EO]?[A-Za-z+])")  # flags, width, modifier and letter of strftime
# Chat template variables are plain data, so the function is defined inside the template.
_FIXED_DATE = """
{%- macro strftime_now(format) -%}
  {%- set parts = format.split('%') -%}
  {%- set after = namespace(percent=true, length=0) -%}
  {%- for part in parts -%}
    {%- if after.percent -%}
      {{- part -}}
      {%- set after.percent = false -%}
    {%- elif not part -%}
      {{- '%' -}}
      {%- set after.percent = true -%}
    {%- else -%}
      {%- set after.length = 0 -%}
      {%- for length in range(1, part | length + 1) if part[:length] in DATE -%}
        {%- set after.length = length -%}
      {%- endfor -%}
      {%- if not after.length and part[0] in '-_0^#+:123456789EO' -%}
        {{- raise_exception('it writes a date in the form %' ~ part ~ ', which is not read') -}}
      {%- endif -%}
      {{- DATE.get(part[:after.length], '%') ~ part[after.length:] -}}
    {%- endif -%}
  {%- endfor -%}
{%- endmacro -%}
"""
_QUESTIONS_AT_ONCE = 1024


@dataclass(frozen=True)
class ShownTools:
    """How prompts describe tools: through schemas for the chat template, or as text at the beginning of a message."""

    schemas: tuple[dict[str, Any], ...] = ()  # passed to the chat template; empty if the text shows the tools
    text: str = ""  # describes the tools; empty if the chat template shows them
    role: Literal["system", "user"] = "system"  # role of the message that begins with the text

    def messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Put the text at the beginning of the first message with this role, or in a new message."""
        if not self.text:
            return tuple(messages)
        place = next((i for i, message in enumerate(messages) if message.role == self.role), None)
        if place is None:
            return (Message(self.role, self.text), *messages)
        message = replace(messages[place], content=f"{self.text}\n\n{messages[place].content}")
        return (*messages[:place], message, *messages[place + 1 :])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools that the chat template must show."""
        return tuple(str(schema["function"]["name"]) for schema in self.schemas)


def render(
    questions: Sequence[Question],
    style: PromptFormat,
    tokenizer: PreTrainedTokenizerBase,
    shown: ShownTools | None = None,
) -> list[Prompt]:
    """Turn questions into prompts, in order, with the tools in `shown`.

    With a chat template, the text is the template's output up to the beginning of the answer; no tokens are added.
    Without one, it is the system prompt, a blank line, and the question in `style.template`. The tokenizer then adds
    its tokens at the beginning; an end token that it appends is removed, since the answer follows. A template that
    writes today's date always gets January 1, 2026, so a resumed run has the same prompts.
    """
    template = chat_template(style, tokenizer)
    chat = template is not None
    drop_end = not chat and _appends_end(tokenizer)
    prompts: list[Prompt] = []
    for start in range(0, len(questions), _QUESTIONS_AT_ONCE):
        batch = questions[start : start + _QUESTIONS_AT_ONCE]
        texts = [
            _plain_text(q, style)
            if template is None
            else _chat_text(q, style, tokenizer, template, shown or ShownTools())
            for q in batch
        ]
        # verbose=False hides the warning about `model_max_length`; the run does its own check of the model's positions.
        ids = tokenizer(texts, add_special_tokens=not chat, verbose=False)["input_ids"]
        for q, text, token_ids in zip(batch, texts, ids, strict=True):
            kept = tuple(token_ids[:-1] if drop_end else token_ids)
            if not kept:
                raise UserError(f"question {q.id} has zero tokens ({text[:60]!r}); fix or delete the row")
            known = PromptIds(kept, q.reference) if q.domain == ENVIRONMENT_DOMAIN else kept
            prompts.append(Prompt(q.id, text, known, q.reference, q.domain, q.source, q.last_turn))
    return prompts


def drop_long(prompts: Sequence[Prompt], max_tokens: int) -> list[Prompt]:
    """Return the prompts with at most `max_tokens` tokens, in order; 0 keeps all."""
    return [prompt for prompt in prompts if not max_tokens or len(prompt.token_ids) <= max_tokens]


def chat_template(style: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template; None if prompts do not use one. An option that the template ignores is an error."""
    if style.chat == "never":
        return None
    if not tokenizer.chat_template:
        if style.chat == "always":
            raise UserError(
                "the tokenizer has no chat template; set prompt.chat: never, and put the text around the question in "
                "prompt.template"
            )
        if style.chat_template_options:
            raise UserError(
                "the tokenizer has no chat template for prompt.chat_template_options; remove it, or choose a chat model"
            )
        return None
    template = tokenizer.get_chat_template()
    for name in style.chat_template_options:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(f"the tokenizer's chat template has no variable {name!r}; fix prompt.chat_template_options")
    return _with_fixed_date(template) if "strftime_now" in template else template


def _with_fixed_date(template: str) -> str:
    """Return the chat template with today's date fixed to January 1, 2026, in every date format."""
    forms = dict.fromkeys([*ascii_letters, *_DATE_PART.findall(template)])
    written = {}
    for form in forms:
        with suppress(ValueError):  # the system does not support the format
            written[form] = _DATE.strftime(f"%{form}")
    # The empty expression preserves a line break at the beginning of the template.
    return _FIXED_DATE.strip().replace("DATE", json.dumps(written)) + "{{ '' }}" + template


def apply_template(
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    style: PromptFormat,
    messages: Sequence[dict[str, Any]],
    schemas: Sequence[dict[str, Any]] = (),
    answering: bool = True,
) -> str:
    """Render messages and tools with a chat template. `answering` adds the beginning of the answer."""
    options = {**style.chat_template_options, **({"tools": list(schemas)} if schemas else {})}
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=answering, chat_template=template, **options
    )
    return str(text)


def _chat_text(
    question: Question, style: PromptFormat, tokenizer: PreTrainedTokenizerBase, template: str, shown: ShownTools
) -> str:
    messages = style.messages_of(question)

    def apply(messages: Sequence[Message]) -> str:
        dicts = [asdict(message) for message in shown.messages(messages)]
        return apply_template(template, tokenizer, style, dicts, shown.schemas)

    systems = [message.content for message in messages if message.role == "system"]
    where = "prompt.system_prompt" if style.system_prompt is not None else f"question {question.id}"
    try:
        text = apply(messages)
    except Exception as error:  # a chat template is a program and can raise anything
        problem = (
            f"the tokenizer's chat template cannot show question {question.id} ({first_line(error)}); "
            "set prompt.chat: never, or fix the row's messages"
        )
        with suppress(Exception):
            if systems:
                apply([message for message in messages if message.role != "system"])
                problem = (
                    f"the tokenizer's chat template rejects system prompts ({first_line(error)}); move it from {where} "
                    "to prompt.template"
                )
        raise UserError(problem) from error
    if any(content.strip() not in text for content in systems):
        raise UserError(
            f"the tokenizer's chat template drops the system prompt; move it from {where} to prompt.template"
        )
    if missing := next((name for name in shown.names if name not in text), None):
        raise UserError(
            f"the tokenizer's chat template does not show the tool {missing} for question {question.id}; set "
            "tools.format: hermes, which shows tools in a system prompt"
        )
    return text


def _plain_text(question: Question, style: PromptFormat) -> str:
    messages = style.messages_of(question)
    roles = [message.role for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise UserError(
            f"question {question.id} is a conversation ({', '.join(roles)}), which needs a chat template; "
            "choose a chat model and leave prompt.chat at auto, or make the prompt a single string"
        )
    return "\n\n".join(message.content for message in messages)


def _appends_end(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer appends its end token to every text."""
    (with_special,) = tokenizer(["1"], add_special_tokens=True, verbose=False)["input_ids"]
    (without,) = tokenizer(["1"], add_special_tokens=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return end is not None and list(with_special[-1:]) == [end] and list(without[-1:]) != [end]


def prompt_problems(
    model: str,
    prompts: Sequence[Prompt],
    limits: Mapping[str, int],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    otherwise: str = "",
) -> Iterator[str]:
    """Yield a problem for each prompt that the tokenizer cannot encode or that leaves no room for a response.

    `limits` maps setting names to the maximum response tokens that they allow; `otherwise` is an alternative fix.
    """
    longest = model_positions(model_config)
    setting, response = max(limits.items(), key=lambda item: item[1])
    for prompt in prompts:
        if (piece := _unknown_part(prompt, tokenizer)) is not None:
            yield (
                f"the tokenizer of {model} cannot encode the prompt {short_repr(prompt.text)} ({prompt.id}): it has no "
                f"token for {short_repr(piece)}; choose a different model or other data"
            )
        elif longest and len(prompt.token_ids) + response > longest:
            has_room = len(prompt.token_ids) < longest
            fix = f"lower {setting}" if has_room else "choose a model with more positions, shorten the prompt"
            yield (
                f"prompt {prompt.id} ({len(prompt.token_ids)} tokens) and {setting} = {response} exceed the {longest} "
                f"positions of {model}; {fix}{otherwise}"
            )


def _unknown_part(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a word in a prompt that the tokenizer has no token for, or None.

    Looking for the unknown token is not enough: OPT uses the same token for unknown text and for the text's ends.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in prompt.token_ids:
        return None
    for piece in prompt.text.split(str(tokenizer.unk_token)):
        if unknown in tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]:
            words = piece.split()
            alone = (tokenizer(word, add_special_tokens=False, verbose=False)["input_ids"] for word in words)
            return next((word for word, ids in zip(words, alone, strict=True) if unknown in ids), piece)
    return None


def model_positions(model_config: PreTrainedConfig) -> int | None:
    """Return a model's number of positions; None if its configuration does not specify one."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)
