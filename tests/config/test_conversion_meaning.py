"""Converted numbers against an independent computation of what the source means by them.

References: transformers' `get_scheduler` for the learning rate of TRL, a plain loop over micro-batches for the number
of its updates, and the formulas of the losses of TRL and verl, written out as in their source.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.algorithms.losses import cispo_loss, clipped_policy_loss, kl_estimates
from brorl.algorithms.rewards import shaped_rewards
from brorl.api.init import convert
from brorl.config.reading import make_config
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from each_row import each_row

TRL: dict[str, Any] = {"model_name_or_path": "some/model", "num_generations": 4, "per_device_train_batch_size": 64}
VERL: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo", "actor_rollout_ref.model.path": "some/model", "actor_rollout_ref.rollout.n": 4,
}  # fmt: skip
A = "actor_rollout_ref.actor."


def recipe_of(config: dict[str, Any], num_prompts: int | None = None) -> TrainConfig:
    return make_config(convert(config, "it.yaml", num_prompts).settings, {}, "it.yaml")


def rates(config: TrainConfig) -> list[float]:
    """The learning rate of every update, as the learner makes it: the fall by steps, the warm-up by updates."""
    optimizer = config.optimizer
    found: list[float] = []
    assert config.steps is not None
    for step in range(config.steps):
        for _ in range(optimizer.mini_batches):
            warmup, done = optimizer.warmup_updates, len(found) + 1
            risen = min(1.0, done / warmup) if warmup else 1.0
            found.append(optimizer.learning_rate * optimizer.decay(step / config.steps) * risen)
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"lr_scheduler_type": "linear"},
        {"lr_scheduler_type": "linear", "warmup_steps": 20},
        {"lr_scheduler_type": "linear", "warmup_steps": 0.1},
        {"lr_scheduler_type": "cosine", "warmup_ratio": 0.25},
        {"lr_scheduler_type": "constant", "warmup_steps": 50},  # which transformers ignores
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 50},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.3}, "warmup_steps": 0.1},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 4e-7}},
        {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
         "warmup_steps": 10},
        # two updates for each generation, and two passes over each of them
        {"lr_scheduler_type": "linear", "steps_per_generation": 2, "warmup_steps": 0.2},
        {"lr_scheduler_type": "cosine", "num_iterations": 2, "warmup_steps": 40},
    ],
)  # fmt: skip
def test_the_learning_rate_of_every_update_is_that_of_transformers(given: dict[str, Any]) -> None:
    from transformers.optimization import get_scheduler

    total, peak = 200, 2e-6
    options = given.get("lr_scheduler_kwargs")
    share = given.get("warmup_steps", given.get("warmup_ratio", 0))
    warmup = math.ceil(share * total) if share < 1 else share
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(given["lr_scheduler_type"], optimizer, warmup, total, options)
    wanted = []
    for _ in range(total):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    config = recipe_of({**TRL, **given, "learning_rate": peak, "max_steps": total, "bf16": False})
    found = rates(config)
    assert len(found) == total // given.get("num_iterations", 1)
    wanted = wanted[:: total // len(found)]
    # a step's updates have one factor, and the warm-up ends an update earlier
    of_a_step = given.get("steps_per_generation", 1) * given.get("num_iterations", 1)
    bound = peak * (of_a_step / max(warmup, 1) * (warmup > 0) + 4 * of_a_step / total)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= bound
    assert config.optimizer.decay(1.0) * peak == pytest.approx(
        scheduler.get_last_lr()[0], abs=2e-9
    )  # after the last update


@each_row(
    ("micro", "accumulated", "rounds", "iterations"),
    [(64, 1, None, 1), (8, 16, None, 1), (64, 1, 4, 1), (16, 2, 4, 1), (16, 4, 1, 1), (16, 2, 4, 3), (16, 1, 2, 2)],
)
def test_the_steps_are_those_of_a_loop_over_micro_batches(
    micro: int, accumulated: int, rounds: int | None, iterations: int
) -> None:
    group, prompts, epochs = 4, 1000, 3
    given = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulated, "bf16": False}
    given |= {"num_iterations": iterations, "num_train_epochs": epochs, "num_generations": group}
    given |= {} if rounds is None else {"steps_per_generation": rounds}
    rounds = accumulated if rounds is None else rounds
    updates, generated, waiting = 0, 0, 0
    for _ in range(epochs):
        left = prompts
        while left >= micro * rounds // group:  # a rest that fills no batch is dropped
            left -= micro * rounds // group
            generated += micro * rounds
            for _ in range(iterations * rounds):
                waiting += 1
                if waiting == accumulated:
                    updates, waiting = updates + 1, 0
        if waiting:  # the end of an epoch makes an update of what there is
            updates, waiting = updates + 1, 0
    config = recipe_of({**TRL, **given}, prompts)
    assert config.steps is not None
    samples = config.steps * config.prompts_per_step * group
    assert samples == pytest.approx(generated, abs=2 * config.prompts_per_step * group * epochs)
    assert config.steps * config.optimizer.mini_batches * iterations == pytest.approx(
        updates, abs=epochs * iterations * config.optimizer.mini_batches
    )
    of_an_update = config.prompts_per_step * group / config.optimizer.mini_batches
    assert of_an_update == micro * accumulated  # the samples of the gradient of one update


def test_epochs_of_verl_become_steps_and_its_warm_up_counts_steps() -> None:
    given = {"data.train_batch_size": 64, f"{A}ppo_mini_batch_size": 16, "trainer.total_epochs": 3}
    config = recipe_of({**VERL, **given, f"{A}optim.lr_warmup_steps": 5}, 1000)
    assert config.steps == 3 * (1000 // 64)  # the loader drops the rest
    assert config.optimizer.warmup_updates == 5 * 4  # its scheduler makes one step for the four updates
    ratio = {f"{A}optim.lr_warmup_steps_ratio": 0.1, f"{A}optim.lr_scheduler_type": "cosine"}
    config = recipe_of({**VERL, **given, **ratio, f"{A}optim.min_lr_ratio": 0.2}, 1000)
    wanted = []
    for step in range(45):
        warm, progress = step / 4, (step - 4) / 41
        wanted += [1e-6 * (warm if step < 4 else 0.6 + 0.4 * math.cos(math.pi * progress))] * 4
    assert max(abs(a - b) for a, b in zip(rates(config), wanted, strict=True)) <= 1e-6 / 4 * 1.001


def ppo_of_trl(ratio: Tensor, advantage: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    bounded = ratio.clamp(1 - low, 1 + high)
    ratio = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(ratio * advantage, bounded * advantage)


def ppo_of_verl(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float) -> Tensor:
    worse = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantage < 0, torch.min(-advantage * dual, worse), worse)


@each_row(
    ("given", "loss_of"),
    [
        (TRL, lambda r, a, _: ppo_of_trl(r, a, 0.2, 0.2, None)),
        (TRL | {"epsilon": 0.1}, lambda r, a, _: ppo_of_trl(r, a, 0.1, 0.1, None)),
        (TRL | {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 2.0}, lambda r, a, _: ppo_of_trl(r, a, 0.1, 0.3, 2.0)),
        (TRL | {"loss_type": "cispo", "epsilon_high": 1.5}, lambda r, a, new: -r.clamp(max=1.5).detach() * a * new),
        (VERL, lambda r, a, _: ppo_of_verl(r, a, 0.2, 0.2, 3.0)),
        (VERL | {f"{A}clip_ratio": 0.05}, lambda r, a, _: ppo_of_verl(r, a, 0.2, 0.2, 3.0)),  # others decide there
        (VERL | {f"{A}clip_ratio": 0.05, f"{A}clip_ratio_low": None, f"{A}clip_ratio_high": None},
         lambda r, a, _: ppo_of_verl(r, a, 0.05, 0.05, 3.0)),
        (VERL | {f"{A}clip_ratio_high": 0.28, f"{A}clip_ratio_c": 5.0},
         lambda r, a, _: ppo_of_verl(r, a, 0.2, 0.28, 5.0)),
        (VERL | {f"{A}policy_loss.loss_mode": "cispo", f"{A}clip_ratio_high": 0.5},
         lambda r, a, new: -r.clamp(0.8, 1.5).detach() * a * new),
    ],
)  # fmt: skip
def test_the_gradient_of_the_policy_loss_is_that_of_the_source(given: dict[str, Any], loss_of: Any) -> None:
    config = recipe_of(given)
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(500, generator=generator, dtype=torch.float64)
    new = (old + torch.randn(500, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(500, generator=generator, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(loss_of((new - old).exp(), advantage, new).mean(), new)
    own, weights = config.loss, (advantage.clamp(min=0), advantage.clamp(max=0))
    bounds: dict[str, Any] = {"clip_low": own.clip.low, "clip_high": own.clip.high, "denominator": 500}
    if own.kind == "cispo":
        found = cispo_loss(new, old, *weights, **bounds)
    else:
        found = clipped_policy_loss(new, old, *weights, dual_clip=own.dual_clip, **bounds)
    torch.testing.assert_close(torch.autograd.grad(found.loss, new)[0], wanted)


@pytest.mark.parametrize(
    ("given", "corrected"),
    [({}, True), ({"use_bias_correction_kl": True}, True), ({"use_bias_correction_kl": False}, False)],
)
def test_the_kl_penalty_has_the_expected_gradient_of_the_source(given: dict[str, Any], corrected: bool) -> None:
    config = recipe_of({**TRL, **given, "beta": 0.04, "bf16": False})
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    log_reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    log_policy = logits.log_softmax(0)
    sampled = log_policy.detach().exp()  # of every token, which stands for the expectation
    log_ratio = log_reference - log_policy
    of_token = log_ratio.exp() - log_ratio - 1
    if corrected:
        of_token = of_token * (log_policy - log_policy.detach()).exp()
    (wanted,) = torch.autograd.grad(0.04 * (sampled * of_token).sum(), logits, retain_graph=True)
    estimates = kl_estimates(log_policy, log_reference, config.kl.estimator, config.kl.clamp)
    (found,) = torch.autograd.grad(config.kl.coefficient * (sampled * estimates).sum(), logits)
    torch.testing.assert_close(found, wanted)


@each_row("kind", ["kl", "k1", "mse", "k2", "low_var_kl", "k3", "low_var_kl+", "k3+", "k1+"])
def test_each_kl_loss_of_verl_has_the_gradient_of_its_source(kind: str) -> None:
    config = recipe_of({**VERL, f"{A}use_kl_loss": True, f"{A}kl_loss_coef": 0.02, f"{A}kl_loss_type": kind})
    assert (config.kl.coefficient, config.kl.placement) == (0.02, "loss")
    generator = torch.Generator().manual_seed(2)
    log_policy = (-torch.rand(50, generator=generator, dtype=torch.float64)).requires_grad_()
    log_reference = -torch.rand(50, generator=generator, dtype=torch.float64)
    difference = log_policy - log_reference
    formulas = {
        "k1": difference, "k2": difference.square() / 2, "k3": (-difference).exp() + difference - 1,
    }  # fmt: skip
    name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind.removesuffix("+"), kind.removesuffix("+"))
    wanted = formulas["k2" if kind.endswith("+") else name]
    found = kl_estimates(log_policy, log_reference, config.kl.estimator, config.kl.clamp)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), log_policy)[0] for one in (found, wanted)))


def test_settings_of_the_run_in_verl() -> None:
    given = {
        "trainer.project_name": "sums", "trainer.experiment_name": "first", "data.train_files": "a/x.parquet",
        "data.val_files": ["a/test.parquet", "b/test.parquet"], "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 4, "actor_rollout_ref.rollout.val_kwargs.n": 8,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 0.6, "data.train_max_samples": 500,
    }  # fmt: skip
    found = convert({**VERL, **given}, "it.yaml")
    config = make_config(found.settings, {}, "it.yaml")
    assert found.without_counterpart == ()
    assert (config.tracking.project, config.tracking.run_name) == ("sums", "first")
    assert config.engine.vllm.tensor_parallel == 4
    assert [source.label for source in config.evaluation.sources] == ["test", "test-2"]
    assert (config.evaluation.rollouts_per_prompt, config.evaluation.ks, config.evaluation.temperature) == (
        8,
        (1, 8),
        0.6,
    )
    assert config.data.sources[0].limit == 500  # type: ignore[union-attr]


def test_verl_validates_with_all_tokens_unless_it_is_told() -> None:
    rollout = "actor_rollout_ref.rollout"
    for given, expected in (
        ({}, (1.0, 0)),
        ({f"{rollout}.top_p": 0.9, f"{rollout}.top_k": 20}, (1.0, 0)),
        ({f"{rollout}.top_k": 20, f"{rollout}.val_kwargs.top_k": 5, f"{rollout}.val_kwargs.top_p": 0.7}, (0.7, 5)),
    ):
        config = make_config(convert({**VERL, **given}, "it.yaml").settings, {}, "it.yaml")
        assert (config.evaluated_sampling.top_p, config.evaluated_sampling.top_k) == expected


def test_clips_of_responses_are_converted() -> None:
    """Those of tokens have no effect on responses, and are refused with the ones to set."""
    for config in ({**TRL, "importance_sampling_level": "sequence"}, {**VERL, f"{A}policy_loss.loss_mode": "gspo"}):
        with pytest.raises(UserError, match=r"set loss\.clip_low: 3e-4 and loss\.clip_high: 4e-4"):
            recipe_of(config)
    narrow = {**TRL, "importance_sampling_level": "sequence", "epsilon": 1e-3, "epsilon_high": 2e-3}
    assert recipe_of(narrow).loss.clip == (1e-3, 2e-3)
    assert recipe_of(narrow).loss.aggregation == "token_mean"  # of dapo, where every token carries the ratio


def test_references_in_a_config_of_verl_are_resolved() -> None:
    given = {
        "data.train_batch_size": 64, f"{A}ppo_mini_batch_size": "${data.train_batch_size}",
        "trainer.project_name": "sums",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "${oc.select:trainer.n_gpus_per_node,4}",
        "actor_rollout_ref.rollout.name": "vllm", "trainer.experiment_name": "first",
        "trainer.default_local_dir": "runs/${trainer.project_name}/${trainer.experiment_name}",
    }  # fmt: skip
    config = recipe_of({**VERL, **given})
    assert (config.optimizer.mini_batches, config.engine.vllm.tensor_parallel) == (1, 4)
    assert config.output_dir == "runs/sums/first"


def test_the_reward_is_the_weighted_sum_of_trl(rng: np.random.Generator) -> None:
    weights = {"my.right": 2.0, "my.short": 0.5, "other.short": -1.5, "my.logged": 0.0}
    given = {"reward_funcs": [*weights], "reward_weights": [*weights.values()]}
    found = convert({**TRL, **given}, "it.yaml")
    rewards = make_config(found.settings, {}, "it.yaml").rewards
    value_L = {name: rng.random(20) for name in weights}
    own = {term.function.replace(":", "."): name for name, term in rewards.terms.items()}
    assert {*own} == {"my.short", "other.short"}
    first_L, terms_L = value_L["my.right"], {name: value_L[function] for function, name in own.items()}
    whole, length = np.zeros(20, np.bool_), np.ones(20, np.int64)
    got = shaped_rewards(first_L > 0.5, first_L, length, whole, "own", 1, rewards, terms_L=terms_L)
    np.testing.assert_allclose(got, sum(weight * value_L[name] for name, weight in weights.items()))


def test_one_reward_function_is_the_verifier_and_the_others_are_said() -> None:
    found = convert({**TRL, "reward_funcs": ["my.right", "my.short"], "reward_weights": [2.0, 0.0]}, "it.yaml")
    recipe = make_config(found.settings, {}, "it.yaml")
    assert (recipe.verification.functions, recipe.rewards.domain_weights) == ({"own": "my:right"}, {"own": 2.0})
    assert any("my.short left out, with the weight 0" in remark for remark in found.remarks)
    built_in = {"reward_funcs": ["think_format_reward", "my.short", "accuracy_reward"], "dataset_name": "some/data"}
    found = convert({**TRL, **built_in, "reward_weights": [0.1, 1.0, 1.0]}, "it.yaml")
    recipe = make_config(found.settings, {}, "it.yaml")
    assert (recipe.verification.functions, recipe.data.sources[0].domain) == ({}, "math")  # type: ignore[union-attr]
    assert recipe.rewards.terms["short"].function == "my:short"
    for said in ("my.short became rewards.terms", "accuracy_reward became the verifier", "set rewards.format_pattern"):
        assert any(said in remark for remark in found.remarks), said


@pytest.mark.parametrize(
    "given", [{**TRL, "num_generations": "many"}, {**TRL, "reward_weights": ["x"], "reward_funcs": ["a.b"]},
              {**VERL, "data.train_batch_size": "${oc.env:SIZE}"}],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_an_error_that_names_it(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"it.yaml has a value of a wrong type: .*(many|'x'|SIZE)"):
        convert(given, "it.yaml")


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate"])
@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.2, None), (0.4, 2.5), (None, None)])
def test_the_importance_weights_of_vllm_are_those_of_trl(mode: str, low: float | None, high: float | None) -> None:
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    found = recipe_of({**TRL, "use_vllm": True, "vllm_importance_sampling_mode": mode, **bounds}).importance
    ratio = torch.logspace(-3, 3, 200, dtype=torch.float64)
    inside = (ratio >= (low or -math.inf)) & (ratio <= (high or math.inf))
    kept = (ratio >= found.low) & (ratio <= found.high)
    if mode == "token_mask":
        assert found.correction == "mask"
        assert torch.equal(kept, inside)
    else:
        assert found.correction == "truncate"
        torch.testing.assert_close(ratio.clamp(max=found.high), ratio.clamp(max=high or math.inf))


@pytest.mark.parametrize(("mode", "is_said"), [("token-mean", False), ("seq-mean-token-sum-norm", True)])
def test_an_entropy_bonus_that_verl_averages_differently_is_said(mode: str, is_said: bool) -> None:
    given = {
        f"actor_rollout_ref.actor.{name}": value for name, value in (("entropy_coeff", 0.1), ("loss_agg_mode", mode))
    }
    assert (
        any(remark.startswith("entropy_coeff") for remark in convert({**VERL, **given}, "it.yaml").remarks) == is_said
    )
