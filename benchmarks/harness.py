"""The harness of all benchmarks: time, limits of repeats, parts that are recorded and continued, and tables.

In: parts with a name and a function. Out: `result.json` in a folder. A part that raises an error is recorded with its
traceback and the others still run. A part in which the process ends is recorded as failed. A finished part is not run
again; a part that failed runs again after all others. This module imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RESULT = "result.json"
ABSENT = "-"


@dataclass(frozen=True)
class Limits:
    """Limits of repeated runs."""

    num_runs: int  # counted runs
    num_warmups: int  # dropped runs before the counted ones
    # Seconds for all runs. A run that would exceed it is not started, but one run always counts. A first run of more
    # than half of it is counted and not a warm-up.
    cell_s: float

    def warmups(self, seconds: Sequence[float]) -> int:
        """Return the number of first runs that are warm-ups."""
        return 0 if seconds and seconds[0] > self.cell_s / 2 else self.num_warmups

    def reached(self, seconds: Sequence[float]) -> bool:
        """Return whether the seconds of the runs so far rule out another run."""
        counted = len(seconds) - self.warmups(seconds)
        if counted < 1:
            return False
        return counted >= self.num_runs or sum(seconds) + seconds[-1] > self.cell_s


class Turn(NamedTuple):
    """The wall time and the processor time of one call."""

    seconds: float
    cpu_seconds: float


def timed(call: Callable[[], object], synchronize: Callable[[], object] = lambda: None) -> Turn:
    """Run a call to its end on a device that is waited for by `synchronize`."""
    synchronize()
    start, cpu_start = time.perf_counter(), time.process_time()
    call()
    synchronize()
    return Turn(time.perf_counter() - start, time.process_time() - cpu_start)


def turns(call: Callable[[], object], limits: Limits, synchronize: Callable[[], object] = lambda: None) -> list[Turn]:
    """Repeat a call within limits; return its counted runs."""
    done: list[Turn] = []
    while not limits.reached([turn.seconds for turn in done]):
        done.append(timed(call, synchronize))
    return done[limits.warmups([turn.seconds for turn in done]) :]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table without the columns that were not measured in any row; "" without rows."""
    texts = [[str(cell) for cell in row] for row in rows]
    if not texts:
        return ""
    kept = [i for i in range(len(columns)) if any(row[i] != ABSENT for row in texts)]
    lines = [[row[i] for i in kept] for row in (columns, *texts)]
    lines.insert(1, ["---"] * len(kept))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Check:
    """One number with an upper bound."""

    name: str  # what was compared
    value: float  # NaN fails
    bound: float  # its largest permitted value

    @property
    def passed(self) -> bool:
        """Whether the number is within its bound."""
        return self.value <= self.bound


@dataclass(frozen=True)
class Findings:
    """The result of a part."""

    checks: Sequence[Check] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # other results, by name
    skipped: str | None = None  # the reason if the part could not be measured here


@dataclass(frozen=True)
class Part:
    """One part of a measurement."""

    name: str  # unique
    run: Callable[[], Findings]
    least_s: float = 0.0  # seconds that must be left of the call for it to start
    most_s: float = 0.0  # seconds after which it fails; 0 for no limit


class DeviceLostError(RuntimeError):
    """The device cannot be used any more after the error of a part, which is recorded."""


class OtherOptionsError(ValueError):
    """The folder has results that were measured with other options."""


class Record:
    """The results in a folder, of one process or of several that measure different parts at the same time.

    Args:
        folder: The folder; it is made if needed.
        options: Everything that the numbers depend on, such as the device and the sizes.

    Raises:
        OtherOptionsError: If the folder has results with other options.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / RESULT
        self.options = json.loads(json.dumps(options))
        self.parts: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        """Read the results that are in the folder, of other processes too."""
        if not self._file.exists():
            return
        record = json.loads(self._file.read_text(encoding="utf-8"))
        if record["options"] != self.options:
            raise OtherOptionsError(
                f"{self._file} was measured with {record['options']}, and this call has {self.options}; give another "
                "folder"
            )
        self.parts = record["parts"]

    def finished(self, name: str) -> bool:
        """Return whether a part needs no further run."""
        return self.parts.get(name, {}).get("state") in ("done", "skipped")

    def write(self, name: str, entry: dict[str, Any]) -> None:
        """Add the entry of a part, and replace the file."""
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.read()
            self.parts[name] = entry
            temporary = self._file.with_suffix(".new")
            temporary.write_text(json.dumps({"options": self.options, "parts": self.parts}, indent=1), encoding="utf-8")
            temporary.replace(self._file)

    def failed_checks(self) -> list[str]:
        """Return a line for each number that is not within its bound."""
        return [
            f"{name}: {check['name']} is {check['value']:.3g}, bound {check['bound']:.3g}"
            for name, entry in self.parts.items()
            for check in entry.get("checks", ())
            if not check["passed"]
        ]

    def failed_parts(self) -> list[str]:
        """Return the names of the parts that raised an error."""
        return [name for name, entry in self.parts.items() if entry["state"] == "failed"]


def run_parts(
    parts: Iterable[Part], record: Record, seconds: float, device_lost: Callable[[], bool] = lambda: False
) -> list[str]:
    """Run the parts that are not finished, and return the names of those that were not started.

    Args:
        parts: The parts in order.
        record: Where their results go.
        seconds: Seconds from now within which parts may start.
        device_lost: Returns whether the device cannot be used any more; called after an error.

    Raises:
        DeviceLostError: If the device is lost; the other parts are not started.
    """
    end = time.monotonic() + seconds
    waiting = [part for part in parts if not record.finished(part.name)]
    waiting.sort(key=lambda part: part.name in record.parts)  # the failed ones last
    left = []
    for part in waiting:
        if end - time.monotonic() < part.least_s:
            left.append(part.name)
            continue
        record.write(part.name, {"state": "failed", "seconds": 0.0, "traceback": "the process ended in this part\n"})
        entry = _entry(part)
        record.write(part.name, entry)
        print(f"{part.name}: {_line(entry)}", flush=True)
        if entry["state"] == "failed" and device_lost():
            raise DeviceLostError(f"the device was lost in {part.name}; rerun the command to continue")
    return left


def _entry(part: Part) -> dict[str, Any]:
    start = time.monotonic()
    try:
        with _time_limit(part.most_s):
            findings = part.run()
    except Exception:  # the other parts must still run
        return {"state": "failed", "seconds": time.monotonic() - start, "traceback": traceback.format_exc()}
    return {
        "state": "skipped" if findings.skipped else "done",
        "seconds": time.monotonic() - start,
        "checks": [asdict(check) | {"passed": check.passed} for check in findings.checks],
        "facts": findings.facts,
        "reason": findings.skipped,
    }


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds; 0 sets no limit."""

    def late(*_: object) -> None:
        raise TimeoutError(f"the part took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late) if seconds else None
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if seconds:
            signal.signal(signal.SIGALRM, before)


def _line(entry: dict[str, Any]) -> str:
    """Return what a part found on one line; facts of many values are only in the file."""
    if entry["state"] == "failed":
        return "FAILED\n" + entry["traceback"]
    if entry["state"] == "skipped":
        return f"skipped, {entry['reason']}"
    checks = [
        f"{'' if c['passed'] else 'NOT WITHIN BOUND: '}{c['name']} {c['value']:.2g} (<= {c['bound']:.2g})"
        for c in entry["checks"]
    ]
    facts = json.dumps(entry["facts"]) if entry["facts"] else ""
    return f"{entry['seconds']:.1f} s; " + "; ".join([*checks, *([facts] if 0 < len(facts) < 3000 else [])])
