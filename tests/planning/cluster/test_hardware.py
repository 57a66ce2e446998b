"""Clusters from text: known GPUs, described GPUs, and one line for everything else."""

import pytest

from brorl.errors import UserError
from brorl.planning.cluster.hardware import GPUS, parse_cluster


@pytest.mark.parametrize(
    ("text", "number", "name"), [("8xH200", 8, "H200"), ("1 x h100", 1, "H100"), ("512XB200", 512, "B200")]
)
def test_a_known_gpu(text: str, number: int, name: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.num_gpus, cluster.gpu, cluster.name) == (number, GPUS[name], f"{number}x{name}")


def test_the_published_ratios() -> None:
    """An H200 is an H100 with more and faster memory; HBM3 of the H100 has 3.35 TB/s."""
    assert GPUS["H200"].tflops == GPUS["H100"].tflops == 989
    assert GPUS["H200"].memory_gb / GPUS["H100"].memory_gb == pytest.approx(1.7625)
    assert GPUS["H100"].memory_gb_s == 3350
    assert all(gpu.link_gb_s > gpu.network_gb_s for gpu in GPUS.values())


def test_a_described_gpu() -> None:
    gpu = parse_cluster(
        "4xmine:memory_gb=96,memory_gb_s=4000,tflops=1000,link_gb_s=450,network_gb_s=50,per_machine=4"
    ).gpu
    assert (gpu.name, gpu.memory_gb, gpu.tflops, gpu.per_machine, gpu.source) == ("mine", 96, 1000, 4, "--cluster")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH300", "'H300' is not a known GPU (A100, B200, H100, H200"),
        ("8xH300", "describe it: --cluster 8xMINE:memory_gb=96"),
        ("H100", "such as 8xH200, got 'H100'"),
        ("0xH100", "between 1 and 65,536, got 0"),
        ("8xM:memory_gb=96", "M is missing memory_gb_s, tflops, link_gb_s and network_gb_s"),
        ("8xM:vram=96", "'vram' is not a figure"),
        ("8xM:memory_gb=big", "memory_gb must be a number, got 'big'"),
        ("8xM:memory_gb=0,memory_gb_s=1,tflops=1,link_gb_s=1,network_gb_s=1", "memory_gb must be above 0"),
    ],
)
def test_what_is_not_a_cluster(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_cluster(text)
    assert said in str(error.value)
