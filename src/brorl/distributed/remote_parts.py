"""Places the parts of a run on a cluster: learner ranks, rollout workers, verifier workers.

The training loop uses the same protocols as for local parts; other processes do the work. Ray is imported on the first
call to one of these functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedTokenizerBase

from brorl.activity import Echo, Observe, Stage, Stopwatch
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.evaluator import weights_fingerprint
from brorl.model.kernels import use_kernels
from brorl.model.load import end_tokens, load_tokenizer
from brorl.rollout.chosen_engine import build_sampling_model, load_engine
from brorl.rollout.engine import Engine, PooledEngine
from brorl.rollout.vllm_engine import start_vllm, vllm_setup
from brorl.sampling import StopStrings
from brorl.seeds import derived_seed
from brorl.tools.setup import load_tools, load_tools_and_verifiers, make_toolbox, with_turns
from brorl.training.async_collector import AsyncCollector
from brorl.training.collector import Collector, SyncCollector
from brorl.training.inputs import ModelInputs, RunInputs
from brorl.training.learner import Learner
from brorl.training.local_parts import build_rank
from brorl.training.ranks import Backend, join
from brorl.verification.sandbox.pool import Workers
from brorl.verification.verifier import Verifier

if TYPE_CHECKING:
    from brorl.distributed.actors import RolloutActors
    from brorl.distributed.cluster import RayCluster
    from brorl.distributed.remote_learner import RemoteLearner
    from brorl.distributed.supervisor import PoolConfig


def build_cluster(
    config: TrainConfig,
    echo: Echo,
    learns: bool = True,
    note: Echo = lambda _: None,
    advice: str = "Rerun the command.",
) -> RayCluster | None:
    """Return a cluster that has not started; None if one process does everything. Evaluations set `learns=False`.

    `note` receives Ray's messages, and `advice` (how to continue) is printed if Ray dies.
    """
    settings = config.cluster
    if not settings.enabled:
        return None
    check_ray(config)
    from brorl.distributed.cluster import RayCluster

    return RayCluster(settings if learns else settings.without_learner(), echo, note, advice)


def check_ray(config: TrainConfig) -> None:
    """Check that Ray is installed if the settings need a cluster."""
    if config.cluster.enabled and find_spec("ray") is None:
        raise UserError(
            f"cluster.nodes = {config.cluster.nodes} needs the package ray, which is not installed: pip install "
            "'brorl[ray]', or set cluster.nodes: 0"
        )


def place_run(
    cluster: RayCluster, config: TrainConfig, inputs: RunInputs, shared: Path, clock: Stopwatch, observe: Observe
) -> tuple[Learner, Collector]:
    """Start the cluster with the learner, the verifiers and the rollout workers. All need the folder `shared`.

    Returns:
        The learner, and the collector with the run's grader.
    """
    observe(Stage("starting", "cluster"))
    cluster.start()
    observe(Stage("loading", "model"))
    learner = place_learner(cluster, config, inputs, shared, observe)
    verifiers = place_verifiers(cluster, config, inputs.grader.verifiers)
    stream = inputs.prompts.train
    grader = replace(inputs.grader, verifiers=verifiers)
    collector: Collector
    if config.cluster.mode == "sync":
        engine = place_engine(cluster, config, inputs.context, observe)
        collector = SyncCollector.for_run(config, stream, grader, engine, learner, clock, observe)
    else:
        pool = place_pool(cluster, config, inputs.context)
        collector = AsyncCollector(config=config, stream=stream, grader=grader, pool=pool, clock=clock, observe=observe)
        cluster.on_release(collector.close)  # before the pool
    learner.wait_until_built()  # the ranks load the model while the workers start
    return learner, collector


def place_engine(cluster: RayCluster, config: TrainConfig, context: int, observe: Observe) -> Engine:
    """Start the rollout workers, which load `config.model`, and return an engine that uses them."""
    return PooledEngine(place_pool(cluster, config, context), config.cluster.prompts_per_task, observe)


def place_pool(cluster: RayCluster, config: TrainConfig, context: int) -> RolloutActors:
    """Start the rollout workers; see `place_engine`."""
    from brorl.distributed.actors import RolloutActors

    settings = config.cluster
    shares_gpus = cluster.settings.shares_gpus
    recipe = partial(_make_engine, _on(config, settings.gpus_per_rollout_worker), context, shares_gpus)
    pool = RolloutActors(
        recipe, _pool_config(cluster, config, "rollout"), settings.cpus_per_worker, cluster.echo, shares_gpus
    )
    cluster.on_release(pool.close)
    return pool


def remote_fingerprint(config: TrainConfig) -> str:
    """Load a model in this cluster process and return the fingerprint of its weights."""
    return weights_fingerprint(build_sampling_model(_on(config, gpus=0), config.model))


def place_verifiers(
    cluster: RayCluster, config: TrainConfig, verifiers: Mapping[str, Verifier]
) -> Mapping[str, Verifier]:
    """Start the verifier workers, and return verifiers that use them. If there are none, return `verifiers`."""
    if not config.cluster.verifier_workers:
        return verifiers
    from brorl.distributed.actors import RemoteVerifier, VerifierActors

    recipe = partial(_make_verifiers, config, tuple(verifiers), Path.cwd())
    actors = VerifierActors(recipe, _pool_config(cluster, config, "verifier"), echo=cluster.echo)
    cluster.on_release(actors.close)
    return {domain: RemoteVerifier(local, domain, actors) for domain, local in verifiers.items()}


def _pool_config(cluster: RayCluster, config: TrainConfig, kind: Literal["rollout", "verifier"]) -> PoolConfig:
    """Return the number, placement and limits of the workers of a kind."""
    from brorl.distributed.supervisor import PoolConfig

    settings = config.cluster
    return PoolConfig(
        kind=f"{kind} worker",
        number=settings.rollout_workers if kind == "rollout" else settings.verifier_workers,
        options=partial(cluster.options, kind),
        timeout_s=settings.task_timeout_s,
        max_restarts=settings.max_restarts,
    )


def place_learner(
    cluster: RayCluster, config: TrainConfig, inputs: RunInputs, shared: Path, observe: Observe
) -> RemoteLearner:
    """Start the learner ranks, and return a learner that uses them. All ranks need access to the folder `shared`."""
    from brorl.distributed.remote_learner import RemoteLearner

    folder = Path(inputs.model_path)
    model_path = str(folder.resolve()) if folder.is_dir() else inputs.model_path
    recipe = partial(_make_learner, _on(config, config.cluster.gpus_per_learner_rank), model_path, inputs.context)
    halved = config.engine.kind == "vllm" and config.autocasts  # from float32 to vLLM's bfloat16
    sent_dtype = torch.bfloat16 if halved else None
    timeout_s = config.cluster.learner_timeout_s
    return RemoteLearner(cluster, recipe, shared.resolve(), timeout_s, cluster.echo, observe, sent_dtype)


def _make_engine(config: TrainConfig, context: int, shares_gpu: bool) -> Engine:
    """In a rollout worker's process, load the model and make the engine with its tools."""
    tokenizer = load_tokenizer(config.model, config.sampling.stop)
    workers = Workers.from_settings(config.verification)
    toolbox = make_toolbox(config, config.model, tokenizer, load_tools(config, workers))
    return with_turns(_make_engine_of_turns(config, context, shares_gpu, tokenizer), toolbox)


def _make_engine_of_turns(
    config: TrainConfig, context: int, shares_gpu: bool, tokenizer: PreTrainedTokenizerBase
) -> Engine:
    if config.engine.kind == "vllm":  # vLLM loads the model itself
        setup = replace(vllm_setup(config, config.model, context), sleeps=shares_gpu)
        stop_token_ids = end_tokens(config.model, tokenizer, config.sampling.stop)
        stop = StopStrings(tokenizer, config.sampling.stop)
        load = partial(build_sampling_model, _on(config, gpus=0), config.model)
        return start_vllm(setup, config.model, stop_token_ids, stop, load)
    return load_engine(config, config.model, tokenizer, context)[1]


def _make_verifiers(config: TrainConfig, domains: tuple[str, ...], folder: Path) -> Mapping[str, Verifier]:
    """In a verifier worker's process, make its verifiers. Paths of user functions may be relative to `folder`."""
    if folder.is_dir():
        os.chdir(folder)
    _, verifiers = load_tools_and_verifiers(config, domains, Workers.from_settings(config.verification))
    return verifiers


def _make_learner(
    config: TrainConfig, model_path: str, context: int, rank: int, size: int, meeting_point: tuple[str, int],
    echo: Echo, observe: Observe,
) -> Learner:  # fmt: skip
    """In a learner rank's process, load the model and make the learner."""
    torch.set_num_threads(config.cluster.cpus_per_worker)
    use_kernels(config.engine.compile)
    torch.manual_seed(derived_seed(config.seed, 0))  # as `prepare_run` does: new adapters are drawn from this seed
    inputs = ModelInputs(model_path, load_tokenizer(model_path, config.sampling.stop), context)
    backend: Backend = "nccl" if config.cluster.gpus_per_learner_rank else "gloo"
    ranks = join(rank, size, *meeting_point, backend, config.cluster.learner_timeout_s)
    return build_rank(config, inputs, ranks, echo, observe)


def _on(config: TrainConfig, gpus: int) -> TrainConfig:
    """Return the settings with the device "cuda" or "cpu". Ray shows a worker only its own GPUs."""
    return config.model_copy(update={"device": "cuda" if gpus else "cpu"})
