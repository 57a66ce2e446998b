"""Configs of TRL and verl as recipes: what each setting becomes, what is left out, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from brorl.api.init import convert, with_data
from brorl.config.reading import make_config
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from each_row import each_row

TRL: dict[str, Any] = {"model_name_or_path": "some/model", "dataset_name": "some/data", "num_generations": 16}
VERL: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {"model": {"path": "some/model"}, "rollout": {"n": 16, "name": "vllm"}},
    "data": {"train_files": "train.parquet", "train_batch_size": 512},
}


DEFAULT_TRIES = TrainConfig().dynamic_sampling.max_tries


def recipe_of(config: dict[str, Any]) -> TrainConfig:
    return make_config(convert(config, "it.yaml").settings, {}, "it.yaml")


def value(config: TrainConfig, name: str) -> Any:
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


@each_row(
    ("given", "name", "expected"),
    [
        ({}, "advantage.estimator", "grpo"),
        ({"scale_rewards": "batch"}, "advantage.estimator", "reinforce_pp_baseline"),
        ({"scale_rewards": False}, "advantage.estimator", "rloo"),
        ({}, "loss.clip_high", 0.2),  # of epsilon, where epsilon_high is not set
        ({"epsilon": 0.1}, "loss.clip_high", 0.1),
        ({"epsilon_high": 0.28}, "loss.clip_high", 0.28),
        ({"loss_type": "dr_grpo"}, "loss.aggregation", "constant"),
        ({"loss_type": "cispo"}, "loss.kind", "cispo"),
        ({"importance_sampling_level": "sequence"}, "loss.kind", "gspo"),
        ({"importance_sampling_level": "sequence", "epsilon": 3e-4}, "loss.clip_low", 3e-4),
        ({}, "optimizer.learning_rate", 1e-6),
        ({"learning_rate": "5e-6"}, "optimizer.learning_rate", 5e-6),  # YAML reads it as text
        ({}, "optimizer.schedule", "linear"),
        ({}, "optimizer.final_rate", 0.0),
        ({"lr_scheduler_type": "constant"}, "optimizer.schedule", "constant"),
        ({}, "optimizer.betas", (0.9, 0.999)),
        ({"beta": 0.04}, "kl.coefficient", 0.04),
        ({"beta": 0.04}, "kl.estimator", "k2"),  # TRL weights k3 by the ratio, which has the gradient of k2
        ({}, "dynamic_sampling.enabled", False),
        ({"bf16": True}, "importance.correction", "truncate"),
        ({"use_vllm": True, "bf16": True}, "engine.kind", "vllm"),
        ({"sync_ref_model": True, "beta": 0.1}, "reference.reset_every", 512),
        ({"max_completion_length": 1024}, "sampling.max_new_tokens", 1024),
        # 8 x 16 samples a batch in one process, and one update of all of them
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 16}, "prompts_per_step", 8),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 16}, "optimizer.mini_batches", 1),
        # four batches of 128 samples are generated at once, and each is an update
        ({"per_device_train_batch_size": 128, "steps_per_generation": 4}, "prompts_per_step", 32),
        ({"per_device_train_batch_size": 128, "steps_per_generation": 4}, "optimizer.mini_batches", 4),
        ({"per_device_train_batch_size": 128, "steps_per_generation": 4, "max_steps": 1000}, "steps", 250),
        ({"generation_batch_size": 320}, "prompts_per_step", 20),
        ({"top_p": 0.9, "generation_kwargs": {"top_p": 0.95}}, "sampling.top_p", 0.95),  # TRL lets these replace it
        ({"generation_kwargs": {"top_k": 20, "temperature": 0.6}}, "sampling.temperature", 0.6),
        ({"report_to": "wandb"}, "tracking.to", ("wandb",)),
        ({"report_to": ["none"]}, "tracking.to", ()),
        ({"use_vllm": True}, "importance.high", 3.0),  # TRL corrects by default
        ({"use_vllm": True}, "importance.correction", "truncate"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}, "importance.correction", "mask"),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "importance.correction", "none"),
        ({"use_peft": True, "lora_r": 8}, "lora.rank", 8),
        ({"use_peft": True, "load_in_4bit": True}, "lora.quantization", "nf4"),
    ],
)
def test_settings_of_trl(given: dict[str, Any], name: str, expected: Any) -> None:
    assert value(recipe_of({**TRL, **given}), name) == expected


@each_row(
    ("given", "name", "expected"),
    [
        ({}, "rollouts_per_prompt", 16),
        ({}, "prompts_per_step", 512),
        ({}, "optimizer.mini_batches", 2),  # verl's mini-batch has 256 prompts by default
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 64}, "optimizer.mini_batches", 8),
        ({"algorithm.adv_estimator": "rloo"}, "advantage.estimator", "rloo"),
        ({"algorithm.adv_estimator": "grpo"}, "advantage.estimator", "grpo"),
        (
            {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
            "advantage.estimator",
            "rloo",
        ),
        ({"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}, "advantage.normalize_over", "tokens"),
        ({"algorithm.filter_groups.enable": True}, "dynamic_sampling.enabled", True),
        ({}, "dynamic_sampling.enabled", False),
        ({"actor_rollout_ref.actor.clip_ratio": 0.1}, "loss.clip_low", 0.2),  # verl's own low and high decide
        ({"actor_rollout_ref.actor.clip_ratio_high": 0.28}, "loss.clip_high", 0.28),
        ({}, "loss.dual_clip", 3.0),
        ({"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}, "loss.aggregation", "sequence_mean"),
        ({"actor_rollout_ref.actor.use_kl_loss": True}, "kl.coefficient", 0.001),
        ({"actor_rollout_ref.actor.use_kl_loss": True}, "kl.estimator", "k3"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, "loss.kind", "gspo"),
        ({}, "optimizer.weight_decay", 0.01),
        ({"actor_rollout_ref.rollout.top_k": -1}, "sampling.top_k", 0),
        ({"trainer.total_training_steps": 300}, "steps", 300),
        ({"trainer.save_freq": -1}, "checkpoint_every", 50),
        ({"trainer.logger": ["console", "wandb"]}, "tracking.to", ("wandb",)),
        ({"trainer.max_actor_ckpt_to_keep": 4}, "keep_checkpoints", 4),
        ({"actor_rollout_ref.model.lora_rank": 8}, "lora.alpha", 16.0),
        ({"algorithm.use_kl_in_reward": True}, "kl.placement", "reward"),
        ({"algorithm.filter_groups.max_num_gen_batches": 0}, "dynamic_sampling.max_tries", DEFAULT_TRIES),
        ({"algorithm.filter_groups.max_num_gen_batches": 7}, "dynamic_sampling.max_tries", 7),
    ],
)
def test_settings_of_verl(given: dict[str, Any], name: str, expected: Any) -> None:
    config = {**VERL, **given}
    assert value(recipe_of(config | {"actor_rollout_ref.rollout.name": "hf"}), name) == expected


def test_the_data_of_both_is_read() -> None:
    (trl,), (verl,) = (recipe_of(config).data.sources for config in (TRL | {"dataset_config": "main"}, VERL))
    assert (trl.path, trl.subset) == ("some/data", "main")  # type: ignore[union-attr]
    assert verl.path.endswith("train.parquet")  # type: ignore[union-attr]
    assert verl.answer_column == "reward_model.ground_truth"  # type: ignore[union-attr]
    two = recipe_of({**VERL, "data.train_files": ["a.parquet", "b.parquet"]}).data.sources
    assert [Path(source.path).name for source in two] == ["a.parquet", "b.parquet"]  # type: ignore[union-attr]


def test_what_has_no_counterpart_is_listed() -> None:
    found = convert({**TRL, "logging_steps": 1, "min_p": 0.1, "unheard_of": 3}, "it.yaml")
    assert found.without_counterpart == ("min_p", "unheard_of")
    assert any("prompts_per_step" in remark for remark in found.remarks)
    converted = {"trainer": {"nnodes": 2}, "actor_rollout_ref.actor.optim.min_lr_ratio": 0.1}
    assert convert({**VERL, **converted}, "it.yaml").without_counterpart == ("trainer.nnodes",)


@pytest.mark.parametrize(
    ("config", "is_truncated"),
    [
        (TRL, False),
        (TRL | {"top_p": 0.95}, True),
        (TRL | {"generation_kwargs": {"top_k": 20}}, True),
        (VERL, False),
        (VERL | {"actor_rollout_ref.rollout.top_k": 20}, True),
    ],
)
def test_truncated_sampling_is_said_to_train_the_policy_of_the_kept_tokens(
    config: dict[str, Any], is_truncated: bool
) -> None:
    assert sum("among the kept tokens" in remark for remark in convert(config, "it.yaml").remarks) == is_truncated


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"learning_rate": 1e-6}, "it.yaml is neither a config of TRL's GRPOTrainer"),
        ({**TRL, "loss_type": "sapo"}, "loss_type: 'sapo' has no counterpart; the values that have one: dapo"),
        ({**VERL, "algorithm": {}}, "algorithm.adv_estimator: 'gae' has no counterpart"),  # verl's default
    ],
)
def test_what_cannot_be_converted_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        convert(config, "it.yaml")


def test_other_data_brings_its_own_functions_and_held_out_questions() -> None:
    config = {"reward_funcs": ["my.right"], "reward_weights": [2.0], "eval_strategy": "steps", "test_split_size": 0.3}
    own = {
        "data.sources": [{"path": "tasks.jsonl", "domain": "tasks"}], "data.held_out_fraction": 0.2,
        "verification.functions": {"tasks": "other.py:score"},
    }  # fmt: skip
    found = make_config(with_data(convert({**TRL, **config}, "it.yaml"), own).settings, {}, "it.yaml")
    assert found.verification.functions == {"tasks": "other.py:score"}
    assert found.rewards.domain_weights == {"tasks": 2.0}
    assert (found.evaluation.sources, found.data.held_out_fraction) == ((), 0.2)
