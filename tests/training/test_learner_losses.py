"""Every loss, aggregation, correction and penalty of the learner against the rows of `row_losses`."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor
from transformers import PreTrainedModel

import brorl.training.mini_batch as mini_batch_module
from brorl.algorithms.settings import ImportanceCorrection, KLPenalty, PolicyLossSettings
from brorl.config.settings import TrainConfig
from brorl.runs.step_record import UpdateRecord
from brorl.training.learner import TreeLearner
from brorl.training.mini_batch import choose_trained
from brorl.tree import RolloutTree
from learner_support import group_of, learn, penalized_groups
from recipes import recipe
from row_losses import (
    OLD,
    SETTINGS,
    Batch,
    Tally,
    add_kl,
    detached,
    flat,
    moved,
    rows_of,
    sampled,
    sampler_rows,
)
from small_models import (
    assert_same_gradients,
    gradients,
    mostly_slow,
    random_tree,
    rollouts,
    small_model,
)


def loss_of(kind: str, aggregation: str, **changes: Any) -> PolicyLossSettings:
    return PolicyLossSettings(kind=kind, clip_low=0.1, clip_high=0.15, aggregation=aggregation, **changes)  # type: ignore[arg-type]


def assert_step_equals_rows(
    learner: TreeLearner,
    settings: TrainConfig,
    batch: Batch,
    reference_model: PreTrainedModel | None = None,
    factors: list[np.ndarray] | None = None,
) -> UpdateRecord:
    """Take a step with one mini-batch; its gradient and its update are those of the rows."""
    plain, trees = deepcopy(learner.model), [g.tree for g in batch[0]]
    plain.zero_grad()
    new = rows_of(plain, trees, settings.sampling)
    old = detached(new) if settings.recompute_old_logprobs else sampler_rows(trees)
    reference = detached(rows_of(reference_model, trees, settings.sampling)) if reference_model is not None else None
    total, told = flat(batch, settings, new, old, reference, factors)
    total.backward()
    update = learn(learner, *batch, seed=0)
    assert_same_gradients(gradients(learner.model), gradients(plain))
    for name, expected in told.items():
        assert getattr(update, name) == pytest.approx(expected, rel=1e-9, abs=1e-12), name
    return update


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_each_loss_and_aggregation_off_policy(kind: str, aggregation: str, rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    settings = recipe(SETTINGS, loss=loss_of(kind, aggregation))
    update = assert_step_equals_rows(TreeLearner(model, settings), settings, sampled(model, rng, num_groups=3))
    assert update.clip_low_fraction > 0 < update.clip_high_fraction
    assert update.mismatch_kl is update.mismatch_mean is update.reference_kl is None


@pytest.mark.parametrize(
    ("mode", "kind", "aggregation"),
    [
        ("truncate", "ppo", "token_mean"),
        ("mask", "ppo", "sequence_mean"),
        ("sequence_mask", "ppo", "token_mean"),
        ("mask", "cispo", "constant"),
        ("sequence_mask", "cispo", "sequence_mean"),
        ("mask", "gspo", "token_mean"),
        ("sequence_mask", "gspo", "sequence_mean"),
        ("none", "gspo", "constant"),
    ],
)
def test_each_importance_correction(mode: str, kind: str, aggregation: str, rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    settings = recipe(
        SETTINGS,
        loss=loss_of(kind, aggregation),
        importance=ImportanceCorrection(correction=mode, low=0.8, high=1.25),  # type: ignore[arg-type]
        old_logprobs="recompute",
    )
    update = assert_step_equals_rows(TreeLearner(model, settings), settings, sampled(model, rng, num_groups=3))
    assert (update.masked_fraction > 0) == (mode in ("mask", "sequence_mask"))


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("recompute", mostly_slow([False, True], True))
def test_each_loss_and_the_penalty_among_the_kept_tokens(kind: str, recompute: bool, rng: np.random.Generator) -> None:
    """Of trees with many tokens that the current weights, or the reference's, do not keep."""
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    start = deepcopy(model)
    settings = recipe(
        SETTINGS,
        top_p=0.8,
        top_k=9,
        loss=loss_of(kind, "token_mean"),
        kl=KLPenalty(coefficient=0.7, estimator="k3"),
        importance=ImportanceCorrection(correction="mask" if recompute else "none", low=0.8, high=1.25),
        old_logprobs=OLD[recompute],
    )
    learner = TreeLearner(model, settings)
    moved(model, rng)
    assert_step_equals_rows(learner, settings, sampled(model, rng, num_groups=3), start)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("kind", "aggregation", "offload"), [("ppo", "token_mean", False), ("gspo", "sequence_mean", True)]
)
def test_each_kl_estimator_in_the_loss(
    estimator: str, kind: str, aggregation: str, offload: bool, rng: np.random.Generator
) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    start = deepcopy(model)
    penalty = KLPenalty(coefficient=0.7, estimator=estimator, placement="loss", clamp=0.8)  # type: ignore[arg-type]
    settings = recipe(SETTINGS, loss=loss_of(kind, aggregation), kl=penalty, offload=offload)
    learner = TreeLearner(model, settings)
    moved(model, rng)
    update = assert_step_equals_rows(learner, settings, sampled(model, rng), start)
    assert update.reference_kl != 0


@pytest.mark.parametrize(("estimator", "recompute"), [("k1", False), ("k2", True), ("k3", False)])
def test_kl_in_the_reward(estimator: str, recompute: bool, rng: np.random.Generator) -> None:
    """Rewards lose the penalty of the sampling policy; the step adds nothing to the loss, and measures."""
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    start = deepcopy(model)
    penalty = KLPenalty(coefficient=0.7, estimator=estimator, placement="reward", clamp=0.8)  # type: ignore[arg-type]
    settings = recipe(SETTINGS, kl=penalty, old_logprobs=OLD[recompute])
    learner = TreeLearner(model, settings)
    moved(model, rng)
    groups, advantages = sampled(model, rng)
    trees = [g.tree for g in groups]
    old = detached(rows_of(model, trees)) if recompute else sampler_rows(trees)
    reference = detached(rows_of(start, trees))

    for p, (before, after) in enumerate(zip(groups, penalized_groups(learner, groups), strict=True)):
        for i, (leaf, _) in enumerate(rollouts(before.tree)):
            row = Tally()
            add_kl(row, old[p][i], reference[p][i], penalty, 1.0, 1.0)
            assert after.reward_L[leaf] == pytest.approx(before.reward_L[leaf] - 0.7 * row.kl, rel=1e-9, abs=1e-12)
        assert (after.correct_L == before.correct_L).all()
    assert_step_equals_rows(learner, settings, (groups, advantages), start)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_step_with_a_penalty_takes_no_pass_more_than_it_needs(placement: str, rng: np.random.Generator) -> None:
    model = small_model(seed=1, num_hidden_layers=1)
    learner = TreeLearner(
        model,
        recipe(SETTINGS, kl=KLPenalty(coefficient=0.7, estimator="k2", placement=placement), old_logprobs="recompute"),
    )  # type: ignore[arg-type]
    groups, advantages = sampled(model, rng)
    passes = []
    original = learner._logprobs.local
    learner._logprobs.local = lambda trees: passes.append(len(trees)) or original(trees)  # type: ignore[method-assign]
    learn(learner, groups, advantages)
    assert passes == [2, 2]  # the old policy and the reference, once each
    learn(learner, groups, advantages)  # the weights have changed: what was computed holds no longer
    assert passes == [2, 2, 2, 2]


@pytest.mark.parametrize(("placement", "aggregation"), [("loss", "sequence_mean"), ("reward", "token_mean")])
def test_chosen_responses_carry_their_factors_into_the_loss_and_the_penalty(
    placement: str, aggregation: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a forced choice the gradient is that of rows with factors, 0 for what was not chosen."""
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    start = deepcopy(model)
    settings = recipe(
        SETTINGS,
        kl=KLPenalty(coefficient=0.7, estimator="k2", placement=placement),
        max_responses_per_outcome=1,
        loss=loss_of("ppo", aggregation),
    )  # type: ignore[arg-type]
    learner = TreeLearner(model, settings)
    moved(model, rng)
    groups, advantages = sampled(model, rng, num_groups=1, noise=0.02)  # one of the two chosen lies within the bounds
    chosen, factor_K = np.array([0, 3]), np.array([1.5, 4.0])
    monkeypatch.setattr(mini_batch_module, "choose_responses", lambda *_: (chosen, factor_K))
    factor_L = np.zeros(groups[0].tree.num_responses)
    factor_L[chosen] = factor_K
    assert_step_equals_rows(learner, settings, (groups, advantages), start, [factor_L])


def test_two_mini_batches_with_everything_at_once(rng: np.random.Generator) -> None:
    """Old and reference log-probs are those before the first update: the second one's ratios are not 1."""
    model = small_model(seed=int(rng.integers(1 << 30)))
    start = deepcopy(model)
    settings = recipe(
        SETTINGS,
        learning_rate=2e-2,
        mini_batches=2,
        loss=loss_of("gspo", "sequence_mean"),
        kl=KLPenalty(coefficient=0.3, estimator="k3"),
        importance=ImportanceCorrection(correction="sequence_mask", low=0.7, high=1.4),
        old_logprobs="recompute",
    )
    learner = TreeLearner(model, settings)
    moved(model, rng)
    plain = deepcopy(model)
    groups, advantages = sampled(model, rng, num_groups=2)
    order = np.random.default_rng(5).permutation(2)  # how the seed deals the groups
    trees = [groups[i].tree for i in order]
    old, reference = detached(rows_of(plain, trees)), detached(rows_of(start, trees))
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=2e-2, betas=settings.optimizer.betas, weight_decay=0.0, foreach=False
    )
    losses = []
    for n, i in enumerate(order):
        optimizer.zero_grad()
        new = rows_of(plain, [trees[n]])
        total, told = flat(([groups[i]], [advantages[i]]), settings, new, [old[n]], [reference[n]])
        total.backward()
        optimizer.step()
        losses.append(told)
    update = learn(learner, groups, advantages, seed=5)
    assert_same_gradients(gradients(model), gradients(plain), tolerance=1e-6)  # Adam's quotient makes rounding grow
    for name in ("loss", "reference_kl", "clip_low_fraction", "clip_high_fraction"):
        assert getattr(update, name) == pytest.approx(np.mean([told[name] for told in losses]), rel=1e-6), name
    assert abs(update.old_policy_kl) > 1e-9  # 0 in the first mini-batch


@pytest.mark.parametrize(
    ("mode", "kl"),
    [
        ("none", KLPenalty()),
        ("truncate", KLPenalty()),
        ("mask", KLPenalty(coefficient=0.7, estimator="k2", placement="reward")),
    ],
)
def test_a_group_that_waited_keeps_the_old_policy_of_its_own_step(
    mode: str, kl: KLPenalty, rng: np.random.Generator
) -> None:
    """After a step has moved the weights, a group's ratios are to the weights that sampled it, also when recomputed."""
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    start = deepcopy(model)
    importance = ImportanceCorrection(correction=mode, low=0.8, high=1.25)  # type: ignore[arg-type]
    settings = recipe(
        SETTINGS, learning_rate=3e-2, importance=importance, kl=kl, old_logprobs="recompute", mini_batches=1
    )
    learner = TreeLearner(model, settings)
    first, waiting = sampled(model, rng, num_groups=1), sampled(model, rng, num_groups=1)
    old_waiting = detached(rows_of(model, [g.tree for g in waiting[0]]))
    carried = learner.with_old_logprobs(waiting[0])
    learn(learner, *first)

    fresh = sampled(model, rng, num_groups=1)
    plain = deepcopy(model)
    plain.zero_grad()
    trees = [g.tree for g in (*carried, *fresh[0])]
    new = rows_of(plain, trees)
    old = [*old_waiting, detached(rows_of(plain, trees[1:]))[0]]
    reference = detached(rows_of(start, trees))
    groups, advantages = [*learner.with_old_logprobs(carried), *fresh[0]], [*waiting[1], *fresh[1]]
    penalized = penalized_groups(learner, groups)
    for p, (before, after) in enumerate(zip([*waiting[0], *fresh[0]], penalized, strict=True)):
        for i, (leaf, _) in enumerate(rollouts(before.tree)):
            row = Tally()
            if kl.coefficient:
                add_kl(row, old[p][i], reference[p][i], kl, 1.0, 1.0)
            assert after.reward_L[leaf] == pytest.approx(before.reward_L[leaf] - 0.7 * row.kl, rel=1e-9, abs=1e-12)
    total, told = flat((groups, advantages), settings, new, old, reference)
    total.backward()
    update = learn(learner, groups, advantages, seed=0)
    assert_same_gradients(gradients(model), gradients(plain))
    _, of_fresh = flat(fresh, settings, new[1:], old[1:], reference[1:])
    for name in told:
        expected = of_fresh if name.startswith("mismatch") else told
        assert getattr(update, name) == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
    assert update.clip_fraction > 0  # all of it from the group that waited: the other's ratios are 1


def test_groups_that_wait_get_the_log_probs_of_the_engine_unless_they_are_recomputed(rng: np.random.Generator) -> None:
    model = small_model(seed=1, num_hidden_layers=1)
    groups, _ = sampled(model, rng)
    for group in TreeLearner(model, SETTINGS).with_old_logprobs(groups):
        assert group.old_logprob_M is group.tree.logprob


def test_a_step_of_waiting_groups_alone_measures_no_mismatch(rng: np.random.Generator) -> None:
    model = small_model(seed=1, num_hidden_layers=1)
    learner = TreeLearner(model, recipe(SETTINGS, old_logprobs="recompute"))
    groups, advantages = sampled(model, rng)
    update = learn(learner, learner.with_old_logprobs(groups), advantages, seed=0)
    assert update.mismatch_mean is update.mismatch_max is update.mismatch_kl is None


def test_dual_clip(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)))
    loss = loss_of("ppo", "token_mean", dual_clip=1.3)
    settings = recipe(SETTINGS, loss=loss)
    update = assert_step_equals_rows(TreeLearner(model, settings), settings, sampled(model, rng, num_groups=3))
    assert update.clip_fraction > update.clip_low_fraction + update.clip_high_fraction + 1e-6


@pytest.mark.parametrize(
    ("kind", "aggregation", "kl"),
    [
        ("ppo", "token_mean", KLPenalty()),
        ("cispo", "sequence_mean", KLPenalty(coefficient=0.7, estimator="k2", placement="loss", clamp=0.8)),
        ("gspo", "constant", KLPenalty(coefficient=0.7, estimator="k3", placement="reward", clamp=0.8)),
    ],
)
def test_truncated_responses_can_be_left_out_of_the_loss(
    kind: str, aggregation: str, kl: KLPenalty, rng: np.random.Generator
) -> None:
    """They count in no term, and in the denominator of means over responses alone, with whatever else there is."""
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    start = deepcopy(model)
    settings = recipe(SETTINGS, loss=loss_of(kind, aggregation, mask_truncated=True), kl=kl)
    learner = TreeLearner(model, settings)
    moved(model, rng)
    while True:  # until every group has finished and truncated responses
        groups, advantages = sampled(model, rng, num_groups=3)
        if all(0 < g.tree.finished.sum() < g.tree.num_responses for g in groups):
            break
    update = assert_step_equals_rows(learner, settings, (groups, advantages), start if kl.coefficient else None)
    kept = [g.tree.select(np.flatnonzero(g.tree.finished))[0] for g in groups]
    assert update.trained_nodes == sum(t.num_nodes for t in kept)


def test_a_chosen_subset_holds_no_truncated_response(rng: np.random.Generator) -> None:
    """The subset is unbiased for the responses that ended by themselves: their factors have a mean of 1."""
    tree = random_tree(rng, num_rollouts=20, branching=5)
    group, draws = replace(group_of(tree, rng), advantage_L=rng.normal(size=tree.num_responses)), 1000
    sum_L, factor_L = np.zeros(tree.num_responses), np.ones(tree.num_responses)
    for seed in range(draws):
        chosen_responses = choose_trained(group, 1, True, np.random.default_rng(seed))
        assert chosen_responses is not None
        place = {response: i for i, (response, _) in enumerate(tree.responses())}
        chosen = [place[response] for response, _ in chosen_responses.tree.responses()]
        sum_L[chosen] += chosen_responses.factor_L
        factor_L[chosen] = chosen_responses.factor_L
    assert (sum_L[~tree.finished] == 0).all()
    seen_L = sum_L > 0
    assert seen_L.any()
    for total, factor in zip(sum_L[seen_L], factor_L[seen_L], strict=True):  # 1 / pi, drawn with probability pi
        times = round(total / factor)
        assert total == pytest.approx(times * factor, rel=1e-9)
        assert binomtest(times, draws, 1 / factor).pvalue > 1e-8  # for at most 20 responses: 2 in ten million


def test_a_batch_of_truncated_responses_alone_changes_nothing(rng: np.random.Generator) -> None:
    model = small_model(seed=3, num_hidden_layers=1)
    before = [p.detach().clone() for p in model.parameters()]
    tree = RolloutTree.from_responses([1, 2], [[3, 4], [3, 5]], [[-1.0, -1.0], [-1.0, -1.0]], [False, False])
    groups = [group_of(tree, rng)]
    settings = recipe(SETTINGS, loss=PolicyLossSettings(mask_truncated=True))
    update = learn(TreeLearner(model, settings), groups, [np.array([1.0, -1.0])], seed=0)
    assert (update.loss, update.grad_norm, update.trained_nodes) == (0.0, 0.0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def row_entropies(model: PreTrainedModel, tree: RolloutTree, temperature: float) -> list[Tensor]:
    """For each rollout the entropy before each of its sampled tokens, from the model's plain forward pass."""
    rows = []
    for _, path in rollouts(tree):
        ids = [*tree.prompt_ids, *tree.token[path].tolist()]
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, len(tree.prompt_ids) - 1 : -1]
        entropy_T = torch.distributions.Categorical(logits=logits / temperature).entropy()
        rows.append(entropy_T[torch.from_numpy(~tree.given[path])])
    return rows


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("aggregation", mostly_slow(["token_mean", "sequence_mean", "constant"], "constant"))
def test_the_entropy_bonus(kind: str, aggregation: str, rng: np.random.Generator) -> None:
    """The mean over the rows' tokens of the entropy of the whole vocabulary, whatever the aggregation.

    Truncated responses that are not in the loss are not in the mean.
    """
    model = small_model(seed=int(rng.integers(1 << 30)))
    masks = aggregation != "token_mean"
    settings = recipe(SETTINGS, loss=loss_of(kind, aggregation, entropy_coefficient=0.4, mask_truncated=masks))
    groups, advantages = sampled(model, rng)
    plain, trees = deepcopy(model), [g.tree for g in groups]
    plain.zero_grad()
    total, _ = flat((groups, advantages), settings, rows_of(plain, trees), sampler_rows(trees))
    entropies = [
        row
        for tree in trees
        for (leaf, _), row in zip(
            rollouts(tree), row_entropies(plain, tree, SETTINGS.sampling.temperature), strict=True
        )
        if tree.finished[leaf] or not masks
    ]
    tokens = sum(row.numel() for row in entropies)
    bonus = sum((row.sum() for row in entropies), torch.zeros(())) / tokens
    (total - 0.4 * bonus).backward()
    update = learn(TreeLearner(model, settings), groups, advantages, seed=0)
    assert_same_gradients(gradients(model), gradients(plain))
    assert update.bonus_entropy == pytest.approx(sum(row.sum().item() for row in entropies) / tokens, rel=1e-9)
    assert update.loss == pytest.approx(total.item(), rel=1e-9)


def test_the_entropy_where_tokens_are_forbidden(rng: np.random.Generator) -> None:
    """A forbidden token has probability 0: the entropy is that of the others, and its gradient is finite."""
    model = small_model(seed=int(rng.integers(1 << 30)), num_hidden_layers=1)
    tree = RolloutTree.from_responses([1, 2], [[3, 4, 0], [3, 7, 6], [4, 6, 5]], [[-1.0] * 3] * 3)
    settings = recipe(SETTINGS, min_new_tokens=2, loss=PolicyLossSettings(entropy_coefficient=1.0))
    plain = deepcopy(model)
    plain.zero_grad()
    entropy, tokens = torch.zeros((), dtype=torch.float64), 0
    for _, path in rollouts(tree):
        ids = [*tree.prompt_ids, *tree.token[path].tolist()]
        logits = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 1:-1] / 0.9
        for length, row in enumerate(logits):
            allowed = [t for t in range(row.numel()) if length >= 2 or t not in (0, 5)]
            p = torch.softmax(row[allowed], 0)
            entropy, tokens = entropy - (p * p.log()).sum(), tokens + 1
    (-entropy / tokens).backward()
    learner = TreeLearner(model, settings, stop_token_ids=(0, 5))
    update = learn(learner, [group_of(tree, rng)], [np.zeros(tree.num_responses)], seed=0)
    assert update.bonus_entropy == pytest.approx(entropy.item() / tokens, rel=1e-9)
    assert_same_gradients(gradients(model), gradients(plain))
