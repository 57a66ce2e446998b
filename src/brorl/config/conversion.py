"""A config of TRL's GRPOTrainer or of verl, as settings of a recipe.

The other trainer's defaults count too: what the config does not set is taken from there, where the default differs.
docs/how-to/from_trl_or_verl.md has the same table with the differences that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from brorl.errors import UserError
from brorl.storage import dotted
from brorl.trackers import TrackerName

_Setting = tuple[str, Callable[[Any], Any]]  # the name in a recipe, and the value there


@dataclass(frozen=True)
class Conversion:
    """The settings of a recipe that do what a config of another trainer did."""

    trainer: Literal["TRL", "verl"]
    settings: Mapping[str, Any]  # by dotted name
    without_counterpart: tuple[str, ...]  # keys of the config that have none, sorted
    remarks: tuple[str, ...]  # sentences on what has to be done by hand


def _same(value: Any) -> Any:
    return value


def _number(value: Any) -> float:
    return float(value)  # YAML reads 1e-6 as text


def _trackers(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    return [name for name in names if name in get_args(TrackerName)]


def _one_of(table: Mapping[Any, Any], name: str) -> Callable[[Any], Any]:
    def look_up(value: Any) -> Any:
        if value not in table:
            raise UserError(
                f"{name}: {value!r} has no counterpart; the values that have one: {', '.join(map(str, table))}"
            )
        return table[value]

    return look_up


_TRL_LOSS = {
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "grpo": "sequence_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
}
_VERL_LOSS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
_SCHEDULE = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
}  # fmt: skip
_ESTIMATOR = {
    "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "grpo_passk": "pass_at_k",
}  # fmt: skip
_IMPORTANCE = {"token_truncate": "truncate", "token_mask": "mask"}
_SCALE = {
    "group": "grpo", "batch": "reinforce_pp_baseline", "none": "rloo", True: "grpo", False: "rloo",
}  # fmt: skip

_TRL: dict[str, _Setting] = {
    "model_name_or_path": ("model", _same),
    "num_generations": ("rollouts_per_prompt", int),
    "max_completion_length": ("sampling.max_new_tokens", int),
    "temperature": ("sampling.temperature", _number),
    "top_p": ("sampling.top_p", _number),
    "top_k": ("sampling.top_k", lambda value: max(int(value or 0), 0)),
    "scale_rewards": ("advantage.estimator", _one_of(_SCALE, "scale_rewards")),
    "epsilon": ("loss.clip_low", _number),
    "epsilon_high": ("loss.clip_high", _number),
    "delta": ("loss.dual_clip", _same),
    "loss_type": ("loss.aggregation", _one_of(_TRL_LOSS, "loss_type")),
    "mask_truncated_completions": ("loss.mask_truncated", bool),
    "entropy_coef": ("loss.entropy_coefficient", _number),
    "beta": ("kl.coefficient", _number),
    "learning_rate": ("optimizer.learning_rate", _number),
    "lr_scheduler_type": ("optimizer.schedule", _one_of(_SCHEDULE, "lr_scheduler_type")),
    "warmup_steps": ("optimizer.warmup_updates", int),
    "weight_decay": ("optimizer.weight_decay", _number),
    "max_grad_norm": ("optimizer.max_grad_norm", _number),
    "seed": ("seed", int),
    "gradient_checkpointing": ("engine.gradient_checkpointing", bool),
    "output_dir": ("output_dir", str),
    "save_total_limit": ("keep_checkpoints", int),
    "report_to": ("tracking.to", _trackers),
}
_TRL_DEFAULTS = {
    "num_generations": 8, "max_completion_length": 512, "scale_rewards": "group", "epsilon": 0.2, "loss_type": "dapo",
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "adam_beta1": 0.9, "adam_beta2": 0.999, "num_iterations": 1,
}  # fmt: skip
_TRL_HANDLED = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "adam_beta1", "adam_beta2", "max_steps", "bf16", "save_steps", "eval_steps", "dataset_name", "dataset_config",
    "dataset_train_split", "importance_sampling_level", "num_iterations", "use_vllm", "reward_funcs", "sync_ref_model",
    "ref_model_sync_steps", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "use_peft", "lora_r", "lora_alpha",
    "lora_target_modules", "load_in_4bit",
}  # fmt: skip

_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
_VERL: dict[str, _Setting] = {
    "actor_rollout_ref.model.path": ("model", _same),
    f"{_R}n": ("rollouts_per_prompt", int),
    "data.train_batch_size": ("prompts_per_step", int),
    "data.max_response_length": ("sampling.max_new_tokens", int),
    "data.max_prompt_length": ("data.max_prompt_tokens", int),
    f"{_R}temperature": ("sampling.temperature", _number),
    f"{_R}top_p": ("sampling.top_p", _number),
    f"{_R}top_k": ("sampling.top_k", lambda value: max(int(value), 0)),
    "algorithm.adv_estimator": ("advantage.estimator", _one_of(_ESTIMATOR, "algorithm.adv_estimator")),
    "algorithm.filter_groups.enable": ("dynamic_sampling.enabled", bool),
    f"{_A}clip_ratio_low": ("loss.clip_low", _number),
    f"{_A}clip_ratio_high": ("loss.clip_high", _number),
    f"{_A}clip_ratio_c": ("loss.dual_clip", _number),
    f"{_A}loss_agg_mode": ("loss.aggregation", _one_of(_VERL_LOSS, f"{_A}loss_agg_mode")),
    f"{_A}entropy_coeff": ("loss.entropy_coefficient", _number),
    f"{_A}optim.lr": ("optimizer.learning_rate", _number),
    f"{_A}optim.lr_scheduler_type": ("optimizer.schedule", _one_of(_SCHEDULE, f"{_A}optim.lr_scheduler_type")),
    f"{_A}optim.lr_warmup_steps": ("optimizer.warmup_updates", lambda value: max(int(value), 0)),
    f"{_A}optim.weight_decay": ("optimizer.weight_decay", _number),
    f"{_A}optim.betas": ("optimizer.betas", list),
    f"{_A}optim.clip_grad": ("optimizer.max_grad_norm", _number),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("engine.gradient_checkpointing", bool),
    "trainer.total_training_steps": ("steps", int),
    "trainer.save_freq": ("checkpoint_every", int),
    "trainer.test_freq": ("evaluation.every", lambda value: max(int(value), 0)),
    "trainer.default_local_dir": ("output_dir", str),
    "trainer.max_actor_ckpt_to_keep": ("keep_checkpoints", int),
    "trainer.logger": ("tracking.to", _trackers),
}
_VERL_DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    f"{_R}n": 1, "data.train_batch_size": 1024, f"{_A}ppo_mini_batch_size": 256, "data.max_response_length": 512,
    "algorithm.filter_groups.enable": False, f"{_A}clip_ratio_high": 0.2, f"{_A}clip_ratio_c": 3.0,
    f"{_A}optim.lr": 1e-6, f"{_A}optim.betas": [0.9, 0.999], f"{_A}optim.weight_decay": 0.01,
}  # fmt: skip
_VERL_HANDLED = {
    f"{_A}ppo_mini_batch_size", f"{_A}clip_ratio", f"{_A}use_kl_loss", f"{_A}kl_loss_coef", f"{_A}kl_loss_type",
    f"{_A}ppo_epochs", "data.train_files", f"{_A}fsdp_config.model_dtype", f"{_R}name",
    "algorithm.norm_adv_by_std_in_grpo", f"{_A}policy_loss.loss_mode", f"{_A}optim.min_lr_ratio",
    "algorithm.filter_groups.max_num_gen_batches", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef",
    "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_alpha",
}  # fmt: skip


def convert(config: Mapping[str, Any], source: str) -> Conversion:
    """Return the recipe of a config of TRL or verl.

    Args:
        config: The config, nested or by dotted name.
        source: Its name, for messages.

    Raises:
        UserError: If it is of neither trainer, or a value has no counterpart.
    """
    given = dict(dotted(config))
    if any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in given):
        return _from_verl(given)
    if {"num_generations", "max_completion_length", "scale_rewards", "loss_type", "epsilon", "beta"} & set(given):
        return _from_trl(given)
    raise UserError(
        f"{source} is neither a config of TRL's GRPOTrainer (num_generations, ...) nor of verl (actor_rollout_ref, ...)"
    )


def _translated(given: Mapping[str, Any], table: Mapping[str, _Setting]) -> dict[str, Any]:
    return {name: read(given[key]) for key, (name, read) in table.items() if given.get(key) is not None}


def _without(given: Mapping[str, Any], table: Mapping[str, _Setting], handled: set[str]) -> tuple[str, ...]:
    return tuple(sorted(set(given) - set(table) - handled))


def _from_trl(given: dict[str, Any]) -> Conversion:
    every = {**_TRL_DEFAULTS, **given}
    settings, remarks = _translated(every, _TRL), []
    number, accumulated = int(every["num_generations"]), int(every["gradient_accumulation_steps"])
    rounds = int(every.get("steps_per_generation") or accumulated)
    batch = int(every.get("generation_batch_size") or int(every["per_device_train_batch_size"]) * rounds)
    updates = max(rounds // accumulated, 1)
    settings["prompts_per_step"] = max(batch // number, 1)
    settings["optimizer.mini_batches"] = min(updates, settings["prompts_per_step"])
    settings["optimizer.betas"] = [float(every["adam_beta1"]), float(every["adam_beta2"])]
    settings.setdefault("loss.clip_high", float(every["epsilon"]))
    settings["dynamic_sampling.enabled"] = False
    if settings["optimizer.schedule"] != "constant":
        settings["optimizer.final_rate"] = 0.0
    remarks.append(
        f"prompts_per_step = {settings['prompts_per_step']} is for one process; multiply it by the number of processes"
    )
    if int(every.get("max_steps", -1)) > 0:
        settings["steps"] = -(-int(every["max_steps"]) // updates)
    else:
        remarks.append("set steps: there are no epochs")
    for key, name in (("save_steps", "checkpoint_every"), ("eval_steps", "evaluation.every")):
        if every.get(key):
            settings[name] = max(round(float(every[key]) / updates), 1)
    if every.get("bf16"):
        settings |= {"dtype": "bfloat16", "importance.correction": "truncate", "optimizer.old_logprobs": "recompute"}
    if every.get("loss_type") == "cispo":
        settings["loss.kind"] = "cispo"
        for name in ("loss.clip_low", "loss.clip_high"):
            settings.pop(name, None)
    if every.get("importance_sampling_level") == "sequence":
        settings |= {"loss.kind": "gspo", "loss.aggregation": "sequence_mean"}
        if "epsilon" not in given:  # the default is made for tokens
            del settings["loss.clip_low"], settings["loss.clip_high"]
    if every.get("beta"):
        settings["kl.estimator"] = "k3"
    if every.get("sync_ref_model"):
        settings["reference.reset_every"] = int(every.get("ref_model_sync_steps", 512))
    if every.get("use_vllm"):
        settings["engine.kind"] = "vllm"
        settings |= _importance_of_trl(every, remarks)
    if every.get("use_peft"):
        settings |= _adapters(every.get("lora_r", 16), every.get("lora_alpha", 32), every.get("lora_target_modules"))
        settings["lora.quantization"] = "nf4" if every.get("load_in_4bit") else "none"
    if int(every["num_iterations"]) > 1:
        remarks.append("num_iterations: one pass is made over the rollouts; raise optimizer.mini_batches instead")
    if path := every.get("dataset_name"):
        settings["data.sources"] = [_source(path, every.get("dataset_config"), every.get("dataset_train_split"))]
    settings["rewards.partial_credit"] = True  # rewards between 0 and 1 count, as in TRL
    remarks.append("verification.functions: {DOMAIN: file.py:function} takes your reward function as it is")
    return Conversion("TRL", settings, _without(given, _TRL, _TRL_HANDLED), tuple(remarks))


def _importance_of_trl(every: Mapping[str, Any], remarks: list[str]) -> dict[str, Any]:
    """Return the correction for what vLLM computes otherwise than the learner, which TRL makes by default."""
    if every.get("vllm_importance_sampling_correction") is False:
        return {}
    mode = every.get("vllm_importance_sampling_mode", "sequence_mask")
    if mode not in _IMPORTANCE:
        remarks.append(f"vllm_importance_sampling_mode: {mode} became importance.correction: truncate, by token")
    bounds = {
        "importance.high": "vllm_importance_sampling_clip_max",
        "importance.low": "vllm_importance_sampling_clip_min",
    }
    given = {name: float(every[key]) for name, key in bounds.items() if every.get(key) is not None}
    correction = {"importance.correction": _IMPORTANCE.get(mode, "truncate"), "optimizer.old_logprobs": "recompute"}
    return {"importance.high": 3.0} | correction | given


def _adapters(rank: Any, alpha: Any, modules: Any = None) -> dict[str, Any]:
    return {"lora.rank": int(rank), "lora.alpha": float(alpha)} | ({"lora.target_modules": modules} if modules else {})


def _source(path: str, subset: str | None, split: str | None) -> dict[str, Any]:
    return {"path": path} | ({"subset": subset} if subset else {}) | ({"split": split} if split else {})


def _from_verl(given: dict[str, Any]) -> Conversion:
    if given.get(f"{_A}clip_ratio") is not None:
        given = {
            f"{_A}clip_ratio_low": given[f"{_A}clip_ratio"],
            f"{_A}clip_ratio_high": given[f"{_A}clip_ratio"],
            **given,
        }
    every = {**_VERL_DEFAULTS, **given}
    settings, remarks = _translated(every, _VERL), []
    prompts = settings["prompts_per_step"]
    settings["optimizer.mini_batches"] = max(prompts // int(every[f"{_A}ppo_mini_batch_size"]), 1)
    if settings.get("advantage.estimator") == "grpo" and every.get("algorithm.norm_adv_by_std_in_grpo") is False:
        settings["advantage.estimator"] = "rloo"
    if settings.get("advantage.estimator") == "reinforce_pp_baseline":
        settings["advantage.normalize_over"] = "tokens"
    if (mode := every.get(f"{_A}policy_loss.loss_mode", "vanilla")) in ("gspo", "cispo"):
        settings["loss.kind"] = mode
        for name in ("loss.clip_low", "loss.clip_high", "loss.dual_clip"):
            settings.pop(name, None)
    if every.get(f"{_A}use_kl_loss"):
        settings["kl.coefficient"] = float(every.get(f"{_A}kl_loss_coef", 0.001))
        settings["kl.estimator"] = {"kl": "k1", "mse": "k2"}.get(every.get(f"{_A}kl_loss_type", ""), "k3")
    if every.get("algorithm.use_kl_in_reward"):
        settings |= {"kl.placement": "reward", "kl.coefficient": float(every.get("algorithm.kl_ctrl.kl_coef", 0.001))}
        settings["kl.estimator"] = "k1"
    if int(rank := every.get("actor_rollout_ref.model.lora_rank", 0)) > 0:
        settings |= _adapters(rank, every.get("actor_rollout_ref.model.lora_alpha", 16))
    if int(tries := every.get("algorithm.filter_groups.max_num_gen_batches", 0)) > 0:  # else there is no limit
        settings["dynamic_sampling.max_tries"] = int(tries)
    if settings["advantage.estimator"] == "pass_at_k":
        remarks.append(
            "grpo_passk rewards the best response only; advantage.estimator: pass_at_k rewards all, unbiased"
        )
    if settings.get("optimizer.schedule", "constant") != "constant":
        settings["optimizer.final_rate"] = float(every.get(f"{_A}optim.min_lr_ratio") or 0.0)
    if str(every.get(f"{_A}fsdp_config.model_dtype", "")) in ("bf16", "bfloat16"):
        settings |= {"dtype": "bfloat16", "importance.correction": "truncate", "optimizer.old_logprobs": "recompute"}
    if every.get(f"{_R}name") == "vllm":
        settings["engine.kind"] = "vllm"
    if int(every.get(f"{_A}ppo_epochs", 1)) > 1:
        remarks.append("ppo_epochs: one pass is made over the rollouts; raise optimizer.mini_batches instead")
    if files := every.get("data.train_files"):
        paths = files if isinstance(files, list) else [files]
        settings["data.sources"] = [{"path": path, "answer_column": "reward_model.ground_truth"} for path in paths]
    if settings.get("checkpoint_every", 1) <= 0:
        del settings["checkpoint_every"]
    if settings.get("steps", 0) <= 0:
        settings.pop("steps", None)
        remarks.append("set steps: there are no epochs")
    settings["rewards.partial_credit"] = True  # scores between 0 and 1 count, as in verl
    remarks.append("a compute_score function becomes verification.functions: {DOMAIN: file.py:function}")
    return Conversion("verl", settings, _without(given, _VERL, _VERL_HANDLED), tuple(remarks))
