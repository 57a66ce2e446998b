"""The memory of a run, predicted from its settings and its prompts without loading its model."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedConfig

from brorl.config.settings import TrainConfig
from brorl.model.device import available_bytes
from brorl.model.load import choose_device
from brorl.model.memory_choices import MemoryChoices
from brorl.model.memory_plan import MemoryPlan, MemorySettings, Workload, check, plan_memory
from brorl.table import Table
from brorl.training.collect import MOST_STEPS
from brorl.training.prompts import Prompts


def check_memory(
    config: TrainConfig, model_config: PreTrainedConfig, prompts: Prompts, show: Callable[[Table], None] | None = None
) -> tuple[MemoryPlan, str | None]:
    """Predict the memory of a run, without loading its model.

    Args:
        config: The settings of the run.
        model_config: The config of its model.
        prompts: Its prompts.
        show: Receives the table of the ways to train by their memory, if the run fits and the free memory is known.

    Returns:
        The prediction, and a warning if it fits unless responses reach the length limit.

    Raises:
        UserError: If the certain part of it exceeds the available memory; it names the smallest change that fits.
    """
    settings, workload = _memory_settings(config), _workload(config, prompts)
    # other machines hold the parts of a run on a cluster
    available = None if config.cluster.enabled else available_bytes(choose_device(config.device))
    plan = plan_memory(model_config, settings, workload, available)
    if available is None:
        return plan, None
    warning = check(plan, available, lambda: MemoryChoices(model_config, settings, workload, available).fix())
    if show is not None:
        show(MemoryChoices(model_config, settings, workload, available).table())
    return plan, warning


def _memory_settings(config: TrainConfig) -> MemorySettings:
    device = choose_device(config.device).type
    offloaded = config.reference.offload and device != "cpu"
    return MemorySettings(
        dtype=config.dtype,
        engine_bytes=int(config.engine.memory_gib * 2**30),
        lora=config.adapters,
        reference=config.kl.coefficient > 0 and not offloaded,
        average=config.optimizer.ema_decay is not None,
        states=config.optimizer.states,
        nodes_per_pass=config.engine.nodes_per_pass,
        gradient_checkpointing=config.engine.gradient_checkpointing,
        forward=config.engine.forward,
        attention=config.engine.attention,
        device=device,
        separate_engine=config.engine.kind == "vllm",
        engine_apart=config.engine.vllm.placement == "apart",
        keeps_cache=config.engine.kind == "native" and device == "cuda" and config.engine.cuda_graphs != "off",
    )


def _workload(config: TrainConfig, prompts: Prompts) -> Workload:
    steps_at_once = MOST_STEPS if config.dynamic_sampling.enabled else 1
    return Workload(
        prompt_tokens=prompts.longest,
        max_new_tokens=max(config.response_limits.values()),
        num_rows=max(
            steps_at_once * config.samples_per_step, len(prompts.held_out) * config.evaluation.rollouts_per_prompt
        ),
        num_prompts=-(-config.prompts_per_step // config.optimizer.mini_batches),
    )
