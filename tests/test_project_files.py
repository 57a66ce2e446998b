"""Project files that must agree: the workflow, the citation, the changelog and the metadata of the package."""

import os
import re
import subprocess
import sys
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
    assert commands[-1].startswith("bash .ci/run ")
    assert all((ROOT / word).is_file() for command in commands for word in command.split() if "/" in word)


def test_the_gate_runs_the_commands_of_the_readme_in_a_fresh_clone(tmp_path: Path) -> None:
    """Nothing else is taken for a command."""
    gate, readme = ((ROOT / name).read_text("utf-8") for name in (".ci/run", "README.md"))
    setup, rest = gate.split('git clone --quiet . "$work/clone"\ncd "$work/clone"\n')
    assert "readme_command" not in setup
    (definition,) = re.findall(r"^readme_command\(\) .*$", rest, re.MULTILINE)
    (tmp_path / "README.md").write_text(readme)
    patterns = re.findall(r'bash -euo pipefail -xc "\$\(readme_command (.*)\)"', rest)
    program = "\n".join(["python=python3", definition, *(f"readme_command {pattern}" for pattern in patterns)])
    printed = subprocess.run(["bash", "-euc", program], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == re.findall(r"^    (python3 -m venv .*)$", readme, re.MULTILINE)


def test_the_tests_that_the_gate_names_exist() -> None:
    names = re.findall(r"\btests/\w[\w/.]*\w", (ROOT / ".ci/run").read_text("utf-8"))
    assert {"tests/training", "tests/verification/test_attacks.py"} < {*names}
    assert [name for name in names if not (ROOT / name).exists()] == []


def gate_functions() -> tuple[str, str]:
    """Return the parts of the gate, and its last lines, which run them."""
    before, start, end = (ROOT / ".ci/run").read_text("utf-8").partition("part() {\n")
    return before, start + end


def defined(before: str) -> set[str]:
    helpers = {"readme_command", "drawn", "some_tests"}
    return set(re.findall(r"^ *(\w+)\(\) \{", before, re.MULTILINE)) - helpers


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("failing", [set(), {"browser", "attacks", "slow_tests"}])
def test_the_gate_runs_every_part_and_names_those_that_fail(failing: set[str], share: int, tmp_path: Path) -> None:
    """Its last lines, with a part that ends at its first error instead of each of its parts."""
    before, end = gate_functions()
    parts = defined(before) - ({"extras", "avx2", "vllm"} if share == 4 else set())
    assert failing < parts
    stubs = [f"{p}() {{ echo {p} >>begun; test {int(p in failing)} = 0; echo {p} >>done; }}\n" for p in defined(before)]
    gate = ["bash", "-aeuo", "pipefail", "-c", "".join([f"work=$PWD share={share}\n", *stubs, end])]
    ended = subprocess.run(gate, cwd=tmp_path, capture_output=True, text=True, check=False)
    begun, done = ((tmp_path / name).read_text().split() for name in ("begun", "done"))
    assert sorted(begun) == sorted(parts)
    assert {*done} == parts - failing
    assert sorted(re.findall(r"^== (\w+) took", ended.stdout, re.MULTILINE)) == sorted(parts)
    assert ended.returncode == bool(failing)
    if failing:
        assert {*ended.stdout.splitlines()[-1].removeprefix("failed: ").split()} == failing


def test_commits_draw_different_quarters_of_the_files_with_slow_tests() -> None:
    """With `all` there is none that no part runs."""
    definition = re.search(r"^drawn\(\) \{\n.*?^\}$", gate_functions()[0], re.MULTILINE | re.DOTALL)
    assert definition

    def drawn(commit: str, share: int) -> list[str]:
        program = [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f"python={sys.executable}\n{definition[0]}\ndrawn {commit} {share}",
        ]
        return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    every = drawn("0123", 1)
    sources = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in ROOT.glob("tests/**/test_*.py")}
    slow = {file for file, text in sources.items() if re.search(r"mark\.slow|mark\.example|mostly_slow\(", text)}
    assert slow - {*every} == {"tests/verification/test_attacks.py"}
    quarters = [drawn(commit, 4) for commit in ("0123", "4567", "4567")]
    assert [len(quarter) for quarter in quarters] == [-(-len(every) // 4)] * 3
    assert all({*quarter} < {*every} for quarter in quarters)
    assert {*quarters[0]} != {*quarters[1]}
    assert quarters[1] == quarters[2]


def test_an_argument_that_the_gate_does_not_know_is_refused() -> None:
    ended = subprocess.run(["bash", ".ci/run", "al"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "usage: bash .ci/run [all]\n"


def test_the_schedule_runs_all_tests_and_attacks_with_random_inputs() -> None:
    workflow = read_yaml(".github/workflows/gate.yml")
    assert workflow["on"]["schedule"]
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == "bash .ci/run ${{ github.event_name == 'schedule' && 'all' || '' }}"
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


def test_the_status_names_every_marker() -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["markers"]
    rows = (ROOT / "docs" / "status.md").read_text("utf-8").split("\n|---|")[1].split("\n\n")[0].splitlines()[1:]
    named = {marker for row in rows for marker in re.findall(r"`(\w+)`", row.split("|")[3])}
    assert named == {marker.split(":")[0] for marker in markers}
