"""Imports of the scripts outside of the package, which no other test runs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = {file.stem: file for file in (ROOT / "benchmarks").glob("*.py")}
SCRIPTS = sorted(file for folder in ("benchmarks", "scripts", "examples") for file in (ROOT / folder).rglob("*.py"))


def imports_of(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the imported modules with the imported names, including imports inside of functions."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module), [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_from_the_package_exist(script: Path) -> None:
    for module, names in imports_of(script):
        if module.split(".")[0] == "brorl":
            try:
                found = import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.startswith("brorl"):
                    raise
                pytest.skip(f"{module} needs {error.name}, of an extra that is not installed")
            for name in names:
                assert hasattr(found, name) or find_spec(f"{module}.{name}"), f"{module} has no {name}"


@pytest.mark.slow
def test_the_benchmark_of_verifiers_starts() -> None:
    """Its hostile answers come from a file of the tests."""
    script = [sys.executable, str(BENCHMARKS["verification"]), "--help"]
    assert subprocess.run(script, capture_output=True, check=False).returncode == 0


def test_the_readme_names_every_benchmark() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    assert [name for name in BENCHMARKS if f"`{name}.py" not in readme and f"/{name}.py" not in readme] == []
