"""Runs a campaign in a process of its own, as this user or as another one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attacks.hoards import Cgroup
from attacks.scene import SECRET_VARIABLE

OTHER_USER = 61_234
_SOURCES = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3] / "src")]
# In a mount namespace, the folders that hide the interpreter from other users are replaced by folders that do not.
# Nothing outside of the namespace changes.
_UNHIDE = """set -e
mount --make-rprivate /
held=$(mktemp -d)
hidden=$1 shown=$2
shift 2
for path in $shown; do mkdir -p "$held$path"; mount --bind "$path" "$held$path"; done
for path in $hidden; do mount -t tmpfs -o mode=755 none "$path"; done
for path in $shown; do mkdir -p "$path"; mount --move "$held$path" "$path"; done
exec "$@"
"""


def run_campaign(arguments: Sequence[str], as_other_user: bool = False) -> dict[str, Any]:
    """Run a campaign and return its report.

    Args:
        arguments: The arguments of `attacks.campaign`.
        as_other_user: Run it as an ordinary user; only root can.

    Raises:
        RuntimeError: If the campaign fails.
    """
    return _run([sys.executable, "-m", "attacks.campaign", *arguments], as_other_user)


def run_hoards(arguments: Sequence[str]) -> dict[str, Any]:
    """Run programs that hoard memory and return their report; `arguments` are those of `attacks.hoards`."""
    return _run([sys.executable, "-m", "attacks.hoards", *arguments], as_other_user=False)


def can_limit_memory() -> bool:
    """Whether this process can make a cgroup with a limit of memory."""
    try:
        Cgroup(1 << 40).remove()
    except OSError:
        return False
    return True


def _run(command: list[str], as_other_user: bool) -> dict[str, Any]:
    if as_other_user:
        command = _as_other_user(command)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_SOURCES), SECRET_VARIABLE: secrets.token_hex(12)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd="/")
    if done.returncode:
        raise RuntimeError(f"the campaign failed: {done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def can_be_another_user() -> bool:
    """Whether a campaign can run as an ordinary user: this one is root, with the programs that it takes."""
    if os.name != "posix" or os.getuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return False
    nested = (
        "import os, subprocess, sys; subprocess.run([sys.executable, '-c', 'import ctypes, os; print(os.getuid())'])"
    )
    try:
        probe = _as_other_user([sys.executable, "-c", nested])  # a campaign starts interpreters too
        return (
            subprocess.run(probe, capture_output=True, timeout=60, cwd="/").stdout.strip() == str(OTHER_USER).encode()
        )
    except subprocess.TimeoutExpired:
        return False


def _as_other_user(command: Sequence[str]) -> list[str]:
    become = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups", *command]
    shown = sorted({sys.base_prefix, sys.prefix, *_SOURCES})
    shown = [path for path in shown if not any(path.startswith(f"{other}/") for other in shown)]
    hidden = sorted({folder for path in shown if (folder := _hidden_folder(path))})
    if not hidden:
        return become
    return ["unshare", "--mount", "sh", "-c", _UNHIDE, "sh", " ".join(hidden), " ".join(shown), *become]


def _hidden_folder(path: str) -> str | None:
    """Return the outermost folder around a path that other users cannot enter."""
    return next((str(p) for p in reversed(Path(path).parents) if not p.stat().st_mode & 0o001), None)
