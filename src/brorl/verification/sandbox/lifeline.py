"""A pipe that ties processes to this one: they end when this process ends, however it ends.

The parent holds the write end and never writes. The child passes the read end to `worker.die_with_parent`. A signal of
the parent's death (PDEATHSIG) would not do: the kernel sends it when the thread that started the child ends.
"""

from __future__ import annotations

import contextlib
import os

_OPEN: set[int] = set()  # write ends in this process


class Lifeline:
    """Both ends of one pipe, in the parent.

    Each child needs a pipe: the process group that gets the signal belongs to the open pipe, not to its reader.

    Attributes:
        child_end: Descriptor that the child inherits; call `close_child_end` once it has started.
    """

    def __init__(self) -> None:
        self.child_end, self._parent_end = os.pipe()
        _OPEN.add(self._parent_end)

    def close_child_end(self) -> None:
        """Close the inherited end in this process."""
        os.close(self.child_end)

    def cut(self) -> None:
        """Close the parent's end, which kills the child."""
        if self._parent_end in _OPEN:
            _OPEN.discard(self._parent_end)
            os.close(self._parent_end)


def _close_all() -> None:
    """Close the ends that a forked child has inherited: they would keep the workers alive after the trainer."""
    while _OPEN:
        with contextlib.suppress(OSError):
            os.close(_OPEN.pop())


os.register_at_fork(after_in_child=_close_all)
