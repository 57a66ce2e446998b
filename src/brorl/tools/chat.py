"""A call and its results, as a model's chat template writes them.

In: a chat template and results. Out: the text of the call, its end token, and all text that follows. A template that
drops calls or results, or changes the text before them, is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from brorl.errors import UserError, first_line
from brorl.prompts.question import Message
from brorl.prompts.rendering import ShownTools, apply_template
from brorl.prompts.settings import PromptFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Results: TypeAlias = Sequence[tuple[str, str]]  # tool name and content, for every call in a turn

_MARK, _RESULTS = "q7Zk4Wm", ("Yw2Rt81", "Yw2Rt82")  # markers to find in the text of a call and of two results
_HERMES = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class RefusedTemplateError(UserError):
    """A chat template cannot write a call and its results. The message names the fix."""


@dataclass(frozen=True)
class Exchange:
    """The text from a model turn with a call up to the next turn, in three parts."""

    turn: str  # the text that the model writes
    end: str  # its end token
    reply: str  # everything up to the first token of the next turn


@dataclass(frozen=True, eq=False)
class Chat:
    """A model's chat template, with the tools that it shows."""

    template: str
    tokenizer: PreTrainedTokenizerBase
    style: PromptFormat
    ends: tuple[str, ...]  # text of the tokens that end a turn
    shown: ShownTools  # if it contains text, calls and results are messages in the Hermes format
    # How multiple results follow a turn: after one call each, after a single call, or joined after a single call.
    several: Literal["calls", "results", "joined"] = "calls"

    def with_hermes(self) -> Chat:
        """Return the same chat with the tools shown as text at the beginning of a message."""
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.shown.schemas)
        text = _HERMES.format(schemas=lines)
        chat = replace(self, shown=ShownTools(text=text))
        with suppress(RefusedTemplateError):
            if text in chat.prompt:
                return chat
        return replace(self, shown=ShownTools(text=text, role="user"))  # the template rejects or drops system messages

    @cached_property
    def prompt(self) -> str:
        """A question's text, up to the first token of the answer."""
        return self._text(self._question)

    @cached_property
    def _unanswered(self) -> str:
        """A question's text without the beginning of an answer."""
        return self._text(self._question, answering=False)

    def shows_tools(self) -> bool:
        """Return whether the chat template writes the names of the tools passed to it."""
        try:
            return all(name in self.prompt for name in self.shown.names)
        except RefusedTemplateError:
            return False

    def exchange(self, results: Results, arguments: Mapping[str, Any] | None = None) -> Exchange:
        """Return the text of a turn that calls the first tool, or every tool, and the text of the results.

        All calls have the same `arguments`, by default the `example_arguments`, which must appear in the text.
        """
        text = self._text([*self._question, *self._messages(results, arguments)])
        # A template that begins answers with an empty thought may omit it in turns with calls.
        asked = next((asked for asked in (self.prompt, self._unanswered) if text.startswith(asked)), None)
        if asked is None:
            raise self.refused("changes the text of a question when a result follows it")
        calls = len(results) if self.several == "calls" and not self.shown.text else 1
        start = text.find(f"{_MARK}{calls}e") if arguments is None else len(asked)
        if start < 0:
            raise self.refused("drops the calls of a turn")
        after = text[start:]
        # the first end token in the text; if several begin there, the longest
        ends = [(after.find(end), -len(end), end) for end in self.ends if end in after]
        if not ends or any(mark in after[: min(ends)[0]] for mark in _RESULTS):
            raise self._without_end(after)
        at, _, end = min(ends)
        return Exchange(text[len(asked) : start + at], end, after[at + len(end) :])

    def _without_end(self, after: str) -> RefusedTemplateError:
        """Return the error for a template without a stop token between a call and its result."""
        between = after[: min((after.find(mark) for mark in _RESULTS if mark in after), default=None)]
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        ends = sorted((between.find(token), token) for token in added if token in between)
        if not ends:
            return self.refused("does not write an end token between a call and its result")
        return RefusedTemplateError(
            f"the tokenizer's chat template ends a turn with {ends[0][1]!r}, but responses end with "
            f"{', '.join(map(repr, self.ends))}; set sampling.stop: [{ends[0][1]!r}]"
        )

    def tried(self) -> Chat:
        """Return the chat with a working way to show multiple results. Reject a template that does not show them."""
        names = self.shown.names or ("tool",)
        if not self.shows_tools():
            raise self.refused("does not show the tools")
        if _RESULTS[0] not in self.exchange([(names[0], _RESULTS[0])]).reply:
            raise self.refused("drops tool results")
        ways: tuple[Literal["calls", "results", "joined"], ...] = ("calls", "results", "joined")
        for chat in (replace(self, several=way) for way in ways):
            with suppress(RefusedTemplateError):
                reply = chat.exchange([(names[0], result) for result in _RESULTS]).reply
                if all(result in reply for result in _RESULTS):
                    return chat
        raise self.refused("cannot show two tool results after one turn")

    def refused(self, problem: str) -> RefusedTemplateError:
        """Return the error for a problem with the template."""
        other = "choose a model with a different template" if self.shown.text else "set tools.format: hermes"
        return RefusedTemplateError(
            f"the tokenizer's chat template {problem}; {other}, or set tools.format to your own file with parse and "
            "render"
        )

    @property
    def _question(self) -> list[dict[str, Any]]:
        return [asdict(message) for message in self.shown.messages([Message("user", "?")])]

    def _messages(self, results: Results, arguments: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Return the model's turn and the messages that follow."""
        if self.shown.text:
            call = {"name": results[0][0], "arguments": arguments or example_arguments()}
            turn = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
            blocks = [f"<tool_response>\n{content}\n</tool_response>" for _, content in results]
            return [{"role": "assistant", "content": turn}, {"role": "user", "content": "\n".join(blocks)}]
        if self.several == "joined":
            results = [(results[0][0], "\n".join(content for _, content in results))]
        calls: list[dict[str, Any]] = []
        messages: list[dict[str, Any]] = []
        for number, (name, content) in enumerate(results, 1):
            ident = f"call{number:05}"  # Mistral's templates require nine characters
            if number == 1 or self.several == "calls":
                function = {"name": name, "arguments": arguments or example_arguments(number)}
                calls.append({"id": ident, "type": "function", "function": function})
            messages.append({"role": "tool", "tool_call_id": calls[-1]["id"], "name": name, "content": content})
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *messages]

    def _text(self, messages: Sequence[dict[str, Any]], answering: bool = True) -> str:
        try:
            return apply_template(
                self.template, self.tokenizer, self.style, messages, self.shown.schemas, answering=answering
            )
        except Exception as error:  # a chat template is a program and can raise anything
            raise self.refused(f"cannot show a call and its result ({first_line(error)})") from error


def example_arguments(number: int = 1) -> dict[str, str]:
    """Return the arguments of call `number` in an `Exchange`."""
    return {"query": f'{_MARK}{number}e "\N{LATIN SMALL LETTER E WITH ACUTE}" {{x}}'}
