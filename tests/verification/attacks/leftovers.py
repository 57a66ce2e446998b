"""Processes that attacks leave running: descendants of this process, orphans included."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path


def inherit_orphans() -> None:
    """Become the parent of all orphans among the descendants of this process, so that none is missed."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def remaining(victims: set[int | None], depth: int, patience_s: float = 10.0) -> list[str]:
    """Return the running descendants of this process from some depth on, after a time to end; and kill them."""
    deadline = time.monotonic() + patience_s
    while (left := descendants(victims, depth)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return list(left.values())


def descendants(victims: set[int | None], depth: int) -> dict[int, str]:
    """Return the running descendants of this process from some depth on, each with its line in /proc."""
    parent_of, line_of = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text("utf-8", "replace")
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                parent_of[int(entry.name)], line_of[int(entry.name)] = int(parent), stat[:60]
    lines = {}
    for pid in parent_of:
        length, above = 0, pid
        while above in parent_of and above != os.getpid():
            length, above = length + 1, parent_of[above]
        if above == os.getpid() and length >= depth and pid not in victims:
            lines[pid] = line_of[pid]
    return lines
