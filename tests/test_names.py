"""Names of the package: a public one has one meaning, and a local one says what it holds.

No two modules define a class or a function with the same name, and no variable is called `one` or `found`.
"""

import ast
from collections import Counter
from pathlib import Path

import brorl

PACKAGE = Path(brorl.__file__).parent
PROGRAMS = {"main"}  # the entry points of two programs: the command line and the fork server
FILLERS = {"one", "found", "each", "said", "them", "these", "it", "thing", "stuff"}


def public_names(folder: Path) -> Counter[str]:
    """Count the public classes and functions that the modules of a folder define, by name."""
    nodes = (node for file in folder.rglob("*.py") for node in ast.parse(file.read_text("utf-8")).body)
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return Counter(node.name for node in nodes if isinstance(node, kinds) and not node.name.startswith("_"))


def test_public_names_are_unique() -> None:
    assert {name for name, count in public_names(PACKAGE).items() if count > 1} == PROGRAMS


def test_a_duplicate_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Result: ...\ndef _private(): ...")
    (tmp_path / "b.py").write_text("class Result: ...\ndef _private(): ...\ndef Other(): ...")
    assert public_names(tmp_path) == {"Result": 2, "Other": 1}


def variables(folder: Path) -> set[str]:
    """Return the names that the modules of a folder assign, also in loops and comprehensions."""
    nodes = (node for file in folder.rglob("*.py") for node in ast.walk(ast.parse(file.read_text("utf-8"))))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_variables_say_what_they_hold() -> None:
    assert not variables(PACKAGE) & FILLERS


def test_a_variable_is_found_wherever_it_is_assigned(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one = 1\nwith x as found: ...\nprint([each for each in y])\nthem += 1")
    assert variables(tmp_path) == {"one", "found", "each", "them"}
