"""Names of settings in TRL, verl, OpenRLHF and the like, with the setting of the same meaning here."""

from __future__ import annotations

_NAMES = {
    "model": "model_name_or_path model_name model_path model_id pretrain pretrained pretrained_model base_model",
    "rollouts_per_prompt": "rollouts num_rollouts num_generations n N n_samples_per_prompt num_samples_per_prompt "
    "group_size rollout_n rollouts_per_example num_return_sequences",
    "prompts_per_step": "batch_size train_batch_size rollout_batch_size per_device_train_batch_size gen_batch_size "
    "generation_batch_size num_prompts_per_step prompts_per_batch",
    "steps": "max_steps num_steps total_steps num_train_steps max_train_steps total_training_steps epochs num_epochs "
    "max_epochs total_epochs num_train_epochs num_episodes",
    "checkpoint_every": "save_steps save_freq save_interval save_every",
    "keep_checkpoints": "save_total_limit max_ckpt_num max_checkpoints",
    "output_dir": "output out_dir save_path save_dir ckpt_path default_local_dir",
    "dtype": "bf16 fp16 torch_dtype precision",
    "data.sources": "dataset datasets dataset_name dataset_path train_data train_file train_files prompt_data",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "prompt.chat": "apply_chat_template",
    "sampling.max_new_tokens": "max_completion_length max_response_length response_length generate_max_len max_tokens "
    "max_length max_gen_len",
    "sampling.min_new_tokens": "min_tokens min_length min_completion_length",
    "sampling.stop": "stop_strings stop_sequences stop_words end_token eos_token stop_token",
    "dynamic_sampling.enabled": "filter_groups dynamic_filtering",
    "advantage.estimator": "adv_estimator advantage_estimator",
    "loss.kind": "loss_type policy_loss",
    "loss.aggregation": "loss_agg_mode loss_aggregation",
    "loss.clip_low": "epsilon eps_clip clip_eps clip_range cliprange clip_ratio clip_ratio_low eps_clip_low "
    "epsilon_low",
    "loss.clip_high": "epsilon_high eps_clip_high clip_ratio_high",
    "loss.dual_clip": "delta clip_ratio_c",
    "loss.entropy_coefficient": "entropy_coef entropy_coeff entropy_bonus",
    "loss.mask_truncated": "mask_truncated_completions overlong_filtering overlong_filter",
    "importance.high": "tis_imp_ratio_cap importance_sampling_cap vllm_importance_sampling_cap",
    "kl.coefficient": "beta kl_beta kl_coef kl_coeff kl_loss_coef init_kl_coef kl_penalty",
    "kl.estimator": "kl_loss_type",
    "optimizer.learning_rate": "lr actor_lr actor_learning_rate",
    "optimizer.mini_batches": "num_mini_batches mini_batch_size ppo_mini_batch_size",
    "optimizer.betas": "adam_betas adam_beta1 adam_beta2",
    "optimizer.max_grad_norm": "max_norm grad_clip clip_grad gradient_clip gradient_clipping",
    "optimizer.warmup_updates": "warmup_steps lr_warmup_steps num_warmup_steps",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "optimizer.final_rate": "min_lr_ratio lr_min_ratio",
    "optimizer.ema_decay": "ema ema_beta",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.quantization": "load_in_4bit bnb_4bit_quant_type",
    "lora.target_modules": "lora_target_modules",
    "evaluation.every": "eval_steps eval_freq eval_every eval_interval test_freq",
    "evaluation.rollouts_per_prompt": "num_samples n_samples num_eval_samples",
    "evaluation.sources": "eval_dataset eval_data val_data val_files test_data",
    "engine.nodes_per_pass": "micro_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu "
    "gradient_accumulation_steps",
    "tracking.to": "report_to use_wandb use_tensorboard logger wandb",
    "tracking.project": "wandb_project project_name",
    "tracking.run_name": "experiment_name wandb_run_name",
}
SETTING_OF = {name: setting for setting, names in _NAMES.items() for name in names.split()}
