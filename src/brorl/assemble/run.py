"""A run from its config: the parts of training, at the last checkpoint or at the start.

In: a checked `TrainConfig` and a run directory. Out: a `TrainingRun` and the state to start from. Cheap checks come
first: the data's rows, the verifiers, the tokenizer and the prompts, the memory. The model's weights are loaded last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from brorl.activity import Observe, Phase, unobserved
from brorl.algorithms import advantages
from brorl.assemble.cluster import place_learner, place_verifiers
from brorl.assemble.engine import OnEnd, build_engine, end_engine
from brorl.assemble.inputs import RunInputs, input_lines, prepare
from brorl.assemble.learner import build_forward, build_learner, build_model
from brorl.assemble.objective import build_objective
from brorl.assemble.resuming import check_resumable, go_back
from brorl.assemble.settings import (
    build_clock,
    build_collapse_limits,
    build_learner_settings,
    build_sampling,
    build_schedule,
)
from brorl.assemble.source import build_collector, in_turns, place_source
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.benchmark import Benchmark
from brorl.planning.pilot import PilotParts
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
from brorl.training.diagnostics import Diagnostics, coverage_record
from brorl.training.learner import Learner
from brorl.training.monitor import Monitor
from brorl.training.run import Algorithm, Measurements, Outputs, TrainingRun
from brorl.training.source import GroupSource, SourceState
from brorl.training.stopwatch import Stopwatch

if TYPE_CHECKING:
    from brorl.distributed.cluster import Cluster

_EVALUATION_SEED = 1_000_003


def build_run(
    config: TrainConfig,
    directory: RunDirectory,
    report: Callable[[Record], None],
    say: Callable[[str], None] = lambda _: None,
    observe: Observe = unobserved,
    cluster: Cluster | None = None,
    on_end: OnEnd = lambda _: None,
) -> tuple[TrainingRun, TrainerState]:
    """Make the parts of a run, at its last checkpoint or at its start.

    Args:
        config: The run's settings.
        directory: The run's files.
        report: Receives every line of the metrics.
        say: Receives lines for the user.
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
    ready = prepare(config, str(checkpoint) if checkpoint else config.model)
    for line in input_lines(ready, config):
        say(line)
    clock = Stopwatch(observe, build_clock(config))
    if cluster is None:
        source, learner = _local_parts(config, ready, clock, say, observe, on_end)
    else:
        observe(Phase("starting", "cluster"))
        cluster.start()
        observe(Phase("loading", "model"))
        learner = place_learner(cluster, config, ready, directory.path, say, observe)
        verifiers = place_verifiers(cluster, config, ready.grader.verifiers, say)
        if config.cluster.mode == "async":
            verifiers = in_turns(verifiers)
        ready = ready._replace(grader=replace(ready.grader, verifiers=verifiers))
        source = place_source(cluster, config, ready, learner, clock, say, observe)
        learner.num_parameters()  # waits for the ranks, which load the model while the workers start
    outputs = Outputs(directory, ready.tokenizer, config.keep_checkpoints, ready.grader, report, observe)
    run = _run_of(config, ready, source, learner, outputs, clock)
    return run, _restore(run, config, checkpoint)


def _local_parts(
    config: TrainConfig,
    ready: RunInputs,
    clock: Stopwatch,
    say: Callable[[str], None],
    observe: Observe,
    on_end: OnEnd,
) -> tuple[GroupSource, Learner]:
    """Make a source and a learner with one model, in this process."""
    model = build_model(config, ready, observe)
    forward = build_forward(config, ready, model, say)
    engine = build_engine(config, ready.source, model, ready.tokenizer, forward, ready.context, observe)
    on_end(partial(end_engine, engine))
    learner = build_learner(config, model, forward, engine.stop_token_ids, say, observe)
    return build_collector(config, ready, engine, learner, clock, observe), learner


def _run_of(
    config: TrainConfig, ready: RunInputs, source: GroupSource, learner: Learner, outputs: Outputs, clock: Stopwatch
) -> TrainingRun:
    """Make the parts that measure and write, before the state of the run is restored."""
    diagnostics = Diagnostics(
        sampler=source.sampler,
        learner=learner,
        grader=ready.grader,
        sampling=build_sampling(config),
        fixed_size=not config.adaptive.enabled,
        check_every=config.diagnostics.held_out_check_every,
        held_out_rollouts=config.diagnostics.held_out_rollouts,
        recompute_old_logprobs=config.recompute_old_logprobs,
        seed=config.seed,
        clock=clock,
    )
    collapse = config.collapse
    monitor = Monitor(
        build_collapse_limits(config), collapse.stop, config.evaluation.keep_best, config.evaluation.every
    )
    return TrainingRun(
        Algorithm(source, build_objective(config), learner, config.seed),
        build_schedule(config),
        Measurements(diagnostics, _benchmark(config, ready, outputs.observe), monitor),
        outputs,
        clock,
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


def build_pilot(config: TrainConfig, observe: Observe = unobserved, on_end: OnEnd = lambda _: None) -> PilotParts:
    """Make the parts of a run before its first step, for `brorl plan`.

    Args:
        config: The settings of the run.
        observe: Receives the activity of the parts.
        on_end: Receives a function that ends the engine.

    Raises:
        UserError: If rollouts are not drawn from the full distribution, or the data, the model, the tokenizer or the
            memory does not fit.
    """
    if config.sampling.top_p < 1 or config.sampling.top_k:
        raise UserError(
            f"a plan needs sampling from the full distribution, but sampling.top_p = {config.sampling.top_p} and "
            f"sampling.top_k = {config.sampling.top_k}; set sampling.top_p: 1.0 and sampling.top_k: 0"
        )
    observe(Phase("loading", "data"))
    ready = prepare(config, config.model)
    return build_pilot_parts(config, ready, build_sampling(config), observe, on_end)


def build_pilot_parts(
    config: TrainConfig,
    ready: RunInputs,
    sampling: SamplingParams,
    observe: Observe = unobserved,
    on_end: OnEnd = lambda _: None,
) -> PilotParts:
    """Load the model and make the parts that a pilot measures; see `build_pilot`.

    Args:
        config: The settings of the run.
        ready: Its inputs.
        sampling: How rollouts are drawn.
        observe: Receives the activity of the parts.
        on_end: Receives a function that ends the engine.
    """
    model = build_model(config, ready, observe)
    forward = build_forward(config, ready, model)
    engine = build_engine(config, ready.source, model, ready.tokenizer, forward, ready.context, observe)
    on_end(partial(end_engine, engine))
    return PilotParts(
        engine=engine,
        model=model,
        stream=ready.prompts.train,
        grader=ready.grader,
        sampling=sampling,
        estimate_advantages=advantages.reinforce_pp_baseline,  # time does not depend on it, and it allows every N
        diagnose=lambda groups: coverage_record(groups, True),
        learner_settings=build_learner_settings(config, engine.stop_token_ids, forward),
        prompts_per_step=config.prompts_per_step,
        dynamic_sampling=config.dynamic_sampling.enabled,
        store_every=config.store_rollouts_every,
        seed=config.seed,
        now=build_clock(config),
    )


def _benchmark(config: TrainConfig, ready: RunInputs, observe: Observe) -> Benchmark | None:
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
        source.load_state(SourceState(state.stream, state.carried, state.attempts, state.ahead))
        if benchmark is not None and state.held_out not in (None, benchmark.fingerprint):
            raise ValueError(
                "the held-out questions have changed since the run began; restore the data, or start a new run"
            )
    except ValueError as error:  # the data or the model has changed since
        raise UserError(f"{directory.path} cannot be resumed: {error}") from error
    source.publish(learner.weights(), version=state.step)
    if state.schedule is not None:
        run.schedule.reference.load_state_dict(state.schedule)
    directory.rewind(state.step if checkpoint else -1, state.attempts)
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
