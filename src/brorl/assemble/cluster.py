"""The parts of a run on a cluster, from its settings: the machines, the learner ranks, the rollout workers.

In: a checked `TrainConfig` with `cluster.nodes` above 0. Out: an engine and a learner with the protocols of the
training loop, whose work is done in other processes. Ray is imported when the first of these functions is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedTokenizerBase

from brorl.activity import Observe
from brorl.assemble.engine import build_engine, build_sampling_model, build_vllm_settings
from brorl.assemble.inputs import ModelInputs, RunInputs
from brorl.assemble.learner import build_rank
from brorl.assemble.verification import build_verifiers, build_workers
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model.forward import choose_forward
from brorl.model.load import end_tokens_of, load_tokenizer
from brorl.rollout.engine import Engine
from brorl.rollout.pool import PooledEngine
from brorl.rollout.vllm import VllmEngine
from brorl.seeds import derived_seed
from brorl.training.learner import Learner
from brorl.training.ranks import Backend, join
from brorl.verification.verifier import Verifier

if TYPE_CHECKING:
    from brorl.distributed.cluster import Cluster
    from brorl.distributed.learner_rank import RankPlace
    from brorl.distributed.rollout_workers import RayRolloutPool
    from brorl.distributed.supervisor import WorkerPoolConfig

Say = Callable[[str], None]


def build_cluster(
    config: TrainConfig, say: Say, learns: bool = True, note: Say = lambda _: None, advice: str = "Rerun the command."
) -> Cluster | None:
    """Return the cluster of a run or an evaluation before its start; None if it has one process.

    Args:
        config: The settings.
        say: Receives lines for the user.
        learns: Whether there are learner ranks.
        note: Receives the messages of Ray, for a log.
        advice: How to continue if Ray dies, as a sentence.

    Raises:
        UserError: If Ray is not installed.
    """
    settings = config.cluster
    if not settings.enabled:
        return None
    check_ray(config)
    from brorl.distributed.cluster import Cluster, ClusterShape

    shape = ClusterShape(
        nodes=settings.nodes,
        address=settings.address,
        rollout_workers=settings.rollout_workers,
        learner_ranks=settings.learner_ranks if learns else 0,
        verifier_workers=settings.verifier_workers,
        cpus=settings.cpus_per_worker,
        gpus_per_rollout_worker=settings.gpus_per_rollout_worker,
        gpus_per_learner_rank=settings.gpus_per_learner_rank if learns else 0,
        colocated=settings.placement == "colocated",
        in_turn=settings.mode == "sync",
        join_timeout_s=settings.join_timeout_s,
    )
    return Cluster(shape, say, note, advice)


def check_ray(config: TrainConfig) -> None:
    """Check that Ray is installed if the settings need a cluster.

    Raises:
        UserError: If it is not.
    """
    if config.cluster.enabled and find_spec("ray") is None:
        raise UserError(
            f"cluster.nodes = {config.cluster.nodes} needs the package ray, which is not installed: pip install "
            "'brorl[ray]', or set cluster.nodes: 0"
        )


def place_engine(cluster: Cluster, config: TrainConfig, context: int, say: Say, observe: Observe) -> Engine:
    """Start the rollout workers, and return an engine over them.

    Every worker loads `config.model`. The weights to sample with are published to it.

    Args:
        cluster: The cluster, which has started.
        config: The settings.
        context: Tokens of the longest prompt and the longest response together.
        say: Receives a line for each lost worker.
        observe: Receives the progress of sampling.
    """
    return PooledEngine(place_pool(cluster, config, context, say), config.cluster.prompts_per_task, observe)


def place_pool(cluster: Cluster, config: TrainConfig, context: int, say: Say) -> RayRolloutPool:
    """Start the rollout workers; see `place_engine`."""
    from brorl.distributed.rollout_workers import RayRolloutPool

    settings, shares_gpus = config.cluster, cluster.shape.shares_gpus
    recipe = _EngineRecipe(_on(config, "cuda" if settings.gpus_per_rollout_worker else "cpu"), context, shares_gpus)
    pool = RayRolloutPool(recipe, _pool_config(cluster, config, "rollout"), settings.cpus_per_worker, say, shares_gpus)
    cluster.on_release(pool.close)
    return pool


def place_verifiers(
    cluster: Cluster, config: TrainConfig, verifiers: Mapping[str, Verifier], say: Say
) -> Mapping[str, Verifier]:
    """Start the verifier workers, and return verifiers over them; without such workers return the given ones.

    Args:
        cluster: The cluster, which has started.
        config: The settings.
        verifiers: The verifier of each domain in this process.
        say: Receives a line for each lost worker.
    """
    if not config.cluster.verifier_workers:
        return verifiers
    from brorl.distributed.verifier_workers import RemoteVerifier, VerifierWorkers

    recipe = _VerifierRecipe(config, tuple(verifiers), Path.cwd())
    workers = VerifierWorkers(recipe, _pool_config(cluster, config, "verifier"), say=say)
    cluster.on_release(workers.close)
    return {domain: RemoteVerifier(local, domain, workers) for domain, local in verifiers.items()}


def _pool_config(cluster: Cluster, config: TrainConfig, kind: Literal["rollout", "verifier"]) -> WorkerPoolConfig:
    """Return the number, the places and the limits of the workers of a kind."""
    from brorl.distributed.supervisor import WorkerPoolConfig

    settings = config.cluster
    return WorkerPoolConfig(
        kind=f"{kind} worker",
        number=settings.rollout_workers if kind == "rollout" else settings.verifier_workers,
        options=partial(cluster.options, kind),
        timeout_s=settings.task_timeout_s,
        max_restarts=settings.max_restarts,
    )


def place_learner(
    cluster: Cluster, config: TrainConfig, ready: RunInputs, shared: Path, say: Say, observe: Observe
) -> Learner:
    """Start the learner ranks, and return a learner over them.

    Args:
        cluster: The cluster, which has started.
        config: The run's settings.
        ready: The source of the model and the length of a context.
        shared: The run directory, which the ranks must see.
        say: Receives lines for the user.
        observe: Receives the activity of the learner.
    """
    from brorl.distributed.remote_learner import RemoteLearner

    source = Path(ready.source)
    recipe = _LearnerRecipe(
        _on(config, "cuda" if config.cluster.gpus_per_learner_rank else "cpu"),
        str(source.resolve()) if source.is_dir() else ready.source,
        ready.context,
    )
    halved = config.engine.kind == "vllm" and config.dtype == "bfloat16"  # of float32, to the format of the engine
    sent_dtype, timeout_s = torch.bfloat16 if halved else None, config.cluster.learner_timeout_s
    return RemoteLearner(cluster, recipe, shared.resolve(), timeout_s, say, observe, sent_dtype)


@dataclass(frozen=True)
class _EngineRecipe:
    """Makes the engine of a rollout worker, in its process.

    Attributes:
        config: The settings, with the device of the worker.
        context: Tokens of the longest prompt and the longest response together.
        shares_gpu: Whether a learner rank uses the GPU of the worker between two calls.
    """

    config: TrainConfig
    context: int
    shares_gpu: bool

    def __call__(self) -> Engine:
        """Load the model and make the engine.

        Raises:
            UserError: If the machine does not have the model.
        """
        config = self.config
        tokenizer = _tokenizer(config, config.model)
        if config.engine.kind == "vllm":  # it loads the model on its own
            settings = replace(build_vllm_settings(config, config.model, self.context), sleeps=self.shares_gpu)
            return VllmEngine(settings, end_tokens_of(config.model, tokenizer))
        model = build_sampling_model(config, config.model)
        forward = choose_forward(model, config.engine.forward, self.context)
        return build_engine(config, config.model, model, tokenizer, forward, self.context)


@dataclass(frozen=True)
class _VerifierRecipe:
    """Makes the verifiers of a verifier worker, in its process.

    Attributes:
        config: The settings.
        domains: The domains of the data.
        folder: Working directory of this process; the paths of a user's functions may be relative to it.
    """

    config: TrainConfig
    domains: tuple[str, ...]
    folder: Path

    def __call__(self) -> Mapping[str, Verifier]:
        """Make the verifier of each domain.

        Raises:
            UserError: If the machine does not have a user's function.
        """
        if self.folder.is_dir():
            os.chdir(self.folder)
        return build_verifiers(self.config, self.domains, build_workers(self.config))


@dataclass(frozen=True)
class _LearnerRecipe:
    """Makes the learner of a rank, in its process.

    Attributes:
        config: The run's settings, with the device of the ranks.
        source: Name or folder of the model or checkpoint.
        context: Tokens of the longest prompt and the longest response together.
    """

    config: TrainConfig
    source: str
    context: int

    def __call__(self, place: RankPlace, say: Say, observe: Observe) -> Learner:
        """Load the model and make the learner.

        Args:
            place: The place of the rank among all ranks.
            say: Receives lines for the user.
            observe: Receives the activity of the learner.

        Raises:
            UserError: If the machine does not have the model.
        """
        config = self.config
        torch.set_num_threads(config.cluster.cpus_per_worker)
        torch.manual_seed(derived_seed(config.seed, 0))  # as `prepare` does: new adapters start from it
        ready = ModelInputs(self.source, _tokenizer(config, self.source), self.context)
        backend: Backend = "nccl" if config.cluster.gpus_per_learner_rank else "gloo"
        ranks = join(place.rank, place.size, place.address, place.port, backend, config.cluster.learner_timeout_s)
        return build_rank(config, ready, ranks, say, observe)


def _on(config: TrainConfig, device: str) -> TrainConfig:
    """Return settings with the device of a worker: Ray shows a worker its own GPUs alone."""
    return config.model_copy(update={"device": device})


def _tokenizer(config: TrainConfig, source: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(source, config.sampling.end_token)
