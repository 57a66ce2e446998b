"""Drawing tokens: numpy's searchsorted, plain loops and transformers' own truncation are the references."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from transformers import TopKLogitsWarper, TopPLogitsWarper

from brorl.model import logprobs as logprobs_module
from brorl.model.logprobs import smallest_kept
from brorl.rollout.engine import prompt_seed
from brorl.rollout.native import draw
from brorl.rollout.native.draw import Uniforms, draw_tokens
from brorl.sampling import SamplingParams
from small_models import Largest

INF = float("inf")
LAST = float(np.nextafter(1.0, 0.0))


def random_logits(rng: np.random.Generator, rows: int, vocabulary: int, forbidden: float = 0.0) -> torch.Tensor:
    """Logits of very different sharpness per row; a fraction of them -inf, but never a whole row."""
    logits = rng.normal(size=(rows, vocabulary)) * rng.choice([0.3, 3.0, 30.0], (rows, 1))
    logits[rng.random(logits.shape) < forbidden] = -INF
    row, allowed = np.arange(rows), rng.integers(0, vocabulary, rows)
    logits[row, allowed] = np.where(np.isinf(logits[row, allowed]), 0.0, logits[row, allowed])
    return torch.from_numpy(logits)


def softmax(logits: np.ndarray) -> np.ndarray:
    mass = np.exp(logits - logits.max())
    return mass / mass.sum()


# -- uniform numbers -------------------------------------------------------------------------------------------------


def test_uniforms_are_uniform_and_never_shared() -> None:
    """Kolmogorov-Smirnov on 40 prompts x 50 rollouts x 33 positions of two seeds, and no number twice."""
    numbers = []
    prompt, rollout = (a.ravel() for a in np.indices((40, 50)))
    for seed in (3, 4):
        uniforms = Uniforms([prompt_seed(seed, index) for index in range(40)], [50] * 40)
        numbers += [uniforms.at(position, prompt, rollout) for position in range(33)]
    drawn = np.concatenate(numbers)
    assert np.unique(drawn).size == drawn.size
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert kstest(drawn, "uniform").pvalue > 1e-3
    successive = np.corrcoef(np.stack(numbers[:33]))  # positions of one rollout must not be correlated
    assert np.abs(successive - np.eye(33)).max() < 5 / np.sqrt(2000)


# -- inverse of the cumulative distribution ---------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 257, 1000])
@pytest.mark.parametrize("forbidden", [0.0, 0.5, 0.95])
def test_tokens_equal_numpy_searchsorted(rng: np.random.Generator, vocabulary: int, forbidden: float) -> None:
    rows, draws = 6, 400
    logits = random_logits(rng, rows, vocabulary, forbidden)
    row, uniform = np.sort(rng.integers(0, rows, draws)), rng.random(draws)
    before = logits.clone()
    token, logprob = draw_tokens(logits, row, uniform, SamplingParams())
    for r, u, t, lp in zip(row, uniform, token.tolist(), logprob.tolist(), strict=True):
        probability = softmax(before[r].numpy())
        cumulative = np.cumsum(probability)
        assert t == np.searchsorted(cumulative, u * cumulative[-1], side="right")
        assert lp == pytest.approx(np.log(probability[t]), rel=1e-12, abs=1e-12)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [2, 5, 17, 64, 300])
def test_no_uniform_selects_a_token_of_probability_zero(
    rng: np.random.Generator, dtype: torch.dtype, vocabulary: int
) -> None:
    rows = 60
    logits = random_logits(rng, rows, vocabulary, forbidden=0.7)
    block = int(vocabulary**0.5)
    for r in range(0, rows, 3):  # empty blocks at either end, where rounding would land
        side = np.s_[:block] if r % 2 else np.s_[-block:]
        if (logits[r] > -INF).sum() > (logits[r, side] > -INF).sum():
            logits[r, side] = -INF
    logits = logits.to(dtype)
    edges = np.array([0.0, 5e-324, 1e-300, 1e-17, 0.5, 1 - 1e-15, LAST])
    row, uniform = np.repeat(np.arange(rows), edges.size), np.tile(edges, rows)
    token, logprob = draw_tokens(logits, row, uniform, SamplingParams())
    assert (logits[torch.from_numpy(row), token] > -INF).all()
    assert torch.isfinite(logprob).all()
    if dtype == torch.float64:  # here nothing underflows, so the two ends of [0, 1) are the first and the last token
        allowed = (logits > -INF).numpy()
        np.testing.assert_array_equal(token.numpy()[uniform == 0.0], allowed.argmax(1))
        likely = torch.zeros(1, vocabulary, dtype=dtype).masked_fill(logits[:1] == -INF, -INF)
        final, _ = draw_tokens(likely, np.array([0]), np.array([LAST]), SamplingParams())
        assert final.item() == np.flatnonzero(allowed[0])[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 5}])
def test_draws_in_blocks_of_rows_are_the_same_tokens(
    dtype: torch.dtype, truncation: dict[str, float], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocabulary = 37, 300
    logits = random_logits(rng, rows, vocabulary).to(dtype)
    row = np.sort(np.append(rng.integers(0, rows, 400), np.arange(rows)))
    uniform = rng.random(row.size)
    sampling = SamplingParams(temperature=0.9, **truncation)
    expected = draw_tokens(logits, row, uniform, sampling)
    for limit in (1, 5 * vocabulary, 36 * vocabulary, 1 << 24):
        monkeypatch.setattr(draw, "LOGITS_PER_DRAW", limit)
        first = np.unique(row, return_index=True)[1]  # of each row a rollout, as the device draws it
        alone, of_alone = draw_tokens(logits, None, torch.from_numpy(uniform[first]), sampling)
        assert torch.equal(alone, expected[0][first])
        torch.testing.assert_close(of_alone, expected[1][first], check_dtype=False)
        token, logprob = draw_tokens(logits, row, uniform, sampling)
        assert torch.equal(token, expected[0])  # each row's masses are computed alone
        torch.testing.assert_close(logprob, expected[1])  # logarithms of R rows can round by their place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 50}])
def test_the_memory_of_a_draw_does_not_grow_with_the_rollouts(
    dtype: torch.dtype, truncation: dict[str, float], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one bit changes, and no temporary is larger than the limit, or one number per rollout, or the logits."""
    monkeypatch.setattr(draw, "kernels_of", lambda _: None)
    rows, vocabulary, rollouts = 3, 700, 2000
    logits = random_logits(rng, rows, vocabulary).to(dtype)
    row, uniform = np.sort(rng.integers(0, rows, rollouts)), rng.random(rollouts)
    sampling = SamplingParams(temperature=0.9, **truncation)
    monkeypatch.setattr(draw, "MASSES_PER_DRAW", 1 << 40, raising=False)
    token, logprob = draw_tokens(logits, row, uniform, sampling)
    for limit in (1 << 11, 1 << 13):
        monkeypatch.setattr(draw, "MASSES_PER_DRAW", limit)
        with Largest() as largest:
            blocks = draw_tokens(logits, row, uniform, sampling)
        assert torch.equal(blocks[0], token)
        assert torch.equal(blocks[1], logprob)
        assert largest.numel <= max(limit, rollouts, rows * 1024)


# -- truncation ------------------------------------------------------------------------------------------------------


def plain_truncation(logits: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Which tokens of one row stay: go from the most probable down, stop at k, then at mass top_p; ties stay."""
    order = sorted(range(logits.size), key=lambda v: -logits[v])
    if top_k:
        order = [v for v in order if logits[v] >= logits[order[min(top_k, logits.size) - 1]]]
    total = sum(np.exp(logits[v] - logits[order[0]]) for v in order)
    kept, mass = np.zeros(logits.size, bool), 0.0
    for v in order:
        kept[v] = True
        mass += np.exp(logits[v] - logits[order[0]]) / total
        if top_p < 1 and mass >= top_p:
            break
    return kept | np.isin(logits, logits[kept])


def truncate(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """The logits with -inf outside of the kept tokens."""
    return logits.masked_fill(logits < smallest_kept(logits, 1.0, top_p, top_k)[:, None], -INF)


@pytest.mark.parametrize("few", [3, 1024])  # of which a nucleus is looked for first
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-9])
@pytest.mark.parametrize("top_k", [0, 1, 4, 17, 99])
def test_truncation_equals_a_plain_loop_and_transformers(
    rng: np.random.Generator, top_p: float, top_k: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_FEW", few)
    logits = random_logits(rng, 40, 17)
    got = truncate(logits, top_p, top_k)
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(got, expected)
    for before, after in zip(logits.numpy(), got.numpy(), strict=True):
        kept = plain_truncation(before, top_p, top_k)
        np.testing.assert_array_equal(after, np.where(kept, before, -INF))


def test_ties_with_the_last_token_stay(rng: np.random.Generator) -> None:
    """So the set does not depend on the order of the tokens."""
    logits = torch.from_numpy(rng.integers(0, 4, (200, 12)).astype(np.float64))
    for top_p, top_k in [(1.0, 3), (0.31, 0), (0.72, 0), (0.99, 0), (0.61, 3)]:
        kept_RV = (truncate(logits, top_p, top_k) > -INF).numpy()
        for row, kept in zip(logits.numpy(), kept_RV, strict=True):
            np.testing.assert_array_equal(kept, plain_truncation(row, top_p, top_k))
        order = torch.from_numpy(rng.permutation(12))
        np.testing.assert_array_equal((truncate(logits[:, order], top_p, top_k) > -INF).numpy(), kept_RV[:, order])
    assert (kept_RV.sum(1) > 3).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float32 takes the compiled draw, where there is one
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=5),
        SamplingParams(temperature=0),
    ],
)
def test_a_row_without_a_distribution_has_no_log_prob(
    dtype: torch.dtype, bad: str, sampling: SamplingParams, rng: np.random.Generator
) -> None:
    """And the other rows draw what they draw beside a good one."""
    vocabulary = int(rng.integers(6, 300))
    logits_RV = torch.from_numpy(rng.normal(size=(3, vocabulary))).to(dtype)
    row_K, uniform_K = np.repeat(np.arange(3), 4), rng.random(12)
    expected_token_K, expected_logprob_K = draw_tokens(logits_RV, row_K, uniform_K, sampling)
    damaged_RV = logits_RV.clone()
    if bad == "-inf":
        damaged_RV[1] = -INF
    else:
        damaged_RV[1, int(rng.integers(vocabulary))] = float(bad)
    token_K, logprob_K = draw_tokens(damaged_RV, row_K, uniform_K, sampling)
    assert logprob_K[row_K == 1].isnan().all()
    assert token_K.max() < vocabulary
    assert torch.equal(token_K[row_K != 1], expected_token_K[row_K != 1])
    assert torch.equal(logprob_K[row_K != 1], expected_logprob_K[row_K != 1])
