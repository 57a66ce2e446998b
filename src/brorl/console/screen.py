"""The terminal, file or pipe that a command writes to.

A terminal shows the permanent lines above one live status line. A file or pipe gets the permanent lines, and the status
line after every 30 seconds without output. A log file gets the permanent lines, without control characters.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

import brorl
from brorl.activity import Activity, Phase
from brorl.console.status_line import StatusLine
from brorl.errors import StorageError
from brorl.storage import storage_errors
from brorl.table import Table

WIDTH = 100  # of the output if it is not a terminal
QUIET_S = 30.0  # without output before the status line is printed if the output is not a terminal
_REFRESHES_PER_S = 4


class Screen:
    """Writes permanent lines, and the status line inside of its `with` block.

    Args:
        silent: Print nothing; the log file is written as usual.
    """

    def __init__(self, silent: bool = False) -> None:
        self.console = Console(highlight=False, quiet=silent)
        if self.console.is_jupyter:  # plain text, as in a file, instead of one HTML element per line
            self.console = Console(highlight=False, quiet=silent, force_jupyter=False, force_terminal=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH
        self.status = StatusLine(Phase("starting"))
        self._log_file: Path | None = None
        self._lock = threading.RLock()
        self._last_output = monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._spinner = Spinner("line", style="dim")

    def __enter__(self) -> Self:
        if self.console.is_interactive and self.console.is_terminal:
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
        """Append all permanent lines from now on to a file."""
        self._log_file = file

    def observe(self, activity: Activity) -> None:
        """Update the status line."""
        self.status.observe(activity)

    def echo(self, text: str | Text, is_command: bool = False) -> None:
        """Write a line; a narrow terminal does not wrap one that contains a command to copy."""
        self._write(text, wraps=self.console.is_terminal and not is_command)

    def dim(self, text: str) -> None:
        """Write a line of less weight."""
        self.echo(Text(text, style="dim"))

    def show(self, table: Table) -> None:
        """Write an empty line and a table."""
        self._write("", table, wraps=True)

    def answer_stop(self, discards: bool) -> None:
        """Write the answer to a stop request, which may discard the current work; from any thread."""
        with suppress(StorageError):  # the main thread reports a full disk
            self.echo(Text(self.status.stop_answer(discards), style="bold"))

    def _write(self, *parts: str | Text | Table, wraps: bool) -> None:
        with self._lock:
            self._last_output = monotonic()
            for part in parts:
                self.console.print(part, soft_wrap=not wraps, markup=False, emoji=False)
            self.log(*parts)

    def log(self, *parts: str | Text | Table) -> None:
        """Write only into the log file."""
        with self._lock:
            if self._log_file:
                with storage_errors(self._log_file), self._log_file.open("a", encoding="utf-8") as file:
                    log = Console(file=file, width=WIDTH, no_color=True, force_terminal=False, highlight=False)
                    for part in parts:
                        log.print(part, soft_wrap=not isinstance(part, Table), markup=False, emoji=False)

    def _live_line(self) -> RenderableType:
        self._spinner.update(text=Text(self.status.line(self.console.width - 3), style="dim", no_wrap=True))
        return self._spinner

    def _print_status_when_quiet(self) -> None:
        wait = QUIET_S
        while not self._closing.wait(wait):
            with self._lock:
                wait = self._last_output + QUIET_S - monotonic()
                if wait <= 0:
                    wait = QUIET_S
                    with suppress(StorageError):
                        self.echo(self.status.line())
