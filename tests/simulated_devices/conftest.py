"""The simulated device is compiled once, into pytest's cache."""

from pathlib import Path

import pytest
import torch
from simulated_device import COMPILER, build


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Path:
    """The library of the simulated CUDA device."""
    if torch.backends.cuda.is_built():
        pytest.skip("PyTorch has CUDA: a build without it is needed to simulate a device")
    if COMPILER is None:
        pytest.skip("needs a C++ compiler: g++, or the one named by CXX")
    assert request.config.cache
    return build(request.config.cache.mkdir("simulated_device"))
