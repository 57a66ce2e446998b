"""`check`: every check of a recipe that needs no training; also the body of `brorl check`. It writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brorl.api.cheap_checks import check_cheaply
from brorl.api.settings import ConfigOrPath, recipe_name, resolve_config

if TYPE_CHECKING:
    from brorl.api.check_result import CheckResult


def check(
    config_or_path: ConfigOrPath = "quickstart", *, timing: bool = True, progress: bool = True, **overrides: Any
) -> CheckResult:
    """Check settings, prompts, verifiers and memory of a recipe, and time a few small steps; write nothing.

    Args:
        config_or_path: Name of a built-in recipe, path of a YAML file, nested settings, or a config.
        timing: Load the model and forecast the seconds of a step.
        progress: Print the report line by line.
        overrides: Settings that replace those of the recipe, nested or by dotted name.

    Raises:
        UserError: On the first problem.
    """
    config = resolve_config(config_or_path, overrides)
    check_cheaply(config)

    from brorl.api.check_result import check_config  # imports torch

    return check_config(config, recipe_name(config_or_path), timing, progress)
