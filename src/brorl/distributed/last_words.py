"""What the user reads if Ray ends this process: it does so without an exception when one of its own processes dies.

In: a line with the command that continues. Out: a small process that prints the line if this process ends first.
"""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
if not sys.stdin.read(1):
    restored = "\\r\\x1b[2K\\x1b[?25h" if sys.stderr.isatty() else ""  # the status line is removed, the cursor shown
    print(restored + sys.argv[1], file=sys.stderr)
"""


class LastWords:
    """Prints a line to stderr if this process ends before `withdraw`.

    Args:
        line: The line.
    """

    def __init__(self, line: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, line]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def withdraw(self) -> None:
        """Print nothing."""
        self._process.communicate(b"\n")
