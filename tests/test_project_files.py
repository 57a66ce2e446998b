"""Project files that must agree: the workflow, the citation, the changelog and the metadata of the package."""

import os
import re
import subprocess
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


def test_the_workflow_has_every_supported_python(project: dict[str, Any]) -> None:
    (job,) = read_yaml(".github/workflows/gate.yml")["jobs"].values()
    prefix = "Programming Language :: Python :: "
    supported = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    assert job["strategy"]["matrix"]["python"] == supported


def test_a_release_has_absolute_links(tmp_path: Path) -> None:
    """The index shows README without the other files."""
    steps = read_yaml(".github/workflows/publish.yml")["jobs"]["build"]["steps"]
    names = [step.get("name", "") for step in steps]
    made = next(i for i, name in enumerate(names) if "absolute" in name)
    assert made < names.index("Build")
    before = (ROOT / "README.md").read_text("utf-8")
    (tmp_path / "README.md").write_text(before)
    github = {"GITHUB_SERVER_URL": "https://host.example", "GITHUB_REPOSITORY": "we/brorl", "GITHUB_REF_NAME": "v1"}
    subprocess.run(["bash", "-euc", steps[made]["run"]], cwd=tmp_path, env=os.environ | github, check=True)
    after = (tmp_path / "README.md").read_text("utf-8")
    link = re.compile(r"(!?)\[[^]]*\]\(([^)]+)\)")
    for (image, old), (_, new) in zip(link.findall(before), link.findall(after), strict=True):
        kind = "raw" if image else "blob"
        assert new == (old if ":" in old else f"https://host.example/we/brorl/{kind}/v1/{old}")
    assert "git clone https://host.example/we/brorl brorl" in after


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


def test_the_status_names_every_marker() -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["markers"]
    rows = (ROOT / "docs" / "status.md").read_text("utf-8").split("\n|---|")[1].split("\n\n")[0].splitlines()[1:]
    named = {marker for row in rows for marker in re.findall(r"`(\w+)`", row.split("|")[3])}
    assert named == {marker.split(":")[0] for marker in markers}
