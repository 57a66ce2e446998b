"""Systematic sampling against the exact distribution of its trees, found by enumeration and by exact integration.

At one node the draw is piecewise constant in the node's offset, so its distribution is a list of interval lengths. The
reference enumerates these intervals over the whole unit interval, conditions on the node's own count, and multiplies
over the nodes. Nothing of it is shared with the engine.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations_with_replacement, pairwise
from math import factorial, floor, prod

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from test_native import EOS, Spy, assert_same_trees, ragged_prompts, room_for
from test_native_distribution import LENGTH, PROMPT, VOCABULARY, enumerate_responses
from transformers import PreTrainedModel

from brorl.algorithms.advantages import rloo
from brorl.algorithms.groups import Group
from brorl.algorithms.policy_loss import node_weights
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.prompts.prompt import Prompt
from brorl.rollout.native.engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from small_models import plain_logprobs, small_model

Response = tuple[int, ...]
Counts = tuple[tuple[Response, int], ...]  # a tree: its responses with their counts, sorted
NextToken = Callable[[Response], np.ndarray]  # prefix to next-token probabilities, shape [V]


# -- the reference ---------------------------------------------------------------------------------------------------


def splits(expected: float, next_V: np.ndarray) -> dict[tuple[int, ...], float]:
    """Chance of each vector of child counts when points stand at x, x + 1, ... below `expected`, x uniform."""
    edges = expected * np.append(0.0, np.cumsum(next_V) / next_V.sum())
    cuts = np.unique(np.concatenate([[0.0, 1.0], edges % 1.0]))
    chance: dict[tuple[int, ...], float] = defaultdict(float)
    for low, high in pairwise(cuts):
        if high - low > 1e-13:
            points = np.arange(np.ceil(expected) + 1) + (low + high) / 2
            counts = tuple(int(((points >= a) & (points < b)).sum()) for a, b in pairwise(edges))
            chance[counts] += high - low
    return chance


def exact_trees(next_token: NextToken, num_rollouts: int, length: int) -> dict[Counts, float]:
    """Return the probability of every tree that systematic sampling can give."""

    @cache
    def below(prefix: Response, count: int, expected: float) -> dict[Counts, float]:
        if len(prefix) == length or prefix[-1:] == (EOS,):
            return {((prefix, count),): 1.0}
        next_V = next_token(prefix)
        here = {split: chance for split, chance in splits(expected, next_V).items() if sum(split) == count}
        found: dict[Counts, float] = defaultdict(float)
        for split, chance in here.items():
            parts: dict[Counts, float] = {(): chance / sum(here.values())}
            for token, child in enumerate(split):
                if child:
                    subtrees = below((*prefix, token), child, expected * next_V[token] / next_V.sum())
                    parts = {a + b: p * q for a, p in parts.items() for b, q in subtrees.items()}
            for tree, probability in parts.items():
                found[tree] += probability
        return found

    return below((), num_rollouts, float(num_rollouts))


def iid_trees(response_p: dict[Response, float], num_rollouts: int) -> dict[Counts, float]:
    """Return the multinomial probability of every multiset of responses."""
    found = {}
    for drawn in combinations_with_replacement(sorted(response_p), num_rollouts):
        counts = {r: drawn.count(r) for r in drawn}
        ways = factorial(num_rollouts) / prod(factorial(c) for c in counts.values())
        found[tuple(sorted(counts.items()))] = ways * prod(response_p[r] ** c for r, c in counts.items())
    return found


def response_probabilities(next_token: NextToken, length: int, prefix: Response = ()) -> dict[Response, float]:
    if len(prefix) == length or prefix[-1:] == (EOS,):
        return {prefix: 1.0}
    next_V = next_token(prefix)
    return {
        response: float(p * q)
        for token, p in enumerate(next_V / next_V.sum())
        for response, q in response_probabilities(next_token, length, (*prefix, token)).items()
    }


def next_token_of(model: PreTrainedModel, prompt: list[int]) -> NextToken:
    @cache
    def next_token(prefix: Response) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=torch.tensor([[*prompt, *prefix]])).logits[0, -1].softmax(0).numpy()

    return next_token


def random_next_token(rng: np.random.Generator, vocabulary: int) -> NextToken:
    return cache(lambda _prefix: rng.dirichlet(np.full(vocabulary, 0.7)))


def mean(trees: dict[Counts, float], value: Callable[[dict[Response, int]], np.ndarray | float]) -> np.ndarray:
    return sum(p * np.asarray(value(dict(tree))) for tree, p in trees.items())


# -- exact marginals, and the engine against the exact distribution ----------------------------------------------------


@pytest.mark.parametrize(("num_rollouts", "vocabulary", "length"), [(1, 3, 3), (3, 2, 4), (7, 3, 2), (4, 3, 3)])
def test_every_response_is_expected_n_times_its_probability(
    rng: np.random.Generator, num_rollouts: int, vocabulary: int, length: int
) -> None:
    """And it comes that often, rounded up or down: the least variance that an integer of this mean can have."""
    next_token = random_next_token(rng, vocabulary)
    trees = exact_trees(next_token, num_rollouts, length)
    assert sum(trees.values()) == pytest.approx(1, abs=1e-12)
    for response, p in response_probabilities(next_token, length).items():
        expected = num_rollouts * p
        moments = mean(trees, lambda t, r=response: [t.get(r, 0), t.get(r, 0) ** 2, r in t])
        fraction = expected - floor(expected)
        variance = moments[1] - moments[0] ** 2
        np.testing.assert_allclose(moments[0], expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(variance, fraction * (1 - fraction), rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(moments[2], min(1, expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("num_rollouts", "vocabulary", "length"), [(2, 3, 3), (5, 3, 2), (9, 2, 3)])
def test_engine_follows_the_exact_distribution_of_trees(
    rng: np.random.Generator, num_rollouts: int, vocabulary: int, length: int
) -> None:
    """Chi-square over whole trees, 4000 of them: marginals, and the dependence between nodes."""
    model = small_model(vocab_size=vocabulary, seed=int(rng.integers(1 << 30)), scale=0.15)
    prompt, draws = [1], 4000
    expected = exact_trees(next_token_of(model, prompt), num_rollouts, length)
    sampling = SamplingParams(max_new_tokens=length, scheme="systematic")
    trees = NativeEngine(model, EOS).sample([prompt] * draws, num_rollouts, sampling, int(rng.integers(1 << 60)))
    observed: dict[Counts, int] = defaultdict(int)
    for tree in trees:
        observed[tuple(sorted(tree.responses()))] += 1
    assert set(observed) <= set(expected)
    common = [t for t, p in expected.items() if p * draws >= 25]
    cells = np.array([[observed[t], expected[t] * draws] for t in common])
    cells = np.vstack([cells, [draws, draws] - cells.sum(0)])
    cells = cells[cells[:, 1] >= 25]
    assert len(cells) > 1
    statistic = ((cells[:, 0] - cells[:, 1]) ** 2 / cells[:, 1]).sum()
    assert chi2.sf(statistic, len(cells) - 1) > 1e-8


def uniform_model(vocabulary: int) -> PreTrainedModel:
    model = small_model(vocab_size=vocabulary)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model


def test_offsets_of_different_nodes_are_independent(rng: np.random.Generator) -> None:
    """Two subtrees with the same probabilities must round apart: with a common offset they always would agree."""
    uniform = uniform_model(4)
    sampling = SamplingParams(max_new_tokens=2, scheme="systematic")
    draws = 2000
    trees = NativeEngine(uniform, 99).sample([[1]] * draws, 8, sampling, int(rng.integers(1 << 60)))  # 2 per subtree
    picks = np.array([[t.token[t.parent == root].min() for root in np.flatnonzero(t.parent < 0)] for t in trees])
    assert picks.shape == (draws, 4)
    assert set(np.unique(picks)) == {0, 1}
    for a, b in ((0, 1), (0, 3), (1, 2), (2, 3)):
        assert abs((picks[:, a] == picks[:, b]).mean() - 0.5) < 5.5 * 0.5 / np.sqrt(draws)
    after = np.array(
        [t.token[t.parent < 0].min() for t in NativeEngine(uniform, 99).sample([[1]] * draws, 2, sampling, 1)]
    )
    assert abs(after.mean() - 0.5) < 5.5 * 0.5 / np.sqrt(draws)  # of one prompt and the next, too
    assert abs((after[1:] == after[:-1]).mean() - 0.5) < 5.5 * 0.5 / np.sqrt(draws)


# -- floor or ceiling everywhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 1.4, "top_k": 4, "top_p": 0.7}],
)
def test_every_prefix_has_its_expected_count_rounded_up_or_down(settings: dict, rng: np.random.Generator) -> None:
    """Truncated distributions too; so no prefix or response that is expected at least once is ever missed."""
    model = small_model("qwen2", vocab_size=VOCABULARY, seed=int(rng.integers(1 << 30)))
    sampling = SamplingParams(max_new_tokens=LENGTH, scheme="systematic", **settings)
    expected: dict[Response, float] = defaultdict(float)
    for response, p in enumerate_responses(model, sampling).items():
        for end in range(1, len(response) + 1):
            expected[response[:end]] += p
    missable = 0
    for num_rollouts in (1, 6, 47, 300):
        for tree in NativeEngine(model, EOS).sample([PROMPT] * 8, num_rollouts, sampling, int(rng.integers(1 << 60))):
            tree.validate()
            found = {tuple(tree.token[tree.path(i)].tolist()): int(tree.count[i]) for i in range(tree.token.size)}
            assert set(found) <= {prefix for prefix, p in expected.items() if p > 0}
            for prefix, p in expected.items():
                assert abs(found.get(prefix, 0) - num_rollouts * p) < 1 + 1e-9
                missable += num_rollouts * p < 1
    assert missable > 0


def test_long_and_improbable_responses(rng: np.random.Generator) -> None:
    """Far below the point where fewer than one rollout is expected, rollouts go on, one by one."""
    model = small_model(seed=int(rng.integers(1 << 30)), vocab_size=97, scale=0.1)
    sampling = SamplingParams(max_new_tokens=90, scheme="systematic")
    trees = NativeEngine(model, 99).sample(ragged_prompts(rng, 2), 24, sampling, int(rng.integers(1 << 60)))
    for tree in trees:
        log_expected = np.log(24) + tree.sum_along_paths(tree.logprob)
        assert log_expected.min() < -300
        np.testing.assert_array_less(np.abs(tree.count - np.exp(log_expected)), 1 + 1e-9)
        assert (tree.length == 90).all()
        assert np.unique(tree.token).size > 80


def test_temperature_zero_and_a_single_rollout(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    engine, prompts = NativeEngine(model, EOS), ragged_prompts(rng, 3)
    for num_rollouts, temperature in ((20, 0.0), (1, 1.0)):  # one rollout has nothing to be spread with
        iid, systematic = (
            engine.sample(prompts, num_rollouts, SamplingParams(temperature, max_new_tokens=9, scheme=scheme), seed=3)
            for scheme in ("iid", "systematic")
        )
        assert iid == systematic


# -- nothing but the tree decides the draws --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_memory_limits_change_nothing(rows: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    prompts, sampling = ragged_prompts(rng, 4), SamplingParams(max_new_tokens=7, scheme="systematic")
    seed = int(rng.integers(1 << 60))
    ample = NativeEngine(model, EOS).sample(prompts, 40, sampling, seed)
    spy = Spy(monkeypatch)
    engine = NativeEngine(model, EOS, memory_bytes=room_for(model, rows, 7, prompts))
    assert_same_trees(engine.sample(prompts, 40, sampling, seed), ample)
    assert spy.prefills > 1  # so some rows did wait


def test_other_prompts_change_nothing(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    engine, sampling = NativeEngine(model, EOS), SamplingParams(max_new_tokens=6, scheme="systematic")
    prompts = ragged_prompts(rng, 4)
    together = engine.sample(prompts, 20, sampling, seed=3)
    for p in range(4):
        assert_same_trees([together[p]], engine.sample([*ragged_prompts(rng, p), prompts[p]], 20, sampling, seed=3)[p:])
    assert together == engine.sample(prompts, 20, sampling, seed=3)
    assert all(
        a.responses() != b.responses() for a, b in zip(together, engine.sample(prompts, 20, sampling, 4), strict=True)
    )


def test_systematic_without_shared_prefixes_is_refused() -> None:
    engine = NativeEngine(small_model(), EOS, share_prefixes=False)
    with pytest.raises(ValueError, match=r"share_prefixes=False; make it with share_prefixes=True, or .*scheme: iid"):
        engine.sample([[1]], 4, SamplingParams(max_new_tokens=3, scheme="systematic"), seed=0)
    assert engine.sample([[1]], 4, SamplingParams(max_new_tokens=3), seed=0)[0].num_rollouts == 4


def test_independent_rollouts_each_invert_their_own_uniform_numbers(rng: np.random.Generator) -> None:
    """The scheme iid, rollout by rollout: Philox numbers, a plain forward pass, numpy's searchsorted."""
    model, seed, num_rollouts = small_model(seed=int(rng.integers(1 << 30))), int(rng.integers(1 << 60)), 12
    prompts = ragged_prompts(rng, 2)
    trees = NativeEngine(model, EOS).sample(prompts, num_rollouts, SamplingParams(max_new_tokens=18), seed)
    for place, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        blocks = [np.random.Generator(np.random.Philox(key=seed << 64 | place << 32 | b)) for b in (0, 1)]
        uniform_TN = np.concatenate([b.random((16, num_rollouts)) for b in blocks])
        next_token, responses = next_token_of(model, prompt), []
        for n in range(num_rollouts):
            response: Response = ()
            while len(response) < 18 and response[-1:] != (EOS,):
                cumulative = np.cumsum(next_token(response))
                target = uniform_TN[len(response), n] * cumulative[-1]
                response += (int(np.searchsorted(cumulative, target, side="right")),)
            responses.append(response)
        assert sorted(tree.responses()) == sorted((r, responses.count(r)) for r in set(responses))


# -- what it does to baselines ---------------------------------------------------------------------------------------


def scored(model: PreTrainedModel, prompt: list[int], responses: list[Response]) -> dict[Response, np.ndarray]:
    """Gradient of each response's log-prob in the parameters of the head."""
    logprobs = plain_logprobs(model, [prompt] * len(responses), responses)
    head = model.lm_head.weight
    return {
        r: torch.autograd.grad(lp.sum(), head, retain_graph=True)[0].numpy().ravel()
        for r, lp in zip(responses, logprobs, strict=True)
    }


def estimates(
    tree: dict[Response, int], reward: dict[Response, float], score: dict[Response, np.ndarray]
) -> Iterator[np.ndarray]:
    """Gradient estimates from one group: without baseline, with the group's mean, with RLOO, and mean times mean."""
    num = sum(tree.values())
    rewards = sum(c * reward[r] for r, c in tree.items()) / num
    yield sum(c * reward[r] * score[r] for r, c in tree.items()) / num
    yield sum(c * (reward[r] - rewards) * score[r] for r, c in tree.items()) / num
    whole = RolloutTree.from_responses([1], [r for r, c in tree.items() for _ in range(c)])
    reward_L = np.array([reward[r] for r, _ in whole.responses()])
    (advantage_L,) = rloo([Group(Prompt("p", "p", (1,), "", "d"), whole, reward_L > 0, reward_L)])
    yield sum(c * a * score[r] for (r, c), a in zip(whole.responses(), advantage_L, strict=True)) / num
    weights = node_weights(whole, advantage_L)
    assert weights.positive_M.sum() + weights.negative_M.sum() == pytest.approx(
        sum(c * a * len(r) for (r, c), a in zip(whole.responses(), advantage_L, strict=True)), abs=1e-9
    )
    yield rewards * sum(c * score[r] for r, c in tree.items()) / num


def expected_estimates(
    trees: dict[Counts, float], reward: dict[Response, float], score: dict[Response, np.ndarray]
) -> np.ndarray:
    return mean(trees, lambda tree: np.stack(list(estimates(tree, reward, score))))


@pytest.mark.parametrize("num_rollouts", [2, 5])
def test_expected_gradients(rng: np.random.Generator, num_rollouts: int) -> None:
    """No baseline: exact. Group mean: the gradient minus Cov(mean reward, mean score), a 1/N share only for iid."""
    model, prompt = small_model(vocab_size=3, seed=int(rng.integers(1 << 30))), [1, 2]
    next_token = next_token_of(model, prompt)
    response_p = response_probabilities(next_token, 2)
    reward = {r: float(rng.normal()) for r in response_p}
    score = scored(model, prompt, list(response_p))
    logprobs = plain_logprobs(model, [prompt] * len(response_p), list(response_p))
    objective = sum(reward[r] * lp.sum().exp() for r, lp in zip(response_p, logprobs, strict=True))
    true = torch.autograd.grad(objective, model.lm_head.weight)[0].numpy().ravel()
    close = {"rtol": 1e-9, "atol": 1e-11 + 1e-9 * np.abs(true).max()}

    plain, centered, leave_one_out, covariance = expected_estimates(iid_trees(response_p, num_rollouts), reward, score)
    np.testing.assert_allclose(plain, true, **close)
    np.testing.assert_allclose(centered, (1 - 1 / num_rollouts) * true, **close)
    np.testing.assert_allclose(leave_one_out, true, **close)
    np.testing.assert_allclose(covariance, true / num_rollouts, **close)

    trees = exact_trees(next_token, num_rollouts, 2)
    plain, centered, leave_one_out, covariance = expected_estimates(trees, reward, score)
    np.testing.assert_allclose(plain, true, **close)
    np.testing.assert_allclose(centered, true - covariance, **close)
    np.testing.assert_allclose(leave_one_out, num_rollouts / (num_rollouts - 1) * (true - covariance), **close)
    assert np.abs(covariance - true / num_rollouts).max() > 1e-6 * np.abs(true).max()


def test_the_bias_of_the_group_mean_falls_faster_than_one_over_n() -> None:
    """Exact errors of the mean estimate over some fixed models, N = 32: no theorem, hence no random inputs."""
    num_rollouts, errors = 32, []
    for seed in range(10):
        model, prompt = small_model(vocab_size=3, seed=seed, scale=0.3), [1, 2]
        response_p = response_probabilities(next_token_of(model, prompt), 2)
        reward = {r: float(r[-1] == 1) for r in response_p}
        score = scored(model, prompt, list(response_p))
        true = sum(p * reward[r] * score[r] for r, p in response_p.items())
        trees = exact_trees(next_token_of(model, prompt), num_rollouts, 2)
        _, centered, leave_one_out, _ = expected_estimates(trees, reward, score)
        errors.append([np.linalg.norm(e - true) / np.linalg.norm(true) for e in (centered, leave_one_out)])
    group_mean, leave_one_out = np.mean(errors, axis=0)
    assert group_mean < 0.5 / num_rollouts  # with independent rollouts it is 1 / N
    assert group_mean < leave_one_out


def one_token(next_V: list[float]) -> NextToken:
    return lambda _prefix: np.array(next_V)


def test_where_no_rounding_is_left_the_group_mean_is_exact_and_rloo_overshoots(rng: np.random.Generator) -> None:
    """With N p whole for every token the counts are certain: no variance, and N / (N - 1) corrects nothing."""
    next_V = np.array([0.5, 0.25, 0.25])
    trees = exact_trees(one_token(next_V.tolist()), 4, 1)
    assert trees == {(((0,), 2), ((1,), 1), ((2,), 1)): 1.0}
    reward = {(v,): float(rng.normal()) for v in range(3)}
    score = {(v,): np.eye(3)[v] - next_V for v in range(3)}
    true = sum(next_V[v] * reward[v,] * score[v,] for v in range(3))
    plain, centered, leave_one_out, covariance = expected_estimates(trees, reward, score)
    np.testing.assert_allclose([plain, centered, leave_one_out], [true, true, 4 / 3 * true], atol=1e-14)
    np.testing.assert_allclose(covariance, 0, atol=1e-14)


def test_tokens_in_step_with_the_points_are_the_worst_case() -> None:
    """Every single count varies as little as it can, and yet a sum may vary more than with independent rollouts."""
    reward = [1.0, 0.0, 1.0, 0.0]
    trees = exact_trees(one_token([0.25] * 4), 2, 1)
    num_correct = {t: sum(c * reward[r[0]] for r, c in t) for t in trees}
    assert sorted(num_correct.values()) == [0.0, 2.0]
    (tree,) = NativeEngine(uniform_model(4), 99).sample(
        [[1]], 2, SamplingParams(max_new_tokens=1, scheme="systematic"), 0
    )
    assert tree.token.tolist() in ([0, 2], [1, 3])
    assert mean(trees, lambda t: (sum(c * reward[r[0]] for r, c in t.items()) - 1) ** 2) == pytest.approx(1.0)
    independent = iid_trees({(v,): 0.25 for v in range(4)}, 2)
    assert mean(independent, lambda t: (sum(c * reward[r[0]] for r, c in t.items()) - 1) ** 2) == pytest.approx(0.5)


def test_pass_at_k_from_systematic_rollouts_is_biased() -> None:
    """Two of four equal tokens are correct; systematic rollouts always hold one of them, independent ones may not."""
    trees = exact_trees(one_token([0.25] * 4), 2, 1)
    num_correct = [sum(c for r, c in t if r[0] < 2) for t in trees]
    np.testing.assert_array_equal(pass_at_k(num_correct, 2, 2), 1.0)
    independent = iid_trees({(v,): 0.25 for v in range(4)}, 2)
    unbiased = mean(independent, lambda t: pass_at_k([sum(c for r, c in t.items() if r[0] < 2)], 2, 2)[0])
    assert unbiased == pytest.approx(1 - 0.5**2)
