"""The passes of a model that one process holds: nothing has to be agreed on. See `sharding.SyncedForward` for ranks."""

from __future__ import annotations

from typing import Protocol

import torch


class PeerOutOfMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory, so all ranks start again."""


class Passes(Protocol):
    """Keeps the passes of several ranks in step."""

    def finish(self) -> None:
        """Make the passes that other ranks still need; the end of a piece of work."""
        ...

    def fail(self) -> None:
        """Report that this rank ran out of memory."""
        ...

    def any(self, failed: bool) -> bool:
        """Return whether some work failed on any rank."""
        ...


class OwnPasses:
    """The passes of one process."""

    def finish(self) -> None:
        """Do nothing: there are no other ranks."""

    def fail(self) -> None:
        """Do nothing: there are no other ranks."""

    def any(self, failed: bool) -> bool:
        """Return whether the work of this process failed."""
        return failed
