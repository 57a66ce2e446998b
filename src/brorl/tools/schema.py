"""Builds the JSON schemas of tools. Only workers import this module: types and docstrings are the user's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers.utils import chat_template_utils

from brorl.verification.sandbox.inside.functions import describe

# Arguments are JSON, never tensors; this avoids importing torch.
chat_template_utils.is_torch_available = lambda: False  # type: ignore[attr-defined]
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def describe_function(function: Callable[..., object]) -> dict[str, Any]:
    """Return a function's `schema` and whether it is `deterministic`, or its `problem`."""
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in _BY_NAME:
                raise TypeError(f"its parameter {str(parameter)!r} cannot be passed by name")
        schema = chat_template_utils.get_json_schema(function)
    except Exception as error:
        return {"problem": describe(error)}
    return {"schema": schema, "deterministic": bool(getattr(function, "deterministic", True))}


def describe_environment(factory: Callable[[], object]) -> dict[str, Any]:
    """Return the schemas of an environment's `tools` and whether it `has_reward`, or its `problem`."""
    try:
        game = factory()
        methods = dict(inspect.getmembers(game, inspect.ismethod))
    except Exception as error:
        return {"problem": describe(error)}
    public = [name for name in methods if not name.startswith("_") and name not in ("reset", "get_reward")]
    if "reset" not in methods or not public:
        return {"problem": f"it has no method {'that is a tool' if 'reset' in methods else 'reset'}"}
    tools: dict[str, Any] = {}
    for name in public:
        described = describe_function(methods[name])
        if "problem" in described:
            return {"problem": f"{name}: {described['problem']}"}
        tools[name] = described["schema"]
    return {"tools": tools, "has_reward": "get_reward" in methods}
