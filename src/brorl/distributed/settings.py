"""Cluster settings: how many workers of each kind, where they run, and whether they wait for each other."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from brorl.section import Section

Kind: TypeAlias = Literal["rollout", "learner", "verifier"]


class ClusterSettings(Section):
    """Rollout workers, verifier workers and learner ranks on one machine or many (needs the extra `ray`)."""

    nodes: int = Field(
        0, ge=0, le=4096, description="machines that must be in the cluster before the run starts; 0 trains in one "
        "process, without a cluster",
    )  # fmt: skip
    address: str | None = Field(
        None, description="Ray cluster to join: HOST:PORT, or auto for one that runs on this machine; null starts "
        "one here, which other machines can join with `ray start`",
    )  # fmt: skip
    rollout_workers: int = Field(1, ge=1, le=4096, description="processes that sample, each with its own engine")
    learner_ranks: int = Field(1, ge=1, le=4096, description="processes that share the learner, one per GPU")
    verifier_workers: int = Field(
        0, ge=0, le=4096, description="processes that verify, each with its own verification.workers; 0 verifies on "
        "the machine that runs the loop",
    )  # fmt: skip
    placement: Literal["apart", "colocated"] = Field(
        "apart", description="apart: rollout workers and learner ranks on different GPUs | colocated: on the same "
        "GPUs, in turn",
    )  # fmt: skip
    gpus_per_rollout_worker: int = Field(
        0, ge=0, le=64, description="GPUs of each rollout worker; more than 1 is tensor parallel (engine.kind: vllm)"
    )
    gpus_per_learner_rank: int = Field(0, ge=0, le=1, description="GPUs of each learner rank")
    cpus_per_worker: int = Field(1, ge=1, le=1024, description="CPU threads of each worker and learner rank")
    prompts_per_task: int = Field(
        1, ge=1, description="prompts that a rollout worker samples together; results depend on it in their last "
        "bits, but not on the number of workers",
    )  # fmt: skip
    task_timeout_s: float = Field(
        1800.0, gt=0, description="seconds after which a task's worker counts as stalled and is replaced"
    )
    learner_timeout_s: float = Field(
        3600.0, gt=0, description="seconds without an answer or a mini-batch after which the learner counts as "
        "stalled; the run then continues from its last checkpoint",
    )  # fmt: skip
    join_timeout_s: float = Field(600.0, gt=0, description="longest wait for the cluster's machines, in seconds")
    max_restarts: int = Field(10, ge=0, description="lost workers and learners to replace before the run gives up")
    mode: Literal["sync", "async"] = Field(
        "sync", description="sync: sample, then learn | async: sample the next groups while the learner learns"
    )
    max_staleness: int = Field(
        1, ge=0, le=64, description="async: largest number of updates between the weights that sampled a group and "
        "those that it trains, except for prompts that take too long; 0 samples and learns in turn",
    )  # fmt: skip

    @property
    def enabled(self) -> bool:
        """Whether the run uses a cluster."""
        return self.nodes > 0

    @property
    def colocated(self) -> bool:
        """Whether rollout worker i and learner rank i use the same GPUs."""
        return self.placement == "colocated"

    @property
    def in_turn(self) -> bool:
        """Whether sampling, verification and learning wait for each other, and use the same CPUs."""
        return self.mode == "sync"

    @property
    def needed_cpus(self) -> int:
        """CPUs needed by all processes that work at the same time."""
        numbers = (self.rollout_workers, self.learner_ranks, self.verifier_workers)
        return self.cpus_per_worker * (max(numbers) if self.in_turn else sum(numbers))

    @property
    def needed_gpus(self) -> int:
        """GPUs needed by all processes; colocated processes share theirs."""
        sampling = self.rollout_workers * self.gpus_per_rollout_worker
        learning = self.learner_ranks * self.gpus_per_learner_rank
        return max(sampling, learning) if self.colocated else sampling + learning

    @property
    def shares_gpus(self) -> bool:
        """Whether a rollout worker and a learner rank use the same GPU, in turn."""
        return self.colocated and self.gpus_per_rollout_worker > 0 and self.gpus_per_learner_rank > 0

    def bundles(self, kind: Kind) -> list[dict[str, float]]:
        """Return the CPUs and GPUs to reserve for each process of a kind; none for those that use another's."""
        cpus = 0 if self.in_turn else self.cpus_per_worker
        match kind:
            case "rollout" if self.colocated:
                shared_places = max(self.rollout_workers, self.learner_ranks)
                return _bundles(shared_places, self.cpus_per_worker, gpus=int(self.needed_gpus > 0))
            case "rollout":
                return _bundles(self.rollout_workers, self.cpus_per_worker, self.gpus_per_rollout_worker)
            case "learner" if self.colocated:
                return []
            case "learner":
                return _bundles(self.learner_ranks, cpus, self.gpus_per_learner_rank)
            case "verifier":
                return _bundles(self.verifier_workers, cpus, 0)

    def request(self, kind: Kind) -> dict[str, float]:
        """Return the CPUs and GPUs that each process of a kind takes from its reserved place, as actor options."""
        own_cpus = kind == "rollout" or not self.in_turn
        gpus: float = {"rollout": self.gpus_per_rollout_worker, "learner": self.gpus_per_learner_rank}.get(kind, 0)
        if self.shares_gpus:
            gpus = gpus / 2
        return {"num_cpus": self.cpus_per_worker if own_cpus else 0, "num_gpus": gpus}

    def without_learner(self) -> ClusterSettings:
        """Return the settings for an evaluation, which has no learner ranks."""
        return self.model_copy(update={"learner_ranks": 0, "gpus_per_learner_rank": 0})

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        """Reject asynchronous training without workers, and placements that cannot work."""
        if self.mode == "async" and not self.enabled:
            raise ValueError(
                "cluster.mode = async needs workers that sample while the learner learns, but cluster.nodes = 0; set "
                "cluster.nodes, for example 1, or, in a new run, cluster.mode: sync"
            )
        if self.colocated and self.gpus_per_rollout_worker > 1:
            raise ValueError(
                "cluster.placement = colocated puts a rollout worker on a learner rank's GPU, but "
                f"cluster.gpus_per_rollout_worker = {self.gpus_per_rollout_worker}; set it to 1, or cluster.placement: "
                "apart"
            )
        if self.colocated and self.mode == "async":
            raise ValueError(
                "cluster.placement = colocated samples and learns in turn, but cluster.mode = async does both at once; "
                "set cluster.placement: apart, or cluster.mode: sync"
            )
        return self


def _bundles(count: int, cpus: float, gpus: float) -> list[dict[str, float]]:
    """Return equal bundles; none if there is nothing to reserve."""
    bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    return [bundle] * count if bundle else []
