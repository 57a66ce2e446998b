"""Chooses the program among the Python blocks in a response, by their syntax.

Parsing can take quadratic time and memory: `import a.a.a...` with 98,000 characters takes 2.5 GB. The trainer therefore
never calls this module. Instead, `CodeVerifier` sends its source to the sandbox as a program and calls `choose_block`
there. The module imports only the standard library and never executes a response's code.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

_WORD = re.compile(r"[^\W\d]\w*+")
_READING = frozenset({"input", "raw_input", "stdin", "open", "fileinput"})
_PRINTING = frozenset({"print", "pprint", "stdout", "write", "writelines"})
_BUILT_IN = frozenset({*dir(builtins), "__file__"})
_NO_PROGRAM = re.compile(r"\s*(?:>>>|\$)|[ \t]")  # starts a session (`>>> f(2)`) or an indented excerpt of a program


def choose_block(codes: Sequence[str], function: str | None, has_input: bool, known: Collection[str]) -> int:
    """Return the index of the last block that has what the tests need, or else the last block.

    Tests of a function need a block that defines it, or a `Solution` class with a method of that name. Other tests
    (`function` is None) need a program that prints. If there is input and any program reads it, the chosen program must
    read it too. A block that uses names from an earlier block or omits parts with `...` does not count as a program.
    Blocks may use `known` names without binding them.
    """
    blocks = [_Block.of(code, known) for code in codes]
    last = len(blocks) - 1
    if function is not None:
        return next((place for place in range(last, -1, -1) if blocks[place].defines(function)), last)
    earlier: set[str] = set()
    programs: list[int] = []
    for place, block in enumerate(blocks):
        if block.acts and block.missing.isdisjoint(earlier) and block.words & _PRINTING:
            programs.append(place)
        earlier |= block.bound
    reading = [place for place in programs if blocks[place].words & _READING]
    return (reading if has_input and reading else programs or [last])[-1]


class _Block(NamedTuple):
    """A Python block."""

    code: str
    body: Sequence[ast.stmt] | None  # None if the code is not valid Python
    bound: frozenset[str] = frozenset()  # names that the block binds, in any scope
    missing: frozenset[str] = frozenset()  # names that the block uses without binding or importing them
    words: frozenset[str] = frozenset()  # names, attributes and modules in the block; all words if it is invalid

    @classmethod
    def of(cls, code: str, known: Collection[str]) -> _Block:
        """Parse a block."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escape sequences warn
                scopes = [symtable.symtable(code, "answer.py", "exec")]
                tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return cls(code, None, words=frozenset(_WORD.findall(code)))
        for scope in scopes:
            scopes += scope.get_children()
        symbols = [symbol for scope in scopes for symbol in scope.get_symbols()]
        bound = frozenset(s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_parameter())
        used = frozenset(symbol.get_name() for symbol in symbols if symbol.is_referenced())
        texts = (getattr(node, name, None) for node in ast.walk(tree) for name in ("id", "attr"))
        words = {*filter(None, texts), *(node.name for node in ast.walk(tree) if isinstance(node, ast.alias))}
        return cls(code, tree.body, bound, used.difference(bound, known, _BUILT_IN), frozenset(words))

    @property
    def acts(self) -> bool:
        """Whether the block can be a program: it does more than define names, and omits nothing."""
        if self.body is None:
            return not _NO_PROGRAM.match(self.code)
        defining = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        acting = [s for s in self.body if not isinstance(s, defining) and not _is_constant(s)]
        return bool(acting) and not _leaves_out(self.body)

    def defines(self, function: str) -> bool:
        """Return whether the block defines a function, or a `Solution` class with a method of that name."""
        if self.body is None:
            text = rf"^(?:async[ \t]+)?def[ \t]+{re.escape(function)}\b|^class[ \t]+Solution\b"
            return re.search(text, self.code, re.MULTILINE) is not None
        return any(_makes(statement, function) for statement in _statements(self.body))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements in a scope, including those inside `if`, `try` and similar blocks."""
    left: list[Any] = list(body)
    while left:  # not recursive, because `elif` chains nest deeply
        statement = left.pop()
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                left += getattr(statement, name, ())


def _makes(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement binds a name to a function, class or `Solution` method with a body."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            empty = all(isinstance(part, ast.Pass) or _is_constant(part) for part in statement.body)
            return statement.name == name and not empty and not _leaves_out(statement.body)
        case ast.ImportFrom(module=module, names=aliases):  # `from solution import f` is a usage example
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
    """Return whether a statement in a body is `...`."""
    return any(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and s.value.value is ... for s in body)
