"""The learner against plain PyTorch: PPO over N x T rows, clip_grad_norm_, torch.optim.AdamW (float64)."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import row_losses
from brorl.activity import Activity, Updating
from brorl.algorithms.settings import PolicyLossSettings
from brorl.config.settings import TrainConfig
from brorl.training import mini_batch
from brorl.training.learner import TreeLearner
from learner_support import group_of, learn
from recipes import recipe
from row_losses import Batch, flat, rows_of, sampled, sampled_part, sampler_rows
from small_models import mostly_slow, random_tree, rollouts, small_model

SETTINGS = recipe(row_losses.SETTINGS, max_grad_norm=1.0, loss=PolicyLossSettings(clip_low=0.2, clip_high=0.28))


def plain_update(
    model: PreTrainedModel, optimizer: torch.optim.AdamW, batch: Batch, max_grad_norm: float, weight_of_batch: float = 1
) -> dict[str, float]:
    """One update on all rollouts, row by row; returns what `UpdateRecord` should say."""
    trees = [group.tree for group in batch[0]]
    loss, told = flat(batch, SETTINGS, rows_of(model, trees), sampler_rows(trees))
    optimizer.zero_grad()
    (loss * weight_of_batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return told | {"loss": told["loss"] * weight_of_batch, "grad_norm": norm.item()}


def plain_adamw(model: PreTrainedModel, settings: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=settings.scaled_learning_rate, betas=settings.optimizer.betas,
        weight_decay=settings.optimizer.weight_decay,
        foreach=False,
    )  # fmt: skip


def assert_same_weights(
    got: PreTrainedModel, expected: PreTrainedModel, start: PreTrainedModel, tolerance: float
) -> None:
    """Compare the changes of the weights, not the weights, which hardly change."""
    for (name, a), b, s in zip(got.named_parameters(), expected.parameters(), start.parameters(), strict=True):
        change = (b - s).abs().max()
        assert change > 0, name
        assert (a - b).abs().max() <= tolerance * change, (name, (a - b).abs().max(), change)


@pytest.mark.parametrize("architecture", mostly_slow(["llama", "qwen2", "qwen3", "mistral"]))
@pytest.mark.parametrize("max_grad_norm", [1e9, 0.01])
def test_one_update_equals_adamw_on_the_flattened_batch(
    architecture: str, max_grad_norm: float, rng: np.random.Generator
) -> None:
    model = small_model(architecture, seed=int(rng.integers(1 << 30)))
    start, plain = deepcopy(model), deepcopy(model)
    settings = recipe(SETTINGS, max_grad_norm=max_grad_norm, weight_decay=0.1)
    batch = sampled(model, rng, num_groups=4)
    update = learn(TreeLearner(model, settings), *batch, seed=0)
    told = plain_update(plain, plain_adamw(plain, settings), batch, max_grad_norm)
    assert_same_weights(model, plain, start, 1e-7)
    for name, expected in told.items():
        assert getattr(update, name) == pytest.approx(expected, rel=1e-9, abs=1e-12), name
    assert 0.05 < update.clip_fraction < 0.8
    assert update.trained_nodes == sum(g.tree.num_nodes for g in batch[0])
    trees = [g.tree for g in batch[0]]
    tokens = [lp for tree in trees for _, path in rollouts(tree) for lp in tree.logprob[sampled_part(tree, path)]]
    assert update.entropy == pytest.approx(-np.mean(tokens), rel=1e-12)


def test_several_steps_with_mini_batches_and_warm_up_equal_plain_training(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group trains once a step; update u of a warm-up over 5 has u/5 of the learning rate."""
    model = small_model(seed=int(rng.integers(1 << 30)))
    start, plain = deepcopy(model), deepcopy(model)
    settings = recipe(SETTINGS, mini_batches=3, warmup_updates=5)
    learner, optimizer = TreeLearner(model, settings), plain_adamw(plain, settings)
    dealt = []
    original = mini_batch.make_mini_batch
    monkeypatch.setattr(
        mini_batch, "make_mini_batch", lambda trees, *rest: dealt.append(trees) or original(trees, *rest)
    )
    updates = 0
    for step in range(2):
        groups, advantages = sampled(model, rng, num_groups=7)
        dealt.clear()
        update = learn(learner, groups, advantages, seed=step)
        assert sorted(id(t) for batch in dealt for t in batch) == sorted(id(g.tree) for g in groups)
        assert sorted(len(batch) for batch in dealt) == [2, 2, 3]
        assert [id(t) for batch in dealt for t in batch] != [id(g.tree) for g in groups]  # 1 in 5040 by chance
        means = []
        for batch in dealt:
            updates += 1
            optimizer.param_groups[0]["lr"] = 1e-3 * min(updates / 5, 1)
            places = [next(i for i, g in enumerate(groups) if g.tree is mine) for mine in batch]
            chosen = [groups[i] for i in places], [advantages[i] for i in places]
            means.append(plain_update(plain, optimizer, chosen, 1.0, len(batch) / (7 / 3)))  # all groups weigh the same
        for name in means[0]:
            expected = np.mean([told[name] for told in means])
            assert getattr(update, name) == pytest.approx(expected, rel=1e-6, abs=1e-12), name
        assert update.learning_rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-15)
    assert_same_weights(model, plain, start, 1e-5)  # rounding of tiny gradients grows in Adam's quotient


@pytest.mark.parametrize("broken", ["old log-prob", "advantage", "weights", "gradient norm"])
def test_a_loss_that_is_not_finite_changes_nothing(broken: str, rng: np.random.Generator) -> None:
    model = small_model(seed=1, dtype=torch.float32 if broken == "gradient norm" else torch.float64)
    groups, advantages = sampled(model, rng)
    if broken == "old log-prob":  # the new policy finds a token infinitely more likely, and it was bad
        old = groups[0].tree.logprob.copy()
        old[0], advantages[0][:] = -1e4, -1.0
        groups[0] = replace(groups[0], tree=replace(groups[0].tree, logprob=old))
    elif broken == "advantage":
        advantages[1][0] = np.nan
    elif broken == "gradient norm":  # the loss is finite, the sum of squares is not
        advantages = [a * 1e30 for a in advantages]
    else:
        with torch.no_grad():
            model.model.norm.weight[0] = torch.inf
    learner = TreeLearner(model, SETTINGS)
    before = deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match=r"gradient norm .*; start a new run with a lower optimizer"):
        learn(learner, groups, advantages, seed=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert learner.state_dict()["updates"] == 0
    assert learner.state_dict()["optimizer"]["state"] == {}


def test_a_later_mini_batch_that_is_not_finite_keeps_the_earlier_updates(rng: np.random.Generator) -> None:
    model = small_model(seed=1)
    groups, advantages = sampled(model, rng, num_groups=2)
    reference = TreeLearner(deepcopy(model), SETTINGS)
    last = int(np.random.default_rng(0).permutation(2)[1])
    good = 1 - last
    learn(reference, [groups[good]], [advantages[good]], seed=0)
    advantages[last][:] = np.inf
    learner = TreeLearner(model, recipe(SETTINGS, mini_batches=2))
    with pytest.raises(FloatingPointError):
        learn(learner, groups, advantages, seed=0)
    for (_, a), (_, b) in zip(learner.weights(), reference.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert learner.state_dict()["updates"] == 1


def test_every_update_is_reported_before_it_is_made(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    reports: list[tuple[Activity, int]] = []

    def observe(activity: Activity) -> None:
        reports.append((activity, learner.state_dict()["updates"]))

    learner = TreeLearner(model, recipe(SETTINGS, mini_batches=3), observe=observe)
    learn(learner, *sampled(model, rng, num_groups=4), seed=0)
    assert reports == [(Updating(done, 3), done) for done in range(3)]


@pytest.mark.slow
def test_max_responses_per_outcome_trains_fewer_nodes_and_all_of_them_when_they_fit(rng: np.random.Generator) -> None:
    model = small_model(seed=1)
    trees = [random_tree(rng, num_rollouts=60, branching=8) for _ in range(2)]
    trees = [replace(t, logprob=np.full(t.num_unique_tokens, -1.0)) for t in trees]
    batch = [group_of(t, rng) for t in trees], [rng.normal(size=t.num_responses) for t in trees]
    few, all_of_them, full = (
        TreeLearner(deepcopy(model), recipe(SETTINGS, max_responses_per_outcome=k)) for k in (3, 1000, 0)
    )
    nodes = learn(few, *batch, seed=0).trained_nodes
    assert nodes <= sum(2 * 4 * int(t.length.max()) for t in trees)
    assert learn(all_of_them, *batch, seed=0) == learn(full, *batch, seed=0)
    assert nodes < sum(t.num_unique_tokens for t in trees) / 2


def test_max_responses_per_outcome_with_a_group_whose_advantages_are_all_zero(rng: np.random.Generator) -> None:
    """Shaped rewards can be equal in a group of mixed verdicts: it has nothing to teach, and must not stop the step."""
    model = small_model(seed=1)
    groups, advantages = sampled(model, rng, num_groups=2)
    advantages[0][:] = 0.0
    full, subset = (TreeLearner(deepcopy(model), recipe(SETTINGS, max_responses_per_outcome=k)) for k in (0, 1000))
    expected, got = learn(full, groups, advantages, seed=0), learn(subset, groups, advantages, seed=0)
    assert got.loss == pytest.approx(expected.loss, rel=1e-12)
    assert_same_weights(subset.model, full.model, model, 1e-9)


@pytest.mark.slow
def test_autocast_gives_nearly_the_same_update_and_keeps_the_weights_dtype(rng: np.random.Generator) -> None:
    """The rounding of bfloat16 is 4% of the gradient in the median, and more where the terms of a batch cancel."""
    model = small_model(seed=1, dtype=torch.float32)
    errors = []
    for _ in range(9):
        batch = sampled(model, rng, num_groups=4)
        exact, fast = (
            TreeLearner(deepcopy(model), recipe(SETTINGS, dtype=dtype, max_grad_norm=1e9, old_logprobs="recompute"))
            for dtype in ("float32", "bfloat16")
        )
        first, second = learn(exact, *batch, seed=0), learn(fast, *batch, seed=0)
        assert second.grad_norm != first.grad_norm
        flat_a, flat_b = (torch.cat([p.grad.flatten() for p in x.model.parameters()]) for x in (exact, fast))
        errors.append(float((flat_a - flat_b).norm() / flat_a.norm()))
        assert {p.dtype for _, p in fast.weights()} == {torch.float32}
    # Fewer than 1 of 100 batches is above 0.11 (of 1,500): 5 of 9 above it have a chance below 126 * 0.01^5 = 2e-8.
    assert np.median(errors) < 0.15


def test_too_few_groups_are_refused(rng: np.random.Generator) -> None:
    model = small_model(seed=1)
    learner = TreeLearner(model, recipe(SETTINGS, mini_batches=5))
    with pytest.raises(ValueError, match="5 mini-batches need at least as many groups, got 2"):
        learn(learner, *sampled(model, rng), seed=0)
