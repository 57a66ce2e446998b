"""The text of a task of Reasoning Gym gives back its values; those of exact types: `test_values`."""

import json
from fractions import Fraction

import numpy as np
import pytest

from brorl.verification.gym.task import GymTask
from each_row import each_row


def test_a_task_comes_back_from_its_text_with_builtin_values() -> None:
    """Scalars of numpy become numbers, and fractions text; the type of every other value stays."""
    metadata = {np.str_("name"): np.int64(3), "f": Fraction(1, 3), "deep": [((1, {2: {"x"}}), np.bool_(True))], 5: None}
    task = GymTask("maze", {"answer": np.str_("a"), "metadata": metadata}, {"min_dist": 3}, 5, 17)
    read = GymTask.from_text(task.to_text())
    assert repr(read.entry["metadata"]) == "{'name': 3, 'f': '1/3', 'deep': [((1, {2: {'x'}}), True)], 5: None}"
    assert (read.data_set, read.config, read.seed, read.index) == ("maze", {"min_dist": 3}, 5, 17)
    assert type(read.answer) is str
    assert read.to_text() == task.to_text()


def test_an_object_is_rejected() -> None:
    with pytest.raises(ValueError, match="of type object"):
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
        (json.dumps({**RIGHT, "entry": {"d": [["answer", "7"]]}}), "without answer or metadata"),
        (json.dumps({**RIGHT, "entry": {"t": []}}), "without answer or metadata"),
        (json.dumps({**RIGHT, "entry": {"answer": "7", "metadata": {}}}), "cannot be read"),
    ],
)
def test_other_texts_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GymTask.from_text(text)
