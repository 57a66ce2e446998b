"""`brorl report` and `brorl samples` on a real run, and one line for whatever cannot work."""

import base64
import gzip
import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from brorl.reporting.page import write_report
from run_support import SMALL, command, refused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps."""
    path = tmp_path_factory.mktemp("runs") / "small"
    outcome = command("train", *SMALL, "--steps=3", f"--output_dir={path}", "--checkpoint_every=3")
    assert outcome.code == 0, outcome
    return path


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


def test_a_report_of_a_real_run(run: Path) -> None:
    outcome = command("report", run)
    assert outcome.code == 0, outcome
    target = run / "report.html"
    assert outcome.out.startswith(f"{target} (")
    page = target.read_text("utf-8")
    data = embedded(page)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    traces = {chart["name"]: chart["traces"] for chart in data["charts"]}
    assert set(traces) >= {"reward", "pass1", "passk", "held-out", "mixed", "unsampled", "sharing", "seconds"}
    steps = [r for r in records if "sampling" in r]
    assert traces["reward"][0]["y"] == pytest.approx([r["sampling"]["reward"] for r in steps], rel=1e-6)
    assert traces["entropy"][0]["y"] == pytest.approx([r["update"]["entropy"] for r in steps], rel=1e-6)
    assert data["runs"][0]["x"]["step"] == [r["step"] for r in records]
    assert [entry["step"] for entry in data["runs"][0]["rollouts"]] == [1, 2, 3]
    evaluated = {r["step"]: r["evaluation"]["prompts"]["num_correct"] for r in records if "evaluation" in r}
    assert {entry["step"] for entry in data["runs"][0]["evaluations"]} >= {min(evaluated), max(evaluated)}
    for entry in data["runs"][0]["evaluations"]:
        packed = re.search(rf'id="evaluations-0-{entry["step"]}">([^<]*)<', page)
        assert packed
        groups = json.loads(gzip.decompress(base64.b64decode(packed[1])))["groups"]
        assert [group["right"] for group in groups] == evaluated[entry["step"]]  # fewer than 8 prompts: all are stored
    assert data["runs"][0]["tokensKnown"]
    for step in steps:
        packed = re.search(rf'id="rollouts-0-{step["step"]}">([^<]*)<', page)
        assert packed
        rollouts = json.loads(gzip.decompress(base64.b64decode(packed[1])))
        assert sum(g["rollouts"] for g in rollouts["groups"]) == step["sampling"]["samples"]
        assert sum(len(g["token"]) for g in rollouts["groups"]) == step["sampling"]["unique_tokens"]
        assert sum(sum(g["count"]) for g in rollouts["groups"]) == step["sampling"]["sampled_tokens"]
        assert "<eos>" in rollouts["tokenTexts"]
        # The tokens' texts give the stored text, so that it need not be repeated.
        assert all(text is None for g in rollouts["groups"] for text in g["text"])

    assert command("report", run).code == 0  # a report may be written over
    both = command("report", run, run.parent / "small", "--output", "x.html")
    assert (both.code, both.err) == (2, f"brorl: the run {run} is listed twice; list each run once\n")


@pytest.mark.slow
def test_the_function_writes_the_file_of_the_command(run: Path) -> None:
    assert command("report", run, "--output", "command.html").code == 0
    report = write_report([run], Path("python.html"))
    assert Path("python.html").read_bytes() == Path("command.html").read_bytes()
    assert (report.path, report.num_bytes) == (Path("python.html"), Path("python.html").stat().st_size)
    assert str(report) == f"python.html ({report.num_bytes / 1e6:.1f} MB): open it in a browser"
    assert report._repr_html_() == f'<a href="python.html" target="_blank">{report}</a>'


@pytest.mark.slow
def test_a_report_of_several_runs_goes_under_runs(run: Path, tmp_path: Path) -> None:
    copytree(run, tmp_path / "twin")
    outcome = command("report", run, tmp_path / "twin")
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("runs/report.html (")
    assert [path.name for path in Path("runs").iterdir()] == ["report.html"]


@pytest.mark.slow
def test_what_cannot_be_reported_is_refused_in_one_line(run: Path) -> None:
    before = sorted(run.rglob("*"))
    assert "there is no run directory none" in refused("report", "none")
    assert "is not a run directory" in refused("report", run, ".")
    Path("compared").mkdir()
    Path("compared/compare.json").write_text("{}")
    assert "compared is a comparison; its results are in comparison.html" in refused("report", "compared")
    assert "brorl report compared/arms/*/seed-0" in refused("samples", "compared")
    Path("notes.html").write_text("mine")
    assert "notes.html exists and is not a report" in refused("report", run, "--output", "notes.html")
    assert Path("notes.html").read_text() == "mine"
    assert "is a folder" in refused("report", run, "--output", ".")
    assert "RUN" in refused("report")
    assert sorted(run.rglob("*")) == before
    outcome = command("report", run, "--output", "new/folder/x.html")
    assert outcome.code == 0
    assert Path("new/folder/x.html").is_file()
    assert not list(Path("new/folder").glob(".*"))
    assert command("report", run, "--output", "notes.html/x.html").code == 1  # the folder cannot be made


def test_samples_of_a_real_run(run: Path) -> None:
    outcome = command("samples", run)
    assert outcome.code == 0, outcome
    assert outcome.out.startswith(f"step 3 of {run}: ")
    assert "mean log-prob -" in outcome.out
    assert "\x1b" not in outcome.out  # plain where it is not a terminal
    held_out = command("samples", run, "--held-out", "--step=0")
    assert held_out.code == 0
    assert held_out.out.startswith(f"held-out prompts at step 0 of {run}: ")
    one = command("samples", run, "--step=1", "--prompt=1", "--limit=1")
    assert one.code == 0
    assert len(re.findall(r"^\d+x ", one.out, re.MULTILINE)) == 1
    wrong = command("samples", run, "--kind=wrong", "--limit=50")
    assert wrong.code == 0
    assert not re.findall(r"^\d+x correct", wrong.out, re.MULTILINE)
    assert re.findall(r"^\d+x ", wrong.out, re.MULTILINE)


def test_samples_that_are_not_there_are_refused_in_one_line(run: Path) -> None:
    assert "contains no rollouts of step 9; it has steps 1 to 3" in refused("samples", run, "--step=9")
    assert "has no prompt nobody; give a number from 1 to" in refused("samples", run, "--prompt=nobody")
    assert "argument --kind: invalid choice: 'wrng' (choose from" in refused("samples", run, "--kind=wrng")
    assert "expected a number of at least 1, not 0" in refused("samples", run, "--limit=0")
    assert "there is no run directory none" in refused("samples", "none")
