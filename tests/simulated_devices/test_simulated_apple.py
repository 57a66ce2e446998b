"""Runs of one process on a simulated Apple GPU, or a real one: no tensor is in float64, and a run resumes bitwise."""

import shutil
from pathlib import Path

import pytest
from simulated_device import run
from test_simulated_runs import COMMAND, TRAIN, VARIANTS, run_all, trained, without_times

from run_support import SMALL, command

pytestmark = pytest.mark.slow

ON_APPLE = ("--device=mps",)
ALL = {**VARIANTS, "whole responses": ("--loss.kind=gspo",)}


@pytest.fixture(scope="module")
def two_steps(apple_device: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two_steps"
    run(apple_device, COMMAND, *TRAIN, *ON_APPLE, "--steps=2", "--output_dir", folder)
    return folder


def test_a_run_agrees_with_the_cpu(two_steps: Path, tmp_path: Path) -> None:
    """Tokens are drawn on the host from the same uniform numbers; the gradients differ by rounding only."""
    folder = tmp_path / "cpu"
    assert command("train", "quickstart", *SMALL, "--device=cpu", "--steps=1", "--output_dir", folder).code == 0
    apple, cpu = without_times(two_steps)[1], without_times(folder)[1]
    assert apple["sampling"] == cpu["sampling"]
    assert apple["update"]["grad_norm"] == pytest.approx(cpu["update"]["grad_norm"], rel=1e-3)
    assert apple["update"]["old_policy_kl"] == pytest.approx(cpu["update"]["old_policy_kl"], rel=1e-2, abs=1e-6)


def test_a_run_resumes_bitwise(apple_device: Path | None, two_steps: Path, tmp_path: Path) -> None:
    resumed, whole = shutil.copytree(two_steps, tmp_path / "resumed"), tmp_path / "whole"
    again = (*TRAIN, *ON_APPLE, "--steps=3", f"--output_dir={whole}")
    run_all(apple_device, ("resume", resumed, "--steps=3"), again)
    assert without_times(resumed) == without_times(whole)


def test_every_variant_trains(apple_device: Path | None, tmp_path: Path) -> None:
    printed = trained(apple_device, tmp_path, "mps", ALL)
    assert [name for name, out in printed.items() if "the flat path runs" in out] == ["flat path"]
    for name in ALL:
        assert without_times(tmp_path / name)[1]["update"]["grad_norm"] > 0, name


def test_a_model_is_planned_and_evaluated(apple_device: Path | None, tmp_path: Path) -> None:
    pilot = ("--pilot-prompts=8", "--pilot-rollouts=8", "--rollouts=4,8")
    few = ("--samples=8", "--max-new-tokens=16", "--evaluation.num_prompts=4")
    run_all(
        apple_device,
        ("plan", "quickstart", *pilot, *ON_APPLE, f"--output-dir={tmp_path / 'plan'}"),
        ("eval", "quickstart", *few, *ON_APPLE, f"--output-dir={tmp_path / 'evaluation'}"),
    )


def test_a_pass_that_does_not_fit_is_repeated_with_half_the_nodes(apple_device: Path | None) -> None:
    if apple_device is None:
        pytest.skip("needs the small memory of the simulated device")
    program = """
import torch
from brorl.model.chunks import ChunkSize

size = ChunkSize(1024, print)
size.run(lambda: torch.empty(size.value << 20, device="mps"))
assert size.value == 128, size.value
"""
    run(apple_device, program, gib=0.5)
