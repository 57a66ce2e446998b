"""What is in progress, against a clock that the tests turn by hand."""

import random

import pytest

from brorl.activity import Decoding, Round, Stage, Step, Updating
from brorl.console.screen import StatusLine


class Clock:
    def __init__(self) -> None:
        self.seconds = random.uniform(0, 1e5)

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status(clock: Clock) -> StatusLine:
    return StatusLine(Stage("starting"), clock)


def test_the_line_shows_progress_and_fits_any_width(clock: Clock, status: StatusLine) -> None:
    clock.seconds += 12
    assert status.line().endswith(" 12s")
    status.observe(Stage("evaluating", "8 prompts of aime24"))  # as `brorl eval` does
    status.observe(Decoding(3, 16, 0, 1))
    assert all(part in status.line(60) for part in (" 0s", "8 prompts of aime24", "3/16"))
    status.observe(Step(7))
    status.observe(Round(7, 3, 5, 16))
    status.observe(Stage("generation"))
    clock.seconds += 20
    status.observe(Decoding(finished=1024, rollouts=8192, tokens=30_000, depth=212))
    longest = status.line()
    parts = ("step 7", "20s", "1,024/8,192 rollouts", "5/16 groups (round 3)", "1,500 tokens/s", "token 212")
    assert all(part in longest for part in parts)
    for width in range(1, len(longest) + 1):
        line = status.line(width)
        assert len(line) <= width
        assert longest.startswith(line)
    assert status.line(80).endswith("(round 3)")  # a part is shown or not, never cut
    status.observe(Stage("training"))
    status.observe(Updating(2, 4))
    assert "update 3 of 4" in status.line()
    assert "groups" not in status.line()


def test_the_rest_of_a_step_is_told_from_the_steps_before(clock: Clock, status: StatusLine) -> None:
    for step, seconds in enumerate((30, 50, 40), 1):
        status.observe(Step(step))
        status.observe(Stage("training"))
        assert ("left" in status.line()) == (step > 1)  # of the first step nothing is known
        clock.seconds += seconds
    status.observe(Step(4))
    status.observe(Stage("generation"))
    clock.seconds += 15
    assert "about 25s left" in status.line()  # 40 is the median
    clock.seconds += 30
    assert "left" not in status.line()  # it takes longer than was thought


def test_the_rest_of_an_evaluation(clock: Clock, status: StatusLine) -> None:
    """The first evaluation is timed by the rollouts that ended, and a later one by the evaluation before it."""
    status.observe(Stage("evaluating"))
    clock.seconds += 30
    status.observe(Decoding(1, 1000, 600, 9))
    assert "20 tokens/s" in status.line()
    assert "left" not in status.line()  # too few rollouts have ended
    status.observe(Decoding(250, 1000, 600, 10))
    assert "about 1m30s left" in status.line()
    clock.seconds += 30
    status.observe(Stage("evaluating", "verifying 80 distinct responses"))  # part of the same evaluation
    assert all(part in status.line() for part in ("1m00s", "verifying 80 distinct responses"))
    status.observe(Step(1))
    status.observe(Stage("training"))
    status.observe(Stage("evaluating"))
    clock.seconds += 10
    assert all(part in status.line() for part in ("after step 1", "10s", "about 50s left"))


def test_answers_to_a_stop_request(status: StatusLine) -> None:
    status.start_training(0)
    status.observe(Stage("evaluating"))
    assert "nothing is lost" in status.stop_answer(True)
    status.observe(Step(1))
    status.observe(Stage("generation"))
    assert "after step 0; step 1" in status.stop_answer(True)
    status.observe(Stage("training"))
    assert status.stop_answer(False).startswith("finishing step 1,")
    assert status.stop_answer(False).endswith("discards it")
    status.observe(Stage("saving"))
    status.observe(Step(2))
    status.observe(Stage("generation"))  # step 2 is not saved
    status.observe(Step(3))
    status.observe(Stage("training"))
    assert status.stop_answer(False).startswith("finishing step 3,")
    assert status.stop_answer(False).endswith("discards everything after step 1")
    status.observe(Stage("evaluating"))
    assert status.stop_answer(False).startswith("finishing the evaluation after step 3,")
