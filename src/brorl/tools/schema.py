"""Makes the JSON schema of a tool. Only workers import this module: types and docstrings are code of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers.utils import chat_template_utils

from brorl.verification.sandbox.inside.functions import describe

# Arguments are JSON, never tensors: this saves the import of torch.
chat_template_utils.is_torch_available = lambda: False  # type: ignore[attr-defined]
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def describe_function(function: Callable[..., object]) -> dict[str, Any]:
    """Return `schema` and `deterministic` of a function, or its `problem`."""
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in _BY_NAME:
                raise TypeError(f"its parameter {str(parameter)!r} cannot be passed by name")
        schema = chat_template_utils.get_json_schema(function)
    except Exception as error:
        return {"problem": describe(error)}
    return {"schema": schema, "deterministic": bool(getattr(function, "deterministic", True))}
