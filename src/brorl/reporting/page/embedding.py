"""Data inside an HTML file: ASCII that is safe inside a script element. Model output stays data."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from math import isfinite
from typing import Any


def to_json(value: Any) -> str:
    r"""Return a value as JSON in ASCII without `<`, `>`, `&` and `'`, which could end the element around it.

    Numbers have 7 significant digits; those that are not finite become null. Lone surrogates stay as `\ud800`.
    """
    return re.sub("[<>&']", lambda match: f"\\u{ord(match[0]):04x}", _json(value))


def compressed(value: Any) -> str:
    """Return a value as JSON, compressed by gzip, in base64."""
    return base64.b64encode(gzip.compress(_json(value).encode("ascii"), 6, mtime=0)).decode("ascii")


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Replace each `{{NAME}}` of a template by its part. Names inside the parts are not replaced.

    Raises:
        KeyError: If a name has no part.
    """
    return re.sub(r"\{\{([A-Z_]+)\}\}", lambda match: parts[match[1]], template)


def head(title: str, mark: str = "") -> str:
    """Return the head that all pages share: the policy that blocks all requests, the theme and the style."""
    return fill(resource("head.html"), {"TITLE": escape(title), "STYLE": resource("page.css"), "MARK": mark})


def resource(name: str) -> str:
    """Return the text of a file of this folder."""
    return (files(__package__) / name).read_text("utf-8")


def _json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}") if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [v if type(v) in (int, str) else _plain(v) for v in value]  # most lists are long and hold plain values
    return value
