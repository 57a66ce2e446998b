"""`brorl plan`."""

from __future__ import annotations

from brorl.cli.settings import Commands


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
