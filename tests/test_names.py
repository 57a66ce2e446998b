"""A public name of the package has one meaning: no two modules define a class or a function with the same name."""

import ast
from collections import Counter
from pathlib import Path

import brorl

PACKAGE = Path(brorl.__file__).parent
PROGRAMS = {"main"}  # the entry points of two programs: the command line and the fork server


def public_names(folder: Path) -> Counter[str]:
    """Count the public classes and functions that the modules of a folder define, by name."""
    nodes = (node for file in folder.rglob("*.py") for node in ast.parse(file.read_text("utf-8")).body)
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return Counter(node.name for node in nodes if isinstance(node, kinds) and not node.name.startswith("_"))


def test_no_public_name_stands_twice() -> None:
    assert {name for name, count in public_names(PACKAGE).items() if count > 1} == PROGRAMS


def test_a_name_that_stands_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Result: ...\ndef _private(): ...")
    (tmp_path / "b.py").write_text("class Result: ...\ndef _private(): ...\ndef Other(): ...")
    assert public_names(tmp_path) == {"Result": 2, "Other": 1}
