"""The defaults of all datasets of Reasoning Gym, checked in a worker."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from reasoning_gym.factory import DATASETS

from brorl.verification.gym.entries import check_source


def rejected() -> tuple[list[Any], int]:
    """Return the problems with defaults, and how many defaults were checked."""
    problems, checked = [], 0
    for name, (_, settings) in DATASETS.items():
        if name == "composite":
            continue
        for field in dataclasses.fields(settings):
            if field.name in ("size", "seed"):
                continue
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            try:
                written = json.loads(json.dumps(value))
            except TypeError:
                continue  # a recipe cannot hold it
            outcome = check_source([name], {name: {field.name: written}})
            problem = outcome if isinstance(outcome, str) else None
            checked += 1
            if problem and "which must be" in problem:
                problems.append([name, field.name, problem])
    return problems, checked
