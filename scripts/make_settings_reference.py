"""Write docs/reference/settings.md: every setting of a recipe with its type, default and description.

In: the sections of `TrainConfig`, which are the truth. Out: the page. `tests/test_docs.py` fails when the two differ.

    python scripts/make_settings_reference.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from brorl.config.settings import TrainConfig
from brorl.prompts.settings import CountdownSource, FileSource, GymSource
from brorl.training.settings import PhaseSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "settings.md"
INTRODUCTION = """\
# Settings

Every setting of `brorl train`. `scripts/make_settings_reference.py` writes this page from the sections of
`TrainConfig`, and `brorl train --help` prints the same.

In a recipe, a section is a group:

```yaml
rollouts_per_prompt: 512
optimizer:
  learning_rate: 2e-6
```

On the command line, a setting has its dotted name: `--optimizer.learning_rate 2e-6`. The command line takes precedence
over the recipe, and the recipe over these defaults. A key that does not exist is an error that names the nearest one.
"""
SOURCES = """\
`data.sources` and `evaluation.sources` take one source or a list. Each source is a built-in puzzle, a file, or
datasets of Reasoning Gym. `evaluation.sources` takes no puzzles. [Use your own data](../how-to/data.md) has examples.
"""
PHASES = """\
`phases` is a list of phases. Each has its own group `advantage`, with the settings of the section `advantage` above.
[Broaden, then sharpen](../how-to/broaden.md) has examples.
"""


def page() -> str:
    """Return the page."""
    top = [(name, info) for name, info in TrainConfig.model_fields.items() if not _is_section(info.annotation)]
    parts = [INTRODUCTION, "## Top level\n", _table(top, "")]
    for name, section in _sections(TrainConfig):
        parts += [f"## `{name}`\n", f"{_summary(section)}\n", _table(_settings(section), f"{name}.")]
    parts += ["## Sources\n", SOURCES]
    for title, source in (
        ("A built-in puzzle", CountdownSource),
        ("A file or a dataset", FileSource),
        ("Datasets of Reasoning Gym", GymSource),
    ):
        parts += [f"### {title}\n", f"{_summary(source)}\n", _table(_settings(source), "")]
    parts += ["## Phases\n", PHASES, _table(_settings(PhaseSettings), "")]
    return "\n".join(parts)


def _sections(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted name and the class of every section, each before those inside it."""
    for name, info in config.model_fields.items():
        if _is_section(info.annotation):
            yield f"{prefix}{name}", info.annotation
            yield from _sections(info.annotation, f"{prefix}{name}.")


def _settings(section: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [(name, info) for name, info in section.model_fields.items() if not _is_section(info.annotation)]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _summary(section: type[BaseModel]) -> str:
    """Return the first paragraph of the docstring."""
    return " ".join((section.__doc__ or "").partition("\n\n")[0].split())


def _table(settings: list[tuple[str, FieldInfo]], prefix: str) -> str:
    rows = ["| setting | type | default | description |", "|---|---|---|---|"]
    for name, info in settings:
        cells = (f"`{prefix}{name}`", type_name(info.annotation), default_text(info), _escaped(info.description or ""))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def type_name(annotation: Any) -> str:
    """Return the type of a setting as text."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(inner[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_name(choice) for choice in inner))
    if _is_section(annotation):
        return {PhaseSettings: "phase"}.get(annotation, "source")
    if origin is tuple:
        of = type_name(inner[0])
        return f"{'list of' if inner[-1] is Ellipsis else len(inner)} {f'{of}s' if of.isalpha() else of}"
    if origin is dict:
        return "mapping"
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`", NoneType: "`null`"}[annotation]


def default_text(info: FieldInfo) -> str:
    """Return a default as it stands in YAML."""
    return "required" if info.is_required() else f"`{_yaml(info.default)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(getattr(value, "label", value))  # a source by its label


def _escaped(text: str) -> str:
    """Return text of which Markdown shows every character, in the cell of a table, with links to the pages it cites."""
    shown = text.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|")
    return re.sub(r"docs/(\S+\.md)", r"[docs/\1](../\1)", shown)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
