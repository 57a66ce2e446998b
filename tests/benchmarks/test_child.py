"""How many runs a cell gets, and the conversation with the process that measures."""

import os
import sys
from pathlib import Path

import pytest
from child import Child
from harness import Limits
from measurement import Job

pytestmark = pytest.mark.linux
STUB = """#!{python}
import json, sys
seconds = iter({seconds})
def answer(**message):
    print(json.dumps(message), flush=True)
answer(baseline_bytes=1000)
answer(waiting=True)
for line in sys.stdin:
    second = next(seconds, None)
    if second is None:
        answer(error="no more")
        sys.exit(1)
    answer(run=dict(seconds=second, cpu_seconds=second, sampled_tokens=8, work=None))
    answer(waiting=True)
answer(peak_bytes=3000)
"""


def child_with(seconds: list[float], limits: Limits, folder: Path) -> Child:
    program = folder / "python"
    program.write_text(STUB.format(python=sys.executable, seconds=seconds), encoding="utf-8")
    program.chmod(0o755)
    job = Job("ours", "generation", str(folder), 4, 1, limits.num_warmups + limits.num_runs, 1)
    return Child(job, limits, max(os.sched_getaffinity(0)), folder / "log", str(program))


@pytest.mark.parametrize(
    ("seconds", "warmups", "runs"),
    [
        (1.0, 1, 5),  # fast: all of them
        (12.0, 1, 4),  # a sixth run would pass 60 s
        (25.0, 1, 1),
        (31.0, 0, 1),  # slow: its first run counts, and is the only one
        (500.0, 0, 1),
    ],
)
def test_a_slow_cell_gets_fewer_runs(seconds: float, warmups: int, runs: int, tmp_path: Path) -> None:
    child = child_with([seconds] * 6, Limits(num_runs=5, num_warmups=1, cell_s=60.0), tmp_path)
    while not child.is_done:
        child.take_turn()
    cell = child.finish()
    assert (len(cell.warmups), len(cell.runs), cell.error) == (warmups, runs, None)
    assert (cell.seconds, cell.above_baseline_bytes) == (seconds, 2000)


def test_a_process_that_fails_has_no_runs_and_a_reason(tmp_path: Path) -> None:
    child = child_with([1.0, 1.0], Limits(num_runs=5, num_warmups=1, cell_s=60.0), tmp_path)
    while not child.is_done:
        child.take_turn()
    cell = child.finish()
    assert (cell.runs, cell.warmups, cell.error) == ([], [], "no more")
