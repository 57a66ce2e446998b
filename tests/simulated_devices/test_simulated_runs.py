"""Whole runs on simulated CUDA devices: every tensor is on its device, and a run resumes on fewer devices."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated_device import run

from run_support import SMALL, command

pytestmark = [pytest.mark.slow, pytest.mark.linux]

COMMAND = "import sys\nfrom brorl.cli import main\ncode = main(sys.argv[1:])\nassert code == 0, code"
RUNS = """
import json, sys
from brorl.cli import main
for options in json.loads(sys.argv[1]):
    print(options[-1], flush=True)
    assert main(options) == 0, options
"""
TRAIN = ("train", "quickstart", *SMALL, "--checkpoint_every=1", "--keep_checkpoints=0")


def run_all(library: Path, *commands: Sequence[str | Path]) -> None:
    """Run commands one after the other in one process, whose imports take most of the time."""
    run(library, RUNS, json.dumps([[*map(str, words)] for words in commands]))


def without_times(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        for part in (record, record.get("evaluation", {})):
            part.pop("seconds", None)
    return records


@pytest.fixture(scope="module")
def on_second(device: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on the second of two devices."""
    folder = tmp_path_factory.mktemp("runs") / "on_second"
    run(device, COMMAND, *TRAIN, "--steps=2", "--device=cuda:1", "--output_dir", folder, devices=2)
    return folder


def test_a_run_resumes_on_fewer_devices_and_a_checkpoint_is_evaluated(
    device: Path, on_second: Path, tmp_path: Path
) -> None:
    resumed, whole = shutil.copytree(on_second, tmp_path / "resumed"), tmp_path / "whole"
    options = ("--samples=8", "--max-new-tokens=16", "--device=cuda", f"--output-dir={tmp_path / 'evaluation'}")
    run_all(
        device,
        ("resume", resumed, "--steps=3", "--device=cuda"),
        (*TRAIN, "--steps=3", "--device=auto", f"--output_dir={whole}"),
        ("eval", on_second / "checkpoints/step-000002", *options),
    )
    assert json.loads((whole / "env.json").read_text())["cuda"] == "simulated CUDA device"
    assert [record["step"] for record in without_times(whole)] == [0, 1, 2, 3]
    assert without_times(resumed) == without_times(whole)
    assert (tmp_path / "evaluation/evaluation.json").is_file()


def test_a_run_resumes_on_a_cpu(on_second: Path, tmp_path: Path) -> None:
    resumed = shutil.copytree(on_second, tmp_path / "resumed")
    assert command("resume", resumed, "--steps=3", "--device=cpu").code == 0
    assert [record["step"] for record in without_times(resumed)] == [0, 1, 2, 3]


VARIANTS = {  # options that do not meet each other share a run
    "adapters": ("--lora.rank=4", "--dtype=bfloat16", "--importance.correction=truncate"),
    "states on the host": (
        "--optimizer.states=host", "--kl.coefficient=0.01", "--reference.offload=true",
        "--sampling.temperature=0.9", "--sampling.top_p=0.9",
    ),
    "flat path": ("--engine.forward=flat", "--optimizer.states=8bit", "--dtype=bfloat16"),
    "tiles": ("--engine.attention=tiled", "--engine.gradient_checkpointing=true"),
}  # fmt: skip


def test_every_variant_trains(device: Path, tmp_path: Path) -> None:
    """A step of each variant, all in one process."""
    one_step = (*TRAIN, "--device=cuda", "--steps=1")
    run_all(device, *([*one_step, *options, f"--output_dir={tmp_path / name}"] for name, options in VARIANTS.items()))
    for name in VARIANTS:
        assert without_times(tmp_path / name)[1]["update"]["grad_norm"] > 0, name


UNCOMPILED = """
import atexit
from brorl.model import compilation, flex_attention, flex_options, logprobs
flex_options._Trial = None  # a trial of uncompiled attention would take minutes
made, original = [], flex_attention.FlexContext.of_heads
for module in (compilation, flex_attention, logprobs):
    module.compiled = lambda function: function
def attend(*inputs):
    made.append(0)
    return SCALE * original(*inputs)
flex_attention.FlexContext.of_heads = attend
atexit.register(lambda: print("attended:", len(made)))
"""
REFUSED = "attention in tiles, without FlexAttention: "


def said_of_attention(device: Path, folder: Path, program: str = "") -> list[str]:
    """Return the lines about the learner's attention of a run with the defaults, which must end."""
    out = run(device, program + COMMAND, *TRAIN, "--steps=1", "--device=cuda", "--output_dir", folder)
    assert without_times(folder)[1]["update"]["nodes_per_pass"] == 16384
    return [line for line in out.splitlines() if re.search("FlexAttention|layers are compiled|attended:", line)]


def test_layers_that_do_not_compile_are_not_taken(device: Path, tmp_path: Path) -> None:
    (line,) = said_of_attention(device, tmp_path / "run")
    assert line.startswith(REFUSED + "BackendCompilerFailed")


def test_packed_passes_are_taken_if_they_agree(device: Path, tmp_path: Path) -> None:
    compiled, agrees = said_of_attention(device, tmp_path / "agrees", UNCOMPILED.replace("SCALE", "1"))
    assert compiled.startswith("the decoder layers are compiled, in ")
    line, differs = said_of_attention(device, tmp_path / "differs", UNCOMPILED.replace("SCALE", "1.5"))
    assert line == REFUSED + "the log-probs of LlamaForCausalLM change"
    assert int(agrees.split()[1]) > int(differs.split()[1]) / 2 > 0  # of the check, which is made for two ways


def test_a_pass_that_does_not_fit_is_repeated_with_half_the_nodes(device: Path) -> None:
    """Torch raises the error of a full device, which the learner must know."""
    program = """
import torch
from brorl.model.chunks import ChunkSize

size = ChunkSize(1024, print)
size.run(lambda: torch.empty(size.value << 20, device="cuda"))
assert size.value == 128, size.value
"""
    run(device, program, gib=0.5)
