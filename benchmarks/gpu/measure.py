"""Checks exactness on a device, then measures speed and memory; continues where an earlier call stopped.

    bash benchmarks/gpu/run.sh [FOLDER]                            # on a CUDA device
    python benchmarks/gpu/measure.py --device cpu --small FOLDER   # the same code on a CPU, with tiny sizes

FOLDER/result.json has every finished part; a part that failed has its traceback and is run again by the next call.
Exit codes: 0 everything is done and within its bounds, 1 a number is not within its bound or a part failed, 3 parts are
left for the next call, 4 the device was lost in a part, which the next call runs last.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks import each other by their names
from gpu.device import Device
from gpu.exactness import LongTrial, Trial, device_part, engine_part, learner_part, long_part
from gpu.models import HOOKED, STATE_SPACE, VARIANTS
from gpu.speed import Ceilings, Setting, Speed, markdown, measure_ceilings
from harness import DeviceLostError, Findings, Limits, OtherOptionsError, Part, Record, run_parts

_MIN_S = 10.0  # of an exactness part
_SIZES = {  # the default, the value with --small, and the help
    "runs": (5, 2, "runs of a measurement, after a warm-up"),
    "part-s": (20.0, 1.0, "seconds for the runs of a measurement with 1,024 tokens; doubled for 4,096"),
    "rollouts": (512, 16, "rollouts of the prompt"),
    "prompt-tokens": (256, 16, "tokens of the prompt"),
    "response-tokens": ("1024,4096", "16", "tokens of a response, a list"),
    "sizes": ("300M,1.5B", "tiny", "sizes of the model, a list"),
    "memory-gib": (96, 1, "memory limit of the engines"),
    "nodes": (8192, 64, "nodes per forward pass of the learner"),
    "exact-rollouts": (24, 8, "rollouts of each prompt in the exactness parts"),
    "exact-tokens": (12, 5, "tokens of a response in the exactness parts"),
}


def main() -> int:
    arguments = _arguments()
    device = Device(arguments.device)
    limits = Limits(arguments.runs, 1, arguments.part_s)

    @cache
    def ceilings() -> Ceilings:
        return measure_ceilings(device, arguments.small, limits)

    try:
        record = Record(arguments.folder, _options(arguments, device))
    except OtherOptionsError as error:
        print(error, file=sys.stderr)
        return 1
    parts = [*_exactness(arguments, device), _long(arguments, device)]
    parts += [Part("ceilings", lambda: Findings(facts=asdict(ceilings())))]
    for tokens, size, low in product(arguments.response_tokens, arguments.sizes, (True, False)):
        part_s = arguments.part_s * max(1.0, (tokens / 1024) ** 0.5)
        setting = _setting(arguments, size, low, tokens)
        parts += _speed(Speed(setting, device, replace(limits, cell_s=part_s), ceilings), 2 * part_s)
    wanted = [part for part in parts if re.search(arguments.parts, part.name)]
    try:
        left = run_parts(wanted, record, arguments.seconds, device.is_lost)
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        return 4
    tables = markdown(record)
    (arguments.folder / "tables.md").write_text(tables, encoding="utf-8")
    print(tables)
    problems = record.failed_checks() + [f"{name}: failed" for name in record.failed_parts()]
    print("\n".join([*problems, *(f"{name}: left for the next call" for name in left)]) or "all parts done")
    return 1 if problems else 3 if left else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the results")
    parser.add_argument("--device", default="cuda")
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
    arguments.response_tokens = [int(number) for number in arguments.response_tokens.split(",")]
    arguments.sizes = arguments.sizes.split(",")
    return arguments


def _options(arguments: argparse.Namespace, device: Device) -> dict[str, object]:
    """Return everything that the numbers depend on."""
    others = ("folder", "parts", "seconds")
    options = {name: value for name, value in vars(arguments).items() if name not in others}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return options | versions | {"hardware": device.describe()}


def _exactness(arguments: argparse.Namespace, device: Device) -> Iterator[Part]:
    trial = Trial(arguments.exact_rollouts, arguments.exact_tokens, arguments.seed)
    for kind in (*HOOKED, *STATE_SPACE):
        yield Part(f"exactness: {kind}, device", partial(device_part, kind, device, trial), _MIN_S)
        for precision in ("float64", "float32", "bfloat16"):
            if kind in STATE_SPACE and precision == "float64":
                continue  # their states are float32 in every precision
            for what, part in (("learner", learner_part), ("engine", engine_part)):
                run = partial(part, kind, precision, device, trial)
                yield Part(f"exactness: {kind}, {what} {precision}", run, _MIN_S)


def _long(arguments: argparse.Namespace, device: Device) -> Part:
    """Return the exactness part with the sizes of a run: the first model, and rollouts of the first length."""
    trial = LongTrial(
        arguments.sizes[0], 8, arguments.prompt_tokens, arguments.response_tokens[0], arguments.nodes, arguments.seed
    )
    return Part("exactness: long responses", partial(long_part, device, trial), 2 * _MIN_S)


def _setting(arguments: argparse.Namespace, size: str, low_entropy: bool, tokens: int) -> Setting:
    return Setting(
        size, low_entropy, tokens, arguments.rollouts, arguments.prompt_tokens, arguments.memory_gib << 30,
        arguments.nodes, arguments.seed,
    )  # fmt: skip


def _speed(speed: Speed, least_s: float) -> list[Part]:
    name = speed.setting.name
    sampling = {"native": speed.native, "generate": speed.generate, "vLLM": speed.vllm}
    return [
        *(Part(f"speed: {name}, {peer}", run, least_s) for peer, run in sampling.items()),
        *(
            Part(f"speed: {name}, learner {variant.name}", partial(speed.learner, variant), least_s)
            for variant in VARIANTS
            if variant.timed
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
