"""The program in a response: one of its fenced blocks of Python, chosen by its syntax and never run.

A response can show more than its program: a draft before it, and an example of its use or a part of it after it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import symtable
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

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


MAX_CODE = 100_000
"""Characters of the longest program that is run."""

_OPENING = re.compile(r"(?P<before>.*?)(?P<fence>(?<!`)`{3,}+|(?<!~)~{3,}+)[ \t]*+(?P<info>[^`\n]{0,200}+)")
_INFO = re.compile(r"\{?\.?(?P<language>[\w+#-]*)\}?(?:[ \t{:].*)?")
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "pypy", "pypy3", "cpython"})
_READING = frozenset({"input", "raw_input", "stdin", "open", "fileinput"})
_PRINTING = frozenset({"print", "pprint", "stdout", "write", "writelines"})
_BUILT_IN = frozenset({*dir(builtins), "__file__"})
_NO_PROGRAM = re.compile(r"\s*(?:>>>|\$)|[ \t]")  # the start of a session, or of lines from the inside of a program


def extract_code(response: str, tests: CodeTests | None = None) -> str | None:
    """Return the code of the last block marked as Python that has what the tests need; None without a block.

    - Without such a block the last one is taken, and without blocks marked as Python one without a language.
    - Tests of a function need a block that defines it, or `Solution` with a method of this name. Others need a program
      that prints, and reads if there is input and any of them does. A block that uses names of an earlier one is an
      example or a part of a program. So is one that leaves out parts with `...`.
    - Blocks of other languages (`text`, `bash`, `output`) are never the answer, and neither are blank blocks.
    - A block without a closing fence ends with the response, or with the next fence that has an info string.
    - A closing fence is at least as long as the opening one, at the start or the end of a line. Shorter fences, and
      fences of the other character, are part of the code.
    - The indentation of the opening fence is removed from the lines of the block, and a byte order mark from its start.
    """
    marked: list[str] = []
    unmarked: list[str] = []
    for language, code in _blocks(response):
        if code.strip() and language in _PYTHON:
            marked.append(code)
        elif code.strip() and not language:
            unmarked.append(code)
    codes = [code.lstrip("\ufeff") for code in marked or unmarked]
    if tests is None or len(codes) < 2:
        return codes[-1] if codes else None
    return _choose([_Block(code) for code in codes], tests).code


@dataclass(frozen=True)
class _Block:
    """A block of Python."""

    code: str

    @cached_property
    def body(self) -> list[ast.stmt] | None:
        """The statements; None if they are not valid Python."""
        return self._read[0]

    @cached_property
    def _read(self) -> tuple[list[ast.stmt] | None, list[symtable.Symbol]]:
        """The statements, and the names of all scopes."""
        if len(self.code) > MAX_CODE:
            return None, []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an invalid escape sequence
                scopes = [symtable.symtable(self.code, "answer.py", "exec")]
                body = ast.parse(self.code).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None, []
        for scope in scopes:
            scopes += scope.get_children()
        return body, [symbol for scope in scopes for symbol in scope.get_symbols()]

    @cached_property
    def bound(self) -> frozenset[str]:
        """All names that the block binds, in any scope."""
        return frozenset(s.get_name() for s in self._read[1] if s.is_assigned() or s.is_imported() or s.is_parameter())

    @cached_property
    def missing(self) -> frozenset[str]:
        """The names that it uses without binding or importing them."""
        used = {symbol.get_name() for symbol in self._read[1] if symbol.is_referenced()}
        return frozenset(used - self.bound - imports().keys() - _BUILT_IN)

    @cached_property
    def words(self) -> frozenset[str]:
        """The names, attributes and modules that it uses, or all words if it is not valid Python."""
        if self.body is None:
            return frozenset(_WORD.findall(self.code))
        nodes = [node for statement in self.body for node in ast.walk(statement)]
        texts = (getattr(node, name, None) for node in nodes for name in ("id", "attr"))
        return frozenset([*filter(None, texts), *(node.name for node in nodes if isinstance(node, ast.alias))])

    @property
    def acts(self) -> bool:
        """Whether it can be a program: it does more than define names, and leaves nothing out."""
        if self.body is None:
            return not _NO_PROGRAM.match(self.code)
        defining = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        acting = [s for s in self.body if not isinstance(s, defining) and not _is_constant(s)]
        return bool(acting) and not _leaves_out(self.body)

    def defines(self, function: str) -> bool:
        """Whether it has a function, or a class `Solution` with such a method."""
        if self.body is None:
            text = rf"^(?:async[ \t]+)?def[ \t]+{re.escape(function)}\b|^class[ \t]+Solution\b"
            return re.search(text, self.code, re.MULTILINE) is not None
        return any(_makes(statement, function) for statement in _statements(self.body))


def _choose(blocks: Sequence[_Block], tests: CodeTests) -> _Block:
    if not isinstance(tests.tests, StdinCases):
        function = tests.tests.function
        return next((block for block in reversed(blocks) if block.defines(function)), blocks[-1])
    earlier: set[str] = set()
    whole: list[_Block] = []
    for block in blocks:
        if block.acts and block.missing.isdisjoint(earlier) and block.words & _PRINTING:
            whole.append(block)
        earlier |= block.bound
    reading = [block for block in whole if block.words & _READING]
    needs_input = any(text.strip() for text in tests.tests.inputs)
    return (reading if needs_input and reading else whole or blocks)[-1]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, those within `if`, `try` and the like too."""
    left: list[Any] = list(body)
    while left:  # no recursion: a chain of `elif` is nested
        statement = left.pop()
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                left += getattr(statement, name, ())


def _makes(statement: ast.stmt, name: str) -> bool:
    """Whether a statement binds a name to a function or a class with a body, also as a method of `Solution`."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            empty = all(isinstance(part, ast.Pass) or _is_constant(part) for part in statement.body)
            return statement.name == name and not empty and not _leaves_out(statement.body)
        case ast.ImportFrom(module=module, names=aliases):  # `from solution import f` is an example
            own = any(name == (alias.asname or alias.name) for alias in aliases)
            return own and str(module).partition(".")[0] in sys.stdlib_module_names
        case ast.ClassDef(name=kind, body=body):
            return kind == name or (kind == "Solution" and any(_makes(method, name) for method in _statements(body)))
        case ast.Assign() | ast.AnnAssign():
            stores = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name)
            return any(isinstance(node.ctx, ast.Store) for node in stores)
        case _:
            return False


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _leaves_out(body: Sequence[ast.stmt]) -> bool:
    """Whether a statement of a body is `...`."""
    return any(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and s.value.value is ... for s in body)


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the code of each block; one pass over the lines."""
    opening: tuple[str, str, int] | None = None
    code: list[str] = []
    for raw in response.split("\n"):
        line = raw.removesuffix("\r")
        if opening is None:
            opening, code = _opening(line), []
            continue
        fence, language, indentation = opening
        text = line.strip()
        if text.startswith(fence):
            yield language, "\n".join(code)
            reopens = text.lstrip(fence[0]).strip().lower() in _PYTHON
            opening, code = _opening(line.lstrip()) if reopens else None, []
            continue
        closes = text.endswith(fence)
        content = line.rstrip().rstrip(fence[0]) if closes else line
        space = len(content) - len(content.lstrip(" \t"))
        code.append(content[min(space, indentation) :])
        if closes:
            yield language, "\n".join(code)
            opening = None
    if opening is not None:
        yield opening[1], "\n".join(code)


def _opening(line: str) -> tuple[str, str, int] | None:
    """Return the fence, the language and the indentation of the block that a line opens."""
    if "```" not in line and "~~~" not in line:
        return None
    opening = _OPENING.fullmatch(line)
    info = _INFO.fullmatch(opening["info"].strip()) if opening else None
    if opening is None or info is None:
        return None
    before = opening["before"]
    return opening["fence"], info["language"].lower(), 0 if before.strip() else len(before)
