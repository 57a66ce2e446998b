"""Makes the JSON schema of a tool. Only workers import this module: types and docstrings are code of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers.utils import chat_template_utils, get_json_schema

from brorl.verification.sandbox.inside.functions import describe

chat_template_utils.is_torch_available = lambda: False  # arguments are JSON, never tensors: this saves torch's import
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def describe_function(function: Callable[..., object]) -> dict[str, Any]:
    """Return `schema` and `deterministic` of a function, or its `problem`."""
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in _BY_NAME:
                raise TypeError(f"its parameter {str(parameter)!r} cannot be passed by name")
        schema = get_json_schema(function)
    except Exception as error:
        return {"problem": describe(error)}
    return {"schema": schema, "deterministic": bool(getattr(function, "deterministic", True))}
