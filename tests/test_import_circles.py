"""No module imports itself through others, also for its types alone; a step does not load what it does not use."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import brorl
from brorl.verification.domains.verifiers import DOMAINS
from run_support import SMALL

PACKAGE = Path(brorl.__file__).parent
MAX_MODULES = 155  # of the package, in the process of a step


def imports_in(folder: Path) -> dict[str, set[str]]:
    """Return the modules of a package that each one imports, also in functions and for type checkers.

    The package itself is no part of it: its functions are imported on first use, and modules read its version.
    """
    files = {".".join(file.relative_to(folder.parent).with_suffix("").parts): file for file in folder.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in files.items()}
    del modules[folder.name]
    found: dict[str, set[str]] = {}
    for name, file in modules.items():
        named = [name for node in ast.walk(ast.parse(file.read_text("utf-8"))) for name in names_in(node)]
        found[name] = {part for part in named if part in modules} - {name}
    return found


def names_in(node: ast.AST) -> list[str]:
    """Return the names of modules that a statement imports, some of which may be names in a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def in_circles(imports: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that are left when those that import none of the others are taken away, again and again."""
    left = {name: set(imported) for name, imported in imports.items()}
    for graph in (left, {name: {other for other in imports if name in imports[other]} for name in imports}):
        while done := {name for name, others in graph.items() if name in left and not others & left.keys()}:
            for name in done:
                del left[name]
    return {*left}


def test_no_module_imports_itself_through_others() -> None:
    assert in_circles(imports_in(PACKAGE)) == set()


def test_a_circle_is_found(tmp_path: Path) -> None:
    sources = {
        "__init__": "from p import a",
        "a": "from p import b",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.c import C",
        "c": "import p.a",
        "above": "import p.a",
        "d": "def f():\n    import p.e",
        "e": "import p.d",
    }
    folder = tmp_path / "p"
    folder.mkdir()
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    assert in_circles(imports_in(folder)) == {"p.a", "p.b", "p.c", "p.d", "p.e"}


@pytest.mark.slow
def test_a_step_loads_only_the_verifiers_that_it_uses(tmp_path: Path) -> None:
    program = "import sys; from brorl.cli import main; main(); print(*sys.modules, sep='\\n')"
    arguments = ("train", *SMALL, "--steps=1", f"--output_dir={tmp_path / 'run'}")
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("brorl.")}
    verifiers = {f"brorl.verification.domains.{domain}" for domain in DOMAINS}
    assert loaded & verifiers == {"brorl.verification.domains.countdown"}
    assert len(loaded) <= MAX_MODULES
