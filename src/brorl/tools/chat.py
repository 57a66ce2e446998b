"""A call and its results, as the chat template of a model writes them.

In: a chat template and results. Out: the text of the call, its end token, and the text of all that follows. A template
that drops calls or results, or changes what stands before them, is refused.
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

Results: TypeAlias = Sequence[tuple[str, str]]  # the name of the tool and the content, for every call of a turn

_MARK, _RESULTS = "q7Zk4Wm", ("Yw2Rt81", "Yw2Rt82")  # found again in the text of a call, and of two results
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
    """A chat template cannot write a call and its results; the message names the fix."""


@dataclass(frozen=True)
class Exchange:
    """The three parts of the text from the model's turn with a call to its next turn."""

    turn: str  # what the model writes
    end: str  # its end token
    reply: str  # all up to the first token of the next turn


@dataclass(frozen=True, eq=False)
class Chat:
    """The chat template of a model that is shown tools."""

    template: str
    tokenizer: PreTrainedTokenizerBase
    style: PromptFormat
    ends: tuple[str, ...]  # the texts of the tokens that end a turn
    shown: ShownTools  # with a text, calls and results are messages in the form of Hermes
    # How several results follow a turn: as many calls, a single call, or a single call and all results in one.
    several: Literal["calls", "results", "joined"] = "calls"

    def with_hermes(self) -> Chat:
        """Return the same chat with a text that shows the tools, at the beginning of a message."""
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.shown.schemas)
        text = _HERMES.format(schemas=lines)
        chat = replace(self, shown=ShownTools(text=text))
        with suppress(RefusedTemplateError):
            if text in chat.prompt:
                return chat
        return replace(self, shown=ShownTools(text=text, role="user"))  # the template rejects or drops system messages

    @cached_property
    def prompt(self) -> str:
        """The text of a question, up to the first token of the answer."""
        return self._text(self._question)

    @cached_property
    def _unanswered(self) -> str:
        """The text of a question without the beginning of an answer."""
        return self._text(self._question, answering=False)

    def shows_tools(self) -> bool:
        """Whether the chat template writes the names of the tools that it gets."""
        try:
            return all(name in self.prompt for name in self.shown.names)
        except RefusedTemplateError:
            return False

    def exchange(self, results: Results, arguments: Mapping[str, Any] | None = None) -> Exchange:
        """Return the text of a turn with a call of the first tool, or of each tool, and of the results.

        Every call has the same `arguments`; by default, the `example_arguments`, which must be found in the text.
        """
        text = self._text([*self._question, *self._messages(results, arguments)])
        # A template that begins answers with an empty thought can leave it out of turns with calls.
        asked = next((asked for asked in (self.prompt, self._unanswered) if text.startswith(asked)), None)
        if asked is None:
            raise self.refused("changes the text of a question when a result follows it")
        calls = len(results) if self.several == "calls" and not self.shown.text else 1
        start = text.find(f"{_MARK}{calls}e") if arguments is None else len(asked)
        if start < 0:
            raise self.refused("drops the calls of a turn")
        after = text[start:]
        found = [(after.find(end), -len(end), end) for end in self.ends if end in after]
        if not found or any(mark in after[: min(found)[0]] for mark in _RESULTS):
            raise self._without_end(after)
        at, _, end = min(found)
        return Exchange(text[len(asked) : start + at], end, after[at + len(end) :])

    def _without_end(self, after: str) -> RefusedTemplateError:
        """Return the error of a template in which no stop token stands between a call and its result."""
        between = after[: min((after.find(mark) for mark in _RESULTS if mark in after), default=None)]
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        ends = sorted((between.find(token), token) for token in added if token in between)
        if not ends:
            return self.refused("writes no end token between a call and its result")
        return RefusedTemplateError(
            f"the tokenizer's chat template ends a turn with {ends[0][1]!r}, and responses end with "
            f"{', '.join(map(repr, self.ends))}; set sampling.stop: [{ends[0][1]!r}]"
        )

    def tried(self) -> Chat:
        """Return the chat with the way in which its template shows several results; refuse one that shows none."""
        names = self.shown.names or ("tool",)
        if not self.shows_tools():
            raise self.refused("does not show the tools")
        if _RESULTS[0] not in self.exchange([(names[0], _RESULTS[0])]).reply:
            raise self.refused("drops the results of tools")
        ways: tuple[Literal["calls", "results", "joined"], ...] = ("calls", "results", "joined")
        for chat in (replace(self, several=way) for way in ways):
            with suppress(RefusedTemplateError):
                reply = chat.exchange([(names[0], result) for result in _RESULTS]).reply
                if all(result in reply for result in _RESULTS):
                    return chat
        raise self.refused("cannot show two results after a turn")

    def refused(self, problem: str) -> RefusedTemplateError:
        """Return the error of a template with a problem."""
        other = "choose a model with a different template" if self.shown.text else "set tools.format: hermes"
        return RefusedTemplateError(
            f"the tokenizer's chat template {problem}; {other}, or set tools.format to a file of your own with parse "
            "and render"
        )

    @property
    def _question(self) -> list[dict[str, Any]]:
        return [asdict(message) for message in self.shown.messages([Message("user", "?")])]

    def _messages(self, results: Results, arguments: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Return the turn of the model and what follows."""
        if self.shown.text:
            call = {"name": results[0][0], "arguments": arguments or example_arguments()}
            turn = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
            blocks = [f"<tool_response>\n{content}\n</tool_response>" for _, content in results]
            return [{"role": "assistant", "content": turn}, {"role": "user", "content": "\n".join(blocks)}]
        if self.several == "joined":
            results = [(results[0][0], "\n".join(content for _, content in results))]
        calls, messages = list[dict[str, Any]](), list[dict[str, Any]]()
        for number, (name, content) in enumerate(results, 1):
            ident = f"call{number:05}"  # Mistral's templates want nine characters
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
    """Return the arguments of the call with this number in an `Exchange`."""
    return {"query": f'{_MARK}{number}e "\N{LATIN SMALL LETTER E WITH ACUTE}" {{x}}'}
