"""CPU threads: chosen by the size of the model, stored with the run, compared by `brorl check`."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from brorl.api.check import _threads_line
from brorl.config.reading import make_config, read_recipe
from brorl.config.settings import TrainConfig
from brorl.model import kernels
from brorl.planning import step_forecast
from brorl.planning.step_cost import StepTimer
from brorl.rollout import chosen_engine
from brorl.training.inputs import prepare_run
from brorl.training.local_parts import LocalParts
from run_support import SMALL, command


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(chosen_engine, "_AT_START", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config_of(**settings: Any) -> TrainConfig:
    return make_config(read_recipe("quickstart"), {"engine.threads": 0, **settings}, "quickstart")


@pytest.mark.parametrize(
    ("settings", "num_weights", "number"),
    [({}, 9_999_999, 1), ({}, 10_000_000, 4), ({"engine.threads": 3}, 1, 3), ({"cluster.nodes": 1}, 1, 4)],
)
def test_a_small_model_gets_one_thread(settings: dict[str, Any], num_weights: int, number: int) -> None:
    chosen_engine.set_threads_and_kernels(config_of(**settings), num_weights)
    assert torch.get_num_threads() == number


def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    chosen_engine.set_threads_and_kernels(config_of(), 10**9)
    assert torch.get_num_threads() == 2
    assert chosen_engine.numbers_of_threads(config_of()) == [1, 2]


@pytest.mark.parametrize("choice", ["auto", "off"])
def test_the_kernels_are_those_of_the_settings(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_choice", "other")
    chosen_engine.set_threads_and_kernels(config_of(**{"engine.compile": choice}), 1)
    assert kernels._choice == choice


def test_a_missing_compiler_ends_a_run_that_needs_it_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_load", lambda: "no C compiler is found (CC, cc, gcc, clang)")
    monkeypatch.setattr(kernels, "_choice", "auto")
    outcome = command("train", *SMALL, "--engine.compile=on", "--output_dir=run")
    assert outcome.code == 2
    assert "engine.compile = on, and no C compiler is found (CC, cc, gcc, clang); install a C compiler" in outcome.err
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("small", [0, 10_000_000])
def test_a_resume_has_the_threads_that_the_run_chose(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_engine, "_SMALL", small)
    chosen = 1 if small else 4
    assert command("train", *SMALL, "--engine.threads=0", "--steps=1", "--output_dir=run").code == 0
    assert f"\n  threads: {chosen}\n" in Path("run/config.yaml").read_text()
    monkeypatch.setattr(chosen_engine, "_SMALL", 10_000_000 - small)  # another version would choose the other number
    assert command("resume", "run", "--steps=2").code == 0
    assert json.loads(Path("run/env.json").read_text())["threads"] == chosen


@pytest.mark.slow
def test_the_same_step_is_timed_with_each_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drawn, learned = [0.0], [], []
    sample, finish = step_forecast.sample_groups, StepTimer.finish

    def slow_sample(*arguments: Any, **options: Any) -> Any:
        clock[0] += torch.get_num_threads()
        drawn.append(sample(*arguments, **options))
        return drawn[-1]

    def slow_finish(self: StepTimer, sampled: Any) -> Any:
        clock[0] += 10 * torch.get_num_threads()
        learned.append(sampled)
        return finish(self, sampled)

    config = config_of(rollouts_per_prompt=16, prompts_per_step=8)
    parts = LocalParts.load(config, prepare_run(config, config.model))
    monkeypatch.setattr(step_forecast, "sample_groups", slow_sample)
    monkeypatch.setattr(StepTimer, "finish", slow_finish)
    monkeypatch.setattr(step_forecast, "perf_counter", lambda: clock[0])
    forecast = step_forecast.forecast_step(parts, tmp_path, (1, 3), max_seconds=math.inf)
    assert forecast.seconds_of_threads == {1: 11.0, 3: 33.0}
    assert torch.get_num_threads() == 1
    assert learned[-1] is learned[-2]  # the same rollouts
    sizes = [(one.groups[0].tree.num_rollouts, len(one.groups)) for one in drawn]
    assert sizes[:4] == [(2, 1), (2, 1), (8, 2), (4, 1)]  # tiny ones, one that is slow, and one that is smaller
    assert [group.tree for group in forecast.groups] == [group.tree for group in drawn[2].groups]
    assert forecast.num_prompts == 2


def test_the_line_names_a_faster_number() -> None:
    assert _threads_line({1: 0.5, 8: 2.0}, 8).endswith("the run uses 8; fastest right now: engine.threads: 1")
    assert _threads_line({1: 0.5, 8: 2.0}, 1).endswith("with 1 thread, 2 s with 8 threads; the run uses 1")
    assert _threads_line({1: 2.1, 8: 2.0}, 1).endswith("the run uses 1")
