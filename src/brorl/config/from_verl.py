"""Converts a config of verl's PPO trainer. Names, defaults and meanings are from verl 0.9."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from brorl.config.conversion import (
    BFLOAT16,
    Conversion,
    Converter,
    Counterpart,
    all_tokens,
    distinct_names,
    file_source,
    names,
    trackers,
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
    # "X+" has the value of X and the gradient of k2
    "kl+": "k2", "k1+": "k2", "mse+": "k2", "k2+": "k2", "low_var_kl+": "k2", "k3+": "k2",
}  # fmt: skip

_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
_M = "actor_rollout_ref.model."
_O = f"{_A}optim."
_TABLE: dict[str, Counterpart] = {
    f"{_M}path": ("model", str),
    f"{_R}n": ("rollouts_per_prompt", int, 1),
    "data.train_batch_size": ("prompts_per_step", int, 1024),
    "data.max_response_length": ("sampling.max_new_tokens", int, 512),
    "data.max_prompt_length": ("data.max_prompt_tokens", int),
    f"{_R}temperature": ("sampling.temperature", float),
    f"{_R}top_p": ("sampling.top_p", float),
    f"{_R}top_k": ("sampling.top_k", all_tokens),
    "algorithm.adv_estimator": ("advantage.estimator", _ESTIMATOR, "gae"),
    "algorithm.filter_groups.enable": ("dynamic_sampling.enabled", bool, False),
    f"{_A}clip_ratio_low": ("loss.clip_low", float, 0.2),
    f"{_A}clip_ratio_high": ("loss.clip_high", float, 0.2),
    f"{_A}clip_ratio_c": ("loss.dual_clip", float, 3.0),
    f"{_A}loss_agg_mode": ("loss.aggregation", _LOSS),
    f"{_A}policy_loss.loss_mode": ("loss.kind", {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}, "vanilla"),
    f"{_A}entropy_coeff": ("loss.entropy_coefficient", float),
    f"{_O}lr": ("optimizer.learning_rate", float, 1e-6),
    f"{_O}lr_scheduler_type": ("optimizer.schedule", _SCHEDULE),
    f"{_O}warmup_style": ("optimizer.schedule", _SCHEDULE),  # older name of lr_scheduler_type; takes precedence
    f"{_O}weight_decay": ("optimizer.weight_decay", float, 0.01),
    f"{_O}betas": ("optimizer.betas", list, [0.9, 0.999]),
    f"{_O}clip_grad": ("optimizer.max_grad_norm", float),
    f"{_O}grad_clip": ("optimizer.max_grad_norm", float),
    f"{_M}enable_gradient_checkpointing": ("engine.gradient_checkpointing", bool),
    "trainer.save_freq": ("checkpoint_every", int),
    "trainer.test_freq": ("evaluation.every", lambda value: max(int(value), 0)),
    "trainer.default_local_dir": ("output_dir", str),
    "trainer.max_actor_ckpt_to_keep": ("keep_checkpoints", int),
    "trainer.logger": ("tracking.to", trackers),
    "trainer.project_name": ("tracking.project", str),
    "trainer.experiment_name": ("tracking.run_name", str),
    f"{_R}val_kwargs.temperature": ("evaluation.temperature", float),
    f"{_R}val_kwargs.top_p": ("evaluation.top_p", float),
    f"{_R}val_kwargs.top_k": ("evaluation.top_k", all_tokens),
    "data.val_max_samples": ("evaluation.num_prompts", int),
}
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^}]*))?\}")
_REWARD_FILES = ("reward.custom_reward_function.", "custom_reward_function.")
_OVERLONG = ("reward.reward_kwargs.overlong_buffer_cfg.", "reward_model.overlong_buffer.")
_WITHOUT: dict[str, Any] = {
    f"{_O}optimizer": "AdamW", f"{_O}optimizer_impl": "torch.optim", f"{_O}num_cycles": 0.5,
    f"{_O}zero_indexed_step": True, f"{_O}override_optimizer_config": None, "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1, "trainer.val_only": False, "trainer.resume_from_path": None, "data.shuffle": True,
    "data.seed": None, "data.sampler": None, "data.custom_cls.path": None, "data.system_prompt": None,
    "algorithm.kl_ctrl.type": "fixed", "algorithm.filter_groups.metric": "acc", "algorithm.use_pf_ppo": False,
    "algorithm.rollout_correction.bypass_mode": False, "algorithm.rollout_correction.loss_type": "ppo_clip",
    "algorithm.rollout_correction.rollout_is_batch_normalize": False, "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.rollout_rs_threshold": None, "reward_model.enable": False,
    "reward.reward_model.enable": False, "reward.reward_manager.name": "naive",
    "reward.reward_manager.source": "register", "reward_model.reward_manager": "naive", f"{_M}trust_remote_code": False,
    "data.trust_remote_code": False, f"{_M}lora.rank": 0, f"{_M}exclude_modules": None, f"{_M}override_config": None,
    f"{_M}custom_chat_template": None, f"{_R}do_sample": True, f"{_R}over_sample_rate": 0, f"{_R}ignore_eos": False,
    f"{_R}multi_turn.enable": False, f"{_R}repetition_penalty": 1.0,
    f"{_A}grad_clip": 1.0, f"{_A}tis_imp_ratio_cap": -1, f"{_A}loss_scale_factor": None,
    "algorithm.rollout_correction.rollout_token_veto_threshold": None, f"{_M}tokenizer_path": None,
    f"{_M}lora_adapter_path": None, **{f"{at}penalty_factor": 1.0 for at in _OVERLONG},
    **dict.fromkeys(f"{at}reward_kwargs" for at in _REWARD_FILES),
}  # fmt: skip


def from_verl(given: Mapping[str, Any], num_prompts: int | None) -> Conversion:
    """Convert a config of verl; the arguments are those of `from_trl`."""
    given = _resolved(given)
    alone = given.get(f"{_A}clip_ratio")
    for name in (f"{_A}clip_ratio_low", f"{_A}clip_ratio_high"):
        if alone is not None and name in given and given[name] is None:  # null stands for `clip_ratio`
            given[name] = alone
    config = Converter(given, _TABLE)
    settings = config.settings
    settings["optimizer.mini_batches"] = max(
        settings["prompts_per_step"] // int(config(f"{_A}ppo_mini_batch_size", 256)), 1
    )
    _learning_rate(config, _steps(config, num_prompts))
    model_dtype = str(config(f"{_A}fsdp_config.dtype", "bfloat16"))
    if model_dtype in ("bf16", "bfloat16"):  # the optimizer keeps float32 weights
        settings |= BFLOAT16
    _advantages(config)
    _kl(config)
    _engine(config)
    _evaluation(config)
    _data(config)
    _rewards(config)
    for name, least in (("checkpoint_every", 1), ("evaluation.num_prompts", 0)):
        if settings.get(name, least) < least:  # verl's -1 means off
            del settings[name]
    return config.finish("verl", "trainer.logger", _WITHOUT)


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with `${name}` and `${oc.select:name,default}` replaced by the values they refer to."""

    def resolve(value: Any) -> Any:
        if not isinstance(value, str) or not (found := _REFERENCE.search(value)):
            return value
        other = resolve(given.get(found[1], found[2]))
        return other if found[0] == value else resolve(value.replace(found[0], str(other)))

    return {key: resolve(value) for key, value in given.items()}


def _steps(config: Converter, num_prompts: int | None) -> int | None:
    """Set and return the number of steps. As in verl, an epoch drops the prompts that do not fill a step."""
    epochs = Fraction(str(config("trainer.total_epochs", 30)))
    steps = int(config("trainer.total_training_steps", 0))
    if steps <= 0 and num_prompts is None:
        config.say_epochs("total_epochs", epochs, None, None)
        return None
    if steps <= 0:
        steps = max(int(epochs * (num_prompts // config.settings["prompts_per_step"])), 1)
        config.say_epochs("total_epochs", epochs, num_prompts, steps)
    config.settings["steps"] = steps
    return steps


def _learning_rate(config: Converter, steps: int | None) -> None:
    """Set the schedule of the learning rate; verl counts the warm-up in steps, not in updates."""
    given, ratio = int(config(f"{_O}lr_warmup_steps", 0)), float(config(f"{_O}lr_warmup_steps_ratio", 0))
    of_ratio = 0 if not ratio else None if steps is None else int(ratio * steps)
    config.set_schedule(given if given > 0 else of_ratio, steps, end=float(config(f"{_O}min_lr_ratio", 0)))


def _advantages(config: Converter) -> None:
    settings, remarks = config.settings, config.remarks
    estimator, by_std = settings["advantage.estimator"], config("algorithm.norm_adv_by_std_in_grpo", True)
    if estimator == "grpo" and by_std is False:
        settings["advantage.estimator"] = "rloo"
    if estimator == "reinforce_pp_baseline":
        settings["advantage.normalize_over"] = "tokens"
    if estimator == "pass_at_k":
        remarks.append(
            "grpo_passk rewards the best response only; advantage.estimator: pass_at_k rewards all, unbiased"
        )
    if (tries := int(config("algorithm.filter_groups.max_num_gen_batches", 0))) > 0:  # 0 means no limit
        settings["dynamic_sampling.max_tries"] = tries
    if int(config(f"{_A}ppo_epochs", 1)) > 1:
        remarks.append("ppo_epochs: one pass is made over the rollouts; raise optimizer.mini_batches instead")
    if settings.get("loss.entropy_coefficient") and settings.get("loss.aggregation", "token_mean") != "token_mean":
        remarks.append(
            "entropy_coeff: the bonus is the mean entropy over tokens; verl averages it as loss_agg_mode says, so "
            "adapt loss.entropy_coefficient"
        )


def _kl(config: Converter) -> None:
    reward, loss = config("algorithm.use_kl_in_reward"), config(f"{_A}use_kl_loss")
    for is_used, placement, kind, usual, coefficient in (
        (loss and not reward, "loss", f"{_A}kl_loss_type", "low_var_kl", f"{_A}kl_loss_coef"),
        (reward, "reward", "algorithm.kl_penalty", "kl", "algorithm.kl_ctrl.kl_coef"),
    ):
        weight, _ = float(config(coefficient, 0.001)), config(kind)
        if is_used:
            estimator = config.one_of(kind, _KL, usual)
            config.settings |= {"kl.placement": placement, "kl.coefficient": weight, "kl.estimator": estimator}


def _engine(config: Converter) -> None:
    """Set the engine, its correction, and the adapters."""
    settings, parallel = config.settings, int(config(f"{_R}tensor_model_parallel_size", 1))
    if config(f"{_R}name") == "vllm":
        settings["engine.kind"] = "vllm"
        if parallel > 1:
            settings["engine.vllm.tensor_parallel"] = parallel
    level = config("algorithm.rollout_correction.rollout_is")
    high = float(config("algorithm.rollout_correction.rollout_is_threshold", 2.0))
    if level:
        settings |= {"importance.correction": "truncate", "importance.high": high}
        settings["optimizer.old_logprobs"] = "recompute"
    if level not in (None, False, "token"):
        config.remarks.append(f"rollout_is: {level} became importance.correction: truncate, by token")
    rank, alpha, modules = config(f"{_M}lora_rank", 0), config(f"{_M}lora_alpha", 16), config(f"{_M}target_modules")
    if int(rank) > 0:
        config.adapters(rank, alpha, modules)
    if chat := config.within("data.apply_chat_template_kwargs"):
        settings["prompt.chat_template_options"] = chat


def _evaluation(config: Converter) -> None:
    samples, is_sampled = config(f"{_R}val_kwargs.n"), config(f"{_R}val_kwargs.do_sample", True)
    if is_sampled is False:
        config.settings["evaluation.temperature"] = 0.0
    for name, every in (("top_p", 1.0), ("top_k", 0)):  # verl validates with all tokens, whatever it trains with
        if config.settings.get(f"sampling.{name}", every) != every:
            config.settings.setdefault(f"evaluation.{name}", every)
    if samples is not None or is_sampled is False or "evaluation.temperature" in config.settings:
        number = 1 if is_sampled is False else int(samples or 1)
        config.settings |= {"evaluation.rollouts_per_prompt": number, "evaluation.ks": sorted({1, number})}


def _data(config: Converter) -> None:
    settings, prompt = config.settings, config("data.prompt_key", "prompt")
    columns = {"answer_column": "reward_model.ground_truth", "prompt_column": None if prompt == "prompt" else prompt}
    trained, evaluated = (names(config(f"data.{part}_files", [])) for part in ("train", "val"))
    limit = int(config("data.train_max_samples", -1))
    limited = {"limit": limit} if limit > 0 else {}
    if trained:
        settings["data.sources"] = distinct_names([file_source(path, **columns) | limited for path in trained])
    if trained and evaluated:
        settings["evaluation.sources"] = distinct_names([file_source(path, **columns) for path in evaluated])
        settings["data.held_out_fraction"] = 0.0


def _rewards(config: Converter) -> None:
    config.settings["rewards.partial_credit"] = True  # scores between 0 and 1 count, as in verl
    paths, functions = ([config(f"{at}{name}") for at in _REWARD_FILES] for name in ("path", "name"))
    file, function = next(filter(None, paths), None), next(filter(None, functions), "compute_score")
    where = "a compute_score function" if file is None else f"{function} of {file}"
    config.remarks.append(
        f"{where} is called as it is if you set verification.functions: {{DOMAIN: {file or 'file.py'}:{function}}}; "
        "until then, brorl's verifier of the domain judges"
    )
    for at in _OVERLONG:
        length, _ = config(f"{at}len"), config(f"{at}log")
        if config(f"{at}enable"):
            config.settings["rewards.overlong_tokens"] = int(length)
