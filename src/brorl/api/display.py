"""Rich tables as HTML for notebooks."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

_WIDTH = 100
_PAGE = '<pre style="white-space:pre; overflow-x:auto; line-height:1.2">{code}</pre>'


def to_html(renderable: RenderableType) -> str:
    """Return the output of a terminal as HTML that needs no style sheet."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, highlight=False, force_jupyter=False)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=_PAGE)
