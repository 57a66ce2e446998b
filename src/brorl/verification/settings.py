"""Settings of the verification."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from brorl.paths import is_file
from brorl.section import Section


class VerificationSettings(Section):
    """Worker processes for verifiers that can hang or crash, and your own verifiers."""

    workers: int = Field(0, ge=0, le=1024, description="worker processes; 0 for one per core")
    timeout_s: float = Field(
        4.0,
        gt=0,
        description="time limit of one verification, in seconds; a longer one is stopped and counted as timed out",
    )
    batch_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="time limit of all programs of responses that are verified together, in seconds; what has run for "
        "its part of it is then counted as timed out, the rest as unverified",
    )
    memory_mib: int = Field(1024, ge=256, description="memory limit of a worker process, in MiB")
    sandbox: Literal["auto", "landlock", "seccomp", "unsafe"] = Field(
        "auto",
        description="confinement of untrusted code: auto, the strongest that works here | landlock, with seccomp | "
        "seccomp, no file can be opened | unsafe, none",
    )
    functions: dict[str, str] = Field(
        {}, description="your verifiers by domain: {my_domain: package.module:function} (docs/how-to/verifiers.md)"
    )

    completions: Literal["text", "messages"] = Field(
        "text", description="form in which your reward functions with TRL's signature get responses"
    )

    @field_validator("functions")
    @classmethod
    def _absolute(cls, functions: dict[str, str]) -> dict[str, str]:
        """Make the path of a local file absolute, so that a run can be resumed from any folder."""
        files = {domain: Path(path.rpartition(":")[0]).expanduser() for domain, path in functions.items()}
        return {
            domain: f"{files[domain].absolute()}:{path.rpartition(':')[2]}" if is_file(files[domain]) else path
            for domain, path in functions.items()
        }
