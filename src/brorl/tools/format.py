"""How a model writes calls and reads results: as its chat template says, in the form of Hermes, or in the user's own.

In: a tokenizer, settings, and the schemas of the tools. Out: a `ToolFormat`. It never makes tokens from the text that a
model wrote: the tokens of results are appended to the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

from brorl.errors import UserError, first_line
from brorl.format import short_repr
from brorl.prompts.rendering import ShownTools, chat_template
from brorl.prompts.settings import PromptFormat
from brorl.sampling import StopStrings
from brorl.tools.call_text import FORMS, ReadCalls, UnreadableCallError, call_of, reader
from brorl.tools.calls import Call
from brorl.tools.chat import Chat, RefusedTemplateError, Results, example_arguments
from brorl.tools.result_tokens import ResultTokens
from brorl.tools.settings import ToolSettings
from brorl.verification.sandbox.inside.functions import describe, load
from brorl.verification.thoughts import THINK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESPONSE_TEMPLATE = "response template"


@dataclass(frozen=True, eq=False)
class ToolFormat:
    """The form of calls and results for one model."""

    name: str  # hermes, llama3, mistral, response template, or the user's file
    shown: ShownTools  # what prompts show
    _read: ReadCalls
    _write: Callable[[Results], str]  # the text after the turn's end token, up to the next turn's first token
    _end: str  # the end token that the template writes; empty without one
    _tokens: ResultTokens
    _chat: Chat | None = None  # writes calls; None for a form of the user

    @classmethod
    def choose(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        settings: ToolSettings,
        style: PromptFormat,
        schemas: Sequence[dict[str, Any]],
        stop_token_ids: Sequence[int],
    ) -> ToolFormat:
        """Choose the form that the settings name, or that the chat template writes, and try it.

        Args:
            tokenizer: The model's.
            settings: `format` is the form.
            style: `chat` and `chat_template_options` apply to the whole conversation.
            schemas: At least one tool, as `transformers.utils.get_json_schema` returns it.
            stop_token_ids: The tokens that end a response.

        Raises:
            UserError: If the form does not work with the tokenizer; names the fix.
        """
        tokens, template = ResultTokens(tokenizer, stop_token_ids), chat_template(style, tokenizer)
        chat = None
        if template is not None:
            chat = Chat(template, tokenizer, style, tuple(tokens.ends), ShownTools(tuple(schemas)))
        if settings.has_own_format:
            shown = chat.shown if chat is not None and chat.shows_tools() else ShownTools()
            found = cls(settings.format, shown, *_own_form(settings.format), next(iter(tokens.ends), ""), tokens)
            found.reply([("tool", "1")])
            return found
        if chat is None:
            raise UserError(
                f"tools.format = {settings.format} needs a chat template, and the prompts use none; choose a chat "
                "model, or set tools.format to a file with parse and render, such as my_format.py"
            )
        try:
            name, read, chat = _recognized(settings.format, chat)
        except RefusedTemplateError:
            if settings.format != "hermes":
                raise
            name, read, chat = _recognized("hermes", chat.with_hermes())
        end = chat.exchange([("tool", "1")]).end
        return cls(name, chat.shown, read, lambda results: chat.exchange(results).reply, end, tokens, chat)

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of one turn's tokens, with special tokens and without the end token."""
        return self._tokens.turn_text(token_ids)

    def written(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return the text of a turn that calls a tool, with its end token; None in a form of the user."""
        if self._chat is None:
            return None
        exchange = self._chat.exchange([(name, "")], arguments)
        return exchange.turn + exchange.end

    def parse(self, text: str) -> tuple[Call, ...]:
        """Return the calls of a turn, `()` if it makes none; the last one has a `problem` if it cannot be read."""
        return self._read(text)

    def reply(self, results: Results) -> tuple[int, ...]:
        """Return the tokens between the turn's end token and the first token of the model's next turn.

        Args:
            results: Name of the tool and content for every call of the turn. A special token in them is text: it is
                split into other tokens.
        """
        word, texts = self._tokens.broken([text for result in results for text in result])
        text = self._write(list(zip(texts[::2], texts[1::2], strict=True)))
        return self._tokens.tokens(self._end, text.split(word))


def check_turn_ends(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
    """Refuse texts in `sampling.stop` that are not special tokens: turns with calls end with end tokens alone."""
    for text in StopStrings(tokenizer, stop).texts:
        raise UserError(
            f"sampling.stop has {text!r}, and with tools a turn ends with the end token of the chat template; remove "
            "it, or the tools"
        )


def _recognized(wanted: str, chat: Chat) -> tuple[str, ReadCalls, Chat]:
    """Return the form that reads the calls that a template writes, and the chat that was tried."""
    chat = chat.tried()
    name = next(iter(chat.shown.names), "tool")
    exchange, expected = chat.exchange([(name, "1")]), (call_of({"name": name, "arguments": example_arguments()}),)
    opening = THINK.opening if THINK.opened_by(chat.prompt) else ""
    for form, read in ({RESPONSE_TEMPLATE: _response_reader(chat, exchange.end)} | {**FORMS}).items():
        after = read if form == RESPONSE_TEMPLATE else _after(opening, read)
        # the template can leave the thought that it opened out of the turn that it shows
        found = expected in (read(exchange.turn), after(exchange.turn)) and not read("The answer is 4.")
        if wanted in ("auto", form) and found:
            return form, after, chat
    named = "" if wanted == "auto" else f" in the form of {wanted}"
    raise chat.refused(f"writes a call as {short_repr(exchange.turn)}, which is not read{named}")


def _after(opening: str, read: ReadCalls) -> ReadCalls:
    """Return a reader of turns that begin in a thought, which the prompt opens with `opening`; it can be empty."""
    return lambda text: read(opening + text)


def _response_reader(chat: Chat, end: str) -> ReadCalls:
    """Return a reader with the response template of the tokenizer, which transformers applies; without one, of none."""
    tokenizer = chat.tokenizer
    has_one = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
    known: dict[str, Any] = {"prefix": chat.prompt, "tools": list(chat.shown.schemas)}
    taken = signature(tokenizer.parse_response).parameters if has_one else {}
    options: dict[str, Any] = {name: value for name, value in known.items() if name in taken}

    @reader
    def read(text: str) -> Iterator[Call]:
        if not has_one:
            return
        try:
            message = tokenizer.parse_response(text + end, **options)
        except Exception as error:  # of a template that is not ours, on text of a model
            raise UnreadableCallError(f"the call cannot be read ({first_line(error)})") from error
        for call in message.get("tool_calls") or ():
            yield call_of(call.get("function", call))

    return read


def _own_form(file: str) -> tuple[ReadCalls, Callable[[Results], str]]:
    """Return the functions parse and render of the user's file, which run in this process."""
    try:
        parse, render = load(f"{file}:parse"), load(f"{file}:render")
    except Exception as error:  # the file is a program and can raise anything
        raise UserError(
            f"tools.format = {file}: {describe(error)}; the file needs parse(text), which returns a list of calls, and "
            "render(results), which returns the text that follows the turn"
        ) from error

    @reader
    def read(text: str) -> Iterator[Call]:
        try:
            values = parse(text)
            found = list(values)  # type: ignore[call-overload]
        except Exception as error:
            raise UnreadableCallError(f"the call cannot be read ({describe(error)})") from error
        yield from map(call_of, found)

    def write(results: Results) -> str:
        try:
            text = render(list(results))
        except Exception as error:
            raise UserError(f"tools.format = {file}: render raised {describe(error)}; fix it") from error
        if not isinstance(text, str):
            raise UserError(
                f"tools.format = {file}: render returned {short_repr(text)}; return the text of all results"
            )
        return text

    return read, write
