"""The exit code of a run that ends, at its start and when it is resumed."""

from pathlib import Path

import pytest

from brorl.api.training_session import TrainingResult
from brorl.training.loop import Ending
from each_row import each_row
from run_support import command


@each_row(
    ("ending", "code"),
    [
        (Ending.FINISHED, 0),
        (Ending.COLLAPSED, 0),
        (Ending.STALLED, 0),
        (Ending.NO_MIXED_GROUPS, 1),
        (Ending.UNVERIFIED, 1),
        (Ending.INTERRUPTED, 130),
    ],
)
def test_it_follows_from_the_ending(ending: Ending, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    result = TrainingResult(Path("run"), ending, "the machine is ill", (), (), None, None)
    monkeypatch.setattr("brorl.api.train.train", lambda *_, **__: result)
    outcome = command("train")
    assert (outcome.code, outcome.out, outcome.err) == (code, "", "")
