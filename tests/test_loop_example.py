"""examples/loop.py, the algorithm on one page, against the learner of `brorl train`."""

from copy import deepcopy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings, PolicyLossSettings
from brorl.model.load import load_model, load_tokenizer
from brorl.prompts.countdown import countdown_puzzles, countdown_questions
from brorl.prompts.rendering import render
from brorl.prompts.settings import PromptFormat
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.training.learner import TreeLearner
from recipes import recipe
from small_models import assert_same_gradients, gradients, use_exact_norms


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    spec = spec_from_file_location("loop", Path(__file__).parents[1] / "examples" / "loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_updates_are_those_of_the_learner(loop: ModuleType, rng: np.random.Generator) -> None:
    tokenizer = load_tokenizer("quickstart")
    own = load_model("quickstart", torch.device("cpu"), torch.float64)
    use_exact_norms(own)  # those of transformers round to float32
    puzzles = countdown_puzzles(3, 12, range(1, 100))
    chosen = [puzzles[i] for i in rng.integers(len(puzzles), size=6)]
    prompts = render(countdown_questions(chosen), PromptFormat(), tokenizer)
    trees = NativeEngine(own, tokenizer.eos_token_id).sample(
        SampleTask([p.token_ids for p in prompts], 32, loop.SAMPLING, int(rng.integers(2**31)))
    )
    groups = [loop.verify(prompt, tree, tokenizer) for prompt, tree in zip(prompts, trees, strict=True)]
    mixed: list[Group] = [group for group in groups if group.is_mixed]
    assert len(mixed) > 1

    theirs = deepcopy(own)
    optimizer = torch.optim.AdamW(own.parameters(), loop.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = PolicyLossSettings(clip_low=loop.CLIP_LOW, clip_high=loop.CLIP_HIGH)
    learner = TreeLearner(theirs, recipe(learning_rate=loop.LEARNING_RATE, loss=loss))
    clipped = 0.0
    for step in range(3):  # the ratios leave 1 after the first update, and reach the bounds
        loop.update(own, optimizer, mixed)
        metrics = learner.learn(mixed, advantage_estimator(AdvantageSettings(estimator="maxrl")), step)
        clipped = max(clipped, metrics.clip_fraction)
        assert_same_gradients(gradients(own), gradients(theirs))
        for (name, weight), expected in zip(own.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-8 * loop.LEARNING_RATE, msg=name)
    assert clipped > 0


@pytest.mark.slow
def test_it_runs(loop: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    loop.main(num_rollouts=8, steps=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["held-out", "step", "held-out"]
    assert lines[0] != lines[2]
