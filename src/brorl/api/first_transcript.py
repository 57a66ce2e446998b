"""A sample transcript with tool calls, for `brorl check`: what the model writes, and what it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from brorl.format import counted, listed, visible_text
from brorl.sampling import decode_tokens

if TYPE_CHECKING:
    from brorl.tools.toolbox import Toolbox

_EXAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}  # other types get text


def transcript_lines(toolbox: Toolbox) -> Iterator[Text]:
    """Yield lines on how tools are presented, a made-up call to the first one, and the text up to the next turn."""
    form = toolbox.format
    schema = toolbox.tools.schemas[0]["function"]
    shown = "a text that brorl adds" if form.shown.text else "the chat template" if form.shown.schemas else "nothing"
    yield Text(f"\ntools: {listed([*toolbox.tools.tools])}; shown by {shown}; calls in the form of {form.name}")
    turn = form.written(schema["name"], _made_up(schema["parameters"]))
    if turn is None:
        yield Text("after a prompt, the model writes a turn that your function parse reads, and the end token")
    else:
        yield Text("after a prompt, the model writes, for example:")
        yield from _block(turn, ">", "green")
    reply = form.reply([(schema["name"], "...")])
    yield Text(f"it is given {counted(len(reply), 'token')} with the result ..., and is not trained on them:")
    yield from _block(decode_tokens(toolbox.tokenizer, reply, special=True), "|", "cyan")
    yield Text("it writes its next turn, and so on, until a turn has no call")


def _made_up(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Make up arguments for a tool's required parameters, or for all its parameters if none is required."""
    properties = parameters.get("properties", {})
    return {name: _example(properties[name]) for name in parameters.get("required", properties)}


def _example(parameter: Mapping[str, Any]) -> Any:
    choices = parameter.get("enum", [_EXAMPLES.get(str(parameter.get("type")), "...")])
    return choices[0]


def _block(text: str, mark: str, style: str) -> Iterator[Text]:
    for line in visible_text(text).split("\n"):
        yield Text(f"  {mark} {line}", style=style)
