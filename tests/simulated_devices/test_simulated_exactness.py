"""The exactness parts of `benchmarks/gpu` on a simulated device: its code for CUDA, against plain transformers."""

import json
from pathlib import Path

import pytest
from simulated_device import run

pytestmark = [pytest.mark.slow, pytest.mark.linux]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu/measure.py"
PROGRAM = """
import runpy, sys, torch
from brorl.model import compilation, flex_attention, forward, kernels, logprobs
torch.set_num_threads(1)
for module in (compilation, flex_attention, logprobs):  # kernels cannot be compiled for a simulated device
    module.compiled = lambda function: function
forward.with_recorded_passes = lambda _model, path, *_, **__: path  # nor are there graphs
kernels.TRITON_DEVICES.clear()
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert end.code == 0, end.code
"""


def test_the_exactness_parts_are_within_their_bounds(device: Path, tmp_path: Path) -> None:
    parts = "exactness: (llama|mamba2|long)"  # the other architectures differ in what the CPU tests cover
    run(device, PROGRAM, SCRIPT, tmp_path, "--device", "cuda", "--small", "--parts", parts)
    found = json.loads((tmp_path / "result.json").read_text())["parts"]
    assert len(found) == 13
    for name, part in found.items():
        assert part["state"] == "done", name
        assert part["checks"], name
    assert any("packed, compiled" in check["name"] for check in found["exactness: llama, learner float32"]["checks"])
