"""Parses the calls in the text of a turn, in the three common formats.

In: the text of a turn, with special tokens but without the end token. Out: its calls, in order; `()` if there are none.
Parsing stops at the first unreadable call, which then has a `problem`. Calls inside a thought are ignored; calls inside
a code block are not. Time is linear in the length of the text, and no input raises an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from brorl.prompts.json_text import JSON_NAMES
from brorl.tools.calls import Call
from brorl.verification.thoughts import THINK

ReadCalls: TypeAlias = Callable[[str], tuple[Call, ...]]  # text of a turn -> its calls

_JSON = json.JSONDecoder(strict=False)  # models write raw line breaks inside strings
_SPACE = r"\s*+"
_AFTER_HERMES = re.compile(r"\s*+(?:</tool_call>|(?=<tool_call>)|\Z)")
_LLAMA3_START = re.compile(r"\s*+(?=\{)")
_LLAMA3_NEXT = re.compile(r"[\s;]*+(?:<\|python_tag\|>\s*+)?(?=\{)")
_MISTRAL_NAME = re.compile(r"([^\s\[\]{}]++)(?:\[CALL_ID\][^\s\[\]{}]*+)?(?:\[ARGS\])?\s*+")
_ARGUMENTS = ("arguments", "parameters")


class UnreadableCallError(ValueError):
    """A call cannot be read. The message gives the model the reason, but not the position of the call in the text."""


def reader(form: Callable[[str], Iterator[Call]]) -> ReadCalls:
    """Return a function that reads all calls in a turn's text. An `UnreadableCallError` becomes the last call."""

    def read(text: str) -> tuple[Call, ...]:
        calls: list[Call] = []
        try:
            for call in form(text):
                calls.append(call)  # noqa: PERF402  # keep the calls before an error
        except UnreadableCallError as error:
            calls.append(Call("", "{}", str(error)))
        return tuple(calls)

    return read


def call_of(value: object) -> Call:
    """Return the call in `{"name": ..., "arguments": ...}`, where `parameters` may replace `arguments`.

    The arguments may be an object, the JSON text of one, or missing.

    Raises:
        UnreadableCallError: If the value is not such an object, or cannot be written as JSON.
    """
    if not isinstance(value, dict):
        raise UnreadableCallError(f"a call is an object with a name and arguments, not {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise UnreadableCallError("the call has no name")
    arguments: Any = next((value[key] for key in _ARGUMENTS if value.get(key) is not None), {})
    with _named_problems():
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False)
        if not isinstance(arguments, dict):
            raise UnreadableCallError(f"the arguments are an object, not {_kind(arguments)}")
        text = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        (name + text).encode()  # a lone surrogate cannot be stored
    return Call(name, text)


def _kind(value: object) -> str:
    return JSON_NAMES.get(type(value), type(value).__name__)


@contextmanager
def _named_problems() -> Iterator[None]:
    try:
        yield
    except UnreadableCallError:
        raise
    except json.JSONDecodeError as error:
        raise UnreadableCallError(f"the call is not valid JSON ({error.msg})") from error
    except UnicodeEncodeError as error:
        raise UnreadableCallError("the call has half of a surrogate pair") from error
    except ValueError as error:
        raise UnreadableCallError("the call has a number that is not finite, or has too many digits") from error
    except RecursionError as error:
        raise UnreadableCallError("the call is nested too deeply") from error
    except TypeError as error:
        raise UnreadableCallError("the arguments are not JSON values") from error


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and the index where it ends."""
    with _named_problems():
        return _JSON.raw_decode(text, start)


def _after_marker(marker: str, text: str, start: int = 0) -> int | None:
    """Return the end of the next marker outside thoughts, including trailing white space; None if there is none."""
    either = re.compile(f"(?P<thought>{re.escape(THINK.opening)})|{re.escape(marker)}{_SPACE}")
    while match := either.search(text, start):
        if not match["thought"]:
            return match.end()
        closing = text.find(THINK.closing, match.end())
        if closing < 0:
            return None
        start = closing + len(THINK.closing)
    return None


@reader
def hermes_calls(text: str) -> Iterator[Call]:
    r"""Read `<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>`, the format of Hermes and Qwen.

    The closing tag may be missing at the end of the text and before another call.
    """
    at = _after_marker("<tool_call>", text)
    while at is not None:
        value, end = _decoded(text, at)
        if (after := _AFTER_HERMES.match(text, end)) is None:
            raise UnreadableCallError("more than one JSON object follows <tool_call>")
        yield call_of(value)
        at = _after_marker("<tool_call>", text, after.end())


@reader
def llama3_calls(text: str) -> Iterator[Call]:
    """Read `{"name": ..., "parameters": ...}`, the format of Llama 3, in the whole turn or after `<|python_tag|>`.

    Multiple objects, with or without semicolons between them, are multiple calls. Without the tag, text that begins
    with any other object is an answer.
    """
    at = _after_marker("<|python_tag|>", text)
    surely = at is not None
    if at is None and (match := _LLAMA3_START.match(text, _first_thought_end(text))):
        at = match.end()
    while at is not None:
        try:
            value, end = _decoded(text, at)
        except UnreadableCallError:
            if surely or _names_call(text[at:]):
                raise
            return
        if not surely and not (isinstance(value, dict) and _names_call(value)):
            return
        yield call_of(value)
        match = _LLAMA3_NEXT.match(text, end)
        at = match and match.end()
        surely = False


def _names_call(value: str | dict[str, Any]) -> bool:
    """Return whether an object, or the text of a malformed one, has the keys of a call."""
    keys = [f'"{key}"' if isinstance(value, str) else key for key in ("name", *_ARGUMENTS)]
    return keys[0] in value and any(key in value for key in keys[1:])


def _first_thought_end(text: str) -> int:
    """Return where the thought at the beginning of a turn ends; 0 if there is no thought or it does not end."""
    closing = text.find(THINK.closing) if text.lstrip().startswith(THINK.opening) else -1
    return 0 if closing < 0 else closing + len(THINK.closing)


@reader
def mistral_calls(text: str) -> Iterator[Call]:
    """Read Mistral's `[TOOL_CALLS][{"name": ..., "arguments": ...}]`, or the newer `[TOOL_CALLS]name[ARGS]{...}`."""
    at = _after_marker("[TOOL_CALLS]", text)
    while at is not None:
        if text.startswith("[", at):
            values, end = _decoded(text, at)
            yield from map(call_of, values)
        elif match := _MISTRAL_NAME.match(text, at):
            arguments, end = _decoded(text, match.end())
            yield call_of({"name": match[1], "arguments": arguments})
        else:
            raise UnreadableCallError("neither a list of calls nor the name of a tool follows [TOOL_CALLS]")
        at = _after_marker("[TOOL_CALLS]", text, end)


FORMS: Mapping[str, ReadCalls] = {"hermes": hermes_calls, "llama3": llama3_calls, "mistral": mistral_calls}
"""The built-in call formats by name, in the order in which they are tried on a template."""
