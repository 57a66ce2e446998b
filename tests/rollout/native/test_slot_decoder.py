"""When the host looks at rows that the device draws alone; their trees are tested in `test_random_trees`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import brorl.rollout.native.growth as native_growth
import brorl.rollout.native_engine as native
from brorl.errors import DivergedError
from brorl.rollout.engine import SampleTask
from brorl.rollout.native.graphs import StepGraphs
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from engine_checks import assert_same_trees
from recorded_steps import RecordedSteps
from small_models import mostly_slow, small_model


@pytest.fixture(autouse=True, params=mostly_slow(["eager", "recorded"]))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines draw for single rows as on CUDA; steps are recorded or not."""
    monkeypatch.setattr(native, "draws_on", lambda _: True)
    if request.param == "recorded":
        monkeypatch.setattr(native, "graphs_on", lambda *_: StepGraphs("on", print, RecordedSteps))
    return request.param


def test_the_host_sees_rows_with_one_rollout_every_16_positions(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), scale=0.1)
    looks, draws = [], []
    collect, draw_tokens = native.SlotDecoder.collect_drawn, native_growth.draw_tokens
    monkeypatch.setattr(native.SlotDecoder, "collect_drawn", lambda decoder: (looks.append(0), collect(decoder))[1])
    monkeypatch.setattr(native_growth, "draw_tokens", lambda *args: (draws.append(0), draw_tokens(*args))[1])
    (tree,) = NativeEngine(model, 99).sample(SampleTask([[3, 4]], 6, SamplingParams(max_new_tokens=40), seed=1))
    assert len(looks) == 3  # after 16, 32 and 40 tokens
    shared = tree.depth[tree.count > 1].max(initial=-1) + 1  # tokens after which no two rollouts agree
    assert len(draws) == shared + 1


def test_numbers_that_are_not_finite_are_found_at_the_next_look(rng: np.random.Generator) -> None:
    """A weight breaks between two calls; with the old one the engine samples again what it did before."""
    model = small_model(seed=int(rng.integers(1 << 30)), scale=0.1)
    engine, sampling = NativeEngine(model, 99), SamplingParams(max_new_tokens=40)
    expected = engine.sample(SampleTask([[5, 6], [7, 8, 9]], 1, sampling, seed=0))
    position = 20  # which only rows with one rollout reach
    rotary, forward = model.model.rotary_emb, model.model.rotary_emb.forward

    def broken(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = forward(x, position_ids)
        return torch.where((position_ids >= position)[..., None], torch.nan, cos), sin

    rotary.forward = broken
    with pytest.raises(DivergedError, match=r"the logits of token (1[789]|2\d) of a response .* earlier checkpoint"):
        NativeEngine(model, 99, forward=engine._forward).sample(SampleTask([[5, 6], [7, 8, 9]], 1, sampling, seed=0))
    rotary.forward = forward
    assert_same_trees(engine.sample(SampleTask([[5, 6], [7, 8, 9]], 1, sampling, seed=0)), expected)
