"""Shell completions for options and arguments: the values of a setting, recipes, models, files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import shtab

from brorl.config.reading import builtin_recipes, setting_fields
from brorl.config.settings import TrainConfig
from brorl.model.settings import SHIPPED
from brorl.prompts.public_data import BENCHMARKS

_RECIPES = ("RECIPE", "ARM", "START")
_MODELS = ("MODEL", "CHECKPOINT")
_BENCHMARKS = ("DATA",)
_FILES = ("DATA_FILE", "FILE", "RUN")


def completion_script(parser: argparse.ArgumentParser, shell: str, setting: str) -> str:
    """Return a parser's completion script for a shell. The `dest` of every setting starts with `setting`."""
    kinds = {f"{setting}{name}": info.annotation for name, info in setting_fields(TrainConfig)}
    names = {
        **dict.fromkeys(_RECIPES, ("recipe", builtin_recipes())),
        **dict.fromkeys(_MODELS, ("model", SHIPPED)),
        **dict.fromkeys(_BENCHMARKS, ("benchmark", BENCHMARKS)),
    }
    for action in _actions(parser):
        if action.dest == f"{setting}model":
            _complete(action, _or_a_file(*names["MODEL"]))
        elif action.dest == f"{setting}output_dir":
            _complete(action, shtab.DIRECTORY)
        elif action.dest in kinds:
            values = tuple(dict.fromkeys(_values(kinds[action.dest])))
            action.choices = None if values == ("null",) else values or None
        elif action.metavar in names:
            _complete(action, _or_a_file(*names[str(action.metavar)]))
        elif action.metavar == "DIR" or action.metavar in _FILES:
            _complete(action, shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE)
    return str(shtab.complete(parser, shell=shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


def _values(annotation: Any) -> Iterator[str]:
    """Yield the words a setting accepts: its literals, true and false, and null if it is optional."""
    if get_origin(annotation) is Literal:
        yield from (value for value in get_args(annotation) if isinstance(value, str))
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is NoneType:
        yield "null"
    else:  # unions, tuples and `Annotated` types
        for part in get_args(annotation):
            yield from _values(part)


def _or_a_file(noun: str, names: Iterable[str]) -> dict[str, Any]:
    """Return a completion that offers the given names and files."""
    words = " ".join(names)
    function = f"_brorl_{noun}_or_file"  # bash treats completions from a function with `_file` in its name as files
    return {
        "bash": function,
        "zsh": function,
        "fish": f"{words} {shtab.FILE['fish']}",
        "preamble": {
            "bash": f'{function}() {{\n  compgen -f -- "$1"\n  compgen -W "{words}" -- "$1"\n}}',
            "zsh": f"{function}() {{\n  _alternative '{noun}:{noun}:({words})' 'files:file:_files'\n}}",
        },
    }


def _complete(action: argparse.Action, how: Any) -> None:
    action.complete = how  # type: ignore[attr-defined]
