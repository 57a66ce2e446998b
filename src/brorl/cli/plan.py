"""`brorl plan`: the options of `brorl.plan`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.cli.stop_signals import STOPPED
from brorl.errors import UserError
from brorl.runs import RUNS

_MEASURING = ("pilot_prompts", "pilot_rollouts", "rollouts", "seconds_per_step", "aim")
_CLUSTER = ("engine", "response_tokens", "distinct_fraction", "model_shape", "group_parts")
_ARGUMENTS = ("recipe", *_MEASURING, "output_dir")


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "plan",
        usage="brorl plan [CHECKPOINT] [--recipe RECIPE] [--seconds-per-step S | --cluster NxGPU] [--key value ...]",
        help="predict the gains and costs of more rollouts per prompt on this machine, or of a step on a cluster",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "checkpoint", nargs="?", default=None, metavar="CHECKPOINT",
        help="a model (`quickstart`, a folder, a hub id), a run, or a checkpoint in one (default: the recipe's model); "
        "with --cluster also a recipe",
    )  # fmt: skip
    parser.add_argument("--recipe", metavar="RECIPE", help="YAML file or name (default: the run's, or quickstart)")
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help="file, hub id or puzzle of the prompts, as data.sources (default: the recipe's)",
    )
    parser.add_argument("--pilot-prompts", type=int, metavar="INT", help="training prompts of the pilot (default: 64)")
    parser.add_argument(
        "--pilot-rollouts", type=int, metavar="INT", help="rollouts of each, an even number (default: 64)"
    )
    parser.add_argument(
        "--rollouts", metavar="N,N,...", help="numbers of rollouts per prompt to compare (default: 16,32,...,2048)"
    )
    parser.add_argument(
        "--seconds-per-step", type=float, metavar="S",
        help="time budget of a step (default: the time of the recipe's own N and prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--aim", choices=("pass@1", "pass@k", "coverage"),
        help="recommend N and an estimator for this: pass@1 | pass@16 | coverage of rare successes (default: pass@1)",
    )  # fmt: skip
    parser.add_argument(
        "--output-dir", "--output_dir", metavar="DIR",
        help=f"folder; an earlier plan in it is replaced (default: {RUNS / 'plan'})",
    )  # fmt: skip
    _add_cluster_options(parser)
    parser.set_defaults(execute=run_command)
    if chosen:
        add_settings(parser, lambda name: name != "output_dir")


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster", "a step on GPUs, computed without a GPU, weights or a pilot")
    group.add_argument(
        "--cluster", metavar="NxGPU",
        help="plan a step on these GPUs, such as 8xH200 or 512xH100; 8xMINE:memory_gb=96,... describes another GPU "
        "(default recipe: brorl)",
    )  # fmt: skip
    group.add_argument("--engine", choices=("native", "vllm"), help="engine that samples (default: engine.kind)")
    group.add_argument(
        "--response-tokens", type=float, metavar="TOKENS",
        help="mean tokens of a response (default: those of the run, or half of sampling.max_new_tokens)",
    )  # fmt: skip
    group.add_argument(
        "--distinct-fraction", type=float, metavar="FRACTION",
        help="distinct tokens over sampled tokens (default: that of the run, or a formula)",
    )  # fmt: skip
    group.add_argument(
        "--model-shape", metavar="NAME=NUMBER,...",
        help="sizes of the model in place of its config.json: parameters, layers, hidden, kv_heads, vocabulary, and "
        "heads, head_dim, inner, active_parameters",
    )  # fmt: skip
    group.add_argument(
        "--group-parts", type=int, metavar="INT",
        help="parts of a group that may run on different rollout workers (default: 1)",
    )  # fmt: skip


def run_command(parsed: argparse.Namespace) -> int:
    """Plan and return the exit code."""
    from brorl.api.plan import plan
    from brorl.config.reading import parse_yaml

    given = {name: getattr(parsed, name) for name in _ARGUMENTS if hasattr(parsed, name)}
    if "rollouts" in given:
        given["rollouts"] = _numbers(given["rollouts"])
    given |= _cluster_question(parsed, given)
    overrides = overrides_of(parsed)
    if hasattr(parsed, "data"):
        overrides["data.sources"] = parse_yaml(parsed.data, "--data")
    try:
        plan(parsed.checkpoint, **given, **overrides)
    except KeyboardInterrupt:
        print("\nstopped: a plan is written at its end; rerun the command")  # noqa: T201
        return STOPPED
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise UserError(f"--rollouts: the value should be numbers like 16,64,512, not {text!r}") from None


def _cluster_question(parsed: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument `cluster` of `brorl.plan`; none without --cluster.

    Raises:
        UserError: If options of a pilot and of a cluster are combined.
    """
    options = {name: getattr(parsed, name) for name in _CLUSTER if hasattr(parsed, name)}
    if not hasattr(parsed, "cluster"):
        if options:
            raise UserError(f"--{_dashed(next(iter(options)))} needs --cluster, such as --cluster 8xH200")
        return {}
    measuring = [name for name in _MEASURING if name in given]
    if measuring:
        raise UserError(f"--{_dashed(measuring[0])} measures on this machine, and --cluster does not; give one of them")
    from brorl.api.cluster_plan import ClusterQuestion

    if "model_shape" in options:
        options["model_shape"] = _sizes(options["model_shape"])
    return {"cluster": ClusterQuestion(parsed.cluster, **options)}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _sizes(text: str) -> dict[str, float]:
    try:
        return {name.strip(): float(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise UserError(f"--model-shape: the value should be like parameters=1.5e9,layers=28, not {text!r}") from None
