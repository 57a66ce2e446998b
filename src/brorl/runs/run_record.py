"""A run as its directory records it: settings, machine, and the records of its metrics.

The run may be unfinished. The settings are read as YAML without checks. A directory without metrics is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from brorl.errors import UserError
from brorl.storage import dotted

Record = dict[str, Any]
SPEC_FILE = "compare.json"  # settings of a comparison, in its folder
TUNE_FILE = "tune.json"  # the plan of a tuning, in its folder

_GIVE = "give the directory that `brorl train` printed"


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The contents of a run directory, apart from weights and rollouts."""

    path: Path  # the directory
    name: str  # name of the run among the others
    # the settings by dotted name, values as text, in the order of `config.yaml`; empty if it is missing
    settings: Mapping[str, str]
    environment: Mapping[str, Any]  # `env.json`; empty if it is missing
    records: tuple[Record, ...]  # the complete metrics records, steps ascending
    held_out: tuple[str, ...] = ()  # texts of the held-out prompts, in order; empty if they were not stored

    @property
    def steps(self) -> tuple[Record, ...]:
        """The lines of steps, without that of the start. The last step makes no update if it found no mixed group."""
        return tuple(r for r in self.records if "sampling" in r)

    @property
    def updates(self) -> tuple[Record, ...]:
        """The lines of steps that made an update."""
        return tuple(r for r in self.records if "update" in r)

    @property
    def evaluations(self) -> tuple[Record, ...]:
        """The lines that hold an evaluation."""
        return tuple(r for r in self.records if r.get("evaluation"))


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read run directories, each once; their names differ: the directory's, or as much of its path as needed."""
    resolved = [path.resolve() for path in paths]
    for path, full in zip(paths, resolved, strict=True):
        if resolved.count(full) > 1:
            raise UserError(f"the run {path} is given twice; give each run once")
    names = _names(resolved)
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(path: Path) -> RunRecord:
    """Read one run directory; see `read_runs`."""
    return read_runs([path])[0]


def check_run(path: Path) -> None:
    """Check that a path is a run directory."""
    if not path.is_dir():
        raise UserError(f"there is no run directory {path}; {_GIVE}")
    if (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file():
        return
    if (path / SPEC_FILE).is_file():
        raise UserError(
            f"{path} is a comparison; its results are in comparison.html, and its runs in {path / 'arms'}: "
            f"brorl report {path / 'arms' / '*' / 'seed-0'}"
        )
    raise UserError(f"{path} is not a run directory (no config.yaml, no metrics.jsonl); {_GIVE}")


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the settings in which some runs differ, except for `output_dir`, in order."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if name != "output_dir" and len({run.settings.get(name) for run in runs}) > 1]


def _read_run(path: Path, name: str) -> RunRecord:
    check_run(path)
    records = read_metrics(path / "metrics.jsonl")
    if not records:
        raise UserError(f"{path} contains no metrics yet (metrics.jsonl); wait for the run's first line")
    environment = _read_json(path / "env.json")
    held_out = _read_json(path / "held_out.json")
    return RunRecord(
        path,
        name,
        _read_settings(path / "config.yaml"),
        environment if isinstance(environment, dict) else {},
        tuple(records),
        tuple(str(prompt.get("text", "")) for prompt in held_out) if isinstance(held_out, list) else (),
    )


def read_metrics(file: Path) -> list[Record]:
    """Return all complete lines of a file of metrics; none if it is missing. A damaged line is an error."""
    if not file.is_file():
        return []
    records = []
    # The text after the last line end is incomplete: the run is writing it, or was killed.
    for number, line in enumerate(_text(file).split("\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file} line {number} is not JSON; remove the line, then rerun the command") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{file} line {number} is not a metrics record; remove the line, then rerun the command")
        records.append(record)
    return records


def _read_settings(file: Path) -> dict[str, str]:
    """Return the settings by dotted name, values as text."""
    if not file.is_file():
        return {}
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        settings = YAML(typ="safe", pure=True).load(_text(file))
    except YAMLError as error:
        raise UserError(f"{file} is not YAML; restore the run's config, or move the file away") from error
    if not isinstance(settings, dict) or not settings:
        return {}
    texts = ((n, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for n, v in dotted(settings))
    return dict(texts)


def _read_json(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(_text(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON; move the file away") from error


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"could not read {file}: {error}") from error


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest tails of paths that are all different."""
    longest = max(len(path.parts) for path in paths)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def number(record: Mapping[str, Any], *keys: str) -> float | None:
    """Return a number of a metrics record by its keys, from the outermost; None if it is missing or not finite."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value)


def total(records: Iterable[Mapping[str, Any]], *keys: str) -> float:
    """Return the sum of a number over metrics records; missing ones count as 0."""
    return sum(number(record, *keys) or 0.0 for record in records)
