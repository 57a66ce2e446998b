"""`brorl train`: the options of `brorl.train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.cli.stop_signals import STOPPED
from brorl.errors import UnverifiedResponsesError

if TYPE_CHECKING:
    from brorl.api.settings import ConfigOrPath


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "train",
        usage="brorl train [RECIPE] [--key value ...]",
        help="train a model from a recipe (default: the built-in `quickstart`)",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", nargs="?", default="quickstart", metavar="RECIPE", help="YAML file or built-in recipe"
    )
    parser.set_defaults(execute=lambda parsed: train(parsed.recipe, overrides_of(parsed)))
    if chosen:
        add_settings(parser)


def train(config_or_path: ConfigOrPath | None, overrides: dict[str, Any], resume: bool = False) -> int:
    """Train and return the exit code: 0, 130 if the run was stopped, 1 if it ended because no group was mixed.

    Raises:
        UnverifiedResponsesError: If most rollouts could not be verified.
    """
    from brorl.api.train import train as train_run

    result = train_run(config_or_path, resume=resume, **overrides)

    from brorl.training.journal import Ending

    if result.ending is Ending.UNVERIFIED:
        raise UnverifiedResponsesError(result.message)
    return {Ending.NO_MIXED_GROUPS: 1, Ending.INTERRUPTED: STOPPED}.get(result.ending, 0)
