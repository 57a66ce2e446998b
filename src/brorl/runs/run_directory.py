"""The files of a run: `RunDirectory` writes them, and `StoredRun` is their content, read back.

The files stay readable after a kill at any instant. A line of `metrics.jsonl` is on disk before the checkpoint that
follows it. A response file gets its final name once it is complete. Returning to a checkpoint removes later lines and
files. A run may be read before it is finished; its settings are read as YAML without checks.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import brorl
from brorl.algorithms.groups import Group
from brorl.errors import UserError
from brorl.prompts.prompt import Prompt, stored_reference
from brorl.runs.step_record import StepRecord, from_json, to_json
from brorl.runs.stored_rollouts import Folder, responses_table
from brorl.storage import dotted_items, lock, parquet_bytes, replace_file, storage_errors, to_disk


class RunDirectory:
    """The paths of a run, and functions that write its files. The directory must exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"  # the resolved config
        self.metrics_file = path / "metrics.jsonl"  # one JSON object per line; step 0 is the start, before any update
        self.checkpoints = path / "checkpoints"  # one folder per checkpoint
        self.rollouts = path / "rollouts"  # one Parquet file per step
        self.evaluations = path / "evaluations"  # one Parquet file per evaluation: responses to a few held-out prompts
        # checked by a resumed run: the settings and files that must not change, and whether there was a checkpoint
        self.begun_file = path / "begun.json"

    def write_begun(
        self, settings: dict[str, Any], has_checkpoint: bool, files: Mapping[str, str] | None = None
    ) -> None:
        """Write `begun.json`; `files` contains the fingerprints of the files that a resumed run reads again."""
        content = {"settings": settings, "has_checkpoint": has_checkpoint, "files": dict(files or {})}
        with storage_errors(self.begun_file):
            replace_file(self.begun_file, json.dumps(content, indent=1).encode())

    def read_begun(self) -> dict[str, Any]:
        """Return the content of `begun.json`, or an empty dict if the run has not begun."""
        advice = "restore it from a backup, or start a new run"
        begun: dict[str, Any] = _read_json(self.begun_file, advice) or {}
        return begun

    def note_checkpoint(self) -> None:
        """Record in `begun.json` that the run has had a checkpoint."""
        begun = self.read_begun()
        if not begun.get("has_checkpoint"):
            self.write_begun(begun.get("settings", {}), has_checkpoint=True, files=begun.get("files"))

    def append_metrics(self, record: StepRecord) -> None:
        """Append a line to the metrics. It is on disk when this returns."""
        with storage_errors(self.metrics_file), self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json(record)) + "\n")
            file.flush()
            to_disk(self.metrics_file, file.fileno())

    def read_metrics(self) -> list[StepRecord]:
        """Return the records of all complete lines."""
        return read_metrics(self.metrics_file)

    def rewind(self, step: int, attempts: int = 0) -> None:
        """Remove the metrics and responses of steps after `step`, and unfinished files of a killed process.

        The first `attempts` attempts at the next step found no mixed group. Their lines stay, so their cost still
        counts.
        """

        def stays(record: StepRecord) -> bool:
            tried = record.update is None and record.step == step + 1 and (record.attempt or 0) < attempts
            return record.step <= step or tried

        kept = [line for line, record in _lines(self.metrics_file) if stays(record)]
        with storage_errors(self.metrics_file):
            replace_file(self.metrics_file, "".join(f"{line}\n" for line in kept).encode())
        for folder in (self.rollouts, self.evaluations):
            with storage_errors(folder):
                for file in folder.glob("*step-*.parquet*"):
                    name = re.fullmatch(r"(?:step-(\d+)\.parquet|\.step-\d+\.parquet\.tmp)", file.name)
                    if name and (name[1] is None or int(name[1]) > step):
                        file.unlink()

    def write_responses(self, folder: Folder, step: int, groups: Sequence[Group]) -> None:
        """Store groups with their text: all that a step sampled, whether kept or not, or those of an evaluation."""
        target = self.path / folder / f"step-{step:06d}.parquet"
        with storage_errors(target):
            target.parent.mkdir(exist_ok=True)
            replace_file(target, parquet_bytes(responses_table(step, groups)))

    def write_held_out(self, prompts: Sequence[Prompt]) -> None:
        """Write `held_out.json`, the evaluation prompts in order."""
        target = self.path / "held_out.json"
        with storage_errors(target):
            replace_file(target, json.dumps(held_out_record(prompts), indent=0).encode())

    def read_held_out(self) -> list[dict[str, str]]:
        """Return the prompts in `held_out.json`."""
        file = self.path / "held_out.json"
        if not file.is_file():
            raise UserError(f"{self.path} has no {file.name}, which lists its held-out prompts; train the run again")
        prompts: list[dict[str, str]] = json.loads(file.read_text("utf-8"))
        return prompts

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run within a block. Raise an error if another process has locked it or has just removed it."""
        if sys.platform == "win32":  # Windows cannot open a folder
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                is_locked = lock(descriptor, self.path)
            except BlockingIOError as error:
                raise UserError(f"another process is working on {self.path}; wait for it, or stop it") from error
            if is_locked and not (self.path.is_dir() and os.path.samestat(os.fstat(descriptor), self.path.stat())):
                raise UserError(f"another process has just removed {self.path}; rerun the command")
            yield
        finally:
            os.close(descriptor)

    def arithmetic_line(self, device: str) -> str | None:
        """Return a warning if this process computes sums differently from the run so far, else None."""
        earlier: dict[str, str] = {}
        with suppress(OSError, ValueError):
            earlier = json.loads((self.path / "env.json").read_text("utf-8")).get("arithmetic", {})
        changed = [
            f"{name}: {earlier[name]} so far, {now} now"
            for name, now in _arithmetic(device).items()
            if earlier.get(name, now) != now
        ]
        if not changed:
            return None
        return (
            f"this process computes sums differently from the run so far ({'; '.join(changed)}), so results may "
            "differ from those of an uninterrupted run in their last bits"
        )

    def write_environment(
        self, device: str, continued_from: dict[str, Any] | None = None, model_commit: str | None = None
    ) -> None:
        """Write `env.json`: versions, machine, threads, arithmetic, the model's commit, the continued checkpoint."""
        import torch  # imported here because reports read runs without torch

        target = self.path / "env.json"
        before: dict[str, Any] = {}
        if target.is_file():  # on resume the model may be gone
            with suppress(ValueError):
                before = json.loads(target.read_text("utf-8"))
        environment = {
            "command": sys.argv,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "arithmetic": _arithmetic(device),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "continued_from": continued_from or before.get("continued_from"),
            "model_commit": model_commit or before.get("model_commit"),
            "packages": {
                "brorl": brorl.__version__,  # also correct when running from source
                **{name: version(name) for name in ("torch", "transformers", "numpy")},
            },
        }
        with storage_errors(target):
            replace_file(target, json.dumps(environment, indent=2).encode())


def held_out_record(prompts: Sequence[Prompt]) -> list[dict[str, str]]:
    """Return the content of `held_out.json` for the given prompts."""
    names = ("id", "source", "domain", "text")
    return [
        {**{name: getattr(prompt, name) for name in names}, "reference": stored_reference(prompt.reference)}
        for prompt in prompts
    ]


def _arithmetic(device: str) -> dict[str, str]:
    """Return how this process computes in float32 on the CPU; empty if `device` is not a CPU."""
    from brorl.model.fused_ops import fastest_product
    from brorl.model.kernels import kernels
    from brorl.model.load import choose_device

    if choose_device(device).type != "cpu":
        return {}
    return {"matrix products": fastest_product(), "kernels": "compiled" if kernels() else "of PyTorch"}


def processor_name() -> str:
    """Return the name of the processor, if the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


SPEC_FILE = "compare.json"  # spec of a comparison, in its folder
TUNE_FILE = "tune.json"  # spec of a tuning, in its folder
REPORT_FILE = "report.html"  # in the run directory

_GIVE = "pass the directory that `brorl train` printed"


@dataclass(frozen=True, eq=False)
class StoredRun:
    """The contents of a run directory, except weights and rollouts."""

    path: Path  # the directory
    name: str  # shortest path suffix that distinguishes this run from the others
    # `config.yaml` by dotted name, as text: {"optimizer.learning_rate": "2e-06", ...}; empty if it is missing
    settings: Mapping[str, str]
    environment: Mapping[str, Any]  # `env.json`; empty if it is missing
    records: tuple[StepRecord, ...]  # by ascending step
    held_out: tuple[str, ...] = ()  # text of each held-out prompt, in order; empty if not stored

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The records of steps, without step 0. The last step has no update if it found no mixed group."""
        return tuple(record for record in self.records if record.sampling)

    @property
    def updates(self) -> tuple[StepRecord, ...]:
        """The records with an update."""
        return tuple(record for record in self.records if record.update)

    @property
    def evaluations(self) -> tuple[StepRecord, ...]:
        """The records with an evaluation."""
        return tuple(record for record in self.records if record.evaluation)


def read_runs(paths: Sequence[Path]) -> list[StoredRun]:
    """Read distinct run directories. Names are the shortest distinct path suffixes: `a/seed-0`, `b/seed-0`."""
    resolved = [path.resolve() for path in paths]
    for path, full in zip(paths, resolved, strict=True):
        if resolved.count(full) > 1:
            raise UserError(f"the run {path} is listed twice; list each run once")
    names = _names(resolved)
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(path: Path) -> StoredRun:
    """Read one run directory. See `read_runs`."""
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


def differing_settings(runs: Sequence[StoredRun]) -> list[str]:
    """Return the names of the settings that differ between runs, in order, except `output_dir`."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if name != "output_dir" and len({run.settings.get(name) for run in runs}) > 1]


def _read_run(path: Path, name: str) -> StoredRun:
    """Read a run and give it a name. Reject a run without metrics."""
    check_run(path)
    records = read_metrics(path / "metrics.jsonl")
    if not records:
        raise UserError(f"{path} contains no metrics yet (metrics.jsonl); wait for the run's first line")
    environment = _read_json(path / "env.json")
    held_out = _read_json(path / "held_out.json")
    return StoredRun(
        path,
        name,
        read_settings(path / "config.yaml"),
        environment if isinstance(environment, dict) else {},
        tuple(records),
        tuple(str(prompt.get("text", "")) for prompt in held_out) if isinstance(held_out, list) else (),
    )


def read_metrics(file: Path) -> list[StepRecord]:
    """Return the records of all complete lines in a metrics file; none if it is missing. Reject damaged lines."""
    return [record for _, record in _lines(file)]


def _lines(file: Path) -> list[tuple[str, StepRecord]]:
    """Return the complete lines of a metrics file with their records."""
    # The text after the last newline is incomplete: the run is writing it, or was killed.
    lines = _text(file).split("\n")[:-1] if file.is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append((line, from_json(json.loads(line))))
        except ValueError as error:
            kind = "JSON" if isinstance(error, json.JSONDecodeError) else "a metrics record"
            raise UserError(f"{file} line {number} is not {kind}; remove the line, then rerun the command") from error
    return records


def read_settings(file: Path) -> dict[str, str]:
    """Return the settings as text, by dotted name."""
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
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in dotted_items(settings)
    }


def _read_json(file: Path, advice: str = "move the file away") -> Any:
    """Return the content of a JSON file, or None if it is missing."""
    if not file.is_file():
        return None
    try:
        return json.loads(_text(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON; {advice}") from error


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"could not read {file}: {error}") from error


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest suffixes of the paths that are all different."""
    longest = max(len(path.parts) for path in paths)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
