"""Verification settings."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator

from brorl.section import Section
from brorl.storage import function_path
from brorl.verification.thoughts import THINK, ThoughtTags

Sees: TypeAlias = Literal["last", "all"]


class VerificationSettings(Section):
    """Worker processes for verifiers that can hang or crash, and your own verifiers."""

    workers: int = Field(0, ge=0, le=1024, description="worker processes; 0 for one per core")
    timeout_s: float = Field(
        4.0,
        gt=0,
        description="time limit per verification, in seconds; one that takes longer is stopped and counts as timed out",
    )
    batch_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="time limit for all programs of responses that are verified together, in seconds; then a response "
        "that used its share of the time counts as timed out, the others as unverified",
    )
    memory_mib: int = Field(1024, ge=256, description="memory limit per worker process, in MiB")
    sandbox: Literal["auto", "landlock", "seccomp", "unsafe"] = Field(
        "auto",
        description="confinement of untrusted code: auto, the strongest that works here | landlock, with seccomp | "
        "seccomp, which blocks opening files | unsafe, none",
    )
    functions: dict[str, str] = Field(
        {}, description="your verifiers by domain: {my_domain: package.module:function} (docs/how-to/verifiers.md)"
    )

    completions: Literal["text", "messages"] = Field(
        "text", description="form in which your reward functions with TRL's signature receive responses"
    )

    thought_tags: Annotated[tuple[str, str], Field(strict=False)] | None = Field(
        (THINK.opening, THINK.closing),
        description="tags around a thought: built-in verifiers judge the text after the last thought; null judges the "
        "whole response (docs/how-to/thinking_models.md)",
    )

    sees: Sees = Field(
        "last", description="turns of a response that verifiers see, never tool results: last, the answer | "
        "all, every model turn",
    )  # fmt: skip

    @property
    def thoughts(self) -> ThoughtTags | None:
        """The thought tags; None if built-in verifiers judge whole responses."""
        return None if self.thought_tags is None else ThoughtTags(*self.thought_tags)

    @field_validator("thought_tags")
    @classmethod
    def _are_tags(cls, tags: tuple[str, str] | None) -> tuple[str, str] | None:
        if tags is not None and (
            len({tag.strip() for tag in tags} - {""}) < 2 or any(tag != tag.strip() for tag in tags)
        ):
            raise ValueError(
                f"verification.thought_tags must be two different strings without surrounding spaces, such as "
                f"[{THINK.opening}, {THINK.closing}], or null, got {list(tags)}"
            )
        return tags

    @field_validator("functions")
    @classmethod
    def _absolute(cls, functions: dict[str, str]) -> dict[str, str]:
        """Make local file paths absolute, so a run can resume from any directory."""
        return {domain: function_path(path) for domain, path in functions.items()}
