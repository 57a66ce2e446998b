"""Settings of tools and turns."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from brorl.section import Section
from brorl.storage import function_path

FORMATS = ("auto", "hermes", "llama3", "mistral")
"""The built-in forms of calls; `auto` is the one that the chat template writes."""


class ToolSettings(Section):
    """Tools that responses can call, and limits; without a tool, a response is a single turn."""

    functions: dict[str, str] = Field(
        {}, description="your tools by name: {calculator: tools.py:calculator}, functions with types and a docstring "
        "(docs/how-to/tools.md)",
    )  # fmt: skip
    calculator: bool = Field(False, description="a built-in tool that computes arithmetic")
    python: bool = Field(
        False, description="a built-in tool that runs a Python program in the sandbox of the code domain; no state is "
        "kept between calls",
    )  # fmt: skip
    environment: str | None = Field(
        None, description="a class whose public methods are the tools, one object per distinct transcript: "
        "games.py:Wordle, with reset(**row) and, for the reward, get_reward()",
    )  # fmt: skip
    format: str = Field(
        "auto", description="how calls are written: auto, as the chat template says | hermes, also for a template "
        "without tools | llama3 | mistral | a file of your own with parse and render: my_format.py",
    )  # fmt: skip
    max_turns: int = Field(4, ge=2, description="most turns of the model in a response, the answer included")
    max_result_tokens: int = Field(256, ge=1, description="maximum length of a result, in tokens; the rest is cut off")
    max_response_tokens: int | None = Field(
        None, ge=1, description="maximum tokens of a response, results included: a turn starts only if it fits; null: "
        "max_turns times (sampling.max_new_tokens + max_result_tokens)",
    )  # fmt: skip
    timeout_s: float = Field(5.0, gt=0, description="time limit of one call, in seconds")

    @property
    def enabled(self) -> bool:
        """Whether there is a tool."""
        return bool(self.functions or self.calculator or self.python or self.environment)

    @property
    def untrusted(self) -> tuple[str, ...]:
        """The tools that run the code of responses, as settings."""
        return ("tools.python",) if self.python else ()

    @property
    def has_own_format(self) -> bool:
        """Whether `format` is a file of the user."""
        return self.format.endswith(".py")

    def total_tokens(self, max_new_tokens: int) -> int:
        """Return the most tokens that a response can have, if a turn has at most `max_new_tokens`."""
        if not self.enabled:
            return max_new_tokens
        return self.max_response_tokens or self.max_turns * (max_new_tokens + self.max_result_tokens)

    @field_validator("functions")
    @classmethod
    def _absolute(cls, functions: dict[str, str]) -> dict[str, str]:
        """Make the path of a local file absolute, so that a run can be resumed from any folder."""
        return {name: function_path(path) for name, path in functions.items()}

    @field_validator("environment")
    @classmethod
    def _absolute_environment(cls, path: str | None) -> str | None:
        return None if path is None else function_path(path)

    @field_validator("format")
    @classmethod
    def _known_format(cls, name: str) -> str:
        """Make the path of a file absolute; refuse an unknown name."""
        if name in FORMATS:
            return name
        if not name.endswith(".py"):
            raise ValueError(
                f"tools.format = {name} is not known; set it to {', '.join(FORMATS)}, or to a file of your own with "
                "parse and render, such as my_format.py"
            )
        return str(Path(name).expanduser().absolute())
