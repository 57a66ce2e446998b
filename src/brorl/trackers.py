"""Experiment trackers: copies of the metrics in Weights & Biases, TensorBoard or trackio.

`metrics.jsonl` is always written. A tracker receives its finite numbers under names such as `sampling/reward`, with the
step as the x axis. Per-prompt lists are omitted. A failing tracker is closed with one message, and the run continues. A
resumed run sends the missing steps. An attempt without an update is not sent, because its step is not complete yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from brorl.activity import Echo
from brorl.errors import UserError, first_line
from brorl.section import AsList, Section
from brorl.storage import replace_file, storage_errors

if TYPE_CHECKING:
    from brorl.runs.step_record import StepRecord

TrackerName = Literal["wandb", "tensorboard", "trackio"]
_STATE_FILE = "trackers.json"
_NO_STEP = -1
_START_HINTS: dict[TrackerName, str] = {
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "tensorboard": "make the tensorboard folder in the run directory writable",
    "trackio": "set TRACKIO_DIR to a writable folder",
}


class TrackingSettings(Section):
    """Trackers that receive the metrics in addition to metrics.jsonl."""

    to: Annotated[tuple[TrackerName, ...], AsList, Field(strict=False)] = Field(
        (), description="wandb, tensorboard or trackio (each an extra of the package), or a list"
    )
    project: str = Field("brorl", min_length=1, description="the run's project in the tracker")
    run_name: str | None = Field(None, description="the run's name in the tracker; null uses the run directory's name")


class _Tracker(NamedTuple):
    """An open run in one tracker."""

    log: Callable[[int, dict[str, float]], None]  # takes a step and its numbers: 12, {"sampling/reward": 0.4}
    close: Callable[[], None]  # flushes and closes


class Trackers:
    """The open trackers of a run; made by `open_trackers`.

    For each tracker, `trackers.json` stores the run's name there (`id`) and the last step sent (`told`), so no step is
    sent twice.
    """

    def __init__(self, state_file: Path, echo: Echo) -> None:
        self._state_file = state_file
        self._echo = echo
        self.open: dict[str, _Tracker] = {}
        self.state = _read_state(state_file)

    def log(self, record: StepRecord) -> None:
        """Send a record's numbers to every tracker that does not have its step yet, unless it is an attempt."""
        from brorl.runs.step_record import to_json

        if record.attempt is not None:
            return
        step = record.step
        numbers = flat_numbers(to_json(record))
        behind = [name for name in self.open if self.state[name]["told"] < step]
        for name in behind:
            try:
                self.open[name].log(step, dict(numbers))
            except Exception as error:  # a tracker's library may raise anything
                self._drop(name, f"at step {step}", error)
            else:
                self.state[name]["told"] = step
        if behind:
            self.write_state()

    def close(self) -> None:
        """Close every tracker."""
        for name in list(self.open):
            try:
                self.open[name].close()
            except Exception as error:
                self._drop(name, "when it was closed", error)
        self.open.clear()

    def _drop(self, name: str, when: str, error: Exception) -> None:
        tracker = self.open.pop(name)
        self._echo(
            f"the tracker {name} failed {when} ({first_line(error)}); the run continues without it, metrics.jsonl has "
            "every number, and resuming the run sends the missing steps"
        )
        with suppress(Exception):
            tracker.close()

    def write_state(self) -> None:
        """Write `trackers.json`."""
        with storage_errors(self._state_file):
            replace_file(self._state_file, json.dumps(self.state).encode())


def open_trackers(
    names: Sequence[TrackerName],
    project: str,
    run_name: str,
    config: Mapping[str, Any],
    directory: Path,
    echo: Echo,
    history: Sequence[StepRecord] = (),
) -> Trackers:
    """Open the trackers of a new or resumed run, and send them the steps they lack.

    A run that went back to a checkpoint repeats some steps. TensorBoard replaces these steps; Weights & Biases and
    trackio keep the first version. In bitwise reproducible runs only the times differ. `history` holds all metrics
    records up to the checkpoint.
    """
    for name in names:
        require_package(name)
    trackers = Trackers(directory / _STATE_FILE, echo)
    last_step = history[-1].step if history else _NO_STEP
    for name in dict.fromkeys(names):
        earlier = trackers.state.get(name)
        entry = earlier or {"id": _new_id(name, run_name), "told": _NO_STEP}
        if name == "tensorboard":
            entry["told"] = min(entry["told"], last_step)
        try:
            if name == "wandb":
                tracker = _open_wandb(project, run_name, entry["id"], config, directory)
            elif name == "tensorboard":
                tracker = _open_tensorboard(directory / "tensorboard", config, entry["told"] + 1)
            else:
                tracker = _open_trackio(project, entry["id"], config, resumed=earlier is not None)
        except Exception as error:
            trackers.close()
            raise UserError(
                f"the tracker {name} did not start: {first_line(error)}; {_START_HINTS[name]}, or remove {name} from "
                "tracking.to"
            ) from error
        trackers.open[name], trackers.state[name] = tracker, entry
        trackers.write_state()
    for record in history:
        trackers.log(record)
    return trackers


def require_package(name: TrackerName) -> None:
    """Check that a tracker's package is installed, without importing it."""
    if find_spec(name) is None:
        raise UserError(
            f"the tracker {name} needs the package {name}, which is not installed: pip install 'brorl[{name}]', or "
            f"remove {name} from tracking.to"
        )


def flat_numbers(record: Mapping[Any, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of a metrics record by path.

    {"step": 3, "sampling": {"reward": 0.4, "done": True}} gives {"sampling/reward": 0.4, "sampling/done": 1.0}. Only
    the top-level step is omitted.
    """
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and isfinite(value) and (prefix or key != "step"):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


def _read_state(file: Path) -> dict[str, dict[str, Any]]:
    """Return the content of `trackers.json`; empty without the file."""
    if not file.exists():
        return {}
    try:
        state = json.loads(file.read_text("utf-8"))
        return {name: {"id": str(entry["id"]), "told": int(entry["told"])} for name, entry in state.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged; remove it to restart the trackers") from error


def _new_id(name: str, run_name: str) -> str:
    """Return a new identifier of the run in a tracker; trackio identifies runs by name."""
    return f"{run_name}-{token_hex(4)}" if name == "trackio" else token_hex(8)


def _open_wandb(project: str, run_name: str, run_id: str, config: Mapping[str, Any], directory: Path) -> _Tracker:
    """Open a Weights & Biases run; WANDB_MODE and WANDB_ENTITY apply."""
    import wandb

    run: Any = wandb.init(
        project=project,
        name=run_name,
        id=run_id,
        resume="allow",
        config=dict(config),
        dir=str(directory),
        settings=wandb.Settings(console="off", quiet=True),  # run.log already stores the console's lines
    )
    return _Tracker(lambda step, numbers: run.log(numbers, step=step), run.finish)


def _open_tensorboard(folder: Path, config: Mapping[str, Any], first_step: int) -> _Tracker:
    """Open an event file; readers drop the steps of earlier files from `first_step` on."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder), purge_step=first_step)
    if first_step == 0:
        writer.add_text("config", f"```\n{json.dumps(config, indent=2, default=str)}\n```", 0)

    def log(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return _Tracker(log, writer.close)


def _open_trackio(project: str, run_id: str, config: Mapping[str, Any], resumed: bool) -> _Tracker:
    """Open a trackio run in its local store; TRACKIO_DIR applies."""
    import trackio

    run: Any = trackio.init(
        project=project,
        name=run_id,
        resume="allow" if resumed else "never",
        config=dict(config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return _Tracker(lambda step, numbers: run.log(numbers, step=step), trackio.finish)
