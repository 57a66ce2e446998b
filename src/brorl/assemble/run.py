"""A run from its config: the parts of training, at the last checkpoint or at the start.

In: a checked `TrainConfig` and a run directory. Out: a `TrainingRun` and the state to start from. What can be wrong is
found in the order of its cost: the data's rows, the verifiers, the tokenizer and the prompts, the memory, and only
then the model's weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from brorl.activity import Observe, Phase, unobserved
from brorl.assemble.data import Prompts, all_questions, build_prompts, build_questions
from brorl.assemble.resuming import check_resumable, go_back
from brorl.assemble.settings import (
    build_advantages,
    build_budget,
    build_collapse_limits,
    build_learner_settings,
    build_lora,
    build_policy_loss,
    build_response_format,
    build_rollouts_per_prompt,
    build_sampling,
    build_schedule,
    build_shaping,
)
from brorl.assemble.verification import build_pool, build_verifiers, check_references
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.benchmark import Benchmark
from brorl.model.load import (
    LoadedModel,
    check_vocabulary,
    choose_device,
    end_tokens,
    load_model,
    load_tokenizer,
)
from brorl.model.memory_plan import MemoryPlan, MemorySettings, Workload, available_bytes, check, plan_memory
from brorl.model.source import find_model, read_config
from brorl.planning.pilot import PilotParts
from brorl.rollout.native.engine import NativeEngine
from brorl.runs.checkpoint import (
    START,
    TrainerState,
    discard_unfinished,
    is_checkpoint,
    last_checkpoint,
    load_state,
    mark_best,
    read_state,
)
from brorl.runs.run_directory import Record, RunDirectory
from brorl.sampling import SamplingParams
from brorl.seeds import derived_seed
from brorl.training.collect import Collector
from brorl.training.diagnostics import Diagnostics, coverage_record
from brorl.training.loop import TrainingRun
from brorl.training.monitor import Monitor
from brorl.training.tree_learner import TreeLearner
from brorl.verify.grade import Grader

_EVALUATION_SEED = 1_000_003


class Ready(NamedTuple):
    """What a run needs before its model is loaded: all of it can be wrong, and none of it is expensive.

    Attributes:
        source: What the model is loaded from.
        tokenizer: Its tokenizer.
        prompts: Training and held-out prompts.
        grader: Verifies and rewards responses.
        memory: The memory that the run will need.
    """

    source: str
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    grader: Grader
    memory: MemoryPlan


def prepare(config: TrainConfig, source: str) -> Ready:
    """Read, check and encode the data, and check the memory.

    Args:
        config: The run's settings.
        source: Model or checkpoint to load.

    Raises:
        UserError: On the first thing that is wrong.
    """
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    torch.manual_seed(derived_seed(config.seed, 0))  # torch uses the low 32 bits alone on a CPU
    shaping = build_shaping(config)
    build_policy_loss(config)
    choose_device(config.device)
    model_config = read_config(find_model(source))
    sources = build_questions(config)
    questions = all_questions(sources)
    verifiers = build_verifiers(config, {question.domain for question in questions}, build_pool(config))
    tokenizer = load_tokenizer(source, config.sampling.end_token)
    prompts = build_prompts(config, sources, tokenizer, model_config)
    memory = build_memory_plan(config, model_config, prompts)
    if source == config.model:  # a run that is resumed has been checked
        check_references(verifiers, questions)
    return Ready(
        source,
        tokenizer,
        prompts,
        Grader(verifiers, build_decode(tokenizer), shaping, build_response_format(config)),
        memory,
    )


def build_run(
    config: TrainConfig,
    directory: RunDirectory,
    report: Callable[[Record], None],
    say: Callable[[str], None] = lambda _: None,
    observe: Observe = unobserved,
) -> tuple[TrainingRun, TrainerState]:
    """Make the parts of a run, at its last checkpoint or at its start.

    Args:
        config: The run's settings.
        directory: The run's files.
        report: Gets every line of the metrics.
        say: Gets what a person should know besides.
        observe: Gets what the parts report while they work.

    Returns:
        The run, and the state that its parts hold.

    Raises:
        UserError: If the data, the model, the tokenizer or the machine's memory do not do.
    """
    discard_unfinished(directory.checkpoints)
    checkpoint = last_checkpoint(directory.checkpoints)
    check_resumable(config, directory, checkpoint)
    if not checkpoint:
        check_start(config)
    observe(Phase("loading", "data"))
    ready = prepare(config, str(checkpoint) if checkpoint else config.model)
    for line in readiness_lines(ready, config):
        say(line)
    loaded, engine = build_engine(config, ready, observe)
    num_rollouts, widening = build_rollouts_per_prompt(config)
    collector = Collector(
        engine=engine,
        stream=ready.prompts.train,
        grader=ready.grader,
        sampling=build_sampling(config),
        rollouts_per_prompt=num_rollouts,
        prompts_per_step=config.prompts_per_step,
        dynamic_sampling=config.dynamic_sampling.enabled,
        max_tries=config.dynamic_sampling.max_tries,
        seed=config.seed,
        widening=widening,
        observe=observe,
    )
    learner = TreeLearner(loaded.model, build_learner_settings(config, engine.stop_token_ids), say, observe)
    run = TrainingRun(
        collector=collector,
        estimate_advantages=build_advantages(config),
        learner=learner,
        engine=engine,
        diagnostics=Diagnostics(
            engine=engine,
            learner=learner,
            grader=ready.grader,
            sampling=collector.sampling,
            fixed_size=config.rollouts_per_prompt != "adaptive",
            certificate_every=config.diagnostics.certificate_every,
            held_out_rollouts=config.diagnostics.held_out_rollouts,
            recompute_old_logprobs=config.recompute_old_logprobs,
            seed=config.seed,
        ),
        schedule=build_schedule(config),
        reset_optimizer=config.reference.reset_optimizer,
        watch=Monitor(
            build_collapse_limits(config), config.collapse.stop, config.evaluation.keep_best, config.evaluation.every
        ),
        benchmark=_benchmark(config, ready, observe),
        evaluate_every=config.evaluation.every,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        directory=directory,
        steps=config.steps,
        budget=build_budget(config),
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
        store_rollouts_every=config.store_rollouts_every,
        seed=config.seed,
        report=report,
        observe=observe,
    )
    return run, _restore(run, config, checkpoint)


def check_start(config: TrainConfig) -> None:
    """Refuse to start with the optimizer's state of a checkpoint where the model is none.

    Raises:
        UserError: If the model is no checkpoint.
    """
    if config.optimizer.from_checkpoint and not is_checkpoint(Path(config.model)):
        raise UserError(
            f"optimizer.from_checkpoint needs a checkpoint, but model = {config.model} is not one; set model to "
            "RUN/checkpoints/step-..., or optimizer.from_checkpoint: false"
        )


def build_pilot(config: TrainConfig, observe: Observe = unobserved) -> PilotParts:
    """Make the parts that `brorl plan` measures: those of a run before its first step.

    Args:
        config: The settings of the run.
        observe: Gets what the parts report while they work.

    Raises:
        UserError: If rollouts are not drawn from the whole distribution, or the data, the model, the tokenizer or the
            memory do not do.
    """
    if config.sampling.top_p < 1 or config.sampling.top_k:
        raise UserError(
            f"a plan needs sampling from the full distribution, but sampling.top_p = {config.sampling.top_p} and "
            f"sampling.top_k = {config.sampling.top_k}; set sampling.top_p: 1.0 and sampling.top_k: 0"
        )
    observe(Phase("loading", "data"))
    ready = prepare(config, config.model)
    return build_pilot_parts(config, ready, replace(build_sampling(config), scheme="iid"), observe)


def build_pilot_parts(
    config: TrainConfig, ready: Ready, sampling: SamplingParams, observe: Observe = unobserved
) -> PilotParts:
    """Load the model and make the parts whose work on a few prompts is measured, with rollouts drawn like this."""
    loaded, engine = build_engine(config, ready, observe)
    return PilotParts(
        engine=engine,
        model=loaded.model,
        stream=ready.prompts.train,
        grader=ready.grader,
        sampling=sampling,
        estimate_advantages=build_advantages(config),
        diagnose=lambda groups: coverage_record(groups, config.sampling.scheme, True),
        learner_settings=build_learner_settings(config, engine.stop_token_ids),
        prompts_per_step=config.prompts_per_step,
        dynamic_sampling=config.dynamic_sampling.enabled,
        store_every=config.store_rollouts_every,
        seed=config.seed,
    )


def build_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return the function from a response's token ids to its text, without special tokens."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return decode


def build_engine(config: TrainConfig, ready: Ready, observe: Observe = unobserved) -> tuple[LoadedModel, NativeEngine]:
    """Load the model to train and the engine that samples with it.

    The engine shares the learner's weights, except where all weights are trained with bfloat16: then it has a copy.
    """
    observe(Phase("loading", "model"))
    device = choose_device(config.device)
    lora = build_lora(config)
    low = config.dtype == "bfloat16"
    dtype = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16 if lora else torch.float32}
    model = load_model(
        ready.source, device, dtype[config.dtype], lora, gradient_checkpointing=config.engine.gradient_checkpointing
    )
    check_vocabulary(ready.source, model, ready.tokenizer)
    sampler = load_model(ready.source, device, torch.bfloat16) if low and not lora else model
    memory_bytes = int(config.engine.memory_gib * 2**30)
    engine = NativeEngine(sampler, end_tokens(model, ready.tokenizer), memory_bytes, observe=observe)
    return LoadedModel(model, ready.tokenizer), engine


def build_memory_plan(config: TrainConfig, model_config: PreTrainedConfig, prompts: Prompts) -> MemoryPlan:
    """Predict the memory of a run, without loading its model.

    Raises:
        UserError: If what it certainly needs is more than there is.
    """
    num_rollouts, widening = build_rollouts_per_prompt(config)
    rollouts = widening.max_rollouts if widening else num_rollouts
    device = choose_device(config.device)
    offloaded = config.reference.offload and device.type != "cpu"
    settings = MemorySettings(
        dtype=config.dtype,
        engine_bytes=int(config.engine.memory_gib * 2**30),
        lora=build_lora(config),
        reference=config.kl.coefficient > 0 and not offloaded,
        nodes_per_pass=config.engine.nodes_per_pass,
        gradient_checkpointing=config.engine.gradient_checkpointing,
    )
    workload = Workload(
        prompt_tokens=prompts.longest,
        max_new_tokens=max(config.sampling.max_new_tokens, config.evaluation.max_new_tokens or 0),
        num_rows=max(config.prompts_per_step * rollouts, len(prompts.held_out) * config.evaluation.num_samples),
        num_prompts=-(-config.prompts_per_step // config.optimizer.mini_batches),
    )
    plan = plan_memory(model_config, settings, workload, available_bytes(device))
    check(plan, plan.available_bytes)
    return plan


def _benchmark(config: TrainConfig, ready: Ready, observe: Observe) -> Benchmark | None:
    if not ready.prompts.held_out:
        return None
    evaluation = config.evaluation
    limit = evaluation.max_new_tokens or config.sampling.max_new_tokens
    return Benchmark(
        ready.prompts.held_out,
        ready.grader.verifiers,
        ready.grader.decode,
        SamplingParams(temperature=evaluation.temperature, top_p=evaluation.top_p, max_new_tokens=limit),
        evaluation.num_samples,
        evaluation.ks,
        config.seed + _EVALUATION_SEED,
        accept_truncated=config.rewards.stop_properly > 0,  # as in training
        observe=observe,
    )


def _restore(run: TrainingRun, config: TrainConfig, checkpoint: Path | None) -> TrainerState:
    """Put the parts into the state of a checkpoint, and the files of the run with them."""
    try:
        state = load_state(checkpoint) if checkpoint else START
    except UserError as error:
        raise UserError(f"{error}; {go_back(run.directory)}") from error
    if run.steps is not None and state.step > run.steps:
        raise UserError(f"the run has already made {state.step} steps, but steps = {run.steps}; raise --steps")
    if not checkpoint and config.optimizer.from_checkpoint:
        _take_optimizer(run, config.model)
    try:
        if state.learner is not None:
            run.learner.load_state_dict(state.learner)
        if state.stream is not None:
            run.collector.stream.load_state_dict(state.stream)
        if run.benchmark is not None and state.held_out not in (None, run.benchmark.fingerprint):
            raise ValueError(
                "the held-out questions have changed since the run began; restore the data, or start a new run"
            )
    except ValueError as error:  # the data or the model has changed since
        raise UserError(f"{run.directory.path} cannot be resumed: {error}") from error
    if state.schedule is not None:
        run.schedule.load_state_dict(state.schedule)
    run.directory.rewind(state.step if checkpoint else -1, state.attempts)
    run.watch.recall(run.directory.read_metrics())
    if run.watch.best_step is not None:  # a kill may have come before the link
        mark_best(run.directory.checkpoints, run.watch.best_step)
    return state


def _take_optimizer(run: TrainingRun, model: str) -> None:
    """Start with the optimizer's state of the checkpoint that the run continues from."""
    try:
        state = read_state(Path(model)).learner
        if state is not None:
            run.learner.load_optimizer_state(state)
    except (UserError, ValueError) as error:
        raise UserError(f"{error}; set optimizer.from_checkpoint: false") from error


def readiness_lines(ready: Ready, config: TrainConfig) -> list[str]:
    """Return what was left out of the data, and the memory that the run will need, as lines for a person."""
    lines = []
    if ready.prompts.dropped:
        lines.append(
            f"{ready.prompts.dropped:,} prompts with more than {config.data.max_prompt_tokens} tokens were dropped"
        )
    if ready.prompts.asked:
        lines.append(
            f"{ready.prompts.asked:,} training questions were removed because they are also in the evaluation data"
        )
    if ready.prompts.train.num_prompts < config.prompts_per_step:
        lines.append(
            f"warning: prompts_per_step = {config.prompts_per_step:,} is more than the "
            f"{ready.prompts.train.num_prompts:,} training prompts, so that a step repeats prompts; lower "
            "prompts_per_step, or add data"
        )
    warning = check(ready.memory, ready.memory.available_bytes)
    return [*lines, ready.memory.summary if warning is None else f"warning: {warning}"]
