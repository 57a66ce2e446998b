"""The command line: one module a command, each of which adds its options and says what runs.

Errors that the user can fix are one line on stderr, exit code 2 for what was found before any work and 1 for what
stopped a run. numpy, torch and transformers are imported only once a command really runs.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

import brorl
from brorl.cli import compare, plan, report, resume, samples, simulate, train
from brorl.cli import eval as evaluate
from brorl.cli.settings import unknown_option
from brorl.errors import UserError

_COMMANDS = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "compare": compare,
    "report": report,
    "samples": samples,
    "plan": plan,
    "simulate": simulate,
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: Command line without the program's name; that of the process if not given.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"brorl: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print("brorl: interrupted", file=sys.stderr)  # noqa: T201
        return 130


def _run(arguments: list[str]) -> int:
    parser = _Parser(
        prog="brorl",
        description="Reinforcement learning from verifiable rewards at many rollouts per prompt, as one tree.",
    )
    parser.add_argument("--version", action="version", version=f"brorl {brorl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, command in _COMMANDS.items():
        command.add_parser(commands, chosen=arguments[:1] == [name])
    if arguments and arguments[0] not in _COMMANDS and not arguments[0].startswith("-"):
        close = difflib.get_close_matches(arguments[0], list(_COMMANDS), n=1)
        advice = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(_COMMANDS)}"
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
