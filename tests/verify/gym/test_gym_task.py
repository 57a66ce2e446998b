"""The text of a task of Reasoning Gym gives back equal values of exactly the same types."""

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.verification.gym.task import GymTask
from each_row import each_row

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.fractions()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.sampled_from(["tuple!", "set!", "pairs!"])
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(SIMPLE, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    """Return a value with the type of each part; the parts of a set in any order."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, set):
        return kind, sorted(map(repr, map(shape, value)))
    if isinstance(value, list | tuple):
        return kind, [shape(item) for item in value]
    return kind, value


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_values_and_types_survive(metadata: dict[str, Any]) -> None:
    task = GymTask("maze", {"question": "?", "answer": "7", "metadata": metadata}, {"min_dist": 3}, 5, 17)
    read = GymTask.from_text(task.to_text())
    assert shape(read.entry) == shape(task.entry)
    assert (read.data_set, read.config, read.seed, read.index) == ("maze", {"min_dist": 3}, 5, 17)
    assert read.to_text() == task.to_text()


def test_subclasses_and_numpy_scalars_become_builtin_values() -> None:
    metadata = {np.str_("name"): np.int64(3), "share": np.float64(0.5), "flag": np.bool_(True), "f": Fraction(1, 3)}
    read = GymTask.from_text(GymTask("maze", {"answer": np.str_("a"), "metadata": metadata}).to_text())
    assert shape(read.entry["metadata"]) == shape({"name": 3, "share": 0.5, "flag": True, "f": Fraction(1, 3)})
    assert type(read.answer) is str


def test_an_object_is_rejected() -> None:
    with pytest.raises(ValueError, match="an object of type object, which cannot be stored"):
        GymTask("maze", {"answer": "7", "metadata": {"deep": [(1, object())]}}).to_text()


RIGHT = json.loads(GymTask("maze", {"answer": "7", "metadata": {}}).to_text())


@each_row(
    ("text", "problem"),
    [
        ("7", "input should be an object"),
        ("{", "is not JSON text"),
        ("[" * 100_000, "is not JSON text"),
        (json.dumps({**RIGHT, "more": 1}), "has the unknown key more"),
        (json.dumps({**RIGHT, "index": "0"}), "has '0' as index"),
        (json.dumps({**RIGHT, "entry": {"answer": "7"}}), "without answer or metadata"),
        (json.dumps({**RIGHT, "entry": {"tuple!": []}}), "without answer or metadata"),
        (json.dumps({**RIGHT, "entry": {"pairs!": [[1]]}}), "cannot be read"),
        (json.dumps({**RIGHT, "entry": {"set!": [[]]}}), "cannot be read"),
        (json.dumps({**RIGHT, "entry": {"answer": {"fraction!": "1/0"}}}), "cannot be read"),
    ],
)
def test_other_texts_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GymTask.from_text(text)
