"""A config of verl's PPO trainer as settings; the names, defaults and meanings are those of verl 0.9."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
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

_LOSS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
_SCHEDULE = {"constant": "constant", "cosine": "cosine"}
_ESTIMATOR = {
    "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "grpo_passk": "pass_at_k",
}  # fmt: skip
_KL = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
    # with the value of the first and the gradient of k2
    "kl+": "k2", "k1+": "k2", "mse+": "k2", "k2+": "k2", "low_var_kl+": "k2", "k3+": "k2",
}  # fmt: skip

_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
_M = "actor_rollout_ref.model."
_O = f"{_A}optim."
_TABLE: dict[str, Counterpart] = {
    f"{_M}path": ("model", same),
    f"{_R}n": ("rollouts_per_prompt", int),
    "data.train_batch_size": ("prompts_per_step", int),
    "data.max_response_length": ("sampling.max_new_tokens", int),
    "data.max_prompt_length": ("data.max_prompt_tokens", int),
    f"{_R}temperature": ("sampling.temperature", number),
    f"{_R}top_p": ("sampling.top_p", number),
    f"{_R}top_k": ("sampling.top_k", all_tokens),
    "algorithm.adv_estimator": ("advantage.estimator", one_of(_ESTIMATOR, "algorithm.adv_estimator")),
    "algorithm.filter_groups.enable": ("dynamic_sampling.enabled", bool),
    f"{_A}clip_ratio_low": ("loss.clip_low", number),
    f"{_A}clip_ratio_high": ("loss.clip_high", number),
    f"{_A}clip_ratio_c": ("loss.dual_clip", number),
    f"{_A}loss_agg_mode": ("loss.aggregation", one_of(_LOSS, f"{_A}loss_agg_mode")),
    f"{_A}entropy_coeff": ("loss.entropy_coefficient", number),
    f"{_O}lr": ("optimizer.learning_rate", number),
    f"{_O}lr_scheduler_type": ("optimizer.schedule", one_of(_SCHEDULE, f"{_O}lr_scheduler_type")),
    f"{_O}warmup_style": ("optimizer.schedule", one_of(_SCHEDULE, f"{_O}warmup_style")),  # its older name, which wins
    f"{_O}weight_decay": ("optimizer.weight_decay", number),
    f"{_O}betas": ("optimizer.betas", list),
    f"{_O}clip_grad": ("optimizer.max_grad_norm", number),
    f"{_O}grad_clip": ("optimizer.max_grad_norm", number),
    f"{_M}enable_gradient_checkpointing": ("engine.gradient_checkpointing", bool),
    "trainer.save_freq": ("checkpoint_every", int),
    "trainer.test_freq": ("evaluation.every", lambda value: max(int(value), 0)),
    "trainer.default_local_dir": ("output_dir", str),
    "trainer.max_actor_ckpt_to_keep": ("keep_checkpoints", int),
    "trainer.logger": ("tracking.to", trackers),
    "trainer.project_name": ("tracking.project", str),
    "trainer.experiment_name": ("tracking.run_name", str),
    f"{_R}val_kwargs.temperature": ("evaluation.temperature", number),
    f"{_R}val_kwargs.top_p": ("evaluation.top_p", number),
    "data.val_max_samples": ("evaluation.num_prompts", int),
}
_DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    f"{_R}n": 1, "data.train_batch_size": 1024, f"{_A}ppo_mini_batch_size": 256, "data.max_response_length": 512,
    "algorithm.filter_groups.enable": False, f"{_A}clip_ratio_low": 0.2, f"{_A}clip_ratio_high": 0.2,
    f"{_A}clip_ratio_c": 3.0, f"{_O}lr": 1e-6, f"{_O}betas": [0.9, 0.999], f"{_O}weight_decay": 0.01,
    "trainer.total_epochs": 30, f"{_A}fsdp_config.dtype": "bfloat16", "data.prompt_key": "prompt",
}  # fmt: skip
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^}]*))?\}")
_CLIPS = (f"{_A}clip_ratio_low", f"{_A}clip_ratio_high")
_REWARD_FILES = ("reward.custom_reward_function.", "custom_reward_function.")
_OVERLONG = ("reward.reward_kwargs.overlong_buffer_cfg.", "reward_model.overlong_buffer.")
_HANDLED = {
    *_DEFAULTS, f"{_A}clip_ratio", f"{_A}use_kl_loss", f"{_A}kl_loss_coef", f"{_A}kl_loss_type", f"{_A}ppo_epochs",
    "data.train_files", "data.val_files", "data.train_max_samples", f"{_A}fsdp_config.model_dtype", f"{_R}name",
    "algorithm.norm_adv_by_std_in_grpo", f"{_A}policy_loss.loss_mode", f"{_O}min_lr_ratio", f"{_O}lr_warmup_steps",
    f"{_O}lr_warmup_steps_ratio", "algorithm.filter_groups.max_num_gen_batches", "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", f"{_M}lora_rank", f"{_M}lora_alpha", f"{_M}target_modules",
    f"{_R}tensor_model_parallel_size", f"{_R}val_kwargs.n", f"{_R}val_kwargs.do_sample",
    "trainer.total_training_steps", "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.rollout_is_threshold", *(f"{at}{name}" for at in _REWARD_FILES
    for name in ("path", "name")), *(f"{at}{name}" for at in _OVERLONG for name in ("enable", "len", "log")),
}  # fmt: skip
_IRRELEVANT = (
    "critic.*", "reward_model.rollout.*", "data.apply_chat_template_kwargs.*", "hydra.*", "ray_kwargs.*", "ray_init.*",
    "transfer_queue.*", "global_profiler.*", "sandbox_fusion.*", f"{_A}ppo_micro_batch_size*", f"{_A}checkpoint.*",
    f"{_A}ppo_max_token_len_per_gpu", f"{_A}use_dynamic_bsz", f"{_A}ulysses*", f"{_A}fsdp_config.*", f"{_A}strategy",
    f"{_A}use_torch_compile", f"{_A}entropy_from_logits*", f"{_A}entropy_checkpointing", f"{_A}profiler.*",
    f"{_A}megatron.*", f"{_A}use_fused_kernels", f"{_A}shuffle", f"{_A}data_loader_seed", f"{_A}rollout_n",
    "actor_rollout_ref.ref.*", f"{_R}log_prob_*", f"{_R}gpu_memory_utilization", f"{_R}enforce_eager",
    f"{_R}free_cache_engine", f"{_R}max_num_*", f"{_R}max_model_len", f"{_R}enable_*", f"{_R}load_format", f"{_R}mode",
    f"{_R}dtype", f"{_R}disable_log_stats", f"{_R}prompt_length", f"{_R}response_length", f"{_R}engine_kwargs.*",
    f"{_R}layered_summon", f"{_R}seed", f"{_R}calculate_log_probs", f"{_R}mtp", f"{_R}qat", f"{_R}agent.*",
    f"{_R}checkpoint_engine.*", f"{_R}trace.*", f"{_R}profiler.*", f"{_R}prometheus.*", f"{_R}skip_tokenizer_init",
    f"{_R}data_parallel_size",
    f"{_M}use_remove_padding", f"{_M}use_shm", f"{_M}use_liger", f"{_M}use_fused_kernels",
    f"{_M}fused_kernel_options.*", f"{_A}use_remove_padding", f"{_A}calculate_*", f"{_A}pad_to_length",
    f"{_A}use_prefix_grouper", f"{_A}freeze_vision_tower", f"{_R}logprobs_mode", f"{_R}moe_load_*", f"{_R}n_gpus*",
    f"{_R}nnodes", f"{_R}multi_stage_wake_up", f"{_R}scheduling_policy", f"{_R}full_determinism",
    f"{_R}expert_parallel_size", f"{_R}pipeline_model_parallel_size", "reward.num_workers", "reward.sandbox_fusion.*",
    "trainer.esi_redundant_time",
    # parts of losses and penalties that are refused or named
    f"{_A}policy_loss.clip_cov*", f"{_A}policy_loss.kl_cov*", f"{_A}policy_loss.ppo_kl_coef", f"{_A}tau_*",
    "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl", "algorithm.pf_ppo.*",
    # how the work is divided and the data loaded
    f"{_M}enable_activation_offload", "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout",
    "data.reward_fn_key", "data.val_batch_size", "data.gen_batch_size", "data.filter_overlong_prompts*",
    "data.truncation", "data.return_*", "data.dataloader_num_workers", "data.use_shm", "data.image_*", "data.video_key",
    "data.audio_key", "data.validation_shuffle", "trainer.balance_batch", "trainer.val_before_train",
    "trainer.resume_mode", "trainer.critic_warmup", "trainer.default_hdfs_dir", "trainer.del_local_ckpt_after_load",
    "trainer.max_critic_ckpt_to_keep", "trainer.ray_wait_register_center_timeout", "trainer.device",
    "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.use_v1",
    "trainer.v1.*", "algorithm.gamma", "algorithm.lam", "algorithm.filter_groups.max_inflight_gen_batches",
    f"{_O}total_training_steps",
)  # fmt: skip
_NEUTRAL: dict[str, Any] = {
    f"{_O}optimizer": "AdamW", f"{_O}optimizer_impl": "torch.optim", f"{_O}num_cycles": 0.5,
    f"{_O}zero_indexed_step": True, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1, "data.shuffle": True,
    "algorithm.kl_ctrl.type": "fixed", "algorithm.filter_groups.metric": "acc", f"{_R}do_sample": True,
    f"{_M}trust_remote_code": False, "data.trust_remote_code": False, "reward_model.enable": False,
    "algorithm.use_pf_ppo": False, "reward.reward_manager.name": "naive", "reward.reward_manager.source": "register",
    f"{_R}over_sample_rate": 0, "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.loss_type": "ppo_clip", f"{_R}val_kwargs.top_k": -1,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False, f"{_R}multi_turn.enable": False,
    "trainer.val_only": False,
    f"{_R}ignore_eos": False, f"{_A}grad_clip": 1.0, **{f"{at}penalty_factor": 1.0 for at in _OVERLONG},
}  # fmt: skip


def from_verl(given: Mapping[str, Any], num_prompts: int | None) -> Conversion:
    """Return the recipe of a config of verl; `num_prompts` as for `from_trl`."""
    given = _resolved(given)
    every: dict[str, Any] = {**_DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    for name in _CLIPS:  # null is `clip_ratio`
        if name in given and given[name] is None:
            every[name] = given.get(f"{_A}clip_ratio", every[name])
    remarks: list[str] = []
    settings = translated(every, _TABLE)
    prompts = settings["prompts_per_step"]
    settings["optimizer.mini_batches"] = max(prompts // int(every[f"{_A}ppo_mini_batch_size"]), 1)
    steps = _steps(every, prompts, num_prompts, remarks)
    settings |= {} if steps is None else {"steps": steps}
    settings |= _learning_rate(settings, every, steps, remarks)
    if str(every[f"{_A}fsdp_config.dtype"]) in ("bf16", "bfloat16"):  # the weights of the optimizer stay float32
        settings |= BFLOAT16
    _advantages(settings, every, remarks)
    _loss(settings, every, given, remarks)
    settings |= _kl(every) | _engine(every, remarks)
    engine_with_rounded_weights(settings, remarks)
    policy_of_kept_tokens(settings, remarks)
    _data(settings, every)
    _rewards(settings, every, remarks)
    if settings.get("checkpoint_every", 1) <= 0:
        del settings["checkpoint_every"]
    if settings.get("evaluation.num_prompts", 0) < 0:
        del settings["evaluation.num_prompts"]
    off = tuple(
        f"{section}.*" for section, _, switch in (name.rpartition(".") for name in given)
        if switch in ("enable", "enabled") and given[f"{section}.{switch}"] is False
    )  # fmt: skip
    off += () if given.get(f"{_M}lora.rank") else (f"{_M}lora.*",)
    missing = left_out(given, {*_TABLE, *_HANDLED}, (*_IRRELEVANT, *off), _NEUTRAL)
    missing = [name for name in missing if not name.endswith("._target_")]
    return Conversion("verl", settings, (*missing, *other_loggers(given, "trainer.logger")), tuple(remarks))


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the values that `${name}` and `${oc.select:name,default}` refer to."""

    def resolve(value: Any) -> Any:
        if not isinstance(value, str) or not (found := _REFERENCE.search(value)):
            return value
        other = given.get(found[1], found[2])
        if found[0] == value:
            return resolve(other)
        return resolve(value.replace(found[0], str(resolve(other))))

    return {key: resolve(value) for key, value in given.items()}


def _steps(every: Mapping[str, Any], prompts: int, num_prompts: int | None, remarks: list[str]) -> int | None:
    """Return the steps of the run; of epochs, those that drop the rest of the prompts, as verl does."""
    if int(given := every.get("trainer.total_training_steps", 0)) > 0:
        return int(given)
    epochs = Fraction(str(every["trainer.total_epochs"]))
    if num_prompts is None:
        remarks.append(
            f"set steps: total_epochs = {float(epochs):g} is {float(epochs):g} x (number of prompts) / {prompts} "
            "steps, and the data was not read"
        )
        return None
    steps = max(int(epochs * (num_prompts // prompts)), 1)
    remarks.append(f"steps = {steps}: total_epochs = {float(epochs):g} over {num_prompts:,} prompts, {prompts} a step")
    return steps


def _learning_rate(
    settings: Mapping[str, Any], every: Mapping[str, Any], steps: int | None, remarks: list[str]
) -> dict[str, Any]:
    """Return the warm-up and the fall of the learning rate, which verl counts in steps and not in updates."""
    found: dict[str, Any] = {}
    warmup = int(every.get(f"{_O}lr_warmup_steps", 0))
    if warmup <= 0 and (ratio := float(every.get(f"{_O}lr_warmup_steps_ratio", 0))):
        warmup = 0 if steps is None else int(ratio * steps)
        if steps is None:
            remarks.append(f"set optimizer.warmup_updates: lr_warmup_steps_ratio = {ratio:g} of an unknown number")
    if warmup > 0:
        found["optimizer.warmup_updates"] = warmup * settings["optimizer.mini_batches"]
    if settings.get("optimizer.schedule", "constant") != "constant":
        found["optimizer.final_rate"] = float(every.get(f"{_O}min_lr_ratio", 0.0))
        if warmup > 0 and steps is not None:
            found["optimizer.decay_from"] = round(min(warmup / steps, 0.999), 6)
        elif warmup > 0:
            remarks.append("set optimizer.decay_from to the fraction of the steps at which the learning rate falls")
    return found


def _advantages(settings: dict[str, Any], every: Mapping[str, Any], remarks: list[str]) -> None:
    if settings["advantage.estimator"] == "grpo" and every.get("algorithm.norm_adv_by_std_in_grpo") is False:
        settings["advantage.estimator"] = "rloo"
    if settings["advantage.estimator"] == "reinforce_pp_baseline":
        settings["advantage.normalize_over"] = "tokens"
    if settings["advantage.estimator"] == "pass_at_k":
        remarks.append(
            "grpo_passk rewards the best response only; advantage.estimator: pass_at_k rewards all, unbiased"
        )
    if int(tries := every.get("algorithm.filter_groups.max_num_gen_batches", 0)) > 0:  # else there is no limit
        settings["dynamic_sampling.max_tries"] = int(tries)
    if int(every.get(f"{_A}ppo_epochs", 1)) > 1:
        remarks.append("ppo_epochs: one pass is made over the rollouts; raise optimizer.mini_batches instead")


def _loss(settings: dict[str, Any], every: Mapping[str, Any], given: Mapping[str, Any], remarks: list[str]) -> None:
    mode = every.get(f"{_A}policy_loss.loss_mode", "vanilla")
    kind = one_of({"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}, f"{_A}policy_loss.loss_mode")(mode)
    settings["loss.kind"] = kind
    if kind != "ppo":
        del settings["loss.dual_clip"]
    alone, (low, high) = given.get(f"{_A}clip_ratio"), (float(every[name]) for name in _CLIPS)
    if alone is not None and float(alone) not in (low, high):
        remarks.append(
            f"clip_ratio = {alone} has no effect in verl, where clip_ratio_low = {low:g} and clip_ratio_high = "
            f"{high:g} count; set loss.clip_low and loss.clip_high if it was meant"
        )
    if kind == "gspo":
        narrow_clips(settings, remarks)


def _kl(every: Mapping[str, Any]) -> dict[str, Any]:
    if every.get("algorithm.use_kl_in_reward"):
        estimator = one_of(_KL, "algorithm.kl_penalty")(every.get("algorithm.kl_penalty", "kl"))
        coefficient = float(every.get("algorithm.kl_ctrl.kl_coef", 0.001))
        return {"kl.placement": "reward", "kl.coefficient": coefficient, "kl.estimator": estimator}
    if not every.get(f"{_A}use_kl_loss"):
        return {}
    estimator = one_of(_KL, f"{_A}kl_loss_type")(every.get(f"{_A}kl_loss_type", "low_var_kl"))
    return {"kl.coefficient": float(every.get(f"{_A}kl_loss_coef", 0.001)), "kl.estimator": estimator}


def _engine(every: Mapping[str, Any], remarks: list[str]) -> dict[str, Any]:
    """Return the engine, its correction, and the adapters."""
    found: dict[str, Any] = {}
    if every.get(f"{_R}name") == "vllm":
        found["engine.kind"] = "vllm"
        if int(parallel := every.get(f"{_R}tensor_model_parallel_size", 1)) > 1:
            found["engine.vllm.tensor_parallel"] = int(parallel)
    if level := every.get("algorithm.rollout_correction.rollout_is"):
        if level != "token":
            remarks.append(f"rollout_is: {level} became importance.correction: truncate, by token")
        high = float(every.get("algorithm.rollout_correction.rollout_is_threshold", 2.0))
        found |= {"importance.correction": "truncate", "importance.high": high}
        found |= {"optimizer.old_logprobs": "recompute"}
    if int(rank := every.get(f"{_M}lora_rank", 0)) > 0:
        found |= adapters(rank, every.get(f"{_M}lora_alpha", 16), every.get(f"{_M}target_modules"))
    if chat := nested(every, "data.apply_chat_template_kwargs"):
        found["prompt.chat_template_options"] = chat
    if f"{_R}val_kwargs.n" in every or f"{_R}val_kwargs.temperature" in every:
        samples = int(every.get(f"{_R}val_kwargs.n", 1))
        found |= {"evaluation.rollouts_per_prompt": samples, "evaluation.ks": sorted({1, samples})}
    if every.get(f"{_R}val_kwargs.do_sample") is False:
        found |= {"evaluation.temperature": 0.0, "evaluation.rollouts_per_prompt": 1, "evaluation.ks": [1]}
    return found


def _data(settings: dict[str, Any], every: Mapping[str, Any]) -> None:
    columns: dict[str, Any] = {"answer_column": "reward_model.ground_truth"}
    if every["data.prompt_key"] != "prompt":
        columns["prompt_column"] = every["data.prompt_key"]
    for key, name, limit in (
        ("data.train_files", "data.sources", "data.train_max_samples"),
        ("data.val_files", "evaluation.sources", None),
    ):
        if files := every.get(key):
            sources = [file_source(path, **columns) for path in names(files)]
            if limit and int(every.get(limit, -1)) > 0:
                sources = [{**source, "limit": int(every[limit])} for source in sources]
            settings[name] = distinct_names(sources)
    if "evaluation.sources" in settings and "data.sources" in settings:
        settings["data.held_out_fraction"] = 0.0
    elif "evaluation.sources" in settings:
        del settings["evaluation.sources"]


def _rewards(settings: dict[str, Any], every: Mapping[str, Any], remarks: list[str]) -> None:
    settings["rewards.partial_credit"] = True  # scores between 0 and 1 count, as in verl
    file = next((every[f"{at}path"] for at in _REWARD_FILES if every.get(f"{at}path")), None)
    function = next((every[f"{at}name"] for at in _REWARD_FILES if every.get(f"{at}name")), "compute_score")
    where = "a compute_score function" if file is None else f"{function} of {file}"
    remarks.append(
        f"{where} becomes verification.functions: {{DOMAIN: file.py:check}}, with def check(response, reference): "
        f"return {function}(DOMAIN, response, reference); until you set it, brorl's verifier of the domain judges"
    )
    for at in _OVERLONG:
        if every.get(f"{at}enable"):
            settings["rewards.overlong_tokens"] = int(every[f"{at}len"])
