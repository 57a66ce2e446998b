"""A run from its config: the parts of training, at the last checkpoint or at the start.

Cheap checks come first: the data's rows, the verifiers, the tokenizer and the prompts, the memory. The model's weights
are loaded last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING

from brorl.activity import Echo, Observe, Phase, Stopwatch, unobserved
from brorl.assemble.cluster import place_async_source, place_engine, place_learner, place_verifiers
from brorl.assemble.engine import OnEnd, build_engine, end_engine
from brorl.assemble.inputs import RunInputs, input_lines, prepare
from brorl.assemble.learner import build_forward, build_learner_forward, build_learner_settings, build_model
from brorl.assemble.resuming import check_resumable, go_back
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.benchmark import Benchmark
from brorl.model.load import end_tokens
from brorl.rollout.engine import Engine
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
from brorl.training.collect import Collector
from brorl.training.diagnostics import Diagnostics
from brorl.training.learner import Learner
from brorl.training.monitor import Monitor
from brorl.training.objective import Objective
from brorl.training.run import Algorithm, Measurements, Outputs, TrainingRun
from brorl.training.schedule import ReferenceSchedule, Schedule
from brorl.training.settings import PhaseSettings
from brorl.training.source import GroupSource
from brorl.training.tree_learner import TreeLearner

if TYPE_CHECKING:
    from brorl.distributed.cluster import RayCluster

_EVALUATION_SEED = 1_000_003
CLOCKS = {"wall": perf_counter, "cpu": process_time}


def build_run(
    config: TrainConfig,
    directory: RunDirectory,
    report: Callable[[Record], None],
    echo: Echo = lambda _: None,
    observe: Observe = unobserved,
    cluster: RayCluster | None = None,
    on_end: OnEnd = lambda _: None,
) -> tuple[TrainingRun, TrainerState]:
    """Make the parts of a run, at its last checkpoint or at its start.

    Args:
        config: The run's settings.
        directory: The run's files.
        report: Receives every metrics record.
        echo: Receives lines for the user.
        observe: Receives the activity of the parts.
        cluster: Where the engine and the learner work; None for this process. It is started after the cheap checks.
        on_end: Receives a function that ends the engine, if this process has one.

    Returns:
        The run, and the state that its parts hold.

    Raises:
        UserError: If the data, the model, the tokenizer or the machine's memory does not fit.
    """
    discard_unfinished(directory.checkpoints)
    checkpoint = last_checkpoint(directory.checkpoints)
    check_resumable(config, directory, checkpoint)
    if not checkpoint:
        check_start(config)
    observe(Phase("loading", "data"))
    inputs = prepare(config, str(checkpoint) if checkpoint else config.model)
    for line in input_lines(inputs, config):
        echo(line)
    clock = Stopwatch(observe, CLOCKS[config.engine.clock])
    if cluster is None:
        source, learner = _local_parts(config, inputs, clock, echo, observe, on_end)
    else:
        observe(Phase("starting", "cluster"))
        cluster.start()
        observe(Phase("loading", "model"))
        learner = place_learner(cluster, config, inputs, directory.path, observe)
        verifiers = place_verifiers(cluster, config, inputs.grader.verifiers)
        inputs = replace(inputs, grader=replace(inputs.grader, verifiers=verifiers))
        if config.cluster.mode == "async":
            source = place_async_source(cluster, config, inputs, clock, observe)
        else:
            engine = place_engine(cluster, config, inputs.context, observe)
            source = _collector(config, inputs, engine, learner, clock, observe)
        learner.num_parameters()  # waits for the ranks, which load the model while the workers start
    if not config.cluster.verifier_workers:
        inputs.workers.pool.start()
    outputs = Outputs(directory, inputs.tokenizer, config.keep_checkpoints, inputs.grader, report, observe)
    run = _run_of(config, inputs, source, learner, outputs, clock)
    return run, _restore(run, config, checkpoint)


def _local_parts(
    config: TrainConfig,
    inputs: RunInputs,
    clock: Stopwatch,
    echo: Echo,
    observe: Observe,
    on_end: OnEnd,
) -> tuple[GroupSource, Learner]:
    """Make a source and a learner with one model, in this process."""
    model = build_model(config, inputs, observe)
    forward = build_forward(config, inputs, model, echo)
    engine = build_engine(config, inputs.model_path, model, inputs.tokenizer, forward, inputs.context, observe, echo)
    on_end(partial(end_engine, engine))
    stop_token_ids = end_tokens(model, inputs.tokenizer, config.sampling.stop)
    forward = build_learner_forward(config, model, forward, echo)
    learner = TreeLearner(model, build_learner_settings(config, stop_token_ids, forward), echo, observe)
    return _collector(config, inputs, engine, learner, clock, observe), learner


def _run_of(
    config: TrainConfig, inputs: RunInputs, source: GroupSource, learner: Learner, outputs: Outputs, clock: Stopwatch
) -> TrainingRun:
    """Make the parts that measure and write, before the state of the run is restored."""
    diagnostics = Diagnostics(
        sampler=source.sampler,
        learner=learner,
        grader=inputs.grader,
        sampling=config.sampling.params,
        check_every=config.diagnostics.held_out_check_every,
        held_out_rollouts=config.diagnostics.held_out_rollouts,
        recompute_old_logprobs=config.recompute_old_logprobs,
        seed=config.seed,
        clock=clock,
    )
    monitor = Monitor(config.collapse, config.evaluation)
    phases = config.phases or (PhaseSettings(name="train", advantage=config.advantage),)
    rate, decay = config.optimizer.learning_rate, config.optimizer.decay
    objective = Objective(phases, rate, config.rollouts_per_prompt, config.evaluation.every, decay)
    return TrainingRun(
        Algorithm(source, objective, learner, config.seed, config.optimizer.ema_decay is not None),
        build_schedule(config),
        Measurements(diagnostics, build_benchmark(config, inputs, outputs.observe), monitor),
        outputs,
        clock,
    )


def _collector(
    config: TrainConfig,
    inputs: RunInputs,
    engine: Engine,
    learner: Learner,
    clock: Stopwatch,
    observe: Observe,
) -> Collector:
    """Make a source that samples when the loop needs groups."""
    return Collector(
        engine=engine,
        stream=inputs.prompts.train,
        grader=inputs.grader,
        sampling=config.sampling.params,
        num_rollouts=config.rollouts_per_prompt,
        prompts_per_step=config.prompts_per_step,
        dynamic_sampling=config.dynamic_sampling.enabled,
        max_tries=config.dynamic_sampling.max_tries,
        seed=config.seed,
        keep_old_logprobs=learner.with_old_logprobs,
        clock=clock,
        observe=observe,
    )


def build_schedule(config: TrainConfig) -> Schedule:
    """Return when the run ends, is evaluated and saved, and when the reference policy is reset."""
    return Schedule(
        budget=config.total_budget,
        steps=config.steps,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.checkpoint_every,
        store_rollouts_every=config.store_rollouts_every,
        reference=ReferenceSchedule(config.reference),
        pause_at=config.budget.pause_at,
    )


def check_start(config: TrainConfig) -> None:
    """Check that the model is a checkpoint if the optimizer's state is loaded from it.

    Raises:
        UserError: If it is not.
    """
    if config.optimizer.from_checkpoint and not is_checkpoint(Path(config.model)):
        raise UserError(
            f"optimizer.from_checkpoint needs a checkpoint, but model = {config.model} is not one; set model to "
            "RUN/checkpoints/step-..., or optimizer.from_checkpoint: false"
        )


def build_benchmark(config: TrainConfig, inputs: RunInputs, observe: Observe) -> Benchmark | None:
    """Make the evaluation of the held-out prompts; None without any."""
    if not inputs.prompts.held_out:
        return None
    evaluation = config.evaluation
    return Benchmark(
        inputs.prompts.held_out,
        inputs.grader,
        SamplingParams(
            temperature=evaluation.temperature, top_p=evaluation.top_p, max_new_tokens=config.max_evaluated_tokens
        ),
        evaluation.rollouts_per_prompt,
        evaluation.ks,
        config.seed + _EVALUATION_SEED,
        observe=observe,
    )


def _restore(run: TrainingRun, config: TrainConfig, checkpoint: Path | None) -> TrainerState:
    """Restore the state of a checkpoint in the parts and the files of a run."""
    directory, learner, source = run.outputs.directory, run.algorithm.learner, run.algorithm.source
    benchmark, monitor = run.measurements.benchmark, run.measurements.monitor
    try:
        state = load_state(checkpoint) if checkpoint else START
    except UserError as error:
        raise UserError(f"{error}; {go_back(directory)}") from error
    if config.steps is not None and state.step > config.steps:
        raise UserError(f"the run has already made {state.step} steps, but steps = {config.steps}; raise --steps")
    if not checkpoint and config.optimizer.from_checkpoint:
        _take_optimizer(learner, config.model)
    try:
        if state.learner is not None:
            learner.load_state_dict(state.learner)
        source.load_state(state.source)
        if benchmark is not None and state.held_out not in (None, benchmark.fingerprint):
            raise ValueError(
                "the held-out questions have changed since the run began; restore the data, or start a new run"
            )
    except ValueError as error:  # the data or the model has changed since
        raise UserError(f"{directory.path} cannot be resumed: {error}") from error
    source.publish(learner.weights(), version=state.step)
    if state.schedule is not None:
        run.schedule.reference.load_state_dict(state.schedule)
    directory.rewind(state.step if checkpoint else -1, state.source.attempts)
    monitor.recall(directory.read_metrics())
    run.algorithm.objective.recall(directory.read_metrics())
    if monitor.best_step is not None:  # a kill may have come before the link
        mark_best(directory.checkpoints, monitor.best_step)
    return state


def _take_optimizer(learner: Learner, model: str) -> None:
    """Load the optimizer's state of the checkpoint that the run continues from."""
    try:
        state = read_state(Path(model)).learner
        if state is not None:
            learner.load_optimizer_state(state)
    except (UserError, ValueError) as error:
        raise UserError(f"{error}; set optimizer.from_checkpoint: false") from error
