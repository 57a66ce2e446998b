"""The module that a program becomes: imports as in the usual judges, a prelude of its dataset, and the program."""

from __future__ import annotations

import builtins
import importlib
import re
from collections.abc import Mapping
from functools import lru_cache

from brorl.prompts.code_tests import CodeTests, StdinCases, TestCode

# The judge of LiveCodeBench imports these modules and all of their names before an answer; that of APPS imports fewer,
# and that of EvalPlus none. A later module replaces the names of an earlier one.
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_LIMITS = "import sys\nsys.setrecursionlimit(50_000)\nsys.set_int_max_str_digits(50_000)"  # of the same judge
_WORD = re.compile(r"[^\W\d]\w*+")
# Possessive: a run of blanks would otherwise be split in all ways, in time quadratic in its length.
_FUTURE = re.compile(r"^from[ \t]++__future__[ \t]++import[ \t]++(?:\([^()]{0,500}+\)|[^\n(]*+)$", re.MULTILINE)


def module(tests: CodeTests, code: str) -> str:
    """Return the code after its imports; those from `__future__` stay first.

    A function that the tests call is never an imported one. Test code stays as the judge of its dataset runs it,
    without imports.
    """
    function = "" if isinstance(tests.tests, StdinCases) else tests.tests.function
    before: list[str] = []
    if not isinstance(tests.tests, TestCode):  # of the program's words: all names would take longer than most programs
        import_of = imports()
        before = sorted(import_of[word] for word in {*_WORD.findall(code)} - {function} if word in import_of)
        before.append(_LIMITS)
    if tests.prelude:
        before += [tests.prelude, f"globals().pop({function!r}, None)"]
    if not before:
        return code
    future = "\n".join(_FUTURE.findall(code))
    return "\n".join([future, *before, _FUTURE.sub("", code) if future else code])


@lru_cache(maxsize=1)
def imports() -> Mapping[str, str]:
    """Return the import statement of every name that a program has without one, those of builtins left out."""
    import_of: dict[str, str] = {}
    for name in (*_MODULES, "typing"):
        of_module = importlib.import_module(name)
        public = (text for text in vars(of_module) if not text.startswith("_"))
        names = getattr(of_module, "__all__", public)
        import_of |= {text: f"from {name} import {text}" for text in names if not hasattr(builtins, text)}
    return import_of | {name: f"import {name}" for name in _MODULES}
