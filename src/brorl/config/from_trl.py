"""Converts a config of TRL's GRPOTrainer: the fields of GRPOConfig and the arguments of TRL's scripts.

Names, defaults and meanings are from TRL 1.16 with transformers 5. TRL generates `generation_batch_size` samples at
once and divides them into `steps_per_generation` micro-batches. Every `gradient_accumulation_steps` micro-batches make
an update, and `num_iterations` repeats all of it. A step of TRL is an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, sqrt
from typing import Any, NamedTuple

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
from brorl.errors import UserError

OWN_DOMAIN = "own"
"""The domain of questions that a function of the config verifies."""

_LOSS = {
    "dapo": "token_mean", "bnpo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant", "cispo": "token_mean",
}  # fmt: skip
_SCALE = {"group": "grpo", "none": "rloo", True: "grpo", False: "rloo"}
_SCHEDULE = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine",
}  # fmt: skip
_IMPORTANCE = {"token_truncate": "truncate", "token_mask": "mask"}
_NO_BOUND = 1e9
_TABLE: dict[str, Counterpart] = {
    "model_name_or_path": ("model", str),
    "num_generations": ("rollouts_per_prompt", int, 8),
    "max_completion_length": ("sampling.max_new_tokens", int, 512),
    "max_prompt_length": ("data.max_prompt_tokens", int),
    "temperature": ("sampling.temperature", float),
    "top_p": ("sampling.top_p", float),
    "top_k": ("sampling.top_k", all_tokens),
    "scale_rewards": ("advantage.estimator", _SCALE, "group"),
    "epsilon": ("loss.clip_low", float, 0.2),
    "epsilon_high": ("loss.clip_high", float),
    "delta": ("loss.dual_clip", float),
    "loss_type": ("loss.aggregation", _LOSS, "dapo"),
    "mask_truncated_completions": ("loss.mask_truncated", bool),
    "entropy_coef": ("loss.entropy_coefficient", float),
    "beta": ("kl.coefficient", float),
    "learning_rate": ("optimizer.learning_rate", float, 1e-6),
    "lr_scheduler_type": ("optimizer.schedule", _SCHEDULE, "linear"),
    "weight_decay": ("optimizer.weight_decay", float),
    "max_grad_norm": ("optimizer.max_grad_norm", lambda norm: float(norm) or _NO_BOUND, 1.0),
    "seed": ("seed", int),
    "gradient_checkpointing": ("engine.gradient_checkpointing", bool),
    "output_dir": ("output_dir", str),
    "save_total_limit": ("keep_checkpoints", int),
    "report_to": ("tracking.to", trackers),
    "run_name": ("tracking.run_name", str),
    "project": ("tracking.project", str),
    "test_split_size": ("data.held_out_fraction", float),
}
_WITHOUT: dict[str, Any] = {
    "trust_remote_code": False, "cast_lm_head_to_fp32": False, "shuffle_dataset": True, "repetition_penalty": 1.0,
    "multi_objective_aggregation": "sum_then_normalize", "ref_model_mixup_alpha": 0.6, "top_entropy_quantile": 1.0,
    "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
    "entropy_target": 0.2, "model_revision": "main", "use_dora": False, "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False, "adam_epsilon": 1e-8, "fp16": False,
    "label_smoothing_factor": 0.0, "train_sampling_strategy": "random", "push_to_hub": False, "data_seed": None,
    "model_init_kwargs": None, "router_aux_loss_coef": 0.0, "min_p": None, "vllm_structured_outputs_regex": None,
    "max_tool_calling_iterations": None, "off_policy_mask_threshold": None, "lora_target_parameters": None,
    "lora_modules_to_save": None, "reward_model_name_or_path": None, "optim_args": None, "optim_target_modules": None,
    "neftune_noise_alpha": None, "resume_from_checkpoint": None, "generation_kwargs": None,
    "lr_scheduler_kwargs": None, "optim": None,
}  # fmt: skip
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_ACCURACY = ("accuracy_reward", "reasoning_accuracy_reward")
_BUILT_IN_REWARDS = {
    "think_format_reward": "rewards.format_pattern: '<think>.*</think>.*', and rewards.format_reward to its weight,",
    "get_soft_overlong_punishment": "rewards.overlong_tokens: 256",
}


def from_trl(given: Mapping[str, Any], num_prompts: int | None) -> Conversion:
    """Convert a config of TRL, keyed by dotted name; `num_prompts` of its data turns epochs into steps."""
    if given.get("scale_rewards") == "batch":
        raise UserError(
            "scale_rewards: 'batch' divides by the standard deviation of all rewards of a batch, and brorl has no such "
            "estimator: advantage.estimator: reinforce_pp_baseline divides by that of the advantages, which is "
            "smaller; set scale_rewards: group or none, and the estimator that you want in the recipe"
        )
    config = Converter(given, _TABLE)
    settings = config.settings
    _learning_rate(config, _updates(config, num_prompts))
    settings["optimizer.betas"] = [float(config("adam_beta1", 0.9)), float(config("adam_beta2", 0.999))]
    settings["dynamic_sampling.enabled"] = False
    if config("use_cpu"):
        settings["device"] = "cpu"
    if config("bf16", not given.get("fp16")) or config("dtype") == "bfloat16":
        settings |= BFLOAT16
    if chat := config.within("chat_template_kwargs"):
        settings["prompt.chat_template_options"] = chat
    if samples := int(config("num_generations_eval", 0)):
        settings |= {"evaluation.rollouts_per_prompt": samples, "evaluation.ks": sorted({1, samples})}
    reset_every = config("ref_model_sync_steps", 512)
    if config("sync_ref_model"):
        settings["reference.reset_every"] = int(reset_every)
    _loss(config)
    _vllm(config)
    _lora(config)
    _data(config, _rewards(config))
    usual = {"optim": given.get("optim")} if given.get("optim") in _ADAMW else {}
    return config.finish("TRL", "report_to", _WITHOUT | usual)


class _Updates(NamedTuple):
    """How many updates TRL makes."""

    of_a_step: Fraction  # updates on the samples of one brorl step, over all iterations
    total: int | None  # updates in the whole run; None if the number of prompts is unknown

    def in_steps(self, given: Any) -> Fraction | None:
        """Return a number of updates in steps. A number below 1 is a fraction of the total: None if it is unknown."""
        value = float(given)
        if 0 < value < 1:
            return None if self.total is None else ceil(self.total * value) / self.of_a_step
        return int(value) / self.of_a_step


def _updates(config: Converter, num_prompts: int | None) -> _Updates:
    """Set the batch of a step, the number of steps, and the steps between checkpoints and evaluations."""
    settings, remarks, group = config.settings, config.remarks, config.settings["rollouts_per_prompt"]
    micro, accumulated = int(config("per_device_train_batch_size", 8)), int(config("gradient_accumulation_steps", 1))
    rounds, iterations = int(config("steps_per_generation", accumulated)), int(config("num_iterations", 1))
    if samples := int(config("generation_batch_size", 0)):
        rounds = max(samples // micro, 1)
    updates = max(Fraction(rounds, accumulated), Fraction(1))  # updates per step
    prompts = max(micro * max(rounds, accumulated) // group, 1)
    mini_batches = min(max(round(updates), 1), prompts)
    settings |= {"prompts_per_step": prompts, "optimizer.mini_batches": mini_batches}
    remarks.append(f"prompts_per_step = {prompts} is for one process; multiply it by the number of processes")
    if updates != mini_batches:
        remarks.append(
            f"TRL makes {float(updates):g} updates on these prompts, and optimizer.mini_batches {mini_batches}"
        )
    if iterations > 1:
        remarks.append("num_iterations: one pass is made over the rollouts; raise optimizer.mini_batches instead")
    an_epoch, total, epochs = None, int(config("max_steps", -1)), Fraction(str(config("num_train_epochs", 3)))
    if num_prompts is not None:
        generated = max(micro * rounds // group, 1)  # prompts per generation
        an_epoch = max(ceil(Fraction(num_prompts // generated * rounds * iterations, accumulated)), 1)
    by_epochs = total <= 0
    if by_epochs and an_epoch is not None:
        total = ceil(epochs * an_epoch)
    found = _Updates(updates * iterations, total if total > 0 else None)
    if found.total is not None:
        settings["steps"] = ceil(found.total / found.of_a_step)
    if by_epochs:
        config.say_epochs("num_train_epochs", epochs, num_prompts, settings.get("steps"))
    _intervals(config, found, an_epoch)
    return found


def _intervals(config: Converter, updates: _Updates, an_epoch: int | None) -> None:
    for what, name in (("save", "checkpoint_every"), ("eval", "evaluation.every")):
        strategy, given = str(config(f"{what}_strategy")), config(f"{what}_steps")
        if strategy == "no" and what == "eval":
            config.settings[name] = 0
        elif strategy == "epoch" or (given and strategy != "no"):
            number = an_epoch if strategy == "epoch" else given
            if number is None or (steps := updates.in_steps(number)) is None:
                wanted = "an epoch" if strategy == "epoch" else f"{what}_steps = {given}, a fraction of all steps"
                config.remarks.append(f"set {name}: the config has {wanted}, and the number of prompts is unknown")
            else:
                config.settings[name] = max(round(steps), 1)


def _learning_rate(config: Converter, updates: _Updates) -> None:
    """Set the schedule of the learning rate; `warmup_ratio` is the older name of a fraction."""
    kind, older = config("lr_scheduler_type", "linear"), config("warmup_ratio", 0)
    end, relative = config("lr_scheduler_kwargs.min_lr"), config("lr_scheduler_kwargs.min_lr_rate")
    if end is None and relative is None and kind.endswith("min_lr"):
        raise UserError(f"lr_scheduler_type = {kind} needs min_lr or min_lr_rate in lr_scheduler_kwargs; add one")
    last = float(relative or 0) if end is None else float(end) / config.settings["optimizer.learning_rate"]
    warmup = config("warmup_steps", 0) if float(config("warmup_steps", 0)) else older
    steps = None if updates.total is None else updates.total / updates.of_a_step
    config.set_schedule(updates.in_steps(0 if kind == "constant" else warmup), steps, last)


def _loss(config: Converter) -> None:
    """Set the kind of the loss with its clips, and the KL penalty."""
    settings = config.settings
    settings.setdefault("loss.clip_high", settings["loss.clip_low"])
    if config("loss_type") == "cispo":
        settings["loss.kind"] = "cispo"
        del settings["loss.clip_low"]  # no lower bound
        largest = settings.pop("loss.clip_high")  # TRL bounds the weight itself, brorl its distance from 1
        if largest > 1:
            settings["loss.clip_high"] = largest - 1
        elif config("epsilon_high") is not None:
            config.remarks.append(
                f"epsilon_high = {largest:g} bounds the weights of CISPO below 1; the recipe bounds them by 5"
            )
    if config("importance_sampling_level") == "sequence":
        settings["loss.kind"] = "gspo"
    corrected = config("use_bias_correction_kl", True)
    if config("beta"):  # TRL's weight on k3 gives the gradient of KL(policy, reference), which is k2's own
        settings["kl.estimator"] = "k2" if corrected else "k3"


def _vllm(config: Converter) -> None:
    """Set the engine, and the importance correction for its numerics, which TRL has on by default."""
    is_colocated = config("vllm_mode", "colocate") == "colocate"
    parallel, corrects = config("vllm_tensor_parallel_size"), config("vllm_importance_sampling_correction", True)
    mode = config("vllm_importance_sampling_mode", "sequence_mask")
    low, cap = config("vllm_importance_sampling_clip_min", 0), config("vllm_importance_sampling_cap")
    config("vllm_importance_sampling_clip_max")
    high = config.given.get("vllm_importance_sampling_clip_max", 3.0)  # null means no bound
    if not config("use_vllm"):
        return
    config.settings |= {"engine.kind": "vllm", "engine.vllm.placement": "colocated" if is_colocated else "apart"}
    if parallel:
        config.settings["engine.vllm.tensor_parallel"] = int(parallel)
    if not corrects:
        config.settings["importance.correction"] = "none"
        return
    if mode not in _IMPORTANCE:
        config.remarks.append(f"vllm_importance_sampling_mode: {mode} became importance.correction: truncate, by token")
    config.settings |= {
        "importance.correction": _IMPORTANCE.get(mode, "truncate"), "optimizer.old_logprobs": "recompute",
        "importance.high": float(cap or high or _NO_BOUND), "importance.low": float(low),
    }  # fmt: skip


def _lora(config: Converter) -> None:
    rank, alpha = int(config("lora_r", 16)), float(config("lora_alpha", 32))
    modules, dropout = config("lora_target_modules"), float(config("lora_dropout", 0.05))
    alpha *= sqrt(rank) if config("use_rslora") else 1.0  # rsLoRA scales by alpha / sqrt(rank)
    quantization = "nf4" if config("load_in_4bit") else "none"
    if not config("use_peft"):
        return
    config.adapters(rank, alpha, modules)
    config.settings["lora.quantization"] = quantization
    if not modules:
        config.remarks.append(
            "lora_target_modules is not set: PEFT then adapts the layers that it knows for the architecture, mostly "
            "q_proj and v_proj, and brorl all linear layers; set lora.target_modules to them"
        )
    if dropout > 0:
        config.remarks.append(f"lora_dropout = {dropout:g} is left out: adapters have no dropout here")


def _data(config: Converter, verifier: str | None) -> None:
    """Set the sources: TRL's convention is a column `prompt`, and `solution` for the reward function."""
    columns = {"answer_column": "solution"} | ({} if verifier in (None, *_ACCURACY) else {"domain": OWN_DOMAIN})
    name, subset, mixture = config("dataset_name"), config("dataset_config"), config("datasets")
    train, test = config("dataset_train_split"), config("dataset_test_split", "test")
    if mixture:
        sources = [file_source(one["path"], one.get("name"), one.get("split"), **columns) for one in mixture]
        config.settings["data.sources"] = distinct_names(sources)
    elif name:
        config.settings["data.sources"] = [file_source(name, subset, train, **columns)]
        if config("eval_strategy", "no") != "no":
            evaluated = {**file_source(name, subset, test, **columns), "name": "test"}
            config.settings |= {"evaluation.sources": [evaluated], "data.held_out_fraction": 0.0}


def _rewards(config: Converter) -> str | None:
    """Set TRL's weighted sum, and return the verifier: TRL's accuracy, or else the first function of the user.

    The verifier's weight scales the whole reward, so the weights of the further terms are divided by it.
    """
    settings, remarks = config.settings, config.remarks
    settings["rewards.partial_credit"] = True  # rewards between 0 and 1 count, as in TRL
    functions = names(config("reward_funcs", []))
    weights = dict(zip(functions, map(float, config("reward_weights", [1.0] * len(functions))), strict=False))
    accuracy = [name for name in functions if name in _ACCURACY]
    verifier = next(iter(accuracy or [name for name in functions if name not in _BUILT_IN_REWARDS]), None)
    if verifier is None:
        remarks.append("verification.functions: {DOMAIN: file.py:function} takes your reward function as it is")
    elif verifier in _ACCURACY:
        remarks.append(f"reward_funcs: {verifier} became the verifier of the domain math")
    else:
        settings["verification.functions"] = {OWN_DOMAIN: _path(verifier)}
    factor = 1.0 if verifier is None else weights.get(verifier, 1.0)
    if factor != 1:
        settings["rewards.domain_weights"] = {"math" if verifier in _ACCURACY else OWN_DOMAIN: factor}
    others = [name for name in functions if name != verifier]
    known = [name for name in others if name in _BUILT_IN_REWARDS]
    remarks += [f"set {_BUILT_IN_REWARDS[name]} for reward_funcs: {name}" for name in known]
    own = {name: weights.get(name, 1.0) / factor for name in others if name not in known} if factor > 0 else {}
    if unused := [name for name, weight in own.items() if not weight]:
        remarks.append(f"reward_funcs: {', '.join(unused)} left out, with the weight 0")
    if terms := {name: weight for name, weight in own.items() if weight}:
        short = [name.rpartition(".")[2] for name in terms]
        settings["rewards.terms"] = {
            alone if short.count(alone) == 1 else name.replace(".", "_"): {"function": _path(name), "weight": weight}
            for alone, (name, weight) in zip(short, terms.items(), strict=True)
        }
        remarks.append(f"reward_funcs: {', '.join(terms)} became rewards.terms; {verifier} decides what is correct")
    return verifier


def _path(function: str) -> str:
    """Turn `package.module.function` into `package.module:function`."""
    return ":".join(function.rsplit(".", 1))
