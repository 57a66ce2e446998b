"""The names of the package: light to import, complete for `dir` and for type checkers."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import brorl

VERBS = {"train", "evaluate", "compare", "plan"}


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    program = """
import json, sys
import brorl
names = dir(brorl)
heavy = sorted({"torch", "transformers", "numpy", "pyarrow", "rich"} & set(sys.modules))
brorl.train
after = sorted({"torch", "transformers", "pyarrow"} & set(sys.modules))
print(json.dumps([names, heavy, after]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, heavy, after = json.loads(done.stdout)
    assert {*names} >= VERBS | {"RolloutTree", "SamplingParams", "UserError", "__version__"}
    assert heavy == []
    assert after == []  # settings are checked before torch is imported


def test_type_checkers_see_the_names_that_are_imported_on_first_use() -> None:
    tree = ast.parse(Path(brorl.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == brorl._HOMES
    assert sorted(seen) == sorted(brorl.__all__)
    assert {*seen} >= VERBS


@pytest.mark.parametrize("name", sorted(brorl.__all__))
def test_every_name_is_there(name: str) -> None:
    assert getattr(brorl, name).__name__ == name


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'brorl' has no attribute 'tarin'"):
        brorl.tarin  # noqa: B018
