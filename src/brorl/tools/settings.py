"""Settings for tools and turns."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from brorl.section import Section
from brorl.storage import function_path

FORMATS = ("auto", "hermes", "llama3", "mistral")
"""The built-in call formats; `auto` means the chat template's format."""


class ToolSettings(Section):
    """Tools that responses can call, and their limits; without tools, a response is a single turn."""

    functions: dict[str, str] = Field(
        {}, description="your own tools, by name: {calculator: tools.py:calculator}, functions with type hints and a "
        "docstring (docs/how-to/tools.md)",
    )  # fmt: skip
    calculator: bool = Field(False, description="a built-in tool that evaluates arithmetic")
    python: bool = Field(
        False, description="a built-in tool that runs a Python program in the code domain's sandbox; calls do not "
        "share state",
    )  # fmt: skip
    environment: str | None = Field(
        None, description="a class whose public methods are the tools, with one object per distinct transcript: "
        "games.py:Wordle, with reset(**row) and, for the reward, get_reward()",
    )  # fmt: skip
    format: str = Field(
        "auto", description="how calls are written: auto, as in the chat template | hermes, which also works if the "
        "template has no tools | llama3 | mistral | your own file with parse and render: my_format.py",
    )  # fmt: skip
    max_turns: int = Field(4, ge=2, description="maximum model turns per response, including the answer")
    max_result_tokens: int = Field(256, ge=1, description="maximum length of a result, in tokens; the rest is dropped")
    max_response_tokens: int | None = Field(
        None, ge=1, description="maximum length of a response in tokens, including results: a turn starts only if it "
        "fits; null: max_turns times (sampling.max_new_tokens + max_result_tokens)",
    )  # fmt: skip
    timeout_s: float = Field(5.0, gt=0, description="time limit of one call, in seconds")

    @property
    def enabled(self) -> bool:
        """Whether there are any tools."""
        return bool(self.functions or self.calculator or self.python or self.environment)

    @property
    def untrusted(self) -> tuple[str, ...]:
        """The settings that enable tools which run code from responses."""
        return ("tools.python",) if self.python else ()

    @property
    def has_own_format(self) -> bool:
        """Whether `format` is the user's own file."""
        return self.format.endswith(".py")

    def total_tokens(self, max_new_tokens: int) -> int:
        """Return the maximum tokens per response if a turn has at most `max_new_tokens`."""
        if not self.enabled:
            return max_new_tokens
        return self.max_response_tokens or self.max_turns * (max_new_tokens + self.max_result_tokens)

    @field_validator("functions")
    @classmethod
    def _absolute(cls, functions: dict[str, str]) -> dict[str, str]:
        """Make local file paths absolute, so a run can resume from any directory."""
        return {name: function_path(path) for name, path in functions.items()}

    @field_validator("environment")
    @classmethod
    def _absolute_environment(cls, path: str | None) -> str | None:
        return None if path is None else function_path(path)

    @field_validator("format")
    @classmethod
    def _known_format(cls, name: str) -> str:
        """Make a file's path absolute. Reject an unknown name."""
        if name in FORMATS:
            return name
        if not name.endswith(".py"):
            raise ValueError(
                f"tools.format = {name} is unknown; set it to {', '.join(FORMATS)}, or to your own file with parse and "
                "render, such as my_format.py"
            )
        return str(Path(name).expanduser().absolute())
