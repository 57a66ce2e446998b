"""The simulated devices are compiled once, into pytest's cache."""

from pathlib import Path

import pytest
import torch
from simulated_device import COMPILER, Kind, build


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Path:
    """The library of the simulated CUDA device."""
    if torch.backends.cuda.is_built():
        pytest.skip("PyTorch has CUDA: a build without it is needed to simulate a device")
    return _built(request, "cuda")


@pytest.fixture(scope="session")
def apple_device(request: pytest.FixtureRequest) -> Path | None:
    """The library of the simulated Apple GPU; None on a machine with a real one."""
    if torch.backends.mps.is_available():
        return None
    if torch.backends.mps.is_built():
        pytest.skip("PyTorch has MPS, and this machine has no Apple GPU")
    return _built(request, "mps")


def _built(request: pytest.FixtureRequest, kind: Kind) -> Path:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler: g++, or the one named by CXX")
    assert request.config.cache
    return build(request.config.cache.mkdir("simulated_device"), kind)
