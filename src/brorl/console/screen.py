"""The terminal, or the file or pipe, that a command writes to.

In: lines and tables that stay, and reports of what is under way. Out: on a terminal the lines, and below them one that
changes; elsewhere the lines alone, with one about what is under way whenever nothing else was written for a while.
What stays also goes to a log file, without control characters.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from brorl.activity import Activity, Phase
from brorl.console.under_way import UnderWay
from brorl.errors import StorageError
from brorl.storage import storage_errors

WIDTH = 100  # where the output is not a terminal
_EVERY_S = 30.0
_REFRESHES_PER_S = 4


class Screen:
    """Writes lines that stay, and within the block what is under way.

    Args:
        name: What the command says of itself before anything else, as `brorl 0.1.0`.
        every_s: Where the output is not a terminal: seconds without a line before one says what is under way.
        silent: Print nothing; the log file is written as usual.
    """

    def __init__(self, name: str = "", every_s: float = _EVERY_S, silent: bool = False) -> None:
        self.console = Console(highlight=False, quiet=silent)
        if self.console.is_jupyter:  # plain text, as in a file, instead of one HTML element per line
            self.console = Console(highlight=False, quiet=silent, force_jupyter=False, force_terminal=False)
        self.is_live = self.console.is_interactive and self.console.is_terminal and not silent
        if not self.console.is_terminal:
            self.console.width = WIDTH
        self.under_way = UnderWay(Phase("starting"))
        self._name = name
        self._every_s = every_s
        self._log_file: Path | None = None
        self._lock = threading.RLock()
        self._last_said = monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._spinner = Spinner("line", style="dim")

    def __enter__(self) -> Self:
        if self.is_live:
            self._live = Live(
                console=self.console,
                get_renderable=self._live_line,
                transient=True,
                refresh_per_second=_REFRESHES_PER_S,
            )
            self._live.start(refresh=True)
        elif not self.console.quiet:
            if self._name:
                self.say(f"{self._name}: starting")
            self._thread = threading.Thread(target=self._say_now_and_then, name="what is under way", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop saying what is under way; lines can still be written."""
        self._closing.set()
        if self._thread:
            self._thread.join()
        if self._live:
            self._live.stop()
        self._thread = self._live = None

    def log_to(self, file: Path) -> None:
        """Write what stays to a file too, from now on."""
        self._log_file = file

    @property
    def width(self) -> int:
        """Characters on a line."""
        return self.console.width

    def observe(self, activity: Activity) -> None:
        """Take a report of what is under way."""
        self.under_way.observe(activity)

    def say(self, text: str | Text, is_command: bool = False) -> None:
        """Write a line.

        Args:
            text: The line.
            is_command: Whether it holds a command to copy: then a terminal that is too narrow breaks it nowhere.
        """
        with self._lock:
            self._last_said = monotonic()
            self.console.print(text, soft_wrap=is_command or not self.console.is_terminal, markup=False)
            if self._log_file:
                with storage_errors(self._log_file), self._log_file.open("a", encoding="utf-8") as file:
                    file.write(f"{text}\n")

    def show(self, table: Table) -> None:
        """Write a table, with an empty line before it."""
        with self._lock:
            self._last_said = monotonic()
            self._print(table, self.console)
            if self._log_file:
                with storage_errors(self._log_file), self._log_file.open("a", encoding="utf-8") as file:
                    self._print(table, Console(file=file, width=WIDTH, no_color=True, force_terminal=False))

    def answer_stop(self, discards: bool) -> None:
        """Answer a request to stop, from any thread."""
        with suppress(StorageError):  # the main thread meets a full disk itself
            self.say(Text(self.under_way.answer(discards), style="bold"))

    @staticmethod
    def _print(table: Table, console: Console) -> None:
        console.print()
        console.print(table)

    def _live_line(self) -> RenderableType:
        self._spinner.update(text=Text(self.under_way.line(self.console.width - 3), style="dim", no_wrap=True))
        return self._spinner

    def _say_now_and_then(self) -> None:
        wait = self._every_s
        while not self._closing.wait(wait):
            with self._lock:
                wait = self._last_said + self._every_s - monotonic()
                if wait <= 0:
                    wait = self._every_s
                    with suppress(StorageError):
                        self.say(self.under_way.line())
