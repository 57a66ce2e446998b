"""Settings of a recipe as options of the command line: one option for every field of the config."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_settings(parser: argparse.ArgumentParser, only: Callable[[str], bool] = lambda _: True) -> None:
    """Add an option for every setting whose dotted name is accepted; its help is the setting's description."""
    from brorl.config.reading import settings_of
    from brorl.config.settings import TrainConfig

    group = parser.add_argument_group("settings", "every key of a recipe; the command line takes precedence")
    fields = {name: info for name, info in settings_of(TrainConfig) if only(name)}
    for name, info in fields.items():
        names = {f"--{name}", f"--{name.replace('_', '-')}"}
        group.add_argument(
            *sorted(names, reverse=True),
            dest=f"setting:{name}",
            metavar=_type_name(info.annotation),
            default=argparse.SUPPRESS,
            help=f"{info.description} (default: {_shown(info.default)})".replace("%", "%%"),
        )


def overrides_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given as options; each value is parsed as YAML."""
    from brorl.config.reading import parse_yaml, settings_of
    from brorl.config.settings import TrainConfig

    given = {n.removeprefix("setting:"): v for n, v in vars(parsed).items() if n.startswith("setting:")}
    texts = {n for n, info in settings_of(TrainConfig) if info.annotation in (str, str | None)}
    return {n: v if n in texts and v != "null" else parse_yaml(v, f"--{n}") for n, v in given.items()}


def unknown_option(option: str, command: str | None) -> str:
    """Return the message for an option that a command does not have."""
    from brorl.config.reading import unknown_setting
    from brorl.config.resuming import CHANGEABLE_ON_RESUME

    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    if not option.startswith("--"):
        return f"unexpected argument {option!r} (see brorl {command or ''} --help)"
    if command in ("init", "simulate", "report", "samples", "eval", "verify", "doctor", "completion"):
        return f"--{name} is not an option of brorl {command} (see brorl {command} --help)"
    if command == "resume":
        return f"--{name} cannot be changed on resume; these settings can: {', '.join(CHANGEABLE_ON_RESUME)}"
    return unknown_setting(name, command or "train")


def _shown(default: Any) -> str:
    """Return a default as YAML."""
    if isinstance(default, tuple):
        return f"[{', '.join(map(_shown, default))}]"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(getattr(default, "label", default))  # a source by its label


def _type_name(annotation: Any) -> str:
    choices = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return "|".join(_type_name(choice) for choice in choices if choice is not NoneType)
    if choices and all(isinstance(c, str) for c in choices):
        return "|".join(choices)
    known = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false"}
    return known.get(annotation, "VALUE")
