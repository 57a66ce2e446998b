"""Settings of the rewards."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from brorl.config.section import Section


class CosineLengthConfig(Section):
    """The scheduled cosine length reward; off while `every_steps` is 0."""

    every_steps: int = Field(0, ge=0, description="period of the schedule, in steps; 0 switches it off")
    on_steps: int = Field(
        100, ge=1, description="the length reward applies in this many steps at the start of each period"
    )
    correct_short: float = Field(1.0, description="reward of a correct response of length 0")
    correct_long: float = Field(0.5, description="reward of a correct response of maximum length")
    wrong_short: float = Field(0.0, description="reward of an incorrect response of length 0")
    wrong_long: float = Field(0.0, description="reward of an incorrect response of maximum length")

    @model_validator(mode="after")
    def _fits_its_period(self) -> Self:
        if 0 < self.every_steps < self.on_steps:
            raise ValueError(
                f"rewards.cosine_length.on_steps = {self.on_steps} is more than "
                f"rewards.cosine_length.every_steps = {self.every_steps}; lower it"
            )
        return self


class RewardsConfig(Section):
    """From verdicts to rewards; dynamic sampling always uses the verdict."""

    partial_credit: bool = Field(False, description="use the verifier's score as the reward, not only 0 or 1")
    stop_properly: float = Field(
        0.0, ge=0, le=1, description="factor on the reward of truncated responses; above 0 they are verified too"
    )
    cosine_length: CosineLengthConfig = CosineLengthConfig()
    overlong_tokens: int = Field(
        0, ge=0, description="number of tokens before the length limit in which a penalty grows to 1; 0 switches it off"
    )
    format_pattern: str | None = Field(
        None, description="regular expression that the whole response must match for format_reward, such as "
        "'<think>.*</think>.*'; null switches the format reward off",
    )  # fmt: skip
    format_reward: float = Field(0.1, gt=0, lt=1, description="reward added to a response that matches format_pattern")
    domain_weights: dict[str, float] = Field({}, description="reward factors by domain, such as {math: 1.0}")

    @field_validator("format_pattern")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            import regex

            try:
                regex.compile(pattern)
            except regex.error as error:
                raise ValueError(f"rewards.format_pattern = {pattern!r} is not a regular expression: {error}") from None
        return pattern
