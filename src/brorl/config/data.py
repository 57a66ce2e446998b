"""Settings of the prompts and of their verification."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from brorl.config.section import Section
from brorl.config.sources import CountdownConfig, SourceConfig, as_sources
from brorl.paths import is_file


class DataConfig(Section):
    """The prompts."""

    sources: Annotated[tuple[SourceConfig, ...], BeforeValidator(as_sources), Field(strict=False)] = Field(
        (CountdownConfig(),), min_length=1, description="training data: files, Hugging Face data sets, "
        "Reasoning Gym or built-in puzzles; one, or a list with weights (docs/how-to/data.md)",
    )  # fmt: skip
    held_out_fraction: float = Field(0.1, ge=0, lt=1, description="fraction of the prompts held out for evaluation")
    split_seed: int = Field(0, ge=0, lt=2**63, description="random seed of the held-out split")
    max_prompt_tokens: int = Field(0, ge=0, description="drop prompts with more tokens than this; 0 keeps all")


class PromptConfig(Section):
    """The text around a question."""

    template: str = Field("{prompt}", description="text around the question; {prompt} marks its place")
    domain_templates: dict[str, str] = Field(
        {}, description="templates of some domains, in place of `template`: {math: ..., code: ...}"
    )
    system_prompt: str | None = Field(None, description="system prompt before every question; null for none")
    chat: Literal["auto", "always", "never"] = Field(
        "auto",
        description="use the tokenizer's chat template: auto, if it has one | always, an error if it has none | never",
    )
    chat_template_options: dict[str, Any] = Field(
        {}, description="variables for the chat template, such as {enable_thinking: false}"
    )


class VerificationConfig(Section):
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
        description="confinement of untrusted code: auto, the strongest that holds here | landlock, with seccomp | "
        "seccomp, no file can be opened | unsafe, none",
    )
    functions: dict[str, str] = Field(
        {}, description="your verifiers by domain: {my_domain: package.module:function} (docs/how-to/verifiers.md)"
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
