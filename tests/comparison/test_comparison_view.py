"""What a comparison prints while it runs, into a file or pipe."""

import io
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from rich.console import Console

from brorl.comparison import run_processes
from brorl.comparison.run_processes import ComparisonView, Slot
from brorl.comparison.scores import ArmRun, progress_of
from brorl.comparison.spec import Arguments, spec_for
from brorl.cost import Budget, Unit


def run_with(folder: Path, costs: list[float], unit: Unit = "seconds", limit: float = 100.0) -> ArmRun:
    """A run whose steps cost as much."""
    folder.mkdir()
    step = {"sampling": {"samples": 8, "sampled_tokens": 8, "unique_tokens": 8}, "seconds": {"total": 1.0}}
    records: list[dict[str, Any]] = [{"step": 0}]
    for number, cost in enumerate(costs, 1):
        record: dict[str, Any] = json.loads(json.dumps(step)) | {"step": number}
        record["seconds" if unit == "seconds" else "sampling"]["total" if unit == "seconds" else unit] = cost
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ArmRun(folder.name, 0, folder / "r.yaml", folder, Budget(unit, limit))


def test_runs_in_progress_are_printed_when_nothing_else_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = progress_of(run_with(tmp_path / "N=16", [20.0]))
    out = io.StringIO()
    monkeypatch.setattr(run_processes, "QUIET_S", 0.0)
    view = ComparisonView(Console(file=out), [progress.run])
    view.runs_progressed([progress])
    view.runs_progressed([progress])  # while the run is evaluated
    assert out.getvalue().count("N=16 seed 0 20%; about") == 1

    out = io.StringIO()
    monkeypatch.setattr(run_processes, "QUIET_S", 3600.0)
    view = ComparisonView(Console(file=out), [progress.run])
    view.runs_progressed([progress])
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("load", "settings", "is_warned"),
    [(0.0, {}, False), (99.0, {}, True), (99.0, {"engine.clock": "cpu", "engine.threads": 1}, False)],
)
def test_a_busy_machine_is_told_where_seconds_are_matched(
    load: float, settings: dict[str, Any], is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    out = io.StringIO()
    spec = spec_for(None, Arguments(overrides=settings))
    ComparisonView(Console(file=out), []).announce(spec, Path("out"), 1)
    assert ("engine={'clock': 'cpu'} engine={'threads': 1}" in out.getvalue()) == is_warned


@pytest.mark.parametrize("unit", ["seconds", "samples", "unique_tokens"])
def test_the_costs_of_steps_are_those_of_the_metrics(tmp_path: Path, unit: Unit) -> None:
    assert progress_of(run_with(tmp_path / "A", [50, 4, 8], unit)).costs_of_steps(unit) == [50, 4, 8]


def test_a_run_that_is_stopped_at_its_deadline_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is discarded, and a run that waits is not begun."""
    started, stopped = [], []

    class Process:
        exitcode = None

    def start(run: ArmRun, _slot: Slot) -> Process:
        started.append(run.arm)
        return Process()

    monkeypatch.setattr(run_processes, "_start", start)
    monkeypatch.setattr(run_processes, "_stop", lambda processes, stops: stopped.append((len(processes), len(stops))))
    monkeypatch.setattr(run_processes, "_POLL_S", 0.01)
    runs = [ArmRun(name, 0, tmp_path / f"{name}.yaml", tmp_path / name, Budget("seconds", 9)) for name in "AB"]
    view = ComparisonView(Console(quiet=True), runs)
    assert not run_processes.finish_runs(runs, [Slot()], view, perf_counter() + 0.05)
    assert (started, stopped) == (["A"], [(1, 2)])
    assert run_processes.finish_runs([], [Slot()], view, perf_counter())
