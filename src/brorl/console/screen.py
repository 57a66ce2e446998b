"""Write a command's output to a terminal, file or pipe, with a status line.

A terminal shows permanent lines above a live status line, and a notebook shows them below it. A file or pipe gets the
permanent lines, plus the status line after every 30 seconds without output. A log file gets only the permanent lines,
without control characters.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import IO, Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

import brorl
from brorl.activity import Activity, Decoding, Round, Stage, Step, Updating
from brorl.errors import StorageError
from brorl.format import duration
from brorl.storage import storage_errors
from brorl.table import Table

STAGE_NAMES = {  # name in the metrics -> name shown to users
    "generation": "sampling",
    "verification": "verifying",
    "training": "learning",
    "diagnostics": "measuring",
    "storing": "saving",
}
_RECENT_STEPS = 5
_MIN_FRACTION = 0.05  # of rollouts that must finish before they predict the time for the rest


@dataclass(frozen=True)
class _CurrentWork:
    """The current work. Every change replaces the whole object, so threads never see a mix of two states."""

    stage: Stage
    stage_start: float
    step: int | None = None
    step_start: float = 0.0
    round: Round | None = None
    decoding: Decoding | None = None
    updating: Updating | None = None

    @property
    def title(self) -> str:
        """The step and the stage."""
        name = STAGE_NAMES.get(self.stage.name, self.stage.name)
        detail = self.stage.detail
        if name == "evaluating":
            return "evaluating" if self.step is None else f"evaluating after step {self.step}"
        if self.step is None or self.stage.name in ("saving", "writing"):
            return f"{name} {detail}".rstrip()
        return f"step {self.step}, {name}"


class StatusLine:
    """Observes a run, and describes its current work in one line.

    The time left is shown if it can be predicted from an earlier step or evaluation, or from the finished rollouts.
    """

    def __init__(self, stage: Stage, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._now = _CurrentWork(stage, clock())
        self._stage_seconds: dict[str, float] = {}  # stage -> seconds it took last time
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._saved_step: int | None = None

    def start_training(self, saved_step: int) -> None:
        """Prepare for the steps after a run's last checkpoint, at `saved_step` (0 without one)."""
        self._saved_step = saved_step

    def observe(self, activity: Activity) -> None:
        """Update the current work."""
        now, time = self._now, self._clock()
        match activity:
            case Step():
                self._end_phase(now, time)
                if now.step is not None:
                    self._step_seconds.append(time - now.step_start)
                self._now = _CurrentWork(Stage("starting"), time, activity.number, time)
            case Stage() if activity.name == now.stage.name and activity.detail:  # the same stage continues
                self._now = replace(now, stage=activity, updating=None)
            case Stage():
                self._end_phase(now, time)
                self._now = replace(now, stage=activity, stage_start=time, decoding=None, updating=None)
            case Round():
                self._now = replace(now, round=activity)
            case Decoding():
                self._now = replace(now, decoding=activity)
            case Updating():
                self._now = replace(now, updating=activity)

    def _end_phase(self, now: _CurrentWork, time: float) -> None:
        self._stage_seconds[now.stage.name] = time - now.stage_start
        if now.stage.name == "saving":
            self._saved_step = now.step

    def line(self, width: int | None = None) -> str:
        """Return the status line, without the least important details if it would exceed `width`."""
        now, time = self._now, self._clock()
        head = f"{now.title} for {duration(time - now.stage_start)}"
        return join_fitting([head, *self._details(now, time)], width)

    def stop_answer(self, discards: bool) -> str:
        """Return the reply to a stop request; `discards`: whether the current work is lost."""
        now = self._now
        step = now.step
        if step is None:
            if discards:
                return "stopping now: training has not begun, so nothing is lost"
            return "stopping before the first step; Ctrl-C again stops now"
        if discards:
            return (
                f"stopping now and saving the state after step {step - 1}; step {step} has not updated the model yet, "
                "and `brorl resume` samples it again"
            )
        current = f"the evaluation after step {step}" if now.stage.name == "evaluating" else f"step {step}"
        lost = "it" if self._saved_step == step - 1 else f"everything after step {self._saved_step or 0}"
        return f"finishing {current}, then saving; Ctrl-C again stops now and discards {lost}"

    def _details(self, now: _CurrentWork, time: float) -> list[str]:
        """Return the progress and the time left, most important first."""
        details = []
        if now.stage.detail and now.stage.name == "evaluating":
            details.append(now.stage.detail)
        verifying = now.stage.detail.startswith("verifying")
        if now.decoding and not verifying:
            details.append(f"{now.decoding.finished:,}/{now.decoding.rollouts:,} rollouts")
        if now.updating:
            details.append(f"update {now.updating.done + 1} of {now.updating.updates}")
        if now.round and now.stage.name in ("generation", "verification"):
            details.append(f"{now.round.groups}/{now.round.wanted} groups (round {now.round.number})")
        left = self._seconds_left(now, time)
        if left is not None:
            details.append(f"about {duration(left)} left")
        if now.decoding and not verifying:
            seconds = max(time - now.stage_start, 1e-3)
            details.append(f"{now.decoding.tokens / seconds:,.0f} tokens/s")
            details.append(f"at token {now.decoding.depth:,}")
        return details

    def _seconds_left(self, now: _CurrentWork, time: float) -> float | None:
        """Estimate the time until the end of the step or evaluation; None without an estimate."""
        if now.stage.name == "evaluating":
            elapsed = time - now.stage_start
            fraction = now.decoding.finished / now.decoding.rollouts if now.decoding else 0.0
            if "evaluating" in self._stage_seconds:
                left = self._stage_seconds["evaluating"] - elapsed
            else:
                left = elapsed / fraction - elapsed if fraction >= _MIN_FRACTION else 0.0
        elif now.step is None or not self._step_seconds or now.stage.name in ("saving", "writing"):
            return None
        else:
            left = median(self._step_seconds) - (time - now.step_start)
        return left if left > 0 else None


def join_fitting(parts: Sequence[str], width: int | None, separator: str = ", ") -> str:
    """Join as many leading parts as fit in `width` characters (None: no limit)."""
    line, *more = parts
    for part in more:
        longer = f"{line}{separator}{part}"
        if width is not None and len(longer) > width:
            break
        line = longer
    return line[:width]


WIDTH = 100  # line width in files, pipes and notebooks
QUIET_S = 30.0  # after this many seconds without output, a file or pipe gets the status line
_REFRESHES_PER_S = 4


def in_notebook() -> bool:
    """Return whether this process is a notebook kernel, which displays results without printing them."""
    return Console().is_jupyter


def text_console(file: IO[str] | None = None, quiet: bool = False) -> Console:
    """Return a plain-text console. In a notebook, rich would otherwise repeat every line as an HTML element."""
    is_plain = file is not None or in_notebook()  # rich treats a notebook as a terminal
    return Console(
        file=file, quiet=quiet, highlight=False, no_color=is_plain or None, force_jupyter=False,
        force_terminal=False if is_plain else None, width=WIDTH if is_plain else None,
    )  # fmt: skip


class Screen:
    """Writes permanent lines and, inside its `with` block, the status line. If silent, it writes only the log file."""

    def __init__(self, silent: bool = False) -> None:
        self.console = text_console(quiet=silent)
        if not self.console.is_terminal:
            self.console.width = WIDTH
        self.status = StatusLine(Stage("starting"))
        self.describe: Callable[[int | None], str] = self.status.line  # returns the status line for a width
        self._log_file: Path | None = None
        self._lock = threading.RLock()
        self._last_output = monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._spinner = Spinner("line", style="dim")
        self.ending = "ended"  # final status line in a notebook, after the block

    def __enter__(self) -> Self:
        if in_notebook() and not self.console.quiet:
            self._thread = threading.Thread(target=self._show_in_notebook, name="status line", daemon=True)
            self._thread.start()
        elif self.console.is_interactive and self.console.is_terminal:
            self._live = Live(
                console=self.console,
                get_renderable=self._live_line,
                transient=True,
                refresh_per_second=_REFRESHES_PER_S,
            )
            self._live.start(refresh=True)
        elif not self.console.quiet:
            self.echo(f"brorl {brorl.__version__}: starting")
            self._thread = threading.Thread(target=self._print_status_when_quiet, name="status line", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread:
            self._thread.join()
        if self._live:
            self._live.stop()

    def log_to(self, file: Path) -> None:
        """From now on, also append all permanent lines to a file."""
        self._log_file = file

    def observe(self, activity: Activity) -> None:
        """Update the status line."""
        self.status.observe(activity)

    def echo(self, text: str | Text, is_command: bool = False) -> None:
        """Write a line. With `is_command`, it is not wrapped on a narrow terminal, so the command can be copied."""
        self._write(text, wraps=self.console.is_terminal and not is_command)

    def dim(self, text: str) -> None:
        """Write a dimmed line."""
        self.echo(Text(text, style="dim"))

    def show(self, table: Table) -> None:
        """Write a blank line and a table."""
        self._write("", table, wraps=True)

    def answer_stop(self, discards: bool) -> None:
        """Write the reply to a stop request; any thread may call this."""
        with suppress(StorageError):  # the main thread will report a full disk
            self.echo(Text(self.status.stop_answer(discards), style="bold"))

    def _write(self, *parts: str | Text | Table, wraps: bool) -> None:
        with self._lock:
            self._last_output = monotonic()
            for part in parts:
                self._print(part, wraps)
            self.log(*parts)

    def _print(self, part: str | Text | Table, wraps: bool) -> None:
        """Print a part. If there is a log file, a closed pipe or full disk at the output does not stop the work."""
        try:
            self.console.print(part, soft_wrap=not wraps, markup=False, emoji=False)
        except (SystemExit, OSError) as error:  # rich exits if the pipe's reader has closed it
            if self._log_file is None:
                raise
            self.console.quiet = True
            why = error.strerror if isinstance(error, OSError) else "nobody reads it"
            sys.stderr.write(
                f"brorl: the output is lost ({why}); the work continues, and its lines are in {self._log_file}\n"
            )

    def log(self, *parts: str | Text | Table) -> None:
        """Write only to the log file."""
        with self._lock:
            if self._log_file:
                with storage_errors(self._log_file), self._log_file.open("a", encoding="utf-8") as file:
                    log = text_console(file)
                    for part in parts:
                        log.print(part, soft_wrap=not isinstance(part, Table), markup=False, emoji=False)

    def _live_line(self) -> RenderableType:
        self._spinner.update(text=Text(self.describe(self.console.width - 3), style="dim", no_wrap=True))
        return self._spinner

    def _show_in_notebook(self) -> None:
        """Keep the status line in the notebook cell's output up to date."""
        from IPython.display import display

        def shown(line: str) -> dict[str, str]:
            return {"text/plain": f"brorl {brorl.__version__}: {line}"}

        line: Any = display(shown("starting"), raw=True, display_id=True)  # type: ignore[no-untyped-call]
        while not self._closing.wait(1 / _REFRESHES_PER_S):
            line.update(shown(self.describe(None)), raw=True)
        line.update(shown(self.ending), raw=True)

    def _print_status_when_quiet(self) -> None:
        wait = QUIET_S
        while not self._closing.wait(wait):
            with self._lock:
                wait = self._last_output + QUIET_S - monotonic()
                if wait <= 0:
                    wait = QUIET_S
                    with suppress(StorageError):
                        self.echo(self.describe(None))
