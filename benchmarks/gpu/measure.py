"""Checks exactness on a device, and measures steps, sampling, learning and memory; continues where a call stopped.

    bash benchmarks/gpu/run.sh FOLDER --model MODEL                # on a CUDA device: speed and memory
    bash benchmarks/gpu/run.sh FOLDER exactness                    # on a CUDA device: exactness, in three processes
    python benchmarks/gpu/measure.py --device cpu --small FOLDER   # the same code on a CPU, with tiny sizes

FOLDER/result.json has every finished part, and FOLDER/gpu.md is the page. A part that failed has its traceback and is
run again by the next call. Exit codes: 0 everything is done and within its bounds, 1 a number is not within its bound
or a part failed, 3 parts are left for the next call, 4 the device was lost in a part, which the next call runs last.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks import each other by their names
from gpu.decoding import NATIVE, Decoding, Rows
from gpu.device import Device
from gpu.exactness import LongTrial, Trial, device_part, engine_part, learner_part, long_part
from gpu.learning import Learning, Responses
from gpu.models import FLAT, HOOKED, LARGE_PASSES, STATE_SPACE, VARIANTS, TimedModel
from gpu.page import page
from gpu.real_step import RealStep
from gpu.roofline import Ceilings, measure_ceilings
from harness import DeviceLostError, Findings, Limits, OtherOptionsError, Part, Record, run_parts

_MIN_S = 10.0  # of an exactness part
_MAX_S = 240.0  # of any part
_NO_MODEL = "no step of a real model: give the folder of SmolLM2-135M-Instruct with --model (gguf_model.py makes it)"
_SIZES = {  # the default, the value with --small, and the help
    "runs": (5, 2, "runs of a measurement, after a first one"),
    "part-s": (5.0, 1.0, "seconds for these runs; one always counts"),
    "step-s": (60.0, 20.0, "seconds for the steps of the real model; one always counts"),
    "memory-gib": (24, 1, "memory limit of the engines"),
    "nodes": (8192, 64, "nodes per forward pass of the learner in the exactness parts"),
    "exact-rollouts": (24, 8, "rollouts of each prompt in the exactness parts"),
    "exact-tokens": (12, 5, "tokens of a response in the exactness parts"),
}


def main() -> int:
    arguments = _arguments()
    device = Device(arguments.device)
    try:
        record = Record(arguments.folder, _options(arguments, device))
    except OtherOptionsError as error:
        print(error, file=sys.stderr)
        return 1
    wanted = [part for part in _parts(arguments, device) if re.search(arguments.parts, part.name)]
    try:
        left = run_parts(wanted, record, arguments.seconds, device.is_lost)
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        return 4
    finally:
        record.read()
        (arguments.folder / "gpu.md").write_text(page(record), encoding="utf-8")
    own = {part.name for part in wanted}  # others may be under way in another process
    problems = record.failed_checks() + [f"{name}: failed" for name in record.failed_parts() if name in own]
    lines = [*problems, *(f"{name}: left for the next call" for name in left)]
    print("\n".join([*(lines or ["all parts done"]), f"the page: {arguments.folder / 'gpu.md'}"]))
    return 1 if problems else 3 if left else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="", help="folder of SmolLM2-135M-Instruct, for the steps of a real model")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--parts", default="", help="regular expression; run only the parts whose names have a match")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start parts within this time of the call")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and draws")
    for name, (default, small, text) in _SIZES.items():
        parser.add_argument(f"--{name}", type=type(default), help=f"{text} (default {default}, small {small})")
    arguments = parser.parse_args()
    for name, (default, small, _) in _SIZES.items():
        attribute = name.replace("-", "_")
        if getattr(arguments, attribute) is None:
            setattr(arguments, attribute, small if arguments.small else default)
    return arguments


def _options(arguments: argparse.Namespace, device: Device) -> dict[str, object]:
    """Return everything that the numbers depend on."""
    others = ("folder", "model", "parts", "seconds")
    options = {name: value for name, value in vars(arguments).items() if name not in others}
    versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "transformers": transformers.__version__}
    return {"hardware": device.describe(), "driver": device.driver(), "commit": _commit()} | versions | options


def _commit() -> str:
    """Return the commit of the sources; empty without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _parts(arguments: argparse.Namespace, device: Device) -> Iterator[Part]:
    """Yield all parts in the order in which they are measured."""
    limits = Limits(arguments.runs, 0, arguments.part_s)

    @cache
    def ceilings() -> Ceilings:
        return measure_ceilings(device, arguments.small, Limits(arguments.runs, 1, arguments.part_s))

    yield from _exactness(arguments, device)
    yield Part("ceilings", lambda: Findings(facts=asdict(ceilings())))
    yield from _steps(arguments)
    yield from _decoding(arguments, device, limits, ceilings)
    yield from _learning(arguments, device, limits, ceilings)


def _exactness(arguments: argparse.Namespace, device: Device) -> Iterator[Part]:
    trial = Trial(arguments.exact_rollouts, arguments.exact_tokens, arguments.seed)
    for kind in (*HOOKED, *STATE_SPACE):
        yield Part(f"exactness: {kind}, device", partial(device_part, kind, device, trial), _MIN_S, _MAX_S)
        for precision in ("float64", "float32", "bfloat16"):
            if kind in STATE_SPACE and precision == "float64":
                continue  # their states are float32 in every precision
            for what, part in (("learner", learner_part), ("engine", engine_part)):
                run = partial(part, kind, precision, device, trial)
                yield Part(f"exactness: {kind}, {what} {precision}", run, _MIN_S, _MAX_S)
    sizes = ("tiny", 16, 16) if arguments.small else ("300M", 256, 1024)
    long = LongTrial(sizes[0], 8, *sizes[1:], arguments.nodes, arguments.seed)
    yield Part("exactness: long responses", partial(long_part, device, long), 2 * _MIN_S, _MAX_S)


def _steps(arguments: argparse.Namespace) -> Iterator[Part]:
    """Yield the steps of the real model; with small sizes those of the shipped model, if no folder is given."""
    if not (arguments.model or arguments.small):
        print(_NO_MODEL, file=sys.stderr)
        return
    folder = str(Path(arguments.model).resolve()) if arguments.model else ""
    for shape in ((8, 2, 12),) if arguments.small else ((128, 16, 64), (512, 16, 64)):
        step = RealStep(
            folder, *shape, arguments.memory_gib, 4 if arguments.small else 256, arguments.runs + 1, arguments.step_s,
            arguments.device, arguments.seed,
        )  # fmt: skip
        for peer, name in (("ours", "brorl"), ("trl", "TRL")):
            yield Part(f"step: {step.name} by {name}", partial(step.measure, peer), arguments.step_s, _MAX_S)


def _decoding(
    arguments: argparse.Namespace, device: Device, limits: Limits, ceilings: Callable[[], Ceilings]
) -> Iterator[Part]:
    """Yield the rows of the real model, or of a random one with its shape, and those of larger random models."""
    if arguments.small:
        settings = [(_real(arguments), (4, 1, 8, 26)), (_real(arguments), (3, 2, 8, 26))]
    else:
        rows = [(16, 1), (128, 1), (512, 1), (128, 16), (512, 16)]
        settings = [(_real(arguments), (*shape, 60, 64)) for shape in rows]
        settings += [(TimedModel(size), (512, 1, 256, 512)) for size in ("300M", "1.5B")]
    for model, shape in settings:
        one = Decoding(Rows(model, *shape, arguments.memory_gib << 30, arguments.seed), device, limits, ceilings)
        ways: dict[str, Callable[[], Findings]] = {way: partial(one.native, *asked) for way, asked in NATIVE.items()}
        if model.name != "1.5B":  # whose samples by others take minutes
            ways |= {"generate": one.generate, "vLLM": one.vllm}
        for way, run in ways.items():
            yield Part(f"decoding: {one.rows.name} by {way}", run, 3 * arguments.part_s, _MAX_S)


def _learning(
    arguments: argparse.Namespace, device: Device, limits: Limits, ceilings: Callable[[], Ceilings]
) -> Iterator[Part]:
    shapes = [(_real(arguments), (4, 8, 8) if arguments.small else (256, 200, 256))]
    if not arguments.small:
        shapes += [(TimedModel("300M"), (256, 200, 256)), (TimedModel("1.5B"), (64, 200, 2048))]
    for model, shape in shapes:
        learning = Learning(Responses(model, *shape, arguments.seed), device, limits, ceilings)
        for variant in (*VARIANTS, *LARGE_PASSES):
            if variant.timed or variant.forward is FLAT:
                run = partial(learning.measure, variant)
                name = f"learning: {learning.responses.name} by {variant.name}"
                yield Part(name, run, 4 * arguments.part_s, _MAX_S)


def _real(arguments: argparse.Namespace) -> TimedModel:
    if arguments.model and not arguments.small:
        return TimedModel("SmolLM2", arguments.model)
    return TimedModel("tiny" if arguments.small else "135M")


if __name__ == "__main__":
    sys.exit(main())
