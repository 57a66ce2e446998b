"""The command that starts this installation of brorl from the user's shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def command_name() -> str:
    """Return `brorl` if the shell finds this installation; else the path of its script, or `PYTHON -m brorl`."""
    script = Path(sys.executable).with_name("brorl")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m brorl"
    found = shutil.which("brorl")
    if found is not None and Path(found).samefile(script):
        return "brorl"
    here = script.is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(script) if here else str(script))
