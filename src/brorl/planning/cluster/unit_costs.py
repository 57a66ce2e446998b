"""The unit costs of a cluster plan, each with its range and its origin.

In: a GPU and an engine. Out: `UnitCosts`. A published or measured figure is one number; an assumed one is a range,
from its most favorable end to its least favorable end. No figure of a GPU was measured by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from brorl.planning.cluster.gpus import Gpu

Origin = Literal["published", "measured here", "assumed", "given"]
Engine = Literal["native", "vllm"]
Case = Literal["best", "middle", "worst"]
ENGINES: tuple[Engine, ...] = ("native", "vllm")
CASES: tuple[Case, ...] = ("best", "middle", "worst")

_CPU = "docs/explanation/benchmarks.md, verifying five domains, 2 workers"
_ANSWERS_PER_SECOND = {  # per core, on the slower machine
    "code": 53 / 2,
    "countdown": 5865 / 2,
    "gym": 52 / 2,
    "ifeval": 300 / 2,
    "math": 122 / 2,
    "science": 1784 / 2,
}
_FASTEST_MACHINE = 3.0  # another machine verified this many times faster


@dataclass(frozen=True)
class UnitCost:
    """One unit cost.

    Attributes:
        name: Its name.
        best: Its most favorable value.
        worst: Its least favorable value; the same for a published figure.
        unit: Its unit.
        origin: Where it comes from.
        source: The document, the measurement, or the reason for the range.
    """

    name: str
    best: float
    worst: float
    unit: str
    origin: Origin
    source: str

    def at(self, case: Case) -> float:
        """Return the value in a case; the middle is the geometric mean of the ends."""
        return {"best": self.best, "middle": sqrt(self.best * self.worst), "worst": self.worst}[case]


@dataclass(frozen=True)
class UnitCosts:
    """All unit costs of a plan.

    Attributes:
        bandwidth: Bytes per second of the GPU's memory.
        flops: Operations per second of the GPU's matrix products in bfloat16.
        memory: Bytes of the GPU's memory.
        link: Bytes per second to GPUs of the same machine.
        network: Bytes per second to other machines.
        memory_fraction: Fraction of the memory that a run may use.
        read_fraction: Fraction of the bandwidth that decoding reaches.
        prefill_fraction: Fraction of the operations that a forward pass of the engine reaches.
        train_fraction: Fraction of the operations that the learner reaches.
        link_fraction: Fraction of the link or the network that collectives reach.
        launch: Seconds of a decoding step that are neither reading nor computing.
        publish: Seconds of a weight update in addition to the transfer.
        tree_rate: Bytes per second at which one machine receives trees from the object store.
        verify: Seconds of one core per distinct response.
        verify_cores: Cores that verify, per GPU.
        imbalance: Time of the slowest learner rank over the mean.
    """

    bandwidth: UnitCost
    flops: UnitCost
    memory: UnitCost
    link: UnitCost
    network: UnitCost
    memory_fraction: UnitCost
    read_fraction: UnitCost
    prefill_fraction: UnitCost
    train_fraction: UnitCost
    link_fraction: UnitCost
    launch: UnitCost
    publish: UnitCost
    tree_rate: UnitCost
    verify: UnitCost
    verify_cores: UnitCost
    imbalance: UnitCost

    @classmethod
    def of(
        cls, gpu: Gpu, engine: Engine, domain_fractions: Mapping[str, float], cores: float | None = None
    ) -> UnitCosts:
        """Collect the unit costs.

        Args:
            gpu: The figures of the GPU.
            engine: The engine that samples.
            domain_fractions: Fraction of the prompts of each domain; unknown domains count as mathematics.
            cores: Cores that verify, per GPU; None for an assumption.
        """
        return cls(
            **_hardware(gpu),
            **_efficiencies(engine),
            verify=_verification(domain_fractions),
            verify_cores=_exact("cores that verify, per GPU", cores, "cores", "given", "cluster.verifier_workers")
            if cores
            else _range("cores that verify, per GPU", 12, 4, "cores", "a DGX H100 has 112 cores for 8 GPUs"),
        )

    @property
    def all(self) -> tuple[UnitCost, ...]:
        """All of them, in the order of their names in this class."""
        return tuple(vars(self).values())


def _hardware(gpu: Gpu) -> dict[str, UnitCost]:
    origin: Origin = "given" if gpu.source == "--cluster" else "published"
    figures = {
        "bandwidth": ("memory bandwidth", gpu.memory_gb_s * 1e9, "B/s"),
        "flops": ("bf16 matrix products, dense", gpu.tflops * 1e12, "FLOP/s"),
        "memory": ("memory", gpu.memory_gb * 1e9, "B"),
        "link": ("link between the GPUs of a machine, one direction", gpu.link_gb_s * 1e9, "B/s"),
    }
    found = {key: _exact(name, value, unit, origin, gpu.source) for key, (name, value, unit) in figures.items()}
    known = gpu.network_source is not None
    network = _exact(
        "network per GPU, one direction",
        gpu.network_gb_s * 1e9,
        "B/s",
        origin if known else "assumed",
        gpu.network_source or "as of similar machines; depends on the installation",
    )
    return {**found, "network": network}


def _efficiencies(engine: Engine) -> dict[str, UnitCost]:
    """Return the assumed fractions of the hardware's figures, and the fixed times."""
    vllm = engine == "vllm"
    launch = "vLLM with CUDA graphs" if vllm else "no CUDA graphs: about 400 launches and Python; not measured on a GPU"
    return {
        "memory_fraction": _exact(
            "fraction of memory in use", 0.9, "", "published", "vLLM's default gpu_memory_utilization"),
        "read_fraction": _range(
            "fraction of bandwidth in decoding", 0.75 if vllm else 0.6, 0.4 if vllm else 0.3, "",
            "paged attention and small matrix products do not reach the data sheet's figure",
        ),
        "prefill_fraction": _range(
            "fraction of FLOP/s in sampling", 0.6, 0.3, "", "matrix products of a few hundred rows"),
        "train_fraction": _range(
            "fraction of FLOP/s in training", 0.4, 0.15, "",
            "Llama 3 (arXiv 2407.21783) reports 0.38 to 0.43 for pretraining; small models and ragged trees reach less",
        ),
        "link_fraction": _range("fraction of link and network", 0.8, 0.5, "", "NCCL collectives of large messages"),
        "launch": _range(
            "fixed time of a decoding step", *((0.0015, 0.006) if vllm else (0.008, 0.03)), "s", launch
        ),
        "publish": _range("fixed time of a weight update", 0.5, 5.0, "s", "pause, load, clear caches, resume"),
        "tree_rate": _range("trees received by a machine", 4e9, 1e9, "B/s", "Ray object store over 100 Gb/s or more"),
        "imbalance": _range("slowest learner rank over the mean", 1.02, 1.2, "", "trees are dealt by estimated cost"),
    }  # fmt: skip


def _verification(domain_fractions: Mapping[str, float]) -> UnitCost:
    """Return the core seconds of a response, the mean over the domains."""
    total = sum(domain_fractions.values())
    fractions = (
        {"math": 1.0} if not total else {domain: fraction / total for domain, fraction in domain_fractions.items()}
    )
    slow = sum(fraction / _ANSWERS_PER_SECOND.get(d, _ANSWERS_PER_SECOND["math"]) for d, fraction in fractions.items())
    name = f"verification of a response ({', '.join(sorted(fractions))})"
    return UnitCost(name, slow / _FASTEST_MACHINE, slow, "core s", "measured here", f"{_CPU}; two machines")


def _exact(name: str, value: float, unit: str, origin: Origin, source: str) -> UnitCost:
    return UnitCost(name, value, value, unit, origin, source)


def _range(name: str, best: float, worst: float, unit: str, source: str) -> UnitCost:
    return UnitCost(name, best, worst, unit, "assumed", source)
