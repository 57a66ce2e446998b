"""What is under way, against a clock that the tests turn by hand."""

import random

import pytest

from brorl.activity import Decoding, Phase, Round, Step, Updating
from brorl.console.under_way import UnderWay


class Clock:
    def __init__(self) -> None:
        self.seconds = random.uniform(0, 1e5)

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def under_way(clock: Clock) -> UnderWay:
    return UnderWay(Phase("starting"), clock)


def test_the_line_tells_phase_progress_and_rate(clock: Clock, under_way: UnderWay) -> None:
    assert under_way.line() == "starting for 0s"
    clock.seconds += 12
    assert under_way.line() == "starting for 12s"
    under_way.observe(Phase("loading", "model"))
    assert under_way.line() == "loading model for 0s"
    under_way.observe(Phase("generation", "8 prompts of aime24"))  # as `brorl eval` does
    under_way.observe(Decoding(3, 16, 0, 1))
    assert under_way.line(60) == "sampling 8 prompts of aime24 for 0s, 3/16 rollouts"
    under_way.observe(Step(7))
    under_way.observe(Round(7, 3, 5, 16))
    under_way.observe(Phase("generation"))
    clock.seconds += 20
    under_way.observe(Decoding(finished=1024, rollouts=8192, tokens=30_000, depth=212))
    whole = under_way.line()
    assert whole == (
        "step 7, sampling for 20s, 1,024/8,192 rollouts, 5/16 groups (round 3), 1,500 tokens/s, at token 212"
    )
    for width in range(1, len(whole) + 1):
        line = under_way.line(width)
        assert len(line) <= width
        assert whole.startswith(line)
    assert under_way.line(80).endswith("(round 3)")  # a part is shown or not, never cut
    under_way.observe(Phase("verification"))
    assert under_way.line() == "step 7, verifying for 0s, 5/16 groups (round 3)"
    under_way.observe(Phase("training"))
    under_way.observe(Updating(2, 4))
    assert under_way.line() == "step 7, learning for 0s, update 3 of 4"


def test_the_rest_of_a_step_is_told_from_the_steps_before(clock: Clock, under_way: UnderWay) -> None:
    for step, seconds in enumerate((30, 50, 40), 1):
        under_way.observe(Step(step))
        under_way.observe(Phase("training"))
        assert ("left" in under_way.line()) == (step > 1)  # of the first step nothing is known
        clock.seconds += seconds
    under_way.observe(Step(4))
    under_way.observe(Phase("generation"))
    clock.seconds += 15
    assert under_way.line() == "step 4, sampling for 15s, about 25s left"  # 40 is the median
    clock.seconds += 30
    assert "left" not in under_way.line()  # it takes longer than was thought


def test_the_rest_of_an_evaluation(clock: Clock, under_way: UnderWay) -> None:
    """By the rollouts that ended if there was none before, else by the one before."""
    under_way.observe(Phase("evaluating"))
    clock.seconds += 30
    under_way.observe(Decoding(1, 1000, 600, 9))
    assert under_way.line() == "evaluating before training for 30s, 1/1,000 rollouts, 20 tokens/s, at token 9"
    under_way.observe(Decoding(250, 1000, 600, 10))
    assert "about 1m30s left" in under_way.line()
    clock.seconds += 30
    under_way.observe(Phase("evaluating", "verifying 80 distinct responses"))  # part of the same evaluation
    assert under_way.line().startswith("evaluating before training for 1m00s, verifying 80 distinct responses")
    under_way.observe(Step(1))
    under_way.observe(Phase("training"))
    under_way.observe(Phase("evaluating"))
    clock.seconds += 10
    assert under_way.line() == "evaluating after step 1 for 10s, about 50s left"


def test_answers_to_a_stop_request(clock: Clock, under_way: UnderWay) -> None:
    under_way.start_from(0)
    under_way.evaluates_after = lambda step: step == 3
    under_way.observe(Phase("evaluating"))
    assert under_way.answer(True) == "stopping now: training has not begun, so nothing is lost"
    clock.seconds += 100
    under_way.observe(Step(1))
    under_way.observe(Phase("generation"))
    answer = under_way.answer(True)
    assert answer.startswith("stopping now and saving the state after step 0; step 1 has not learned anything yet")
    under_way.observe(Phase("training"))
    assert under_way.answer(False) == "finishing step 1, then saving; Ctrl-C again stops now and discards it"
    for phase, seconds in (("training", 20), ("storing", 3), ("diagnostics", 2), ("saving", 7)):
        under_way.observe(Phase(phase))
        clock.seconds += seconds
    under_way.observe(Step(2))
    under_way.observe(Phase("training"))
    clock.seconds += 5
    left = 20 + 3 + 2 + 7 - 5
    assert under_way.answer(False) == (
        f"finishing step 2, then saving (about {left}s); Ctrl-C again stops now and discards it"
    )
    clock.seconds += 15
    under_way.observe(Phase("generation"))  # step 2 is not saved
    under_way.observe(Step(3))
    under_way.observe(Phase("training"))
    assert under_way.answer(False) == (  # the evaluation took 100 s
        "finishing step 3, then saving (about 2m12s); Ctrl-C again stops now and discards what came after step 1"
    )
    under_way.observe(Phase("evaluating"))
    clock.seconds += 40
    assert under_way.answer(False).startswith("finishing the evaluation after step 3, then saving (about 1m07s);")
