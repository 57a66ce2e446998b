"""Recorded steps of decoding: the same trees, kept between calls, and what happens where a step cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_native import EOS, assert_same_trees, ragged_prompts
from test_slots import lockstep

import brorl.rollout.native.engine as native
from brorl.errors import UserError
from brorl.rollout.native.engine import NativeEngine
from brorl.rollout.native.graphs import StepGraphs
from brorl.sampling import SamplingParams
from recorded_steps import RecordedSteps
from small_models import mostly_slow, small_model


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines draw for single rows as on CUDA."""
    monkeypatch.setattr(native, "draws_on", lambda _: True)


def recording(model: object, capture: RecordedSteps, choice: str = "auto") -> tuple[NativeEngine, list[str]]:
    """Return an engine that records its steps, and the lines that it says."""
    lines: list[str] = []
    engine = NativeEngine(model, EOS)
    engine._graphs = StepGraphs(choice, lines.append, capture)
    return engine, lines


@pytest.mark.parametrize("architecture", mostly_slow(["llama", "qwen3", "hooked"]))
def test_recorded_steps_are_kept_and_see_new_weights(
    architecture: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that change in place need no new graph; weights in other memory need all of them."""
    model = small_model(architecture, seed=int(rng.integers(1 << 30)), scale=0.3)
    prompts, sampling = ragged_prompts(rng, 2), SamplingParams(temperature=0.7, max_new_tokens=18)
    capture = RecordedSteps()
    engine, lines = recording(model, capture)

    def compare() -> int:
        before = capture.captures
        got = engine.sample(prompts, 4, sampling, seed=3)
        expected = lockstep(monkeypatch, lambda: NativeEngine(model, EOS).sample(prompts, 4, sampling, seed=3))
        assert_same_trees(got, expected)
        return capture.captures - before

    assert compare() > 1
    assert compare() == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    compare()
    for parameter in model.parameters():
        parameter.data = 0.99 * parameter.data
    assert compare() > 1
    model.model.norm.weight = torch.nn.Parameter(1.1 * model.model.norm.weight.data)
    assert compare() > 1
    assert capture.replays > 2 * capture.captures
    assert not lines


def test_a_step_that_cannot_be_recorded_runs_eagerly(rng: np.random.Generator) -> None:
    model, prompts = small_model(seed=int(rng.integers(1 << 30))), ragged_prompts(rng, 3)
    sampling = SamplingParams(max_new_tokens=8)
    expected = NativeEngine(model, EOS).sample(prompts, 8, sampling, seed=2)

    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        step()
        raise RuntimeError("operation not permitted when stream is capturing.\nmore")

    engine, lines = recording(model, refuse)
    for _ in range(2):
        assert_same_trees(engine.sample(prompts, 8, sampling, seed=2), expected)
    said = "RuntimeError: operation not permitted when stream is capturing"
    assert lines == [f"decoding starts its kernels one by one, without CUDA graphs: {said}"]
    engine, _ = recording(model, refuse, "on")
    with pytest.raises(UserError, match=rf"engine.cuda_graphs = on, and .*{said}; set engine.cuda_graphs: auto"):
        engine.sample(prompts, 8, sampling, seed=2)


@pytest.mark.parametrize("change", [0.9, float("nan")])
def test_a_replay_with_other_logits_is_not_taken(change: float, rng: np.random.Generator) -> None:
    model, prompts = small_model(seed=int(rng.integers(1 << 30))), ragged_prompts(rng, 3)
    sampling = SamplingParams(max_new_tokens=8)
    expected = NativeEngine(model, EOS).sample(prompts, 8, sampling, seed=2)
    engine, lines = recording(model, RecordedSteps(lambda: engine._kept._logits.mul_(change)))
    assert_same_trees(engine.sample(prompts, 8, sampling, seed=2), expected)
    assert lines == ["decoding starts its kernels one by one, without CUDA graphs: its logits change"]


def test_graphs_need_a_cuda_device() -> None:
    with pytest.raises(UserError, match=r"engine.cuda_graphs = on needs tree attention on a CUDA device, .* on cpu"):
        NativeEngine(small_model(), EOS, graphs="on")
