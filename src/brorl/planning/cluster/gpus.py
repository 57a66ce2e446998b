"""GPUs and clusters of them, from published figures.

In: `8xH200`, or a number with the figures of another GPU. Out: a `Cluster`. Unknown names are errors that list the
known ones. All figures are per GPU, of the vendor's data sheet, and without sparsity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from brorl.errors import UserError
from brorl.format import listed

_MOST_GPUS = 65_536


@dataclass(frozen=True)
class Gpu:
    """The figures of one GPU.

    Attributes:
        name: Its name.
        memory_gb: Memory, 10^9 bytes.
        memory_gb_s: Bandwidth of the memory, 10^9 bytes per second.
        tflops: Matrix products in bfloat16, 10^12 operations per second, dense.
        link_gb_s: Bandwidth to the other GPUs of its machine, one direction, 10^9 bytes per second.
        network_gb_s: Bandwidth to other machines, one direction, 10^9 bytes per second.
        source: The document of the memory, the operations and the link.
        network_source: The document of the network; None for an assumption.
        per_machine: GPUs of a machine.
    """

    name: str
    memory_gb: float
    memory_gb_s: float
    tflops: float
    link_gb_s: float
    network_gb_s: float
    source: str
    network_source: str | None = None
    per_machine: int = 8


@dataclass(frozen=True)
class Cluster:
    """A number of equal GPUs.

    Attributes:
        num_gpus: GPUs, >= 1.
        gpu: The figures of each.
    """

    num_gpus: int
    gpu: Gpu

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

    Args:
        text: `NxGPU` with a known GPU, such as 8xH200, or `NxNAME:figure=number,...` with the fields of `Gpu`.

    Raises:
        UserError: If the text has another form, or the GPU is not known and has no figures.
    """
    found = re.fullmatch(r"(\d+)\s*[xX*]\s*([^:\s]+)(?::(.+))?", text.strip())
    if found is None:
        raise UserError(f"--cluster should be a number of GPUs and their name, such as 8xH200, not {text!r}")
    number, name, figures = int(found[1]), found[2], found[3]
    if not 1 <= number <= _MOST_GPUS:
        raise UserError(f"--cluster: the number of GPUs must lie between 1 and {_MOST_GPUS:,}, not {number}")
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
    found: dict[str, float] = {"per_machine": 8}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in _FIGURES:
            raise UserError(f"--cluster: {key.strip()!r} is not a figure of a GPU ({', '.join(_FIGURES)})")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            raise UserError(f"--cluster: {key.strip()} should be a number, not {value!r}") from None
    missing = [figure for figure in _FIGURES if figure not in found]
    if missing:
        raise UserError(f"--cluster: {name} lacks {listed(missing)}; give all figures: --cluster {_EXAMPLE}")
    wrong = [figure for figure, value in found.items() if not 0 < value < float("inf")]
    if wrong:
        raise UserError(f"--cluster: {wrong[0]} must be above 0 and finite, not {found[wrong[0]]:g}")
    per_machine = max(1, int(found.pop("per_machine")))
    return Gpu(name, **found, source="--cluster", network_source="--cluster", per_machine=per_machine)
