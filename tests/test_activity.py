"""The stopwatch against a made-up clock, and the clock that a setting names."""

import time

import pytest

from brorl.activity import Stopwatch
from brorl.rollout.settings import EngineSettings


def test_phases_add_up_on_any_clock() -> None:
    ticks = iter([0.0, 1.0, 4.0, 6.0, 6.5, 10.0])
    clock = Stopwatch(now=lambda: next(ticks))
    with clock("a"):
        pass
    with clock("a"):
        pass
    assert clock.seconds() == {"a": pytest.approx(3.5), "total": pytest.approx(10.0)}


def test_the_cpu_clock_counts_the_time_of_the_process() -> None:
    clocks = {name: EngineSettings(clock=name).now for name in ("cpu", "wall")}  # type: ignore[arg-type]
    assert clocks == {"cpu": time.process_time, "wall": time.perf_counter}
