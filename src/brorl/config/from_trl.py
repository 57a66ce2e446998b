"""A config of TRL's GRPOTrainer as settings: the fields of GRPOConfig and of the arguments of TRL's scripts.

The names, defaults and meanings are those of TRL 1.16 with transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from brorl.config.conversion import (
    BFLOAT16,
    Conversion,
    Counterpart,
    adapters,
    all_tokens,
    distinct_names,
    engine_with_rounded_weights,
    file_source,
    left_out,
    names,
    narrow_clips,
    nested,
    number,
    one_of,
    other_loggers,
    policy_of_kept_tokens,
    same,
    trackers,
    translated,
)
from brorl.config.trl_batches import batches, intervals, learning_rate

OWN_DOMAIN = "own"
"""The domain of questions that a function of the config verifies."""

_LOSS = {
    "dapo": "token_mean", "bnpo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant", "cispo": "token_mean",
}  # fmt: skip
_IMPORTANCE = {"token_truncate": "truncate", "token_mask": "mask"}
_SCALE = {
    "group": "grpo", "batch": "reinforce_pp_baseline", "none": "rloo", True: "grpo", False: "rloo",
}  # fmt: skip
_HIGHEST = "vllm_importance_sampling_clip_max"
_NO_BOUND = 1e9
_PLACEMENT = {"colocate": "colocated", "server": "apart"}
_TABLE: dict[str, Counterpart] = {
    "model_name_or_path": ("model", same),
    "num_generations": ("rollouts_per_prompt", int),
    "max_completion_length": ("sampling.max_new_tokens", int),
    "max_prompt_length": ("data.max_prompt_tokens", int),
    "temperature": ("sampling.temperature", number),
    "top_p": ("sampling.top_p", number),
    "top_k": ("sampling.top_k", all_tokens),
    "generation_kwargs.temperature": ("sampling.temperature", number),  # these replace the three above
    "generation_kwargs.top_p": ("sampling.top_p", number),
    "generation_kwargs.top_k": ("sampling.top_k", all_tokens),
    "generation_kwargs.min_new_tokens": ("sampling.min_new_tokens", int),
    "scale_rewards": ("advantage.estimator", one_of(_SCALE, "scale_rewards")),
    "epsilon": ("loss.clip_low", number),
    "epsilon_high": ("loss.clip_high", number),
    "delta": ("loss.dual_clip", number),
    "loss_type": ("loss.aggregation", one_of(_LOSS, "loss_type")),
    "mask_truncated_completions": ("loss.mask_truncated", bool),
    "entropy_coef": ("loss.entropy_coefficient", number),
    "beta": ("kl.coefficient", number),
    "weight_decay": ("optimizer.weight_decay", number),
    "seed": ("seed", int),
    "gradient_checkpointing": ("engine.gradient_checkpointing", bool),
    "output_dir": ("output_dir", str),
    "save_total_limit": ("keep_checkpoints", int),
    "report_to": ("tracking.to", trackers),
    "run_name": ("tracking.run_name", str),
    "project": ("tracking.project", str),
    "test_split_size": ("data.held_out_fraction", number),
}
_DEFAULTS = {
    "num_generations": 8, "max_completion_length": 512, "scale_rewards": "group", "epsilon": 0.2, "loss_type": "dapo",
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "adam_beta1": 0.9, "adam_beta2": 0.999, "num_iterations": 1,
    "num_train_epochs": 3.0, "max_grad_norm": 1.0,
}  # fmt: skip
_HANDLED = {
    *_DEFAULTS, "steps_per_generation", "generation_batch_size", "max_steps", "bf16", "save_steps", "eval_steps",
    "save_strategy", "eval_strategy", "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split",
    "datasets", "importance_sampling_level", "use_vllm", "vllm_mode", "vllm_tensor_parallel_size", "reward_funcs",
    "reward_weights", "sync_ref_model", "ref_model_sync_steps", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit",
    "use_rslora", "use_bias_correction_kl", "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs",
    "num_generations_eval", "use_cpu", "dtype", "lora_dropout",
}  # fmt: skip
_MAPPINGS = ("lr_scheduler_kwargs.", "chat_template_kwargs.")
_IRRELEVANT = (
    # how the work is divided, and how fast it is
    "per_device_eval_batch_size", "eval_accumulation_steps", "auto_find_batch_size", "torch_*", "tf32",
    "use_liger_kernel", "liger_kernel_config*", "use_cache", "attn_implementation", "gradient_checkpointing_kwargs*",
    "activation_checkpointing*", "ddp_*", "fsdp*", "deepspeed*", "accelerator_config*", "parallelism_config*",
    "dataloader_*", "ds3_gather_for_generation", "pad_to_multiple_of", "cache_implementation", "local_rank",
    "use_transformers_*", "transformers_continuous_batching_config*", "bf16_full_eval", "fp16_full_eval",
    "full_determinism", "average_tokens_across_devices", "streaming", "dataset_streaming", "ignore_bias_buffers",
    "eval_use_gather_object", "eval_do_concat_batches", "batch_eval_metrics", "enable_jit_checkpoint",
    "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_*", "vllm_group_port", "vllm_max_model_length",
    "vllm_gpu_memory_utilization", "bnb_4bit_quant_storage", "lora_task_type",
    # what is printed, logged and stored: every step is, and every checkpoint holds all
    "log_*", "logging_*", "disable_tqdm", "num_completions_to_print", "include_num_input_tokens_seen",
    "include_for_metrics*", "skip_memory_metrics", "debug", "trackio_*", "hub_*", "save_on_each_node",
    "save_only_model", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "eval_on_start",
    "eval_delay", "prediction_loss_only", "do_train", "do_eval", "do_predict",
    "restore_callback_states_from_checkpoint", "ignore_data_skip", "ddp_timeout",
    # of losses and models that are not those of GRPO
    "remove_unused_columns", "label_names", "length_column_name", "sapo_*", "vespo_*", "disable_dropout",
)  # fmt: skip
_NEUTRAL: dict[str, Any] = {
    "trust_remote_code": False, "cast_lm_head_to_fp32": False, "shuffle_dataset": True, "repetition_penalty": 1.0,
    "multi_objective_aggregation": "sum_then_normalize", "ref_model_mixup_alpha": 0.6, "top_entropy_quantile": 1.0,
    "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
    "entropy_target": 0.2, "model_revision": "main", "use_dora": False, "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False, "adam_epsilon": 1e-8, "fp16": False,
    "label_smoothing_factor": 0.0, "train_sampling_strategy": "random", "push_to_hub": False, "hub_always_push": False,
    "optim": "adamw_torch_fused",
}  # fmt: skip
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_ACCURACY = ("accuracy_reward", "reasoning_accuracy_reward")
_BUILT_IN_REWARDS = {
    "think_format_reward": "rewards.format_pattern: '<think>.*</think>.*', and rewards.format_reward to its weight,",
    "get_soft_overlong_punishment": "rewards.overlong_tokens: 256",
}


def from_trl(given: Mapping[str, Any], num_prompts: int | None) -> Conversion:
    """Return the recipe of a config of TRL, by dotted name; `num_prompts` of its data make epochs steps."""
    every: dict[str, Any] = {**_DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    every[_HIGHEST] = given.get(_HIGHEST, 3.0)  # null is no bound
    remarks: list[str] = []
    settings = translated(every, _TABLE)
    found = batches(every, num_prompts, remarks)
    settings |= {"prompts_per_step": found.prompts_per_step, "optimizer.mini_batches": found.mini_batches}
    settings |= intervals(every, found, remarks) | learning_rate(every, found, remarks)
    settings["optimizer.betas"] = [float(every["adam_beta1"]), float(every["adam_beta2"])]
    settings["optimizer.max_grad_norm"] = float(every["max_grad_norm"]) or 1e9  # 0 does not clip
    settings["dynamic_sampling.enabled"] = False
    settings |= _precision(every) | _options(every)
    _loss(settings, every, given, remarks)
    if every.get("use_vllm"):
        settings |= _vllm(every, remarks)
    if every.get("use_peft"):
        settings |= _lora(every, remarks)
    engine_with_rounded_weights(settings, remarks)
    policy_of_kept_tokens(settings, remarks)
    _data(settings, every)
    _rewards(settings, every, remarks)
    missing = left_out(
        given, {*_TABLE, *_HANDLED}, (*_IRRELEVANT, *(f"{name}*" for name in _MAPPINGS)), _neutral(every)
    )
    return Conversion("TRL", settings, (*missing, *other_loggers(given, "report_to")), tuple(remarks))


def _neutral(every: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with which keys without a counterpart are not named."""
    named = "optim" not in every or every["optim"] in _ADAMW
    return _NEUTRAL | ({"optim": every.get("optim")} if named else {})


def _precision(every: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtype: TRL computes in bfloat16 unless the config says otherwise."""
    wanted = every.get("bf16", not every.get("fp16"))
    device = {"device": "cpu"} if every.get("use_cpu") else {}
    return device | (BFLOAT16 if wanted or every.get("dtype") == "bfloat16" else {})


def _options(every: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of keys within mappings, and of the evaluation."""
    settings: dict[str, Any] = {}
    if chat := nested(every, "chat_template_kwargs"):
        settings["prompt.chat_template_options"] = chat
    if number_ := every.get("num_generations_eval"):
        settings |= {"evaluation.rollouts_per_prompt": int(number_), "evaluation.ks": sorted({1, int(number_)})}
    if every.get("sync_ref_model"):
        settings["reference.reset_every"] = int(every.get("ref_model_sync_steps", 512))
    return settings


def _loss(settings: dict[str, Any], every: Mapping[str, Any], given: Mapping[str, Any], remarks: list[str]) -> None:
    """Set the kind of the loss with its clips, and the KL penalty."""
    settings.setdefault("loss.clip_high", float(every["epsilon"]))
    if every["loss_type"] == "cispo":
        settings["loss.kind"] = "cispo"
        del settings["loss.clip_low"]  # no lower bound
        largest = settings.pop("loss.clip_high")  # TRL's bound of the weight itself
        if largest > 1:
            settings["loss.clip_high"] = largest - 1
        elif given.get("epsilon_high") is not None:
            remarks.append(
                f"epsilon_high = {largest:g} bounds the weights of CISPO below 1; the recipe bounds them by 5"
            )
    if every.get("importance_sampling_level") == "sequence":
        settings["loss.kind"] = "gspo"
        settings.pop("loss.dual_clip", None)
        narrow_clips(settings, remarks)
    if every.get("beta"):  # TRL's weight on k3 makes its gradient that of KL(policy, reference), which k2 has without
        settings["kl.estimator"] = "k2" if every.get("use_bias_correction_kl", True) else "k3"


def _vllm(every: Mapping[str, Any], remarks: list[str]) -> dict[str, Any]:
    """Return the engine, and the correction for what it computes otherwise than the learner: TRL's default."""
    placement = one_of(_PLACEMENT, "vllm_mode")(every.get("vllm_mode", "colocate"))
    settings: dict[str, Any] = {"engine.kind": "vllm", "engine.vllm.placement": placement}
    if parallel := every.get("vllm_tensor_parallel_size"):
        settings["engine.vllm.tensor_parallel"] = int(parallel)
    if every.get("vllm_importance_sampling_correction") is False:
        return settings | {"importance.correction": "none"}
    mode = every.get("vllm_importance_sampling_mode", "sequence_mask")
    if mode not in _IMPORTANCE:
        remarks.append(f"vllm_importance_sampling_mode: {mode} became importance.correction: truncate, by token")
    settings |= {"importance.correction": _IMPORTANCE.get(mode, "truncate"), "optimizer.old_logprobs": "recompute"}
    settings["importance.high"] = float(every.get("vllm_importance_sampling_cap") or every[_HIGHEST] or _NO_BOUND)
    settings["importance.low"] = float(every.get("vllm_importance_sampling_clip_min") or 0.0)
    return settings


def _lora(every: Mapping[str, Any], remarks: list[str]) -> dict[str, Any]:
    rank, alpha = int(every.get("lora_r", 16)), float(every.get("lora_alpha", 32))
    if every.get("use_rslora"):
        alpha *= sqrt(rank)  # its scale is alpha / sqrt(rank)
    if not every.get("lora_target_modules"):
        remarks.append(
            "lora_target_modules is not set: PEFT then adapts the layers that it knows for the architecture, mostly "
            "q_proj and v_proj, and brorl all linear layers; set lora.target_modules to them"
        )
    if (dropout := float(every.get("lora_dropout", 0.05))) > 0:
        remarks.append(f"lora_dropout = {dropout:g} is left out: adapters have no dropout here")
    quantization = "nf4" if every.get("load_in_4bit") else "none"
    return adapters(rank, alpha, every.get("lora_target_modules")) | {"lora.quantization": quantization}


def _data(settings: dict[str, Any], every: Mapping[str, Any]) -> None:
    """Set the sources: TRL's convention is a column `prompt`, and `solution` for the reward function."""
    mixture = every.get("datasets") or []
    columns: dict[str, Any] = {"answer_column": "solution"}
    verifier = _verifier(names(every.get("reward_funcs") or []))
    if verifier is not None and verifier not in _ACCURACY:
        columns["domain"] = OWN_DOMAIN
    name = every.get("dataset_name")
    if mixture:
        sources = [file_source(one["path"], one.get("name"), one.get("split"), **columns) for one in mixture]
        settings["data.sources"] = distinct_names(sources)
    elif name:
        subset = every.get("dataset_config")
        settings["data.sources"] = [file_source(name, subset, every.get("dataset_train_split"), **columns)]
        if every.get("eval_strategy", "no") != "no":
            test = file_source(name, subset, every.get("dataset_test_split", "test"), **columns)
            settings |= {"evaluation.sources": [{**test, "name": "test"}], "data.held_out_fraction": 0.0}


def _rewards(settings: dict[str, Any], every: Mapping[str, Any], remarks: list[str]) -> None:
    """Set TRL's weighted sum: the verifier, whose weight is a factor of all, and further terms divided by it."""
    settings["rewards.partial_credit"] = True  # rewards between 0 and 1 count, as in TRL
    functions = names(every.get("reward_funcs") or [])
    weights = dict(zip(functions, every.get("reward_weights") or [1.0] * len(functions), strict=False))
    verifier = _verifier(functions)
    if verifier is None:
        remarks.append("verification.functions: {DOMAIN: file.py:function} takes your reward function as it is")
    elif verifier in _ACCURACY:
        remarks.append(f"reward_funcs: {verifier} became the verifier of the domain math")
    else:
        settings["verification.functions"] = {OWN_DOMAIN: _path(verifier)}
    factor = 1.0 if verifier is None else float(weights.get(verifier, 1.0))
    if factor != 1:
        settings["rewards.domain_weights"] = {"math" if verifier in _ACCURACY else OWN_DOMAIN: factor}
    others = [name for name in functions if name != verifier]
    known = [name for name in others if name in _BUILT_IN_REWARDS]
    remarks += [f"set {_BUILT_IN_REWARDS[name]} for reward_funcs: {name}" for name in known]
    own = {name: float(weights.get(name, 1.0)) / factor for name in others if name not in known} if factor > 0 else {}
    if unused := [name for name, weight in own.items() if not weight]:
        remarks.append(f"reward_funcs: {', '.join(unused)} left out, with the weight 0")
    if terms := {name: weight for name, weight in own.items() if weight}:
        short = [name.rpartition(".")[2] for name in terms]
        settings["rewards.terms"] = {
            alone if short.count(alone) == 1 else name.replace(".", "_"): {"function": _path(name), "weight": weight}
            for alone, (name, weight) in zip(short, terms.items(), strict=True)
        }
        remarks.append(f"reward_funcs: {', '.join(terms)} became rewards.terms; {verifier} decides what is correct")


def _path(function: str) -> str:
    """Return the path of a function, `package.module:function`, from its dotted one."""
    return ":".join(function.rsplit(".", 1))


def _verifier(functions: list[str]) -> str | None:
    """Return the reward function that decides what is correct: TRL's accuracy, or the first of the user."""
    accuracy = [name for name in functions if name in _ACCURACY]
    return next(iter(accuracy or [name for name in functions if name not in _BUILT_IN_REWARDS]), None)
