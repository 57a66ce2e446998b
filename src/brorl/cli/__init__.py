"""The command line: one module per command, with its options and the call of its function.

Errors that the user can fix are one line on stderr, with exit code 2 before any work and 1 for an error that stopped a
run. Ctrl-C, SIGTERM and SIGHUP stop every command with exit code 130. numpy, torch and transformers are imported when a
command runs, and not for help.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import NoReturn

import brorl
from brorl.cli import (
    check,
    compare,
    completion,
    data,
    doctor,
    init,
    plan,
    report,
    resume,
    samples,
    simulate,
    train,
    verify,
)
from brorl.cli import eval as evaluate
from brorl.cli.settings import unknown_option
from brorl.cli.stop_signals import STOPPED, signals_as_interrupt
from brorl.errors import UserError

COMMANDS = {
    "init": init,
    "data": data,
    "check": check,
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "compare": compare,
    "report": report,
    "samples": samples,
    "verify": verify,
    "plan": plan,
    "simulate": simulate,
    "doctor": doctor,
    "completion": completion,
}

_NO_PERMISSION = "permission denied; give your user access to it, or choose another path"
_PATH_PROBLEMS = {
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.ENAMETOOLONG: "the name is too long; choose another path",
}


class _Help(argparse.HelpFormatter):
    """Help whose lines break at spaces only, so that a path stays whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        return _Help(prog=self.prog)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: Command line without the program's name; by default that of the process.
    """
    try:
        with signals_as_interrupt():
            return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"brorl: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except OSError as error:
        problem = _PATH_PROBLEMS.get(error.errno or 0)
        if problem is None or error.filename is None:
            raise
        print(f"brorl: {error.filename}: {problem}", file=sys.stderr)  # noqa: T201
        return UserError.exit_code
    except KeyboardInterrupt as stop:
        if not stop.args:  # else the command has printed how to continue
            print("brorl: stopped", file=sys.stderr)  # noqa: T201
        return STOPPED


def make_parser(chosen: Collection[str]) -> argparse.ArgumentParser:
    """Make the parser of all commands; only the `chosen` ones get the settings, because adding them takes time."""
    parser = _Parser(
        prog="brorl",
        description="Reinforcement learning from verifiable rewards at many rollouts per prompt, as one tree.",
    )
    parser.add_argument("--version", action="version", version=f"brorl {brorl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        command.add_parser(commands, chosen=name in chosen)
    return parser


def _run(arguments: list[str]) -> int:
    parser = make_parser(arguments[:1])
    if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        close = difflib.get_close_matches(arguments[0], list(COMMANDS), n=1)
        advice = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"{arguments[0]!r} is not a command; {advice} (see brorl --help)")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UserError(unknown_option(unknown[0], parsed.command))
    if parsed.command is None:
        parser.print_help()
        return 0
    code: int = parsed.execute(parsed)
    return code


if __name__ == "__main__":
    sys.exit(main())
