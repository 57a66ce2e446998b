"""One task of Reasoning Gym, as a reference answer: the dataset, its settings, and the generated entry.

From its JSON text a verifier in another process scores answers exactly as the process that generated the entry. The
entry itself is stored, because some take a second to generate. It keeps the exact types of its tuples, sets and dict
keys. An entry with an object of any other type is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, Self

import numpy as np

from brorl.errors import UserError
from brorl.prompts.prompt import read_object

GYM_DOMAIN = "gym"
# The only key of a JSON object that stands for such a value.
_TUPLE, _SET, _PAIRS, _FRACTION = _MARKS = ("tuple!", "set!", "pairs!", "fraction!")


@dataclass(frozen=True)
class GymTask:
    """A generated question with all that its scorer reads."""

    data_set: str  # name of the dataset in Reasoning Gym
    entry: Mapping[str, Any]  # the generated entry: `question`, `answer` and `metadata`
    # settings of the dataset that differ from its defaults, without `seed` and `size`; JSON values
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # seed of the dataset
    index: int = 0  # index of the entry

    @property
    def answer(self) -> str | None:
        """One right answer; None for a dataset that only checks answers."""
        answer = self.entry.get("answer")
        return None if answer is None else str(answer)

    def to_text(self) -> str:
        """Return the task as one line of JSON, the same for equal tasks.

        Raises:
            ValueError: If the entry has a value that is not of a builtin type.
        """
        return json.dumps(
            {
                "data_set": self.data_set,
                "index": self.index,
                "seed": self.seed,
                "config": self.config,
                "entry": _encoded(self.entry),
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the text of a task.

        Raises:
            ValueError: With the problem, if it is not the text of a task.
        """
        keys = {"data_set": str, "index": int, "seed": int, "config": dict, "entry": dict}
        values = read_object(text, "the text of a Reasoning Gym task", keys, {})
        try:
            entry = _decoded(values.pop("entry"))
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"has an entry that cannot be read ({error})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict) or "answer" not in entry:
            raise ValueError("has an entry without answer or metadata")
        return cls(entry=entry, **values)


def require_reasoning_gym() -> None:
    """Check that Reasoning Gym is installed, without importing it.

    Raises:
        UserError: If it is not.
    """
    if find_spec("reasoning_gym") is None:
        raise UserError("the domain gym needs Reasoning Gym and a C compiler; run: pip install 'brorl[gym]'")


def _encoded(value: Any) -> Any:
    """Return a value as JSON values; a subclass of a builtin type loses its class."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Fraction):
        return {_FRACTION: str(value)}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {_SET: sorted((_encoded(item) for item in value), key=lambda item: json.dumps(item, ensure_ascii=False))}
    if isinstance(value, dict):
        plain = all(isinstance(key, str) for key in value) and set(_MARKS).isdisjoint(value)
        if plain:
            return {str.__str__(key): _encoded(item) for key, item in value.items()}
        return {_PAIRS: [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    raise ValueError(f"an entry contains an object of type {type(value).__name__}, which cannot be stored")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_decoded(item) for item in value[_TUPLE])
    if _SET in value:
        return {_decoded(item) for item in value[_SET]}
    if _FRACTION in value:
        return Fraction(value[_FRACTION])
    if _PAIRS in value:
        return {_decoded(key): _decoded(item) for key, item in value[_PAIRS]}
    return {key: _decoded(item) for key, item in value.items()}
