"""Configs of TRL and verl as recipes: what each setting becomes, what is left out, and what is refused.

The names are those of TRL 1.16 and transformers 5.23, copied from their source.
"""

from pathlib import Path
from typing import Any

import pytest

from brorl.api.init import convert, with_data
from brorl.config.conversion import Conversion
from brorl.config.from_trl import _WITHOUT
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
# 16 prompts a step in one update, 200 updates
BASE: dict[str, Any] = {
    "model_name_or_path": "some/model", "dataset_name": "some/data", "num_generations": 4,
    "per_device_train_batch_size": 64, "max_steps": 200, "bf16": False, "lr_scheduler_type": "constant_with_warmup",
}  # fmt: skip
LORA, VLLM, KL = {"use_peft": True, "lora_target_modules": ["q_proj"]}, {"use_vllm": True}, {"beta": 0.1}
# field, its value, what else the config needs, the setting, and its value there; test_conversion_meaning.py compares
# the losses, the learning rates, the numbers of steps and the corrections with formulas
CONVERTED: list[tuple[str, Any, dict[str, Any], str, Any]] = [
    ("learning_rate", 5e-6, {}, "optimizer.learning_rate", 5e-6),
    ("num_generations", 16, {}, "rollouts_per_prompt", 16),
    ("num_generations_eval", 6, {}, "evaluation.rollouts_per_prompt", 6),
    ("max_completion_length", 700, {}, "sampling.max_new_tokens", 700),
    ("max_prompt_length", 300, {}, "data.max_prompt_tokens", 300),
    ("generation_batch_size", 128, {}, "prompts_per_step", 32),
    ("temperature", 0.7, {}, "sampling.temperature", 0.7),
    ("top_p", 0.9, {}, "sampling.top_p", 0.9),
    ("top_k", 50, {}, "sampling.top_k", 50),
    ("chat_template_kwargs", {"enable_thinking": False}, {}, "prompt.chat_template_options",
     {"enable_thinking": False}),
    ("use_vllm", True, {}, "engine.kind", "vllm"),
    ("vllm_mode", "server", VLLM, "engine.vllm.placement", "apart"),
    ("vllm_tensor_parallel_size", 2, VLLM, "engine.vllm.tensor_parallel", 2),
    ("vllm_importance_sampling_correction", False, VLLM, "importance.correction", "none"),
    ("vllm_importance_sampling_cap", 2.5, VLLM, "importance.high", 2.5),
    ("beta", 0.04, {}, "kl.coefficient", 0.04),
    ("scale_rewards", "none", {}, "advantage.estimator", "rloo"),
    ("loss_type", "dr_grpo", {}, "loss.aggregation", "constant"),
    ("mask_truncated_completions", True, {}, "loss.mask_truncated", True),
    ("sync_ref_model", True, KL, "reference.reset_every", 512),
    ("ref_model_sync_steps", 64, {**KL, "sync_ref_model": True}, "reference.reset_every", 64),
    ("entropy_coef", 0.01, {}, "loss.entropy_coefficient", 0.01),
    ("model_name_or_path", "other/model", {}, "model", "other/model"),
    ("dtype", "bfloat16", {}, "dtype", "bfloat16"),
    ("use_peft", True, {"lora_target_modules": ["q_proj"]}, "lora.rank", 16),
    ("lora_r", 8, LORA, "lora.rank", 8),
    ("lora_alpha", 16, LORA, "lora.alpha", 16.0),
    ("lora_target_modules", ["k_proj"], {"use_peft": True}, "lora.target_modules", ("k_proj",)),
    ("use_rslora", True, {**LORA, "lora_r": 16, "lora_alpha": 32}, "lora.alpha", 128.0),  # 32 / sqrt(16) = 128 / 16
    ("load_in_4bit", True, LORA, "lora.quantization", "nf4"),
    ("test_split_size", 0.2, {}, "data.held_out_fraction", 0.2),
    ("output_dir", "/tmp/there", {}, "output_dir", "/tmp/there"),
    ("per_device_train_batch_size", 128, {}, "prompts_per_step", 32),
    ("max_steps", 300, {}, "steps", 300),
    ("weight_decay", 0.1, {}, "optimizer.weight_decay", 0.1),
    ("adam_beta1", 0.8, {}, "optimizer.betas", (0.8, 0.999)),
    ("adam_beta2", 0.99, {}, "optimizer.betas", (0.9, 0.99)),
    ("max_grad_norm", 0.2, {}, "optimizer.max_grad_norm", 0.2),
    ("bf16", True, {}, "dtype", "bfloat16"),
    ("gradient_checkpointing", True, {}, "engine.gradient_checkpointing", True),
    ("report_to", ["wandb"], {}, "tracking.to", ("wandb",)),
    ("run_name", "first", {}, "tracking.run_name", "first"),
    ("project", "sums", {}, "tracking.project", "sums"),
    ("eval_strategy", "no", {}, "evaluation.every", 0),
    ("eval_steps", 0.5, {}, "evaluation.every", 100),
    ("save_steps", 0.1, {}, "checkpoint_every", 20),
    ("save_total_limit", 7, {}, "keep_checkpoints", 7),
    ("seed", 42, {}, "seed", 42),
    ("use_cpu", True, {}, "device", "cpu"),
]  # fmt: skip
# of the data: what the source becomes
OF_THE_SOURCE: list[tuple[str, Any, dict[str, Any], str, Any]] = [
    ("dataset_name", "other/data", {}, "path", "other/data"),
    ("dataset_config", "main", {}, "subset", "main"),
    ("dataset_train_split", "train[:90%]", {}, "split", "train[:90%]"),
    ("datasets", [{"path": "a/b", "split": "part"}], {}, "split", "part"),
    ("reward_funcs", ["my.rewards.right"], {}, "domain", "own"),
]
# field and its value: said in a remark, because a number is not all that has to change
SAID: list[tuple[str, Any, dict[str, Any], str]] = [
    ("num_iterations", 2, {}, "one pass is made over the rollouts"),
    ("num_train_epochs", 2.0, {"max_steps": -1}, "num_train_epochs = 2 is 2 x (number of prompts) / 16 steps"),
    ("save_strategy", "epoch", {}, "set checkpoint_every: the config has an epoch"),
    ("lora_dropout", 0.1, LORA, "lora_dropout = 0.1 is left out"),
]
# what else decides: given, setting, value
FURTHER: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "advantage.estimator", "grpo"),
    ({"scale_rewards": False}, "advantage.estimator", "rloo"),
    ({"learning_rate": "5e-6"}, "optimizer.learning_rate", 5e-6),  # YAML reads it as text
    ({"lr_scheduler_type": None}, "optimizer.schedule", "linear"),
    ({}, "optimizer.betas", (0.9, 0.999)),
    ({}, "dynamic_sampling.enabled", False),
    ({"bf16": True}, "importance.correction", "truncate"),
    ({"report_to": ["none"]}, "tracking.to", ()),
    ({"use_vllm": True}, "importance.high", 3.0),  # TRL corrects by default
    ({"use_vllm": True}, "importance.correction", "truncate"),
]
OF_VERL: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "rollouts_per_prompt", 16),
    ({}, "prompts_per_step", 512),
    ({}, "optimizer.mini_batches", 2),  # verl's mini-batch has 256 prompts by default
    ({"actor_rollout_ref.actor.ppo_mini_batch_size": 64}, "optimizer.mini_batches", 8),
    ({"algorithm.adv_estimator": "rloo"}, "advantage.estimator", "rloo"),
    ({}, "advantage.estimator", "grpo"),
    ({"algorithm.norm_adv_by_std_in_grpo": False}, "advantage.estimator", "rloo"),
    ({"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}, "advantage.normalize_over", "tokens"),
    ({"algorithm.filter_groups.enable": True}, "dynamic_sampling.enabled", True),
    ({}, "dynamic_sampling.enabled", False),
    ({"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}, "loss.aggregation", "sequence_mean"),
    ({"actor_rollout_ref.actor.use_kl_loss": True}, "kl.coefficient", 0.001),
    ({"actor_rollout_ref.actor.use_kl_loss": True}, "kl.estimator", "k3"),
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
]


def conversion_of(field: str, given: Any, more: dict[str, Any]) -> Conversion:
    return convert({**BASE, **more, field: given}, "it.yaml")


def recipe_of(config: dict[str, Any]) -> TrainConfig:
    return make_config(convert(config, "it.yaml").settings, {}, "it.yaml")


def value_of(conversion: Conversion, name: str) -> Any:
    found: Any = make_config(conversion.settings, {}, "it.yaml")
    for part in name.split("."):
        found = getattr(found, part)
    return found


@each_row(("field", "given", "more", "setting", "expected"), CONVERTED)
def test_a_field_is_converted(field: str, given: Any, more: dict[str, Any], setting: str, expected: Any) -> None:
    found = conversion_of(field, given, more)
    assert value_of(found, setting) == expected
    assert not any(field in name for name in found.without_counterpart)
    before = convert({**BASE, **more, field: None} if field not in BASE else {**BASE, **more}, "it.yaml")
    assert value_of(before, setting) != expected  # it is this field that decides


@pytest.mark.parametrize(("field", "given", "more", "key", "expected"), OF_THE_SOURCE)
def test_a_field_names_the_data(field: str, given: Any, more: dict[str, Any], key: str, expected: Any) -> None:
    found = conversion_of(field, given, more)
    (source,) = value_of(found, "data.sources")
    assert getattr(source, key) == expected
    assert source.answer_column == "solution"  # which TRL's reward functions read
    assert field not in found.without_counterpart


@pytest.mark.parametrize(("field", "given", "more", "said"), SAID)
def test_a_field_is_answered_in_words(field: str, given: Any, more: dict[str, Any], said: str) -> None:
    found = conversion_of(field, given, more)
    assert any(said in remark for remark in found.remarks), found.remarks
    assert field not in found.without_counterpart


@each_row("field", _WITHOUT)
def test_a_field_without_a_counterpart_is_named(field: str) -> None:
    found = conversion_of(field, "another value", {})
    assert found.without_counterpart == (field,)
    assert found.settings == convert(BASE, "it.yaml").settings


def test_the_test_split_is_evaluated_on_where_trl_evaluates() -> None:
    found = convert({**BASE, "eval_strategy": "steps", "eval_steps": 20, "dataset_test_split": "dev"}, "it.yaml")
    (source,) = value_of(found, "evaluation.sources")
    assert (source.path, source.split) == ("some/data", "dev")
    assert (value_of(found, "evaluation.every"), value_of(found, "data.held_out_fraction")) == (20, 0.0)


def test_a_dump_of_all_defaults_names_nothing() -> None:
    others = {"optim": "adamw_torch_fused", "logging_steps": 10, "fsdp": [], "report_to": "none", "loss_type": "dapo"}
    assert convert({**BASE, **_WITHOUT, **others}, "it.yaml").without_counterpart == ()


def test_loggers_that_brorl_does_not_have_are_named() -> None:
    assert convert({**BASE, "report_to": ["wandb", "mlflow"]}, "it.yaml").without_counterpart == ("report_to: mlflow",)


@each_row(
    ("config", "name", "expected"),
    [({**BASE, **given}, *row) for given, *row in FURTHER]
    + [({**VERL, **given, "actor_rollout_ref.rollout.name": "hf"}, *row) for given, *row in OF_VERL],
)
def test_settings_of_both(config: dict[str, Any], name: str, expected: Any) -> None:
    assert value_of(convert(config, "it.yaml"), name) == expected


def test_the_data_of_both_is_read() -> None:
    (trl,), (verl,) = (recipe_of(config).data.sources for config in (TRL | {"dataset_config": "main"}, VERL))
    assert (trl.path, trl.subset) == ("some/data", "main")  # type: ignore[union-attr]
    assert verl.path.endswith("train.parquet")  # type: ignore[union-attr]
    assert verl.answer_column == "reward_model.ground_truth"  # type: ignore[union-attr]
    two = recipe_of({**VERL, "data.train_files": ["a.parquet", "b.parquet"]}).data.sources
    assert [Path(source.path).name for source in two] == ["a.parquet", "b.parquet"]  # type: ignore[union-attr]


def test_every_key_is_read_or_named() -> None:
    keys = {"logging_steps": 1, "min_p": 0.1, "unheard_of": 3, "generation_kwargs": {"x": 1}}
    found = convert({**TRL, **keys}, "it.yaml")
    assert found.without_counterpart == ("generation_kwargs.x", "min_p")
    assert found.not_read == ("logging_steps", "unheard_of")
    assert any("prompts_per_step" in remark for remark in found.remarks)
    given = {"trainer": {"nnodes": 2}, "actor_rollout_ref.actor.optim.min_lr_ratio": 0.1, "new.section": {"size": 3}}
    found = convert({**VERL, **given}, "it.yaml")
    assert (found.without_counterpart, found.not_read) == (("trainer.nnodes",), ("new.section.size",))


@pytest.mark.parametrize(
    ("config", "is_truncated"),
    [
        (TRL, False),
        (TRL | {"top_p": 0.95}, True),
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
        ({**TRL, "lr_scheduler_type": "polynomial"}, "lr_scheduler_type: 'polynomial' has no counterpart"),
        ({**TRL, "lr_scheduler_type": "cosine_with_min_lr"}, "needs min_lr or min_lr_rate in lr_scheduler_kwargs"),
        ({**TRL, "loss_type": "sapo"}, "loss_type: 'sapo' has no counterpart; the values that have one: dapo"),
        ({**TRL, "scale_rewards": "batch"}, "scale_rewards: 'batch' divides by .* all rewards .* group or none"),
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
