"""The number of runs of a cell; parts of a measurement, recorded, limited in time, and run again where they failed."""

import math
import time
from pathlib import Path

import pytest
from harness import Check, DeviceLostError, Findings, Limits, OtherOptionsError, Part, Record, run_parts

from each_row import each_row


def part(order: list[str], name: str, error: BaseException | None = None, least_s: float = 0.0) -> Part:
    """A part that notes its turn, and fails with an error if one is given."""

    def run() -> Findings:
        order.append(name)
        if error:
            raise error
        return Findings([Check("a number", 1.0, 2.0)], {"name": name})

    return Part(name, run, least_s)


def test_a_failing_part_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    order: list[str] = []
    record, beside = Record(tmp_path, {"seed": 1}), Record(tmp_path, {"seed": 1})
    parts = [
        part(order, "a"),
        part(order, "b", RuntimeError("no kernel")),
        part(order, "c"),
        part(order, "late", None, 99.0),
    ]
    parts.append(Part("long", lambda: time.sleep(30), most_s=0.05))
    assert run_parts(parts, record, 50.0) == ["late"]
    assert order == ["a", "b", "c"]
    run_parts([part(order, "x")], beside, 50.0)  # of another process, which read the folder before
    record = Record(tmp_path, {"seed": 1})
    assert record.failed_parts() == ["b", "long"]
    assert "RuntimeError: no kernel" in record.parts["b"]["traceback"]
    assert "TimeoutError: the part took more than 0.05 s" in record.parts["long"]["traceback"]
    assert record.parts["c"]["facts"] == record.parts["x"]["facts"] | {"name": "c"}
    order.clear()
    assert run_parts([part(order, name) for name in ("a", "b", "c", "d", "long")], record, 50.0) == []
    assert order == ["d", "b", "long"]  # what failed comes last
    assert Record(tmp_path, {"seed": 1}).failed_parts() == []
    with pytest.raises(OtherOptionsError, match="give another folder"):
        Record(tmp_path, {"seed": 2})


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("illegal access"), DeviceLostError),
        (SystemExit(), SystemExit),  # such as a signal, after which nothing more is written
    ],
)
def test_a_part_that_loses_the_device_or_ends_the_process_comes_last(
    error: BaseException, raised: type[BaseException], tmp_path: Path
) -> None:
    order: list[str] = []
    with pytest.raises(raised):
        run_parts([part(order, "a", error), part(order, "b")], Record(tmp_path, {}), 50.0, lambda: True)
    record = Record(tmp_path, {})
    assert (order, record.failed_parts()) == (["a"], ["a"])
    run_parts([part(order, "a"), part(order, "b")], record, 50.0)
    assert order == ["a", "b", "a"]


def test_numbers_above_their_bound_and_nan_fail(tmp_path: Path) -> None:
    checks = [Check("equal", 2.0, 2.0), Check("above", 2.1, 2.0), Check("undefined", math.nan, 2.0)]
    record = Record(tmp_path, {})
    run_parts([Part("x", lambda: Findings(checks))], record, 50.0)
    assert [line.split(" is ")[0] for line in record.failed_checks()] == ["x: above", "x: undefined"]


@each_row(
    ("seconds", "warmups", "runs"),
    [
        (1.0, 1, 5),  # fast: all of them
        (12.0, 1, 4),  # a sixth run would pass 60 s
        (25.0, 1, 1),
        (31.0, 0, 1),  # slow: its first run counts, and is the only one
        (500.0, 0, 1),
    ],
)
def test_a_slow_cell_gets_fewer_runs(seconds: float, warmups: int, runs: int) -> None:
    limits, done = Limits(num_runs=5, num_warmups=1, cell_s=60.0), list[float]()
    while not limits.reached(done):
        done.append(seconds)
    assert (limits.warmups(done), len(done) - limits.warmups(done)) == (warmups, runs)
