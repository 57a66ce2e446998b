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


def test_the_workflow_runs_the_gate_on_every_supported_python(project: dict[str, Any]) -> None:
    (job,) = read_yaml(".github/workflows/gate.yml")["jobs"].values()
    prefix = "Programming Language :: Python :: "
    supported = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    assert job["strategy"]["matrix"]["python"] == supported
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == "bash .ci/run"
    assert all((ROOT / word).is_file() for command in commands for word in command.split() if "/" in word)


def test_the_gate_runs_the_commands_of_the_readme_in_a_fresh_clone() -> None:
    """And then again with the kernels of AVX2; nothing else is taken for a command."""
    readme = (ROOT / "README.md").read_text("utf-8")
    try_it, test_it = re.findall(r"^    (python3 -m venv .*)$", readme, re.MULTILINE)
    gate = (ROOT / ".ci/run").read_text("utf-8")
    clone = gate.index('git clone --quiet . "$work/clone"\ncd "$work/clone"\n')
    extracted = "".join(f"{line}\n" for line in gate[:clone].splitlines() if "readme_command" in line)
    printed = subprocess.run(
        ["bash", "-euc", f'python=python3\n{extracted}echo "$try"\necho "$test"'],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed.splitlines() == [try_it, test_it]
    for command, name in ((try_it, "try"), (test_it, "test")):
        run = f'bash -euo pipefail -c "${name}"'
        again = f"ATEN_CPU_CAPABILITY=avx2 {command.rpartition(' && ')[2]}"
        assert clone < gate.index(run) < gate.index(again)
    (numerics,) = re.findall(r'^numerics="(.*)"$', gate, re.MULTILINE)
    assert [folder for folder in numerics.split() if not (ROOT / folder).is_dir()] == []


def test_the_gate_runs_every_part_and_stops_at_one_that_fails(tmp_path: Path) -> None:
    gate = (ROOT / ".ci/run").read_text("utf-8")
    parts = set(re.findall(r"\bprintf '%s\\n' (.*) \|", gate)[0].split())
    exported = set(re.findall(r"^export -f (.*)$", gate, re.MULTILINE)[0].split())
    assert parts < exported == set(re.findall(r"^(\w+)\(\) \{", gate, re.MULTILINE)) - {"readme_command", "stage"}
    (part,) = re.findall(r"^part\(\) \{.*?^\}\n", gate, re.MULTILINE | re.DOTALL)
    for code, said in ((0, "1\n2\n"), (255, "1\n")):
        program = f"one() {{ echo 1; test {code} = 0; echo 2; }}\n{part}export -f one part\npart one"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", program], env={**os.environ, "work": str(tmp_path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.partition("==\n")[2]) == (code, said)


def test_the_schedule_runs_all_attacks_with_other_inputs() -> None:
    workflow = read_yaml(".github/workflows/gate.yml")
    assert workflow["on"]["schedule"]
    (job,) = workflow["jobs"].values()
    for name, value in (("BRORL_ALL_ATTACKS", "1"), ("BRORL_TEST_SEED", "random")):
        assert f"github.event_name == 'schedule' && '{value}'" in job["env"][name]


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


def paths_in(text: str) -> set[str]:
    """Return the paths of this project that a page names in code; `your_` stands for a name of the reader's."""
    names = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.(?:py|md|toml))`", text)
    return {name for name in names if "your_" not in name}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/status.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    """A path is one of the project, of its package, or of its documentation."""
    paths = paths_in((ROOT / page).read_text("utf-8")) - {"site/"}
    assert len(paths) > 8
    roots = (ROOT, ROOT / "src" / "brorl", ROOT / "docs")
    assert {path for path in paths if not any((root / path).exists() for root in roots)} == set()


def test_the_status_names_every_marker() -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["markers"]
    rows = (ROOT / "docs" / "status.md").read_text("utf-8").split("\n|---|")[1].split("\n\n")[0].splitlines()[1:]
    named = {marker for row in rows for marker in re.findall(r"`(\w+)`", row.split("|")[3])}
    assert named == {marker.split(":")[0] for marker in markers}
