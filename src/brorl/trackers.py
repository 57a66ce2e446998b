"""Experiment trackers: the lines of the metrics, sent on to Weights & Biases, TensorBoard or trackio.

In: the records that also go to `metrics.jsonl`, which is always written and stays the truth. Out: their numbers in
each tracker under names such as `sampling/reward`, with the step as the x axis. What is not a finite number is left
out, and so are lists: those are per prompt. It never stops a run: a tracker that fails on the way is left, said so
once, and filled in when the run is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, Protocol, assert_never

from brorl.errors import UserError
from brorl.runs.run_directory import Record
from brorl.storage import replace_file, storage_errors

TrackerName = Literal["wandb", "tensorboard", "trackio"]
_STATE_FILE = "trackers.json"
_BEFORE_ALL = -1


class Tracker(Protocol):
    """One tracker's run, open for writing."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        ...

    def close(self) -> None:
        """Write out what is still in memory."""
        ...


class Trackers:
    """The open trackers of a run; made by `open_trackers`.

    How far each tracker has been told is kept in `trackers.json`, so that a resumed run tells no step twice.
    """

    def __init__(self, state_file: Path, say: Callable[[str], None]) -> None:
        self._state_file = state_file
        self._say = say
        self._open: dict[str, Tracker] = {}
        self._state = _read_state(state_file)

    def earlier(self, name: str) -> tuple[str, int] | None:
        """Return the name of a tracker's run from an earlier part of this one, and the last step it was told."""
        entry = self._state.get(name)
        return (str(entry["id"]), int(entry["told"])) if entry else None

    def add(self, name: str, tracker: Tracker, identity: str, told: int) -> None:
        """Add an open tracker, whose run has a name of its own and knows all steps up to `told`."""
        self._open[name] = tracker
        self._state[name] = {"id": identity, "told": told}
        self._store()

    def log(self, record: Record) -> None:
        """Send the numbers of a record to every tracker that has not been told its step yet."""
        step, numbers = int(record["step"]), flat_numbers(record)
        news = False
        for name, tracker in list(self._open.items()):
            if step <= self._state[name]["told"]:
                continue
            try:
                tracker.log(step, numbers)
            except Exception as error:  # whatever a tracker's library raises, training goes on
                self._leave(name, f"at step {step}", error)
            else:
                self._state[name]["told"] = step
                news = True
        if news:
            self._store()

    def close(self) -> None:
        """Close every tracker."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.close()
            except Exception as error:
                self._leave(name, "when it was closed", error)
        self._open.clear()

    def _leave(self, name: str, when: str, error: Exception) -> None:
        tracker = self._open.pop(name)
        self._say(
            f"the tracker {name} failed {when} ({_first_line(error)}); the run goes on without it, metrics.jsonl has "
            "every number, and resuming the run sends it what it missed"
        )
        with suppress(Exception):
            tracker.close()

    def _store(self) -> None:
        with storage_errors(self._state_file):
            replace_file(self._state_file, json.dumps(self._state).encode())


def open_trackers(
    names: Sequence[TrackerName],
    project: str,
    run_name: str,
    config: Mapping[str, Any],
    directory: Path,
    say: Callable[[str], None],
    history: Sequence[Record] = (),
) -> Trackers:
    """Open the trackers of a run, or those of an earlier part of it again, and tell them what they missed.

    A run that went back to a checkpoint makes some steps again. TensorBoard drops what it knew of them. Weights &
    Biases and trackio cannot: there the first telling stays, which differs from the second in no number but times
    where runs are bitwise reproducible.

    Args:
        names: Which trackers; none is fine.
        project: Project to put the run in.
        run_name: How the run is called there.
        config: The run's settings, nested mappings of plain values.
        directory: The run's directory.
        say: Prints a line to the console.
        history: All lines of the metrics so far, after going back to a checkpoint.

    Returns:
        The trackers.

    Raises:
        UserError: If a tracker's package is not installed, or a tracker does not start.
    """
    for name in names:
        require_package(name)
    trackers = Trackers(directory / _STATE_FILE, say)
    reached = int(history[-1]["step"]) if history else _BEFORE_ALL
    for name in dict.fromkeys(names):
        earlier = trackers.earlier(name)
        identity, told = earlier or (_new_identity(name, run_name), _BEFORE_ALL)
        try:
            match name:
                case "wandb":
                    tracker: Tracker = _Wandb(project, run_name, identity, config, directory)
                case "tensorboard":
                    told = min(told, reached)
                    tracker = _TensorBoard(directory / "tensorboard", config, told + 1)
                case "trackio":
                    tracker = _Trackio(project, identity, config, resumed=earlier is not None)
                case _:
                    assert_never(name)
        except Exception as error:
            trackers.close()
            raise UserError(
                f"the tracker {name} did not start: {_first_line(error)}; {_START_HINTS[name]}, or take {name} out of "
                "tracking.to"
            ) from error
        trackers.add(name, tracker, identity, told)
    for record in history:
        trackers.log(record)
    return trackers


_START_HINTS: dict[TrackerName, str] = {
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "tensorboard": "make the folder tensorboard in the run's directory writable",
    "trackio": "set TRACKIO_DIR to a writable folder",
}


def require_package(name: TrackerName) -> None:
    """Check that a tracker's package is installed, without importing it.

    Raises:
        UserError: If it is not.
    """
    if find_spec(name) is None:
        raise UserError(
            f"the tracker {name} needs the package {name}, which is not installed: pip install 'brorl[{name}]', or "
            f"take {name} out of tracking.to"
        )


def flat_numbers(record: Mapping[Any, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of nested mappings, named by their path: `evaluation/pass_at/16/value`.

    Args:
        record: A line of the metrics, or a part of it; truth values become 0 and 1.
        prefix: What every name starts with; the step is left out where there is none.
    """
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and isfinite(value) and (prefix or key != "step"):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


def _read_state(file: Path) -> dict[str, dict[str, Any]]:
    """Return what `trackers.json` holds; nothing if there is none.

    Raises:
        UserError: If it is not readable.
    """
    if not file.exists():
        return {}
    try:
        state: dict[str, dict[str, Any]] = json.loads(file.read_text("utf-8"))
        for entry in state.values():
            int(entry["told"]), str(entry["id"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged; remove it, and the run's trackers start anew") from error
    return state


def _new_identity(name: str, run_name: str) -> str:
    """Return how a tracker will find the run again; trackio knows runs by their names alone."""
    return f"{run_name}-{token_hex(4)}" if name == "trackio" else token_hex(8)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")


class _Wandb:
    """A run of Weights & Biases; its own environment variables (WANDB_MODE, WANDB_ENTITY) apply."""

    def __init__(self, project: str, run_name: str, identity: str, config: Mapping[str, Any], directory: Path) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project,
            name=run_name,
            id=identity,
            resume="allow",
            config=dict(config),
            dir=str(directory),
            settings=wandb.Settings(console="off", quiet=True),  # the console's lines are in run.log
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """Event files; a reader drops what earlier files hold from `first_step` on."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)
        if first_step == 0:
            self._writer.add_text("config", f"```\n{json.dumps(config, indent=2, default=str)}\n```", 0)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    """A run of trackio, in its local store (or where its environment variables say)."""

    def __init__(self, project: str, identity: str, config: Mapping[str, Any], resumed: bool) -> None:
        import trackio

        self._finish: Any = trackio.finish
        self._run = trackio.init(
            project=project,
            name=identity,
            resume="allow" if resumed else "never",
            config=dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._finish()
