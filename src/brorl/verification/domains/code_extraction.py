"""The code in a response: its last fenced block of Python.

In: the text of a response. Out: the code of one block, or None. A fence is three or more backticks or tildes at the
start of a line or after other text, followed by nothing but an info string. The rules are those of Markdown, with the
deviations that responses of models need: `extract_code` lists them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OPENING = re.compile(r"(?P<before>.*?)(?P<fence>(?<!`)`{3,}+|(?<!~)~{3,}+)[ \t]*+(?P<info>[^`\n]{0,200}+)")
_INFO = re.compile(r"\{?\.?(?P<language>[\w+#-]*)\}?(?:[ \t{:].*)?")
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "pypy", "pypy3", "cpython"})


@dataclass
class _Block:
    """An open block: its fence, the language of its info string, its indentation and its lines so far."""

    fence: str
    language: str
    indentation: int
    lines: list[str] = field(default_factory=list)

    @property
    def code(self) -> str:
        return "\n".join(self.lines)


def extract_code(response: str) -> str | None:
    """Return the last block marked as Python, or else the last block without a language.

    - Blocks of other languages (`text`, `bash`, `output`) are never the answer, and neither are blank blocks.
    - A block without a closing fence ends with the response, or with the next fence that has an info string.
    - A closing fence is at least as long as the opening one, at the start or the end of a line. Shorter fences, and
      fences of the other character, are part of the code.
    - The indentation of the opening fence is removed from the lines of the block.

    Args:
        response: Any string.

    Returns:
        The code without the fences; None if there is no such block.
    """
    marked: str | None = None
    unmarked: str | None = None
    for block in _blocks(response):
        if not block.code.strip():
            continue
        if block.language in _PYTHON:
            marked = block.code
        elif not block.language:
            unmarked = block.code
    return unmarked if marked is None else marked


def _blocks(response: str) -> list[_Block]:
    """Return all blocks in order; one pass over the lines."""
    blocks: list[_Block] = []
    block: _Block | None = None
    for raw in response.split("\n"):
        line = raw.removesuffix("\r")
        if block is None:
            block = _opened(line)
        elif _reopens(line, block):
            blocks.append(block)
            block = _opened(line.lstrip())
        elif line.lstrip().startswith(block.fence):
            blocks.append(block)
            block = None
        elif line.rstrip().endswith(block.fence):
            block.lines.append(_dedented(line.rstrip().rstrip(block.fence[0]), block.indentation))
            blocks.append(block)
            block = None
        else:
            block.lines.append(_dedented(line, block.indentation))
    return blocks if block is None else [*blocks, block]


def _opened(line: str) -> _Block | None:
    """Return the block that a line opens."""
    if "```" not in line and "~~~" not in line:
        return None
    opening = _OPENING.fullmatch(line)
    info = _INFO.fullmatch(opening["info"].strip()) if opening else None
    if opening is None or info is None:
        return None
    before = opening["before"]
    return _Block(opening["fence"], info["language"].lower(), 0 if before.strip() else len(before))


def _reopens(line: str, block: _Block) -> bool:
    """Whether a line within a block is the opening fence of another block of Python."""
    text = line.strip()
    if not text.startswith(block.fence):
        return False
    return text.lstrip(block.fence[0]).strip().lower() in _PYTHON


def _dedented(line: str, indentation: int) -> str:
    """Return a line without at most this much white space at its start."""
    space = len(line) - len(line.lstrip(" \t"))
    return line[min(space, indentation) :]
