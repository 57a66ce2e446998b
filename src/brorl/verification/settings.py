"""Settings of the verification."""

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

    thought_tags: Annotated[tuple[str, str], Field(strict=False)] | None = Field(
        (THINK.opening, THINK.closing),
        description="tags around a thought: built-in verifiers judge what follows the last one; null judges the whole "
        "response (docs/how-to/thinking_models.md)",
    )

    sees: Sees = Field(
        "last", description="turns of a response that verifiers see, never the results of tools: last, the answer | "
        "all, every turn of the model",
    )  # fmt: skip

    @property
    def thoughts(self) -> ThoughtTags | None:
        """The tags of thoughts; None if built-in verifiers judge whole responses."""
        return None if self.thought_tags is None else ThoughtTags(*self.thought_tags)

    @field_validator("thought_tags")
    @classmethod
    def _are_tags(cls, tags: tuple[str, str] | None) -> tuple[str, str] | None:
        if tags is not None and (
            len({tag.strip() for tag in tags} - {""}) < 2 or any(tag != tag.strip() for tag in tags)
        ):
            raise ValueError(
                f"verification.thought_tags must be two different texts without space around them, such as "
                f"[{THINK.opening}, {THINK.closing}], or null, got {list(tags)}"
            )
        return tags

    @field_validator("functions")
    @classmethod
    def _absolute(cls, functions: dict[str, str]) -> dict[str, str]:
        """Make the path of a local file absolute, so that a run can be resumed from any folder."""
        return {domain: function_path(path) for domain, path in functions.items()}
