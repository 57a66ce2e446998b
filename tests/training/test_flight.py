"""Rollouts sampled in segments by the real engine: the same as in one piece, and each node has its own weights."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import PreTrainedModel

from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampledTask
from brorl.rollout.native.engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.training.backlog import Flight, Start
from brorl.tree import RolloutTree
from small_models import plain_logprobs, small_model
from tree_invariants import check_tree

EOS = 0


def flown(
    engines: Sequence[NativeEngine], prompt: tuple[int, ...], sampling: SamplingParams, num_rollouts: int,
    segment: int | None, seed: int,
) -> tuple[RolloutTree, list[int]]:  # fmt: skip
    """Sample a prompt in segments, each with the next engine; return the tree and the prompts of each task."""
    start = Start(0, Prompt("p", "p", prompt, "", "any"), 0, 1, 0)
    flight, sizes = Flight(start, sampling, num_rollouts, segment, seed), []
    while task := flight.next_task():
        number = min(flight.num_tasks, len(engines) - 1)
        trees = engines[number].sample(task.prompts, task.num_rollouts, task.sampling, task.seed, task.first)
        sizes.append(len(task.prompts))
        flight = flight.after(SampledTask(0, trees, number + 3, 0.5))
    assert flight.tree is not None
    check_tree(flight.tree)
    assert flight.start.version == 3  # of the weights that sampled the first tokens
    assert flight.worker_seconds == 0.5 * len(sizes)
    return flight.tree, sizes


def logprobs_by_node(models: Sequence[PreTrainedModel], tree: RolloutTree, segment: int) -> np.ndarray:
    """Compute the log-prob of each node under the model of its segment, with the model as Hugging Face wrote it."""
    found = np.full(tree.num_unique_tokens, np.nan)
    with torch.no_grad():
        for number, model in enumerate(models):
            for leaf in tree.leaf:
                path = tree.path(int(leaf))
                (values,) = plain_logprobs(model, [tree.prompt_ids], [tree.token[path].tolist()])
                own = np.minimum(np.arange(path.size) // segment, len(models) - 1) == number
                found[path[own]] = values.numpy()[own]
    return found


@pytest.mark.parametrize("segment", [1, 3, 5, None])
def test_greedy_responses_are_the_same_in_segments(segment: int | None, rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), scale=0.4)
    engine = NativeEngine(model, EOS)
    sampling = SamplingParams(temperature=0, max_new_tokens=12)
    for _ in range(3):
        prompt = tuple(rng.integers(1, 17, 5).tolist())
        (whole,) = engine.sample([prompt], 6, sampling, 0)
        tree, _ = flown([engine], prompt, sampling, 6, segment, 0)
        assert tree.responses() == whole.responses()
        assert tree.finished.tolist() == whole.finished.tolist()
        np.testing.assert_allclose(tree.logprob, whole.logprob, atol=1e-12)


def test_each_node_has_the_logprob_of_the_weights_of_its_segment(rng: np.random.Generator) -> None:
    """The weights change after every segment; the reference is one row for each response, without a cache."""
    segment = int(rng.integers(2, 5))
    models = [small_model(seed=int(rng.integers(1 << 30)), scale=0.2) for _ in range(3)]
    sampling = SamplingParams(max_new_tokens=11)
    engines = [NativeEngine(model, EOS) for model in models]
    prompt = tuple(rng.integers(1, 17, 4).tolist())
    tree, sizes = flown(engines, prompt, sampling, 24, segment, int(rng.integers(1 << 30)))
    assert tree.num_rollouts == 24
    assert len(sizes) == -(-int(tree.length.max()) // segment)
    assert max(tree.length) <= 11
    assert (tree.finished == (tree.token[tree.leaf] == EOS)).all()
    np.testing.assert_allclose(tree.logprob, logprobs_by_node(models, tree, segment), atol=1e-10)
    others = logprobs_by_node(models[:1], tree, segment)
    assert np.abs(tree.logprob - others)[tree.depth >= segment].max() > 1e-3


def test_segments_have_the_distribution_of_one_piece(rng: np.random.Generator) -> None:
    """Counts of all responses of up to 4 tokens, against their exact probabilities (a chi-square test)."""
    model = small_model(vocab_size=4, seed=int(rng.integers(1 << 30)), scale=0.3)
    number = 4000
    sampling = SamplingParams(max_new_tokens=4)
    tree, _ = flown([NativeEngine(model, EOS)], (1, 2), sampling, number, 2, int(rng.integers(1 << 30)))
    counts = Counter(dict(tree.responses()))
    responses = [r for r, _ in tree.responses()]
    probability = np.exp(tree.prefix_logprob[tree.leaf])
    expected = number * probability
    large = expected > 10
    observed = np.array([counts[r] for r in responses])
    rest = number - observed[large].sum(), number * (1 - probability[large].sum())
    statistic = ((observed - expected)[large] ** 2 / expected[large]).sum() + (rest[0] - rest[1]) ** 2 / max(rest[1], 1)
    assert statistic < chi2.ppf(1 - 1e-7, int(large.sum()))


def test_lengths_are_respected_over_segments(rng: np.random.Generator) -> None:
    model = small_model(vocab_size=4, seed=int(rng.integers(1 << 30)), scale=0.1)
    sampling = SamplingParams(max_new_tokens=9, min_new_tokens=4)
    engine = NativeEngine(model, EOS)
    for segment in (1, 2, 4, 5, 8):
        tree, sizes = flown([engine], (1, 2), sampling, 200, segment, int(rng.integers(1 << 30)))
        assert tree.length.min() == 5  # the shortest: four tokens, and one that ends it
        assert tree.length.max() == 9
        assert (tree.length[~tree.finished] == 9).all()
        cuts = [max(segment, 5)]
        while cuts[-1] < 9:
            cuts.append(min(cuts[-1] + segment, 9))
        assert len(sizes) == len(cuts)
        distinct = [{r[:cut] for r, _ in tree.responses() if len(r) > cut} for cut in cuts[:-1]]
        assert sizes == [1, *map(len, distinct)]  # one prompt for each distinct prefix that is not done
