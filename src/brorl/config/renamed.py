"""Settings that had another name or form: they are still read, and a line names the current one.

In: settings by dotted name, from recipes, options and run directories of any age. Out: current settings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from brorl.errors import UserError

RENAMED: dict[str, str] = {}
_N, _AVERAGE, _ENABLED = "rollouts_per_prompt", "adaptive.samples_per_prompt", "adaptive.enabled"
OLD_NAMES = {**RENAMED, _AVERAGE: _N}  # each with the setting to use now
_DEFAULT_AVERAGE = 64
_SCHEME = "sampling.scheme"


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the current name of each.

    Raises:
        UserError: If a value is no longer available.
    """
    if settings.get(_SCHEME, "iid") != "iid":
        raise UserError(
            f"{_SCHEME} = {settings[_SCHEME]} is no longer available, and rollouts are independent; remove {_SCHEME}"
        )
    for old, new in RENAMED.items():
        if old in settings:
            _notice(f"{old} is now {new}; write {new}: {settings[old]}")
    return {RENAMED.get(name, name): value for name, value in settings.items() if name != _SCHEME}


def with_adaptive_switch(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with a number of rollouts per prompt, where it was `adaptive` with an average beside it.

    The average had no effect on a run with a fixed number of rollouts, and is dropped there.
    """
    current = {name: value for name, value in settings.items() if name != _AVERAGE}
    average = settings.get(_AVERAGE, _DEFAULT_AVERAGE)
    if settings.get(_N) == "adaptive" or (settings.get(_ENABLED) and _AVERAGE in settings):
        _notice(f"rollouts_per_prompt is now a number; write adaptive.enabled: true and {_N}: {average}")
        return {_ENABLED: True, **current, _N: average}
    return current


@cache
def _notice(line: str) -> None:
    """Print a line once."""
    print(f"brorl: {line}", file=sys.stderr)  # noqa: T201
