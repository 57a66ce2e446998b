"""Rollouts of several turns: the tree of all transcripts against enumeration, limits, and seeds."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tools.calls import Turn
from brorl.tools.settings import ToolSettings
from brorl.tools.turns import TurnEngine
from brorl.tree import RolloutTree
from engine_checks import assert_same_trees
from small_models import mostly_slow, small_model
from tree_invariants import check_tree
from turn_checks import END, CountingReader, assert_transcripts_follow_the_model, transcripts_of

SAMPLING = SamplingParams(max_new_tokens=3, temperature=1.3)


def engine_of(rng: np.random.Generator, vocab_size: int = 5) -> NativeEngine:
    model = small_model(vocab_size=vocab_size, seed=int(rng.integers(2**30)), num_hidden_layers=1)
    return NativeEngine(model, END)


def settings_of(**changes: Any) -> ToolSettings:
    return ToolSettings(calculator=True, **{"max_turns": 3, **changes})


@pytest.mark.parametrize("max_turns", mostly_slow([2, 3]))
def test_transcripts_follow_the_model(max_turns: int, rng: np.random.Generator) -> None:
    """Also where no turn more fits: 12 tokens are too few for three turns of all lengths."""
    engine, prompts = engine_of(rng), [(2,), (3, 4, 2)]
    seed = int(rng.integers(2**60))
    assert_transcripts_follow_the_model(engine, engine.model, prompts, SAMPLING, 20_000, seed, 1e-9, max_turns)


def test_a_prompt_samples_the_same_whatever_is_sampled_beside_it(rng: np.random.Generator) -> None:
    engine = TurnEngine(engine_of(rng), CountingReader(), settings_of())
    prompts, counts = [(2,), (3, 4), (2,)], [50, 70, 50]
    seeds = [int(seed) << 30 for seed in rng.integers(2**60, size=3)]
    together = engine.sample(SampleTask(prompts, counts, SAMPLING, seeds))
    alone = [
        engine.sample(SampleTask([p], n, SAMPLING, [own]))[0] for p, n, own in zip(prompts, counts, seeds, strict=True)
    ]
    assert_same_trees(together, alone)  # up to rounding: rows that are computed together
    assert together[0] != together[2]  # the same prompt, a different seed
    assert together == engine.sample(SampleTask(prompts, counts, SAMPLING, seeds))


def test_later_turns_have_their_own_draws(rng: np.random.Generator) -> None:
    """A model that always calls: the same transcript in two prompts, and the turns of one, draw differently."""
    inner = engine_of(rng)
    seen: list[list[int]] = []

    class Recorded:
        version = 0

        def sample(self, task: SampleTask) -> list[RolloutTree]:
            seen.append(list(task.seed))
            return inner.sample(task)

    TurnEngine(Recorded(), CountingReader(), settings_of()).sample(SampleTask([(2,), (2,)], 200, SAMPLING, 7))  # type: ignore[arg-type]
    seeds = [seed for of_turn in seen for seed in of_turn]
    assert len(seen) == 3, seen
    assert len({*seeds}) == len(seeds) > 6
    assert all(0 <= seed < 2**96 for seed in seeds)


def test_responses_without_a_call_are_those_of_the_engine(rng: np.random.Generator) -> None:
    class Silent(CountingReader):
        def calls(self, _token_ids: Sequence[int]) -> tuple:
            return ()

    engine = engine_of(rng, vocab_size=17)
    prompts = [rng.integers(1, 17, 4).tolist() for _ in range(3)]
    got = TurnEngine(engine, Silent(), settings_of()).sample(SampleTask(prompts, 30, SAMPLING, 5))
    assert got == engine.sample(SampleTask(prompts, 30, SAMPLING, 5))


def test_rollouts_fork_by_the_results_of_a_tool_that_is_not_deterministic(rng: np.random.Generator) -> None:
    engine = TurnEngine(engine_of(rng), CountingReader(outcomes=3), settings_of(max_turns=2))
    (tree,) = engine.sample(SampleTask([(2,)], 3000, SAMPLING, int(rng.integers(2**60))))
    check_tree(tree)
    replies = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for (tokens, given, _), (count, _) in transcripts_of(tree).items():
        if any(given):
            start, stop = given.index(True), len(given) - given[::-1].index(True)
            replies[tokens[:start], tokens[start:stop]] += count
    turns = {turn for turn, _ in replies}
    for turn in turns:
        counts = [count for (of_turn, _), count in sorted(replies.items()) if of_turn == turn]
        assert max(counts) - min(counts) <= 1 or len(counts) < 3
    assert any(len([1 for of_turn, _ in replies if of_turn == turn]) == 3 for turn in turns)
    assert tree.num_rollouts == 3000


def test_the_last_turn_and_a_turn_that_does_not_fit_end_with_their_calls(rng: np.random.Generator) -> None:
    class Unread(CountingReader):
        def replies(self, turns: Sequence[Turn]) -> list:
            assert turns
            return super().replies(turns)

    reader = Unread()
    engine = engine_of(rng)
    (tree,) = TurnEngine(engine, reader, settings_of(max_response_tokens=3)).sample(
        SampleTask([(2,)], 500, SAMPLING, 3)
    )
    assert not tree.given.any()  # a second turn of 3 tokens never fits
    (alone,) = engine.sample(SampleTask([(2,)], 500, SAMPLING, 3))
    cut = [1 in response for response, _ in alone.responses()]
    assert [r for r, _ in tree.responses()] == [r for r, _ in alone.responses()]
    assert (tree.finished == alone.finished & ~np.array(cut)).all()
    assert (tree.finished != alone.finished).any()


def test_weights_and_version_are_those_of_the_engine(rng: np.random.Generator) -> None:
    inner = engine_of(rng)
    engine = TurnEngine(inner, CountingReader(), settings_of())
    before = engine.sample(SampleTask([(2,)], 50, SAMPLING, 3))
    engine.load_weights([(name, torch.randn_like(p)) for name, p in inner.model.named_parameters()], version=4)
    assert engine.version == inner.version == 4
    assert engine.sample(SampleTask([(2,)], 50, SAMPLING, 3)) != before
