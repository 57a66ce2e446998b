"""Checks a call's arguments against its tool's schema before the call runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from brorl.format import shortened
from brorl.prompts.json_text import JSON_NAMES

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip
_WORDS = {
    "integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip


def argument_problem(arguments: str, parameters: Mapping[str, Any]) -> str:
    """Return, in one line, what is wrong with a model's JSON arguments; empty if nothing is.

    Checks names, JSON types and the values of enumerations, but not the contents of lists and objects.
    """
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return "the arguments are not JSON that can be read"
    if not isinstance(values, dict):
        return "the arguments are not a JSON object"
    properties: Mapping[str, Any] = parameters.get("properties", {})
    for name in values:
        if name not in properties:
            return f"there is no argument {_shown(name)}; arguments: {', '.join(properties) or 'none'}"
    for name in parameters.get("required", ()):
        if name not in values:
            return f"the argument {name!r} is missing"
    for name, value in values.items():
        if not _fits(value, properties[name]):
            return f"the argument {name!r} must be {_wanted(properties[name])}, not {_shown(value)}"
    return ""


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(choice) and value == choice for choice in schema["enum"])
    return any(_has_type(value, name) for name in _names(schema)) or "type" not in schema


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool):  # in Python, bool is a subclass of int
        return name not in _TYPES or name == "boolean"
    return name not in _TYPES or isinstance(value, _TYPES[name])


def _names(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("type", [])
    return [names] if isinstance(names, str) else list(names)


def _wanted(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    if "anyOf" in schema:
        return " or ".join(_wanted(choice) for choice in schema["anyOf"])
    return " or ".join(_WORDS.get(name, name) for name in _names(schema))


def _shown(value: object) -> str:
    return JSON_NAMES[type(value)] if isinstance(value, list | dict) else shortened(json.dumps(value), 80)
