"""The parts of a measurement: run one by one, recorded after each, continued by the next call.

In: parts with a name and a function. Out: `result.json` in a folder. A part that raises an error is recorded with its
traceback and the others still run. A part in which the process ends is recorded as failed. A finished part is not run
again; a part that failed runs again after all others.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULT = "result.json"


@dataclass(frozen=True)
class Check:
    """One number with an upper bound.

    Attributes:
        name: What was compared.
        value: The number; NaN fails.
        bound: Its largest permitted value.
    """

    name: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the number is within its bound."""
        return self.value <= self.bound


@dataclass(frozen=True)
class Findings:
    """The result of a part.

    Attributes:
        checks: Numbers with bounds.
        facts: Other results, by name.
        skipped: The reason if the part could not be measured here.
    """

    checks: Sequence[Check] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: A unique name.
        run: Measures it.
        least_s: Seconds that must be left of the call for it to start.
    """

    name: str
    run: Callable[[], Findings]
    least_s: float = 0.0


class DeviceLostError(RuntimeError):
    """The device cannot be used any more after the error of a part, which is recorded."""


class OtherOptionsError(ValueError):
    """The folder has results that were measured with other options."""


class Record:
    """The results in a folder.

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
        if self._file.exists():
            found = json.loads(self._file.read_text(encoding="utf-8"))
            if found["options"] != self.options:
                raise OtherOptionsError(
                    f"{self._file} was measured with {found['options']}, and this call has {self.options}; give "
                    "another folder"
                )
            self.parts = found["parts"]

    def finished(self, name: str) -> bool:
        """Return whether a part needs no further run."""
        return self.parts.get(name, {}).get("state") in ("done", "skipped")

    def write(self, name: str, entry: dict[str, Any]) -> None:
        """Add the entry of a part, and replace the file."""
        self.parts[name] = entry
        text = json.dumps({"options": self.options, "parts": self.parts}, indent=1)
        temporary = self._file.with_suffix(".new")
        temporary.write_text(text, encoding="utf-8")
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


def run_parts(parts: Iterable[Part], record: Record, seconds: float, device_lost: Callable[[], bool]) -> list[str]:
    """Run the parts that are not finished.

    Args:
        parts: The parts in order.
        record: Where their results go.
        seconds: Seconds from now within which parts may start.
        device_lost: Returns whether the device cannot be used any more; called after an error.

    Returns:
        The names of the parts that were not started.

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
        found = part.run()
    except Exception:  # the other parts must still run
        return {"state": "failed", "seconds": time.monotonic() - start, "traceback": traceback.format_exc()}
    entry: dict[str, Any] = {"state": "skipped" if found.skipped else "done", "seconds": time.monotonic() - start}
    entry["checks"] = [asdict(check) | {"passed": check.passed} for check in found.checks]
    return entry | {"facts": found.facts, "reason": found.skipped}


def _line(entry: dict[str, Any]) -> str:
    if entry["state"] == "failed":
        return "FAILED\n" + entry["traceback"]
    if entry["state"] == "skipped":
        return f"skipped, {entry['reason']}"
    checks = [
        f"{'' if c['passed'] else 'NOT WITHIN BOUND: '}{c['name']} {c['value']:.2g} (<= {c['bound']:.2g})"
        for c in entry["checks"]
    ]
    facts = [json.dumps(entry["facts"])] if entry["facts"] else []
    return f"{entry['seconds']:.1f} s; " + "; ".join([*checks, *facts])
