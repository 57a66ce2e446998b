"""The processes that verify: workers for trusted functions, sandboxed programs for untrusted code."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from brorl.verification.sandbox.pool import WorkerPool
from brorl.verification.sandbox.programs import ProgramPool


@dataclass(frozen=True)
class Workers:
    """Both pools of a run; their processes start with the first work.

    Attributes:
        pool: Calls trusted functions with limits of time and memory.
        programs: Runs untrusted code.
    """

    pool: WorkerPool = field(default_factory=WorkerPool)
    programs: ProgramPool = field(default_factory=ProgramPool)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; later work starts new ones."""
        self.pool.close()
        self.programs.close()
