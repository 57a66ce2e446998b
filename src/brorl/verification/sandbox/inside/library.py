"""The standard library as programs find it: loaded before they start, with the system's libraries that it links.

At every level the modules are the same. Where a program can open no file, the server also keeps the code of every one.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType

from brorl.verification.sandbox.inside.confinement import LANDLOCK, SECCOMP

_PRELOADED = (
    *("abc", "array", "bisect", "calendar", "cmath", "collections.abc", "contextlib", "copy", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math"),
    *("numbers", "operator", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading"),
    *("time", "types", "typing", "unicodedata"),
)
_LEFT_OUT = frozenset({"_tkinter", "nis"})
_INSTALLED = ("site-packages", "dist-packages")
_TESTS = ("test", "tests", "idle_test")
_FOLDER = os.path.dirname(os.__file__)
_EXTENSIONS = os.path.join(_FOLDER, "lib-dynload")


def preload(level: str, modules: Sequence[str]) -> None:
    """Import and load before any fork what the programs of a level cannot, or what would cost each of them time."""
    for module in (*_PRELOADED, *modules):
        importlib.import_module(module)
    if level == LANDLOCK:
        _load_libraries()
    if level == SECCOMP:
        for path in _extension_files().values():
            _load(path)
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _Memory())


def readable() -> list[str]:
    """Return the directories of the standard library and of installed packages, from where programs can import."""
    folders = [path for path in sys.path if path in (_FOLDER, _EXTENSIONS) or path.endswith(_INSTALLED)]
    return [path for path in folders if os.path.isdir(path)]


def _extension_files() -> dict[str, str]:
    """Return the path of each extension module of the standard library, by its name."""
    with contextlib.suppress(OSError):  # all may be built in
        files = [file for file in sorted(os.listdir(_EXTENSIONS)) if file.endswith(tuple(EXTENSION_SUFFIXES))]
        paths = {file.partition(".")[0]: os.path.join(_EXTENSIONS, file) for file in files}
        return {name: paths[name] for name in paths if name in sys.stdlib_module_names - _LEFT_OUT}
    return {}


def _load(path: str) -> int | None:
    """Load a library without running any code of a module; None if it cannot be loaded, as outside of the server."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(path)._handle
    return None


def _load_libraries() -> None:
    """Load the libraries that extension modules link, and not the modules: fewer mappings make faster forks."""
    extensions = [*_extension_files().values()]
    handles = [_load(path) for path in extensions]
    for path in _mapped() - {os.path.realpath(path) for path in extensions}:
        _load(path)
    for handle in handles:
        if handle is not None:
            _ctypes.dlclose(handle)


def _mapped() -> set[str]:
    """Return the files of the libraries of this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.rstrip("\n").split(maxsplit=5) for line in file]
    return {parts[5] for parts in lines if len(parts) == 6 and "x" in parts[1] and parts[5].startswith("/")}


class _Memory:
    """Finds the modules of the standard library without opening a file."""

    def __init__(self) -> None:
        self._extensions = _extension_files()
        self._sources = dict(_sources(_FOLDER, ""))

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Return how to load a module; None if it is no module of the standard library."""
        if name in self._extensions:
            path = self._extensions[name]
            return spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        if name not in self._sources:
            return None
        loader = self._sources[name]
        folders = [os.path.dirname(loader.path)] if os.path.basename(loader.path) == "__init__.py" else None
        return spec_from_file_location(name, loader.path, loader=loader, submodule_search_locations=folders)


class _KeptLoader(SourceFileLoader):
    """Loads a module whose code was read before."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self._code = super().get_code(name)

    def get_code(self, _name: str) -> CodeType | None:
        """Return the code of the module."""
        return self._code


def _sources(folder: str, package: str) -> Iterator[tuple[str, _KeptLoader]]:
    """Yield the name and the loader of each module below a folder of the standard library."""
    for entry in os.scandir(folder):
        name = entry.name.removesuffix(".py")
        if entry.is_dir() and name.isidentifier() and name not in (*_INSTALLED, *_TESTS):
            yield from _sources(entry.path, f"{package}{name}.")
        elif name != entry.name:
            full = package.removesuffix(".") if name == "__init__" else package + name
            with contextlib.suppress(OSError, SyntaxError):
                yield full, _KeptLoader(full, entry.path)
