"""How a model writes calls and reads results: in its chat template's format, the Hermes format, or the user's own.

In: a tokenizer, settings, and tool schemas. Out: a `ToolFormat`. It never retokenizes text that the model wrote: result
tokens are appended to the model's own.
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
    """The format of calls and results for one model."""

    name: str  # hermes, llama3, mistral, response template, or the user's file
    shown: ShownTools  # the tools as prompts show them
    _read: ReadCalls
    _write: Callable[[Results], str]  # returns the text between the turn's end token and the next turn's first token
    _end: str  # the end token that the template writes; empty without one
    _tokens: ResultTokens
    _chat: Chat | None = None  # writes calls; None for the user's own format

    @classmethod
    def choose(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        settings: ToolSettings,
        style: PromptFormat,
        schemas: Sequence[dict[str, Any]],
        stop_token_ids: Sequence[int],
    ) -> ToolFormat:
        """Choose the format from the settings or the chat template, and test it.

        Args:
            tokenizer: The model's tokenizer.
            settings: Its `format` names the format.
            style: Its `chat` and `chat_template_options` apply to the whole conversation.
            schemas: At least one tool, as returned by `transformers.utils.get_json_schema`.
            stop_token_ids: The tokens that end a response.

        Raises:
            UserError: If the format does not work with the tokenizer. The message names the fix.
        """
        tokens = ResultTokens(tokenizer, stop_token_ids)
        template = chat_template(style, tokenizer)
        chat = None
        if template is not None:
            chat = Chat(template, tokenizer, style, tuple(tokens.ends), ShownTools(tuple(schemas)))
        if settings.has_own_format:
            shown = chat.shown if chat is not None and chat.shows_tools() else ShownTools()
            own_format = cls(settings.format, shown, *_own_form(settings.format), next(iter(tokens.ends), ""), tokens)
            own_format.reply([("tool", "1")])
            return own_format
        if chat is None:
            raise UserError(
                f"tools.format = {settings.format} needs a chat template, but the prompts use none; choose a chat "
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
        """Return the text of one turn, with special tokens but without the end token."""
        return self._tokens.turn_text(token_ids)

    def written(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return the text of a turn that calls a tool, with its end token; None for the user's own format."""
        if self._chat is None:
            return None
        exchange = self._chat.exchange([(name, "")], arguments)
        return exchange.turn + exchange.end

    def parse(self, text: str) -> tuple[Call, ...]:
        """Return the calls in a turn; `()` if there are none. The last one has a `problem` if it cannot be read."""
        return self._read(text)

    def reply(self, results: Results) -> tuple[int, ...]:
        """Return the tokens between the turn's end token and the first token of the model's next turn.

        Args:
            results: Tool name and content for every call in the turn. A special token inside them is treated as text:
                it is split into ordinary tokens.
        """
        word, texts = self._tokens.broken([text for result in results for text in result])
        text = self._write(list(zip(texts[::2], texts[1::2], strict=True)))
        return self._tokens.tokens(self._end, text.split(word))


def check_turn_ends(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
    """Reject strings in `sampling.stop` that are not special tokens: turns with calls end only with end tokens."""
    for text in StopStrings(tokenizer, stop).texts:
        raise UserError(
            f"sampling.stop contains {text!r}, but with tools a turn ends with the chat template's end token; remove "
            "it, or remove the tools"
        )


def _recognized(wanted: str, chat: Chat) -> tuple[str, ReadCalls, Chat]:
    """Return the format that can read the template's calls, and the tested chat."""
    chat = chat.tried()
    name = next(iter(chat.shown.names), "tool")
    exchange = chat.exchange([(name, "1")])
    expected = (call_of({"name": name, "arguments": example_arguments()}),)
    opening = THINK.opening if THINK.opened_by(chat.prompt) else ""
    for form, read in ({RESPONSE_TEMPLATE: _response_reader(chat, exchange.end)} | {**FORMS}).items():
        after = read if form == RESPONSE_TEMPLATE else _after(opening, read)
        # when showing the turn, the template may omit the thought that it opened
        reads_call = expected in (read(exchange.turn), after(exchange.turn)) and not read("The answer is 4.")
        if wanted in ("auto", form) and reads_call:
            return form, after, chat
    named = "not a known format" if wanted == "auto" else f"not in the {wanted} format"
    raise chat.refused(f"writes a call as {short_repr(exchange.turn)}, which is {named}")


def _after(opening: str, read: ReadCalls) -> ReadCalls:
    """Return a reader for turns after a prompt that ends with `opening`, a thought's opening tag or an empty string."""
    return lambda text: read(opening + text)


def _response_reader(chat: Chat, end: str) -> ReadCalls:
    """Return a reader that applies the tokenizer's response template. Without one, it finds no calls."""
    tokenizer = chat.tokenizer
    has_template = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
    known: dict[str, Any] = {"prefix": chat.prompt, "tools": list(chat.shown.schemas)}
    taken = signature(tokenizer.parse_response).parameters if has_template else {}
    options: dict[str, Any] = {name: value for name, value in known.items() if name in taken}

    @reader
    def read(text: str) -> Iterator[Call]:
        if not has_template:
            return
        try:
            message = tokenizer.parse_response(text + end, **options)
        except Exception as error:  # the tokenizer's template can raise anything on a model's text
            raise UnreadableCallError(f"the call cannot be read ({first_line(error)})") from error
        for call in message.get("tool_calls") or ():
            yield call_of(call.get("function", call))

    return read


def _own_form(file: str) -> tuple[ReadCalls, Callable[[Results], str]]:
    """Return the parse and render functions from the user's file, which run in this process."""
    try:
        parse, render = load(f"{file}:parse"), load(f"{file}:render")
    except Exception as error:  # the file is a program and can raise anything
        raise UserError(
            f"tools.format = {file}: {describe(error)}; the file needs parse(text), which returns a list of calls, and "
            "render(results), which returns the text after the turn"
        ) from error

    @reader
    def read(text: str) -> Iterator[Call]:
        try:
            values = list(parse(text))  # type: ignore[call-overload]
        except Exception as error:
            raise UnreadableCallError(f"the call cannot be read ({describe(error)})") from error
        yield from map(call_of, values)

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
