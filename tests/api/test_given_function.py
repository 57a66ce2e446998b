"""Compiled regular expressions of a notebook, which many reward functions use, in the file of a function."""

import linecache
import sys
from pathlib import Path
from types import ModuleType

import pytest

from brorl.api.given_function import source_of
from brorl.verification.sandbox.inside.functions import load

CELL = r"""
import re
LONG = "b" * 300  # longer than the repr of a pattern
ANSWER, TAG = re.compile(r"answer:\s*'(\d+)'", re.I | re.S), re.compile(LONG + r"\\|\Aa\Z")
def check(response, reference):
    found = ANSWER.search(response)
    return bool(found) and found[1] == reference and TAG.search("a") is not None and TAG.search(LONG) is None
"""


def test_a_pattern_is_compiled_again_with_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main, name = ModuleType("__main__"), "/tmp/ipykernel_1/pattern.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(linecache.cache, name, (len(CELL), None, CELL.splitlines(True), name))
    exec(compile(CELL, name, "exec"), vars(main))
    (tmp_path / "cell.py").write_text(source_of(main.check), "utf-8")
    written = load(f"{tmp_path / 'cell.py'}:check")
    responses = ("ANSWER:\n'12'", "answer: 12", "answer:'12'", "Answer:'13'")
    assert [written(text, "12") for text in responses] == [True, False, True, False]
    assert [main.check(text, "12") for text in responses] == [True, False, True, False]
