"""The hardware of a cluster plan: GPUs from published figures, and the unit costs of running on them.

A published or measured figure is one number; an assumed one is a range, from its most favorable end to its least
favorable end. Figures are per GPU, of the vendor's data sheet, and without sparsity. No figure of a GPU was measured by
this project.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal, get_args

from brorl.errors import UserError
from brorl.format import listed

Origin = Literal["published", "measured here", "assumed", "given"]
Engine = Literal["native", "vllm"]
Case = Literal["best", "middle", "worst"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
CASES: tuple[Case, ...] = get_args(Case)

_MAX_GPUS = 65_536
_CPU = "docs/explanation/benchmarks.md, verifying six domains, 2 workers"
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
class Gpu:
    """The figures of one GPU."""

    name: str
    memory_gb: float  # memory, 10^9 bytes
    memory_gb_s: float  # bandwidth of the memory, 10^9 bytes per second
    tflops: float  # matrix products in bfloat16, 10^12 operations per second, dense
    link_gb_s: float  # bandwidth to the other GPUs of its machine, one direction, 10^9 bytes per second
    network_gb_s: float  # bandwidth to other machines, one direction, 10^9 bytes per second
    source: str  # the document of the memory, the operations and the link
    network_source: str | None = None  # the document of the network; None for an assumption
    per_machine: int = 8  # GPUs of a machine


@dataclass(frozen=True)
class Cluster:
    """A number of equal GPUs."""

    num_gpus: int  # >= 1
    gpu: Gpu  # the figures of each

    @property
    def name(self) -> str:
        """The name, such as 8xH200."""
        return f"{self.num_gpus}x{self.gpu.name}"


_DGX_H = "NVIDIA DGX H100/H200 data sheet: 8 ConnectX-7 ports of 400 Gb/s for 8 GPUs"
_GPUS = (
    Gpu("A100", 80, 2039, 312, 300, 25, "NVIDIA A100 80GB data sheet (SXM)",
        "NVIDIA DGX A100 data sheet: 8 ports of 200 Gb/s for 8 GPUs"),
    Gpu("H100", 80, 3350, 989, 450, 50, "NVIDIA H100 data sheet (SXM)", _DGX_H),
    Gpu("H200", 141, 4800, 989, 450, 50, "NVIDIA H200 data sheet (SXM)", _DGX_H),
    Gpu("B200", 180, 8000, 2250, 900, 50, "NVIDIA HGX B200 data sheet",
        "NVIDIA DGX B200 data sheet: 8 ports of 400 Gb/s for 8 GPUs"),
    Gpu("MI300X", 192, 5300, 1307, 448, 50, "AMD Instinct MI300X data sheet"),
    Gpu("L40S", 48, 864, 362, 32, 1.6, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
    Gpu("L4", 24, 300, 121, 32, 1.6, "NVIDIA L4 data sheet; PCIe 4.0 x16"),
    Gpu("RTX4090", 24, 1008, 165, 32, 1.6, "NVIDIA Ada architecture white paper; PCIe 4.0 x16"),
)  # fmt: skip
GPUS = {gpu.name: gpu for gpu in _GPUS}
"""The known GPUs by name."""
_FIGURES = ("memory_gb", "memory_gb_s", "tflops", "link_gb_s", "network_gb_s", "per_machine")
_EXAMPLE = "8xMINE:memory_gb=96,memory_gb_s=4000,tflops=1000,link_gb_s=450,network_gb_s=50"


def parse_cluster(text: str) -> Cluster:
    """Read a cluster from text.

    Raises:
        UserError: If the text has another form, or the GPU is not known and has no figures.
    """
    match = re.fullmatch(r"(\d+)\s*[xX*]\s*([^:\s]+)(?::(.+))?", text.strip())
    if match is None:
        raise UserError(f"--cluster: expected NxGPU such as 8xH200, got {text!r}")
    number, name, figures = int(match[1]), match[2], match[3]
    if not 1 <= number <= _MAX_GPUS:
        raise UserError(f"--cluster: the number of GPUs must be between 1 and {_MAX_GPUS:,}, got {number}")
    if figures is not None:
        return Cluster(number, _described(name, figures))
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    gpu = known.get(re.sub(r"[-_]", "", name.lower()))
    if gpu is None:
        raise UserError(
            f"--cluster: {name!r} is not a known GPU ({listed(sorted(GPUS))}); describe it: --cluster {_EXAMPLE}"
        )
    return Cluster(number, gpu)


def _described(name: str, text: str) -> Gpu:
    """Return a GPU from its figures."""
    figures: dict[str, float] = {"per_machine": 8}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _FIGURES:
            raise UserError(f"--cluster: {key!r} is not a figure of a GPU ({', '.join(_FIGURES)})")
        try:
            figures[key] = float(value)
        except ValueError:
            raise UserError(f"--cluster: {key} must be a number, got {value!r}") from None
    if missing := [figure for figure in _FIGURES if figure not in figures]:
        raise UserError(f"--cluster: {name} is missing {listed(missing)}; give all figures: --cluster {_EXAMPLE}")
    for figure, number in figures.items():
        if not 0 < number < inf:
            raise UserError(f"--cluster: {figure} must be above 0 and finite, got {number:g}")
    per_machine = max(1, int(figures.pop("per_machine")))
    return Gpu(name, **figures, source="--cluster", network_source="--cluster", per_machine=per_machine)


@dataclass(frozen=True)
class UnitCost:
    """One unit cost."""

    name: str
    best: float  # its most favorable value
    worst: float  # its least favorable value; the same for a published figure
    unit: str
    origin: Origin  # where it comes from
    source: str  # the document, the measurement, or the reason for the range

    def at(self, case: Case) -> float:
        """Return the value in a case; the middle is the geometric mean of the ends."""
        return {"best": self.best, "middle": sqrt(self.best * self.worst), "worst": self.worst}[case]


@dataclass(frozen=True)
class UnitCosts:
    """All unit costs of a plan; see `UnitCosts.of` for each name."""

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
        """Collect the unit costs."""
        published: Origin = "given" if gpu.source == "--cluster" else "published"
        vllm = engine == "vllm"
        launch = (
            "vLLM with CUDA graphs" if vllm else "no CUDA graphs: about 400 launches and Python; not measured on a GPU"
        )

        def sheet(name: str, value: float, unit: str) -> UnitCost:
            return UnitCost(name, value, value, unit, published, gpu.source)

        return cls(
            bandwidth=sheet("memory bandwidth", gpu.memory_gb_s * 1e9, "B/s"),
            flops=sheet("bf16 matrix products, dense", gpu.tflops * 1e12, "FLOP/s"),
            memory=sheet("memory", gpu.memory_gb * 1e9, "B"),
            link=sheet("link between the GPUs of a machine, one direction", gpu.link_gb_s * 1e9, "B/s"),
            network=UnitCost(
                "network per GPU, one direction", gpu.network_gb_s * 1e9, gpu.network_gb_s * 1e9, "B/s",
                published if gpu.network_source else "assumed",
                gpu.network_source or "as of similar machines; depends on the installation",
            ),
            memory_fraction=UnitCost(
                "fraction of memory in use", 0.9, 0.9, "", "published", "vLLM's default gpu_memory_utilization"
            ),
            read_fraction=_range(
                "fraction of bandwidth in decoding", 0.75 if vllm else 0.6, 0.4 if vllm else 0.3, "",
                "paged attention and small matrix products do not reach the data sheet's figure",
            ),
            prefill_fraction=_range(
                "fraction of FLOP/s in sampling", 0.6, 0.3, "", "matrix products of a few hundred rows"
            ),
            train_fraction=_range(
                "fraction of FLOP/s in training", 0.4, 0.15, "",
                "Llama 3 (arXiv 2407.21783) reports 0.38 to 0.43 for pretraining; small models and ragged trees reach "
                "less",
            ),
            link_fraction=_range("fraction of link and network", 0.8, 0.5, "", "NCCL collectives of large messages"),
            launch=_range("fixed time of a decoding step", *((0.0015, 0.006) if vllm else (0.008, 0.03)), "s", launch),
            publish=_range("fixed time of a weight update", 0.5, 5.0, "s", "pause, load, clear caches, resume"),
            tree_rate=_range("trees received by a machine", 4e9, 1e9, "B/s", "Ray object store over 100 Gb/s or more"),
            imbalance=_range("slowest learner rank over the mean", 1.02, 1.2, "", "trees are dealt by estimated cost"),
            verify=_verification(domain_fractions),
            verify_cores=UnitCost(
                "cores that verify, per GPU", cores, cores, "cores", "given", "cluster.verifier_workers"
            )
            if cores
            else _range("cores that verify, per GPU", 12, 4, "cores", "a DGX H100 has 112 cores for 8 GPUs"),
        )  # fmt: skip

    @property
    def all(self) -> tuple[UnitCost, ...]:
        """All of them, in the order of their names in this class."""
        return tuple(vars(self).values())

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU's memory that a run may use."""
        return self.memory.best * self.memory_fraction.best


def _verification(domain_fractions: Mapping[str, float]) -> UnitCost:
    """Return the core seconds of a response, the mean over the domains."""
    total = sum(domain_fractions.values())
    fractions = {d: f / total for d, f in domain_fractions.items()} if total else {"math": 1.0}
    slow = sum(fraction / _ANSWERS_PER_SECOND.get(d, _ANSWERS_PER_SECOND["math"]) for d, fraction in fractions.items())
    name = f"verification of a response ({', '.join(sorted(fractions))})"
    return UnitCost(name, slow / _FASTEST_MACHINE, slow, "core s", "measured here", f"{_CPU}; two machines")


def _range(name: str, best: float, worst: float, unit: str, source: str) -> UnitCost:
    return UnitCost(name, best, worst, unit, "assumed", source)
