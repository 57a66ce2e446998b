"""Write docs/reference/command_line.md: every command with its usage and its options.

In: the parsers of `brorl`, which are the truth. Out: the page. `tests/test_docs.py` fails when the two differ. The
settings of a recipe are not repeated: scripts/make_settings_reference.py writes their page.

    python scripts/make_command_reference.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from brorl.cli import COMMANDS, make_parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "command_line.md"
INTRODUCTION = """\
# Command line

Every command of `brorl`. `scripts/make_command_reference.py` writes this page from the parsers, and
`brorl COMMAND --help` prints the same.

Commands with `--key value` also accept [settings](settings.md) by their dotted names, such as
`--optimizer.learning_rate 2e-6`. The command line takes precedence over the recipe. Names may contain `-` instead of
`_`.

## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | a run stopped with an error, or because no group was mixed, also when it is resumed; \
`brorl doctor` found no sandbox; `brorl verify --require-agreement` reaches another verdict |
| 2 | nothing was started: an error in the command, the settings, the data or the model |
| 130 | stopped by Ctrl-C, SIGTERM or SIGHUP |
"""


def page() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for name, summary, parser in _commands():
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        parts += [f"## `brorl {name}`\n", f"{_sentence(summary)}\n", f"```text\n{usage}\n```\n"]
        rows = [_row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _commands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield the name, the summary and the parser of every command, without the settings of a recipe."""
    parser = make_parser(COMMANDS, with_settings=False)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    for name, parser in commands.choices.items():
        yield name, summaries[name], parser


def _row(action: argparse.Action) -> str:
    metavar = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
    flag = next(iter(action.option_strings), "")  # the first spelling; the others differ in - and _
    shown = " ".join(part for part in (flag, str(metavar)) if part).replace("|", "\\|")
    return f"| `{shown}` | {_escaped((action.help or '') % _values(action))} |"


def _values(action: argparse.Action) -> dict[str, object]:
    return {"default": action.default, "prog": "brorl", "choices": action.choices}


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _escaped(text: str) -> str:
    """Return text of which Markdown shows every character, in the cell of a table."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
