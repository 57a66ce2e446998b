"""Builds a run or an evaluation from its settings. Each part constructs itself.

Cheap checks come first: data rows, verifiers, tokenizer, prompts, memory. The model's weights are loaded last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from brorl.activity import Echo, Observe, Stage, Stopwatch, unobserved
from brorl.config.settings import TrainConfig
from brorl.evaluation.evaluator import Evaluator, held_out_batch, weights_fingerprint
from brorl.model.settings import LoraSettings
from brorl.rollout.chosen_engine import OnEnd, load_engine
from brorl.rollout.engine import Engine
from brorl.runs.checkpoint import TrainerState, discard_unfinished
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import StepRecord
from brorl.tools.setup import with_turns
from brorl.training.collector import Collector, SyncCollector
from brorl.training.diagnostics import Diagnostics
from brorl.training.inputs import input_lines, prepare_run
from brorl.training.learner import Learner
from brorl.training.local_parts import LocalParts
from brorl.training.run import TrainingRun, find_start, restore
from brorl.training.schedule import Schedule
from brorl.verification.grade import Grader
from brorl.verification.thoughts import make_decode

if TYPE_CHECKING:
    from brorl.distributed.cluster import RayCluster
    from brorl.evaluation.preparation import EvaluationInputs


def build_run(
    config: TrainConfig,
    directory: RunDirectory,
    report: Callable[[StepRecord], None],
    echo: Echo = lambda _: None,
    observe: Observe = unobserved,
    cluster: RayCluster | None = None,
    on_end: OnEnd = lambda _: None,
) -> tuple[TrainingRun, TrainerState]:
    """Build a run, restored to its last checkpoint if there is one.

    Args:
        config: The run's settings.
        directory: The run's files.
        report: Receives the record of every step.
        echo: Receives lines for the user.
        observe: Receives the activity of the parts.
        cluster: Where the engine and the learner work; None for this process. It starts after the cheap checks.
        on_end: Receives the function that ends the engine, if the engine runs in this process.

    Returns:
        The run, and the state that its parts were restored to.

    Raises:
        UserError: If the data, the model, the tokenizer or the machine's memory does not fit.
    """
    discard_unfinished(directory.checkpoints)
    checkpoint = find_start(config, directory)
    observe(Stage("loading", "data"))
    inputs = prepare_run(config, str(checkpoint) if checkpoint else config.model)
    for line in input_lines(inputs, config):
        echo(line)
    clock = Stopwatch(observe, config.engine.now)
    learner: Learner
    collector: Collector
    if cluster is None:
        parts = LocalParts.load(config, inputs, observe, on_end, echo)
        learner = parts.learner(echo=echo)
        collector = SyncCollector.for_run(config, parts.stream, parts.grader, parts.engine, learner, clock, observe)
    else:
        from brorl.distributed.remote_parts import place_run

        learner, collector = place_run(cluster, config, inputs, directory.path, clock, observe)
    if not config.cluster.verifier_workers:
        inputs.workers.functions.start()
    grader = collector.grader
    run = TrainingRun(
        config=config,
        collector=collector,
        learner=learner,
        schedule=Schedule(config),
        diagnostics=Diagnostics(config, collector.sampler, learner, grader, clock),
        evaluator=Evaluator(grader, config.evaluated_sampling, config.evaluation.rollouts_per_prompt, observe),
        held_out=held_out_batch(inputs.prompts.held_out, config.seed),
        directory=directory,
        tokenizer=inputs.tokenizer,
        grader=grader,
        toolbox=inputs.toolbox,
        report=report,
        observe=observe,
        clock=clock,
    )
    return run, restore(run, checkpoint)


def build_evaluation(
    inputs: EvaluationInputs,
    observe: Observe = unobserved,
    cluster: RayCluster | None = None,
    on_end: OnEnd = lambda _: None,
    echo: Echo = lambda _: None,
) -> tuple[Engine, Evaluator, str]:
    """Load an evaluation's model. See `build_run` for the arguments.

    Returns:
        The model's engine, the evaluator of its responses, and a fingerprint of its weights.

    Raises:
        UserError: If the model cannot be loaded.
    """
    config = inputs.request.config.model_copy(update={"lora": LoraSettings()})  # adapters are merged
    verifiers = inputs.verifiers
    if cluster is None:
        model, engine = load_engine(config, config.model, inputs.tokenizer, inputs.context, observe, echo)
        engine = with_turns(engine, inputs.toolbox)
        on_end(engine.close)
        weights = weights_fingerprint(model)
    else:
        from brorl.distributed.remote_parts import place_engine, place_verifiers, remote_fingerprint

        observe(Stage("starting", "cluster"))
        cluster.start()
        observe(Stage("loading", "model"))
        verifiers = place_verifiers(cluster, config, verifiers)
        engine = place_engine(cluster, config, inputs.context, observe)
        weights = cluster.call(remote_fingerprint, config)
    decode = make_decode(inputs.tokenizer, config.verification.thoughts, config.sampling.stop)
    calls_text = inputs.toolbox.calls_text if inputs.toolbox else None
    grader = Grader(verifiers, decode, config.rewards, sees=config.verification.sees, calls_text=calls_text)
    return engine, Evaluator(grader, inputs.sampling, config.evaluation.rollouts_per_prompt, observe), weights
