"""Recipes: read from YAML and the command line, checked, and turned into a `TrainConfig`.

In: a YAML recipe (a file or a built-in name) and overrides from the command line. Out: a frozen `TrainConfig`. A key
that does not exist, a value of the wrong type and a combination that cannot work are `UserError`s of one line that
name the fix.
"""

from __future__ import annotations

import copy
import difflib
import io
import re
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from brorl.config.other_trainers import SETTING_OF
from brorl.config.settings import TrainConfig
from brorl.config.sources import CountdownConfig, FileConfig
from brorl.errors import UserError


def builtin_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    root = Path(str(files("brorl.recipes")))
    return sorted(p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.yaml"))


def read_recipe(recipe: str) -> dict[str, Any]:
    """Read the settings of a recipe, unchecked.

    Args:
        recipe: Name of a built-in recipe, or path of a YAML file.

    Returns:
        Nested settings.

    Raises:
        UserError: If there is no such recipe, or it is not YAML with keys.
    """
    names = builtin_recipes()
    if recipe in names:
        text = files("brorl.recipes").joinpath(f"{recipe}.yaml").read_text("utf-8")
    elif Path(recipe).is_file():
        try:
            text = Path(recipe).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {recipe} cannot be read as UTF-8 text: {error}") from error
    else:
        raise UserError(
            f"recipe {recipe!r} is neither a file nor a built-in name ({', '.join(names)}){_nearest(recipe, names)}"
        )
    settings = parse_yaml(text, recipe)
    if not isinstance(settings, dict):
        raise UserError(f"{recipe} does not hold settings (lines like `steps: 100`)")
    return settings


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML 1.2 (in which 1e-6 is a number).

    Raises:
        UserError: With source, line and column.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source}{where} is not YAML: {error.problem}") from error
    except YAMLError as error:
        raise UserError(f"{source} is not YAML: {' '.join(str(error).split())}") from error


def dump_yaml(config: TrainConfig) -> str:
    """Return the resolved config as YAML."""
    from ruamel.yaml import YAML

    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def make_config(settings: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> TrainConfig:
    """Check settings and make a config.

    Args:
        settings: Nested settings of a recipe.
        overrides: Settings by dotted name (`loss.clip_high`) that take precedence; `budget.limit` without `steps` also
            takes the place of the recipe's `steps`.
        source: Name of the recipe, for messages.

    Returns:
        The config.

    Raises:
        UserError: On the first thing that is wrong.
    """
    merged = copy.deepcopy({str(name): value for name, value in settings.items()})
    dotted = {name: merged.pop(name) for name in list(merged) if "." in name}
    if overrides.get("budget.limit") is not None and "steps" not in overrides:
        merged.pop("steps", None)  # the budget of the command line replaces the recipe's number of steps
    whole = {name for name, info in settings_of(TrainConfig) if int in (info.annotation, *get_args(info.annotation))}
    for name, value in {**dotted, **overrides}.items():
        *sections, key = name.split(".")
        target: Any = merged
        for depth, section in enumerate(sections, 1):
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UserError(f"{'.'.join(sections[:depth])} in {source} must hold settings, not {target!r}")
        is_whole = name in whole and isinstance(value, float) and value.is_integer()  # such as 1e3
        target[key] = int(value) if is_whole else value
    try:
        return TrainConfig.model_validate(merged)
    except ValidationError as error:
        problems = error.errors()  # a mistyped key says more than the missing value that it was meant to give
        first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
        raise UserError(_explain(first, source, overrides)) from None


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the field of every setting, in order."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from settings_of(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def unknown_setting(name: str) -> str:
    """Return the message for a setting that does not exist.

    Args:
        name: Its dotted name. One that another trainer uses, alone or below that trainer's sections, is recognized.
    """
    names = [n for n, _ in settings_of(TrainConfig)]
    sections = sorted({n.rpartition(".")[0] for n in names} - {""})
    if name in sections:
        return f"{name} is a group of settings; give one of {', '.join(n for n in names if n.startswith(f'{name}.'))}"
    first, _, key = name.rpartition(".")
    elsewhere = SETTING_OF.get(key)
    if elsewhere and (first not in sections or elsewhere.startswith(f"{first}.")):
        return f"{name} is not a setting; did you mean {elsewhere}?"
    if "." not in name:  # the right key without its section, such as clip_high
        same_key = [n for n in names if n.rpartition(".")[2] == name]
        if same_key:
            return f"{name} is not a setting; did you mean {same_key[0]}?"
    return f"{name} is not a setting{_nearest(name, [*names, *sections])}"


def _nearest(word: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; see brorl train --help"


def _nearest_of_source(key: str, section: type[BaseModel]) -> str:
    close = difflib.get_close_matches(key, list(section.model_fields), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(section.model_fields)}"


def _explain(problem: Any, source: str, overrides: Collection[str]) -> str:
    """Turn pydantic's first complaint into a line of ours, which names the option or the recipe that is wrong."""
    name, section = _place(problem["loc"])
    if problem["type"] == "value_error":
        text = str(problem["ctx"]["error"])
        option = next((option for option in overrides if re.search(rf"\b{re.escape(option)}\b", text)), None)
        if option is None:
            return f"{text} (in {source})"
        return f"--{text}" if text.startswith(option) else text
    option = next((option for option in overrides if re.match(rf"{re.escape(option)}\b", name)), None)
    where = f"(in {source})" if option is None else f"(in --{option})"
    if problem["type"] == "extra_forbidden":
        if section is None:
            return f"{unknown_setting(name)} {where}"
        return f"{name} is not a setting{_nearest_of_source(name.rpartition('.')[2], section)} {where}"
    text = f"{_expectation(problem)}, not {problem['input']!r}"
    return f"--{name}: {text}" if name == option else f"{name}: {text} {where}"


def _expectation(problem: Any) -> str:
    """Return what pydantic expected."""
    plain = {
        "tuple_type": "the value should be a list like [1, 16]",
        "model_type": "settings should stand below it",
        "missing": "a value is missing",
        "string_pattern_mismatch": "the value should be auto, cpu, cuda or cuda:N",
        "int_type": "the value should be a whole number",
        "int_from_float": "the value should be a whole number",
        "float_type": "the value should be a number",
        "bool_type": "the value should be true or false",
        "string_type": "the value should be text",
        "dict_type": "the value should be a mapping like {key: value}",
        "finite_number": "the value should be a finite number",
    }
    wanted: str = problem["msg"][0].lower() + problem["msg"][1:]
    return plain.get(problem["type"], wanted.replace("input should", "the value should"))


def _place(location: tuple[int | str, ...]) -> tuple[str, type[BaseModel] | None]:
    """Return the name of what is complained about, and its section if that stands in a list of sources."""
    sections: dict[str, type[BaseModel]] = {"countdown": CountdownConfig, "file": FileConfig}
    if "sources" not in location:
        return ".".join(str(part) for part in location if not isinstance(part, int)), None
    start = location.index("sources") + 1
    name = ".".join(map(str, location[:start]))
    rest = list(location[start:])
    section: type[BaseModel] = FileConfig
    if rest and isinstance(rest[0], int):
        name += f"[{rest.pop(0)}]"
    if rest and rest[0] in sections:
        section = sections[str(rest.pop(0))]
    return ".".join([name, *map(str, rest)]), section if rest else None
