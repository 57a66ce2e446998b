"""What a comparison prints while it runs, and how it stops at a deadline."""

import json
from multiprocessing import current_process
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from brorl.comparison import run_processes
from brorl.comparison.run_processes import ComparisonView, Slot, slots_for
from brorl.comparison.scores import PlannedRun, progress_of
from brorl.comparison.spec import ComparisonRequest, spec_for
from brorl.console.screen import Screen
from brorl.cost import Budget, Unit
from brorl.errors import UserError


def run_with(folder: Path, costs: list[float], unit: Unit = "seconds", limit: float = 100.0) -> PlannedRun:
    """A run whose steps cost as much."""
    folder.mkdir()
    step = {"sampling": {"samples": 8, "sampled_tokens": 8, "unique_tokens": 8}, "seconds": {"total": 1.0}}
    records: list[dict[str, Any]] = [{"step": 0}]
    for number, cost in enumerate(costs, 1):
        record: dict[str, Any] = json.loads(json.dumps(step)) | {"step": number}
        record["seconds" if unit == "seconds" else "sampling"]["total" if unit == "seconds" else unit] = cost
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return PlannedRun(folder.name, 0, folder / "r.yaml", folder, Budget(unit, limit))


def test_the_status_line_has_the_runs_in_progress_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 300 s of training, 100 are done before this call, and it takes 10 s for 120 of the other 200."""
    runs = [run_with(tmp_path / name, costs) for name, costs in (("A", [100.0]), ("B", [60.0]), ("C", [20.0]))]
    monkeypatch.setattr(run_processes, "perf_counter", lambda: 0.0)
    screen = Screen()
    view = ComparisonView(screen, runs)
    assert [run.arm for run in view.complete] == ["A"]
    assert screen.describe(None) == "starting"
    monkeypatch.setattr(run_processes, "perf_counter", lambda: 10.0)
    b, c = map(progress_of, runs[1:])
    view.runs_progressed([b, c])
    assert screen.describe(None) == "B seed 0 60%, C seed 0 20%; about 15s left"
    assert screen.describe(9) == "B seed 0 "
    b.ended = True
    view.run_ended(b)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == ["2/3", "B", "seed", "0", "1", "step,", "60", "s", "7s", "left"]


@pytest.mark.parametrize(("clock", "told"), [("wall", True), ("cpu", False)])
def test_other_work_on_the_machine_is_advised_against_where_seconds_are_matched(clock: str, told: bool) -> None:
    spec = spec_for(None, ComparisonRequest(overrides={"engine.clock": clock, "engine.threads": 1}))
    said = " ".join(spec.announcement(Path("out")))
    assert ("keep the machine free" in said) == told


@pytest.mark.parametrize("unit", ["seconds", "samples", "unique_tokens"])
def test_the_costs_of_steps_are_those_of_the_metrics(tmp_path: Path, unit: Unit) -> None:
    assert progress_of(run_with(tmp_path / "A", [50, 4, 8], unit)).costs_of_steps(unit) == [50, 4, 8]


@pytest.mark.parametrize(
    ("code", "said"),
    [(-9, r"the run A, seed 0, was killed, as happens when memory runs out; free memory or lower `jobs`"),
     (2, r"the run A, seed 0, failed \(exit code 2\): it is wrong \(its errors are in .*A.err\)")],
)  # fmt: skip
def test_a_run_that_fails_ends_the_comparison_with_its_reason(
    code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        exitcode = code

    (tmp_path / "A.err").write_text("" if code < 0 else "a note\nbrorl: it is wrong\n")
    monkeypatch.setattr(run_processes, "_start", lambda *_: Process())
    monkeypatch.setattr(run_processes, "_stop", lambda *_: None)
    monkeypatch.setattr(run_processes, "_POLL_S", 0.01)
    runs = [PlannedRun("A", 0, tmp_path / "A.yaml", tmp_path / "A", Budget("seconds", 9))]
    with pytest.raises(UserError, match=said):
        run_processes.finish_runs(runs, [Slot()], ComparisonView(Screen(silent=True), runs))


def test_a_run_that_is_stopped_at_its_deadline_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is discarded, and a run that waits is not begun."""
    started, stopped = [], []

    class Process:
        exitcode = None

    def start(run: PlannedRun, _slot: Slot) -> Process:
        started.append(run.arm)
        return Process()

    monkeypatch.setattr(run_processes, "_start", start)
    monkeypatch.setattr(run_processes, "_stop", lambda processes, stops: stopped.append((len(processes), len(stops))))
    monkeypatch.setattr(run_processes, "_POLL_S", 0.01)
    runs = [PlannedRun(name, 0, tmp_path / f"{name}.yaml", tmp_path / name, Budget("seconds", 9)) for name in "AB"]
    view = ComparisonView(Screen(silent=True), runs)
    assert not run_processes.finish_runs(runs, [Slot()], view, perf_counter() + 0.05)
    assert (started, stopped) == (["A"], [(1, 2)])
    assert run_processes.finish_runs([], [Slot()], view, perf_counter())


def test_a_daemonic_process_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="daemon=False"):
        slots_for(1, [])
