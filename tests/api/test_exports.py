"""The names of the package: light to import, complete for `dir` and for type checkers."""

import ast
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import brorl
from brorl.api.verify import verify

COMMANDS = {*"check compare data evaluate plan report sample samples train tune verify".split()}  # noqa: SIM905


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
    assert {*names} == COMMANDS | {"RolloutTree", "SamplingParams", "UserError", "__version__"}
    assert heavy == []
    assert after == []  # settings are checked before torch is imported


def test_type_checkers_see_the_names_that_are_imported_on_first_use() -> None:
    tree = ast.parse(Path(brorl.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == brorl._HOMES
    assert sorted(seen) == sorted(brorl.__all__)
    assert {*seen} >= COMMANDS


def test_every_name_is_there() -> None:
    assert [getattr(brorl, name).__name__ for name in brorl.__all__] == brorl.__all__


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'brorl' has no attribute 'tarin'"):
        brorl.tarin  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("modules_first", [True, False])
def test_no_module_of_the_package_takes_the_name_of_a_function(modules_first: bool) -> None:
    """A module that is imported becomes an attribute of the package, also after the function."""
    program = """
import importlib, json, pkgutil, sys
import brorl
functions = lambda: {name: callable(getattr(brorl, name)) for name in brorl.__all__}
if sys.argv[1] == "False":
    functions()
for module in pkgutil.iter_modules(brorl.__path__):
    if module.name != "__main__":
        importlib.import_module(f"brorl.{module.name}")
import brorl.reporting.page, brorl.verification.grade
print(json.dumps(functions()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(modules_first)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == dict.fromkeys(brorl.__all__, True)


def test_a_function_is_found_by_pickle() -> None:
    assert pickle.loads(pickle.dumps(brorl.verify)) is brorl.verify
    assert inspect.signature(brorl.verify) == inspect.signature(verify)
    assert brorl.verify.__doc__ == verify.__doc__


def test_errors_name_the_argument(tmp_path: Path) -> None:
    with pytest.raises(brorl.UserError, match=r"^`jobs`: .* got 0$"):
        brorl.compare(jobs=0)
    with pytest.raises(brorl.UserError, match=r"^`temperature=0` is greedy: .*; add `samples=1`, or use a"):
        brorl.evaluate("quickstart", temperature=0)
    with pytest.raises(brorl.UserError, match=r"lower `pilot_prompts`$"):
        brorl.plan(pilot_prompts=10**6, output_dir=tmp_path / "plan", progress=False)
    with pytest.raises(brorl.UserError, match=r"^`show`: .* at least 0"):
        brorl.data(show=-1)
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(brorl.UserError, match="give a different `output`"):
        brorl.report(tmp_path, output=tmp_path / "report.html")
