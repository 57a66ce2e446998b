"""A function that Python gives, as the path by which worker processes import it: `file.py:function`.

A function of a file keeps its place. One of a notebook, a prompt or another function is written into a file, with the
source of what it uses: modules, and functions and classes of modules by import, others of the notebook by their source,
and constants by their value. Anything else is an error that names it, since a worker could not have it.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from math import isfinite
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from brorl.errors import UserError

_CONSTANTS = (bool, int, float, str, bytes, type(None))


def importable_path(function: Callable[..., object]) -> str | None:
    """Return the path of a function at the top level of a file; None for any other function."""
    name = getattr(function, "__qualname__", "")
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        return None
    if file is None or not Path(file).is_file() or not all(part.isidentifier() for part in name.split(".")):
        return None
    if function.__module__ == "__main__":  # a cell can have a file of its own, without the other cells
        main = getattr(sys.modules["__main__"], "__file__", None)
        if main is None or not Path(main).exists() or not Path(main).samefile(file):
            return None
    return f"{Path(file).absolute()}:{name}"


def source_of(function: Callable[..., object]) -> str:
    """Return the text of a file that defines a function of a notebook and all that it uses.

    Raises:
        UserError: If the function has no source, or uses what cannot be written into a file.
    """
    if not inspect.isfunction(function) or not function.__name__.isidentifier():
        raise UserError(
            f"reward: {getattr(function, '__qualname__', None) or function!r} is not a function with a name; define "
            "it with `def`"
        )
    parts: dict[str, str] = {}
    _add(function, function.__name__, parts)
    imports = sorted(text for text in parts.values() if text.startswith(("import ", "from ")))
    rest = [text for text in parts.values() if not text.startswith(("import ", "from "))]
    return "\n".join(["from __future__ import annotations\n", *imports, "", *rest])


def _add(function: FunctionType, what: str, parts: dict[str, str]) -> None:
    """Add the source of a function to the parts of a file, after all that it uses."""
    name = function.__name__
    if free := function.__code__.co_freevars:
        raise UserError(
            f"reward: {what} uses the variable {free[0]!r} of the function around it, which workers cannot have; make "
            "it an argument with a default, or a variable of the notebook"
        )
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise UserError(
            f"reward: the source of {what} is not available, and worker processes need it; define it in a file "
            "(in a notebook: %%writefile rewards.py, then from rewards import ...)"
        ) from error
    parts[name] = ""  # its place; a function may call itself
    code = compile("from __future__ import annotations\n" + source, "<reward>", "exec")
    for used in dict.fromkeys(_loaded(code)):
        if used in parts or used == name:
            continue
        if used in function.__globals__:
            _add_value(used, function.__globals__[used], what, parts)
            if isinstance(module := function.__globals__[used], ModuleType):
                parts[used] += _submodules(module, {*_names(code)})
        elif not hasattr(builtins, used):
            raise UserError(f"reward: {what} uses {used!r}, which is not defined; define or import it first")
    del parts[name]
    parts[name] = source


def _add_value(name: str, value: Any, what: str, parts: dict[str, str]) -> None:
    """Add the definition of a variable of the notebook."""
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif _is_constant(value):
        parts[name] = f"{name} = {value!r}\n"
    elif isinstance(value, re.Pattern):
        parts[name] = f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})\n"
    elif (home := _home(value)) is not None:
        parts[name] = f"from {home} import {value.__qualname__} as {name}"
    elif inspect.isclass(value):
        raise UserError(
            f"reward: {what} uses the class {name!r} of the notebook, whose source workers cannot have; define it in a "
            "file and import it"
        )
    elif inspect.isfunction(value):
        if value.__name__ != name:
            raise UserError(f"reward: {what} uses {name!r}, another name of {value.__name__}; use that name")
        _add(value, name, parts)
    else:
        raise UserError(
            f"reward: {what} uses the variable {name!r} of type {type(value).__name__}, and worker processes have only "
            "its source; make it within the function, or define the function in a file"
        )


def _home(value: Any) -> str | None:
    """Return the module from which others can import a function or a class; None for those of a notebook."""
    module = getattr(value, "__module__", None)
    if module in (None, "__main__") or not (inspect.isroutine(value) or inspect.isclass(value)):
        return None
    return module if "." not in value.__qualname__ else None


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return type(value) in (tuple, frozenset) and all(map(_is_constant, value))
    return type(value) in _CONSTANTS and (not isinstance(value, float) or isfinite(value))


def _loaded(code: CodeType) -> Iterator[str]:
    """Yield the names that a definition takes from around it: those of its body, defaults and decorators."""
    stored: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
            stored.add(str(instruction.argval))
        if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL") and instruction.argval not in stored:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant)


def _submodules(module: ModuleType, names: Collection[str]) -> str:
    """Return the imports of the modules in a package that code can mean, such as `xml.etree` by `xml`."""
    prefix = f"{module.__name__}."
    inner = [name for name in sorted(sys.modules) if name.startswith(prefix)]
    used = [name for name in inner if all(part in names for part in name.removeprefix(prefix).split("."))]
    return "".join(f"\nimport {name}" for name in used)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of variables and attributes in code."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
