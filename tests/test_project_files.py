"""Project files that must agree: the workflow, the citation, the changelog and the metadata of the package."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import brorl

ROOT = Path(__file__).resolve().parent.parent


def read_yaml(name: str) -> Any:
    return YAML(typ="safe").load((ROOT / name).read_text("utf-8"))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def test_the_workflow_runs_the_gate_on_every_supported_python(project: dict[str, Any]) -> None:
    (job,) = read_yaml(".github/workflows/gate.yml")["jobs"].values()
    prefix = "Programming Language :: Python :: "
    supported = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    assert job["strategy"]["matrix"]["python"] == supported
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == "bash .ci/run"
    assert all((ROOT / word).is_file() for command in commands for word in command.split() if "/" in word)


def test_the_citation_has_the_version_and_the_paper(project: dict[str, Any]) -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == brorl.__version__
    assert citation["license"] == project["license"]
    (paper,) = citation["references"]
    assert paper["url"] == project["urls"]["Paper"]
    assert paper["url"] in (ROOT / "README.md").read_text("utf-8")


def test_the_changelog_begins_with_the_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert versions[0] == brorl.__version__
