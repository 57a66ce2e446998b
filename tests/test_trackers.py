"""Trackers: the numbers that the real libraries stored offline, after a resume and after a failure."""

import contextlib
import json
import math
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl import trackers as module
from brorl.errors import UserError
from brorl.runs.step_record import StepRecord, from_json, to_json
from brorl.trackers import flat_numbers, open_trackers

needs_tensorboard = pytest.mark.skipif(not find_spec("tensorboard"), reason="pip install 'brorl[tensorboard]'")


def record(step: int, rng: np.random.Generator) -> StepRecord:
    """A metrics record; a later line of the same step differs."""
    line: dict[str, Any] = {
        "step": step,
        "sampling": {"reward": float(rng.random()), "groups": int(rng.integers(9))},
        "update": {"loss": float(rng.normal()), "reference_kl": None, "grad_norm": math.inf},
        "coverage": {"pooled": {"q_pos": float(rng.random())}, "prompts": {"id": ["a", "b"], "q_pos": [0.1, 0.2]}},
    }
    if step % 2 == 0:
        line["evaluation"] = {"pass_at": {16: {"value": float(rng.random()), "low": 0.0, "high": 1.0}}, "solved": 3}
    return from_json(line if step else {"step": 0, "evaluation": line["evaluation"]})


def expected(records: Sequence[StepRecord]) -> dict[str, dict[int, float]]:
    """Return the expected numbers by name and step: those of the lines that the file would have."""
    table: dict[str, dict[int, float]] = {}
    for line in map(to_json, records):
        left = [("", line)]
        while left:
            above, values = left.pop()
            for key, value in values.items():
                if isinstance(value, dict):
                    left.append((f"{above}{key}/", value))
                elif isinstance(value, int | float) and math.isfinite(value) and above:
                    table.setdefault(f"{above}{key}", {})[line["step"]] = float(value)
    return table


def read_tensorboard(directory: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    table: dict[str, dict[int, float]] = {}
    for name in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(name)]
        assert len(steps) == len(set(steps)), f"{name} has a step twice: {steps}"
        table[name] = {event.step: event.value for event in events.Scalars(name)}
    return table


def assert_same(got: Mapping[str, Mapping[int, float]], records: Sequence[StepRecord], rel: float) -> None:
    wanted = expected(records)
    assert set(got) == set(wanted)
    for name, at in wanted.items():
        assert dict(got[name]) == pytest.approx(at, rel=rel), name


def test_names_and_numbers_of_a_record(rng: np.random.Generator) -> None:
    line = record(4, rng)
    numbers = flat_numbers(to_json(line))
    assert numbers == {name: at[4] for name, at in expected([line]).items()}
    assert all(type(number) is float for number in numbers.values())
    assert numbers["sampling/reward"] == line.sampling.reward
    assert flat_numbers({"sampling": {"cut": True, "note": "text"}}) == {"sampling/cut": 1.0}
    assert flat_numbers({"step": 3, "pilot": {"step": 2}, "nan": math.nan}) == {"pilot/step": 2.0}


@needs_tensorboard
def test_tensorboard_after_a_kill_and_a_step_back(tmp_path: Path, rng: np.random.Generator) -> None:
    """The run is killed after step 7 and resumed from step 4; steps 5 to 9 have other numbers than before."""
    said: list[str] = []
    first = [record(step, rng) for step in range(8)]
    killed = open_trackers(["tensorboard"], "project", "run", {"seed": 1}, tmp_path, said.append)
    for line in first:
        killed.log(line)
    assert_same(read_tensorboard(tmp_path), first, rel=1e-6)  # nothing waits in memory

    history = [from_json(json.loads(json.dumps(to_json(line)))) for line in first[:5]]  # as read from the file
    second = [record(step, rng) for step in range(5, 10)]
    resumed = open_trackers(["tensorboard"], "project", "run", {"seed": 1}, tmp_path, said.append, history)
    for line in second:
        resumed.log(line)
    resumed.close()
    assert_same(read_tensorboard(tmp_path), [*first[:5], *second], rel=1e-6)

    # A tracker that is new to a resumed run receives the whole history.
    (tmp_path / "trackers.json").unlink()
    other = tmp_path / "other"
    other.mkdir()
    open_trackers(["tensorboard"], "project", "run", {}, other, said.append, [*first[:5], *second]).close()
    assert_same(read_tensorboard(other), [*first[:5], *second], rel=1e-6)
    killed.close()
    assert said == []


@needs_tensorboard
def test_an_attempt_without_an_update_does_not_hide_its_step(tmp_path: Path, rng: np.random.Generator) -> None:
    """An attempt has the number of the step that it could not make; a resumed run makes that step."""
    done = [record(step, rng) for step in range(3)]
    attempt = from_json({"step": 3, "attempt": 0, "sampling": {"reward": 0.0}})
    stopped = open_trackers(["tensorboard"], "project", "run", {}, tmp_path, print)
    for line in (*done, attempt):
        stopped.log(line)
    stopped.close()
    resumed = open_trackers(["tensorboard"], "project", "run", {}, tmp_path, print, [*done, attempt])
    resumed.log(last := record(3, rng))
    resumed.close()
    assert_same(read_tensorboard(tmp_path), [*done, last], rel=1e-6)


@needs_tensorboard
def test_a_tracker_that_fails_is_closed_and_gets_the_missing_steps_later(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    said: list[str] = []
    records = [record(step, rng) for step in range(8)]
    add_scalar = SummaryWriter.add_scalar

    def failing(self: SummaryWriter, name: str, value: float, step: int) -> None:
        if step == 3 and name == "update/loss":
            raise ConnectionError("no route to host\nmore")
        add_scalar(self, name, value, step)

    running = open_trackers(["tensorboard"], "project", "run", {}, tmp_path, said.append)
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "add_scalar", failing)
        for line in records[:6]:
            running.log(line)
    running.close()
    assert len(said) == 1
    assert said[0].startswith("the tracker tensorboard failed at step 3 (no route to host); the run continues")
    assert max(read_tensorboard(tmp_path)["sampling/reward"]) == 3  # part of step 3, and nothing of 4 and 5

    resumed = open_trackers(["tensorboard"], "project", "run", {}, tmp_path, said.append, records[:6])
    for line in records[6:]:
        resumed.log(line)
    resumed.close()
    assert_same(read_tensorboard(tmp_path), records, rel=1e-6)
    assert len(said) == 1


OFFLINE = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
from brorl.runs.step_record import from_json
from brorl.trackers import open_trackers
first, history, second, directory = json.loads(sys.argv[1]), *map(json.loads, sys.argv[2:4]), Path(sys.argv[4])
said = []
names = ["wandb", "trackio", "wandb"]
for lines, told in ((first, []), (second, history)):
    read = [*map(from_json, told)]
    opened = open_trackers(names, "words", "my run", {"loss": {"clip": 0.2}}, directory, said.append, read)
    for line in lines:
        opened.log(from_json(line))
    opened.close()
assert not said, said
"""


@pytest.mark.slow
def test_wandb_and_trackio_offline(tmp_path: Path, rng: np.random.Generator) -> None:
    """The steps that a resumed run repeats are not sent twice; in a subprocess: both leave threads."""
    if not (find_spec("wandb") and find_spec("trackio")):
        pytest.skip("pip install 'brorl[wandb,trackio]'")
    first = [record(step, rng) for step in range(6)]
    second = [record(step, rng) for step in range(4, 9)]
    whole = [*first, *second[2:]]  # the first version of steps 4 and 5 stays
    texts = (json.dumps([*map(to_json, lines)]) for lines in (first, first[:4], second))
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *texts, str(tmp_path)],
        env={
            "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1",
            "TRACKIO_DIR": str(tmp_path / "trackio"), "OMP_NUM_THREADS": "1",
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    print(done.stdout, done.stderr)

    told = json.loads((tmp_path / "trackers.json").read_text())
    assert {name: entry["told"] for name, entry in told.items()} == {"wandb": 8, "trackio": 8}
    assert_same(read_trackio(tmp_path / "trackio" / "words.db", told["trackio"]["id"]), whole, rel=1e-12)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [file.stem for file in files] == [f"run-{told['wandb']['id']}"] * 2  # one run, in two parts
    table: dict[str, dict[int, float]] = {}
    for file in files:
        for name, at in read_wandb(file).items():
            assert not set(at) & set(table.get(name, {}))
            table.setdefault(name, {}).update(at)
    assert_same(table, whole, rel=1e-12)


def read_trackio(database: Path, run: str) -> dict[str, dict[int, float]]:
    table: dict[str, dict[int, float]] = {}
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT run_id, run_name, step, metrics FROM metrics").fetchall()
    assert len({identity for identity, *_ in rows}) == 1
    for _, name_of_run, step, metrics in rows:
        assert name_of_run == run
        for name, number in json.loads(metrics).items():
            assert step not in table.setdefault(name, {}), f"{name} has step {step} twice"
            table[name][step] = number
    return table


def read_wandb(file: Path) -> dict[str, dict[int, float]]:
    """Read the history of an offline run: protobuf records in a log of 32 KiB blocks, each piece after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole = file.read_bytes(), 7, b""
    table: dict[str, dict[int, float]] = {}
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last piece of one
            parsed = Record.FromString(whole)
            whole = b""
            for item in parsed.history.item:
                name = item.key or ".".join(item.nested_key)
                if not name.startswith("_"):
                    table.setdefault(name, {})[parsed.history.step.num] = json.loads(item.value_json)
    return table


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_a_missing_package_is_an_error_before_anything_is_written(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda package: None if package == name else object())
    with pytest.raises(UserError, match=rf"needs the package {name}, .*pip install 'brorl\[{name}\]'"):
        open_trackers([name], "project", "run", {}, tmp_path, print)
    assert not list(tmp_path.iterdir())


@needs_tensorboard
def test_a_tracker_that_does_not_start_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(
        UserError, match=r"the tracker tensorboard did not start: .*remove tensorboard from tracking\.to"
    ):
        open_trackers(["tensorboard"], "project", "run", {}, tmp_path, print)


@pytest.mark.parametrize("content", ["{", "[1]", '{"wandb": {"id": "a"}}', '{"wandb": {"id": "a", "told": "x"}}'])
def test_a_damaged_state_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text(content)
    with pytest.raises(UserError, match=r"trackers\.json is damaged; remove it"):
        open_trackers([], "project", "run", {}, tmp_path, print)


def test_no_trackers_write_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    none = open_trackers([], "project", "run", {}, tmp_path, print, [record(0, rng)])
    none.log(record(1, rng))
    none.close()
    assert not list(tmp_path.iterdir())
