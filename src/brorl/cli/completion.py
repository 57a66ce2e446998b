"""`brorl completion`: a script that completes commands and options in bash, zsh and fish.

shtab makes the script from the parsers of all commands. The script is static: the Tab key starts no Python process.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from brorl.cli.settings import Commands
from brorl.errors import UserError

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("ARM", "CHECKPOINT", "DATA", "DATA_FILE", "FILE", "MODEL", "RECIPE", "RUN", "SOURCE")  # placeholders of paths
_FOLDERS = ("DIR",)


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "completion",
        usage="brorl completion bash | zsh | fish",
        help="print a script that completes commands and options in a shell",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    parser.set_defaults(execute=lambda parsed: completion(parsed.shell))


def completion(shell: str) -> int:
    """Print the script and return the exit code."""
    from brorl.cli import COMMANDS, make_parser

    try:
        import shtab
    except ImportError as error:
        raise UserError("brorl completion needs the package shtab; pip install shtab") from error
    parser = make_parser(COMMANDS)
    _complete_paths(parser, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(parser, shell=shell))  # noqa: T201
    return 0


def _complete_paths(
    parser: argparse.ArgumentParser, files: Mapping[str, object], folders: Mapping[str, object]
) -> None:
    """Complete paths where an argument's placeholder stands for one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, files, folders)
        elif action.metavar in (*_FILES, *_FOLDERS):
            action.complete = folders if action.metavar in _FOLDERS else files  # type: ignore[attr-defined]
