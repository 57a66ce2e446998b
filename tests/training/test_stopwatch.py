"""The stopwatch against a made-up clock, and the CPU clock against sleep."""

import time

import pytest

from brorl.activity import Stopwatch


def test_phases_add_up_on_any_clock() -> None:
    ticks = iter([0.0, 1.0, 4.0, 6.0, 6.5, 10.0])
    clock = Stopwatch(now=lambda: next(ticks))
    with clock("a"):
        pass
    with clock("a"):
        pass
    assert clock.seconds() == {"a": pytest.approx(3.5), "total": pytest.approx(10.0)}


def test_the_cpu_clock_does_not_count_waiting() -> None:
    clocks = Stopwatch(now=time.process_time), Stopwatch()
    with clocks[0]("wait"), clocks[1]("wait"):
        time.sleep(0.2)
    cpu, wall = (clock.seconds()["wait"] for clock in clocks)
    assert wall >= 0.2
    assert cpu < wall / 2
