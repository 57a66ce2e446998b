"""Moments in 8 bits against the nearest of all codes, bitsandbytes, and the bytes of real tensors."""

import numpy as np
import pytest
import torch

from brorl.model.moments import MOMENTS, NUMBERS_PER_SCALE, dequantize, moment_bytes, quantize
from brorl.model.settings import States
from brorl.training.adamw import AdamW


def numbers(rng: np.random.Generator, signed: bool, rows: int = 7, columns: int = 700) -> torch.Tensor:
    """Return numbers over nine decades, some of them zero, and a row of zeros."""
    sizes = 10 ** rng.uniform(-9, 0, size=(rows, columns)) * rng.integers(0, 2, size=(rows, columns))
    sizes[0] = 0
    sign = rng.choice([-1, 1], size=sizes.shape) if signed else 1
    return torch.from_numpy(sizes * sign * rng.uniform(1e-6, 1e3)).float()


def values(signed: bool) -> np.ndarray:
    """Return what the codes stand for, by hand: each decade has twice as many equal steps as the one below it."""
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (i + 0.5) / count) * 10.0 ** (decade - 6) for i in range(count)]
        found += [sign * x for x in middles for sign in ((1, -1) if signed else (1,))]
    assert len(found) == 256
    return np.sort(found)


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_gets_the_nearest_code_of_its_block(signed: bool, rng: np.random.Generator) -> None:
    given = numbers(rng, signed)
    codes, scales = quantize(given, signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, given.shape, (7, 3))
    got, table = dequantize(codes, scales, signed).double().numpy(), values(signed)
    for row, (exact, rounded) in enumerate(zip(given.double().numpy(), got, strict=True)):
        for start in range(0, len(exact), NUMBERS_PER_SCALE):
            block, near = exact[start : start + NUMBERS_PER_SCALE], rounded[start : start + NUMBERS_PER_SCALE]
            largest = np.abs(block).max()
            assert float(scales[row, start // NUMBERS_PER_SCALE]) == pytest.approx(largest)
            errors = np.abs(block[:, None] - largest * table)
            if not signed:
                errors[block > 0, 0] = np.inf  # never zero
            np.testing.assert_allclose(np.abs(block - near), errors.min(1), rtol=1e-3, atol=1e-6 * largest)
    assert ((got > 0) == (given.numpy() > 0)).all() or signed


@pytest.mark.parametrize("states", ["device", "8bit"])
def test_the_bytes_of_moments_are_those_of_the_tensors(states: States, rng: np.random.Generator) -> None:
    shapes = [(64, 64), (63, 64), (5000,), (30, 257), (3, 50, 40), (2, 4000), (4000, 2)]
    parameters = [torch.nn.Parameter(torch.from_numpy(rng.normal(size=shape)).float()) for shape in shapes]
    optimizer = AdamW(parameters, states, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stored = [moment for state in optimizer.state.values() for name, moment in state.items() if name != "step"]
    assert moment_bytes(shapes, states, 4, "cpu") == sum(t.numel() * t.element_size() for t in stored)
    assert moment_bytes(shapes, states, 4, "cuda") == moment_bytes(shapes, states, 4, "cpu")
    assert moment_bytes(shapes, "host", 4, "cuda") == 0
    assert moment_bytes(shapes, "host", 4, "cpu") == moment_bytes(shapes, "device", 4, "cpu")
    assert {name.removesuffix("_scale") for name in optimizer.state[parameters[0]]} == {"step", *MOMENTS}
