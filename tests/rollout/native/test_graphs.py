"""Recorded steps of decoding: the same trees, kept between calls, and what happens where a step cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

import brorl.rollout.native_engine as native
from brorl.errors import UserError
from brorl.model import cuda_graphs
from brorl.rollout.engine import SampleTask
from brorl.rollout.native.graphs import StepGraphs
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from engine_checks import EOS, assert_same_trees, lockstep, ragged_prompts
from recorded_steps import RecordedSteps
from small_models import small_model


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines draw for single rows as on CUDA."""
    monkeypatch.setattr(native, "draws_on", lambda _: True)


def recording(model: object, capture: RecordedSteps, choice: str = "auto") -> tuple[NativeEngine, list[str]]:
    """Return an engine that records its steps, and the lines that it says."""
    lines: list[str] = []
    engine = NativeEngine(model, EOS)
    engine._graphs = StepGraphs(choice, lines.append, lambda: capture)
    return engine, lines


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "hooked"])
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
        got = engine.sample(SampleTask(prompts, 4, sampling, seed=3))
        expected = lockstep(
            monkeypatch, lambda: NativeEngine(model, EOS).sample(SampleTask(prompts, 4, sampling, seed=3))
        )
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
    expected = NativeEngine(model, EOS).sample(SampleTask(prompts, 8, sampling, seed=2))

    def refuse(steps: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        steps[0]()
        raise RuntimeError("operation not permitted when stream is capturing.\nmore")

    engine, lines = recording(model, refuse)
    for _ in range(2):
        assert_same_trees(engine.sample(SampleTask(prompts, 8, sampling, seed=2)), expected)
    message = "RuntimeError: operation not permitted when stream is capturing"
    assert lines == [f"decoding launches its kernels one by one, without CUDA graphs: {message}"]
    assert engine._reusable_decoder is None  # it keeps no memory for graphs
    engine, _ = recording(model, refuse, "on")
    with pytest.raises(UserError, match=rf"engine.cuda_graphs = on, but .*{message}; set engine.cuda_graphs: auto"):
        engine.sample(SampleTask(prompts, 8, sampling, seed=2))


def read_a_number(x: Tensor) -> Tensor:
    return x if float(x.abs().max()) else 2 * x


def count_a_mask(x: Tensor) -> Tensor:
    return x * max(1, x[x != x].numel())


def look_for_places(x: Tensor) -> Tensor:
    return x.index_fill(0, (x[:, 0] != x[:, 0]).nonzero()[:, 0], 1.0)


@pytest.mark.parametrize(
    ("waits", "name"), [(read_a_number, "_local_scalar_dense"), (count_a_mask, "index"), (look_for_places, "nonzero")]
)
def test_a_step_in_which_the_host_waits_is_not_recorded(
    waits: Callable[[Tensor], Tensor], name: str, rng: np.random.Generator
) -> None:
    """A recorded step would repeat what the host decided once."""
    model, prompts = small_model("hooked", seed=int(rng.integers(1 << 30))), ragged_prompts(rng, 3)
    sampling = SamplingParams(max_new_tokens=8)
    expected = NativeEngine(model, EOS).sample(SampleTask(prompts, 8, sampling, seed=2))
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _inputs, output: waits(output))
    capture = RecordedSteps()
    engine, lines = recording(model, capture)
    assert_same_trees(engine.sample(SampleTask(prompts, 8, sampling, seed=2)), expected)
    assert capture.captures == 0
    assert lines == [f"decoding launches its kernels one by one, without CUDA graphs: {name} makes the host wait"]


@pytest.mark.parametrize("change", [0.9, float("nan")])
def test_a_replay_with_other_logits_is_not_taken(change: float, rng: np.random.Generator) -> None:
    model, prompts = small_model(seed=int(rng.integers(1 << 30))), ragged_prompts(rng, 3)
    sampling = SamplingParams(max_new_tokens=8)
    expected = NativeEngine(model, EOS).sample(SampleTask(prompts, 8, sampling, seed=2))
    engine, lines = recording(model, RecordedSteps(lambda: engine._reusable_decoder._logits.mul_(change)))
    assert_same_trees(engine.sample(SampleTask(prompts, 8, sampling, seed=2)), expected)
    assert lines == ["decoding launches its kernels one by one, without CUDA graphs: its logits change"]


def test_graphs_need_a_cuda_device() -> None:
    with pytest.raises(UserError, match=r"engine.cuda_graphs = on needs tree attention on a CUDA device, .* on cpu"):
        NativeEngine(small_model(), EOS, graphs="on")


@pytest.mark.slow
def test_slots_without_a_row_forget_the_positions_of_an_earlier_call(rng: np.random.Generator) -> None:
    """A row in 8 slots, 7 of which had a long prompt before: that and the new tokens are beyond all rotations."""
    model = small_model(seed=int(rng.integers(1 << 30)), scale=0.1)
    engine, lines = recording(model, RecordedSteps())
    engine.sample(SampleTask([rng.integers(1, 17, 200).tolist()], 8, SamplingParams(max_new_tokens=2), seed=0))
    sampling = SamplingParams(temperature=0, max_new_tokens=80)
    got = engine.sample(SampleTask([[1, 2]], 8, sampling, seed=1))
    assert_same_trees(got, NativeEngine(model, EOS).sample(SampleTask([[1, 2]], 8, sampling, seed=1)))
    assert not lines


@pytest.mark.slow
def test_graphs_for_tensors_in_other_memory_have_a_new_pool(rng: np.random.Generator) -> None:
    """The pool of the graphs that were dropped ends with them; torch refuses to record into it again."""
    model, captures = small_model(seed=int(rng.integers(1 << 30))), []
    engine = NativeEngine(model, EOS)
    engine._graphs = StepGraphs("on", print, lambda: captures.append(RecordedSteps()) or captures[-1])
    for _ in range(2):
        for _ in range(2):
            engine.sample(SampleTask(ragged_prompts(rng, 2), 4, SamplingParams(max_new_tokens=8), seed=3))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    num_captures = len(captures)
    engine.sample(SampleTask([[1, 2]], 4, SamplingParams(max_new_tokens=8), seed=3))
    assert len(captures) == num_captures + 1
    assert all(capture.captures for capture in captures)


def test_a_failed_capture_leaves_the_stream_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context of torch does not restore it if its end fails, as it does after an error in the step."""
    current: list[object] = ["default"]

    class Stream:
        def __init__(self, *_: object) -> None: ...

        def wait_stream(self, _: object) -> None: ...

    class Within:
        def __init__(self, stream: object) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            self._before, current[0] = current[0], self._stream

        def __exit__(self, *_: object) -> None:
            current[0] = self._before

    class Graph:
        def capture_begin(self, *_: object, **__: object) -> None: ...

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    fakes = {"Stream": Stream, "current_stream": Stream, "stream": Within, "CUDAGraph": Graph, "device": nullcontext}
    fakes |= {name: lambda: None for name in ("graph_pool_handle", "synchronize", "empty_cache")}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    cuda_graphs._stream.cache_clear()
    steps = []
    capture = cuda_graphs.CudaCapture(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="previous error"):
        capture([lambda: steps.append(current[0])])
    cuda_graphs._stream.cache_clear()
    assert [type(stream) for stream in steps] == [Stream, Stream]
    assert current == ["default"]


@pytest.mark.slow
def test_calls_of_other_sizes_keep_the_memory_and_the_graphs(rng: np.random.Generator) -> None:
    """With little memory, fewer rows leave more of it for keys and values, and more rows less."""
    model, captures = small_model(seed=int(rng.integers(1 << 30)), scale=0.1), []
    engine = NativeEngine(model, EOS, memory_bytes=120_000)
    engine._graphs = StepGraphs("on", print, lambda: captures.append(RecordedSteps()) or captures[-1])
    prompts, sampling = [[1, 2, 3], [4, 5, 6]], SamplingParams(max_new_tokens=16)
    for num_rollouts in (40, 6, 40, 12, 24, 5):
        trees = engine.sample(SampleTask(prompts, num_rollouts, sampling, seed=1))
        assert_same_trees(trees, NativeEngine(model, EOS).sample(SampleTask(prompts, num_rollouts, sampling, seed=1)))
    assert len(captures) == 1
