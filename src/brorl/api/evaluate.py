"""`brorl.evaluate`: a model's pass@k on benchmarks, files, puzzles or held-out prompts.

Settings and data are checked before the model is loaded. Every response is stored, and an interrupted evaluation
resumes in its folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.activity import Echo, Observe, Stage
from brorl.api.arguments import WITHOUT_TRAINING, refuse_in_worker, resolve_checkpoint, resolve_config
from brorl.api.in_memory import rows_to_evaluate
from brorl.config.reading import flat_settings, make_config, read_recipe
from brorl.console.screen import Screen
from brorl.errors import UserError, option
from brorl.evaluation.datasets import NO_LIMIT, EvaluationRequest
from brorl.format import listed
from brorl.runs import RUNS
from brorl.runs.run_directory import RunDirectory
from brorl.storage import output_folder, replace_file, storage_errors

if TYPE_CHECKING:
    from brorl.distributed.cluster import RayCluster
    from brorl.evaluation.evaluator import BatchCounts
    from brorl.evaluation.preparation import EvaluationInputs
    from brorl.evaluation.responses import EvaluationResult, ResponseStore

_OPTIONS = {  # setting -> option of `brorl eval`
    "evaluation.rollouts_per_prompt": "samples", "evaluation.ks": "ks", "evaluation.temperature": "temperature",
    "evaluation.top_p": "top-p", "evaluation.max_new_tokens": "max-new-tokens", "seed": "seed",
}  # fmt: skip
_SINGLE = (
    "device", "dtype", "engine.kind", "engine.dtype", "engine.memory_gib", "engine.threads", "sampling.stop",
    "evaluation.num_prompts", "evaluation.top_k", "evaluation.min_new_tokens",
)  # fmt: skip
_SHOWN_IF_SET = {"top_k": "top-k", "min_new_tokens": "minimum length"}  # stored if above 0
_SECTIONS = ("prompt.", "verification.", "engine.vllm.", "cluster.")
_TOP_P = 0.95  # as in the paper
SETTINGS = (*_SINGLE, *_SECTIONS)
"""The recipe settings and sections that apply to an evaluation."""


def evaluate(
    checkpoint: str | Path,
    *,
    data: str | Sequence[str] | Any = (),
    samples: int = 512,
    ks: Sequence[int] | None = None,
    temperature: float = 0.6,
    top_p: float | None = None,
    max_new_tokens: int | None = None,
    output_dir: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
    **overrides: Any,
) -> EvaluationResult:
    """Measure pass@k of a model, as `brorl eval` does.

    Examples:
        >>> result = brorl.evaluate("runs/first", samples=64)  # on the prompts that the run held out
        >>> result = brorl.evaluate("Qwen/Qwen2.5-0.5B-Instruct", data=["math", "aime24"], samples=256, ks=[1, 16, 128])

    Args:
        checkpoint: A model (`quickstart`, a folder, a hub id), a run directory (its last checkpoint), or a checkpoint
            in one.
        data: aime24, aime25, hmmt25, brumo25, cmimc25, amc, math, minerva, olympiadbench, gsm8k, humaneval_plus,
            mbpp_plus, livecodebench, apps, codecontests, codeforces, taco, gpqa_diamond, mmlu_pro, ifeval; NAME=PATH
            for a copy of one of these; gym; gym_ood; a file, hub id or puzzle; or {path: ..., layout: ...}; may be
            repeated; from Python also rows, as in `train` (default: the prompts that the checkpoint's run held out).
        samples: Responses per prompt, n, at least 1.
        ks: Values of k for pass@k, each 1 to n. By default 1 and the powers of 2 up to n / 2, at most 256.
        temperature: Divisor of the logits, at least 0; 0 is greedy and needs one response per prompt.
        top_p: Nucleus mass, above 0 and at most 1. By default 0.95, or the run's sampling.top_p if it is lower.
        max_new_tokens: Length limit of a response in tokens, at least 1. By default the run's limit, or the longest
            that fits the model, at most 32,768.
        output_dir: Folder of the evaluation. A folder that contains this evaluation is continued. By default one in
            `runs/evaluations`, named after the model and the settings.
        seed: Seed of the sampling, at least 0.
        progress: Print the settings and the progress, as the command does.
        overrides: Settings of a recipe, nested or by dotted name: device, dtype, engine.kind, engine.dtype,
            engine.memory_gib, engine.threads, sampling.stop, evaluation.num_prompts (limit per
            dataset), evaluation.top_k and evaluation.min_new_tokens (by default the run's), and those in `prompt`,
            `verification`, `engine.vllm` and `cluster`. An evaluation uses a cluster only if cluster.nodes is given.

    Returns:
        pass@k with 95% intervals, the counts of every prompt, and the folder with every response.

    Raises:
        UserError: If a setting is wrong, or the data or the model cannot be read.
        KeyboardInterrupt: If the evaluation was stopped. Repeat the call to resume it.
    """
    refuse_in_worker()
    sets, guessed = _dataset_names(data, checkpoint)
    replaced = flat_settings(overrides)
    wanted = default_ks(samples) if ks is None else tuple(sorted(set(ks)))
    sampled = {"samples": samples, "temperature": temperature, "top_p": top_p, "seed": seed}
    request = make_request(str(checkpoint), sets, wanted, max_new_tokens, sampled, replaced)
    with Screen(silent=not progress) as screen:
        for line in guessed:
            screen.echo(line, is_command=True)
        return _evaluate(str(checkpoint), request, output_dir, screen)


def default_ks(num_rollouts: int) -> tuple[int, ...]:
    """Return 1 and the powers of 2 up to half the number of samples, at most 256: 64 samples give 1, 2, 4, 8, 16, 32.

    At larger k, the subsets over which pass@k averages share most of their responses.
    """
    return (1, *(2**i for i in range(1, 9) if 2 ** (i + 1) <= num_rollouts))


def _dataset_names(data: Any, checkpoint: str | Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the dataset names, and lines about guesses. Rows are written to a file, which becomes the dataset name."""
    if isinstance(data, str):
        return (data,), ()
    if isinstance(data, list | tuple) and all(isinstance(name, str) for name in data):
        return tuple(data), ()
    stored, lines = rows_to_evaluate(data, checkpoint)
    return (stored,), lines


def make_request(
    checkpoint: str,
    data: tuple[str, ...],
    ks: tuple[int, ...],
    max_new_tokens: int | None,
    sampled: Mapping[str, Any],
    replaced: Mapping[str, Any],
) -> EvaluationRequest:
    """Return the checked settings of an evaluation: those of the checkpoint's run, with the given ones applied."""
    samples = sampled["samples"]
    temperature = sampled["temperature"]
    if temperature == 0 and samples > 1:
        raise UserError(
            f"{option('temperature', 0)} is greedy: all {samples} responses to a prompt would be the same, and pass@k "
            f"would be pass@1; add {option('samples', 1)}, or use a temperature above 0"
        )
    if samples >= 1 and not (ks and min(ks) >= 1 and max(ks) <= samples):
        raise UserError(f"{option('ks')} must be between 1 and {option('samples')} = {samples}, got {tuple(ks)}")
    if not all(text.strip() for text in data):
        raise UserError(
            f"{option('data')}: the value is empty; name a benchmark, file, hub id or puzzle, or omit {option('data')}"
        )
    if wrong := next((name for name in replaced if name not in _SINGLE and not name.startswith(_SECTIONS)), None):
        raise UserError(
            f"{wrong} is not a setting of an evaluation; the settings are: {', '.join(_SINGLE)}, and all in "
            f"{listed([section.rstrip('.') for section in _SECTIONS])}"
        )
    start = resolve_checkpoint(checkpoint)
    settings = {} if start.recipe is None else read_recipe(start.recipe)
    settings.pop("cluster", None)  # the run's cluster; an evaluation uses a cluster only on request
    if max_new_tokens is None:
        max_new_tokens = settings.get("evaluation", {}).get("max_new_tokens")
    top_p = sampled["top_p"]
    if top_p is None:
        top_p = min(_TOP_P, settings.get("sampling", {}).get("top_p", 1.0))
    overrides = {
        "evaluation.num_prompts": NO_LIMIT,
        **replaced,
        **WITHOUT_TRAINING,
        "model": start.model,
        "evaluation.rollouts_per_prompt": samples,
        "evaluation.ks": list(ks),
        "evaluation.temperature": temperature,
        "evaluation.top_p": top_p,
        "evaluation.max_new_tokens": max_new_tokens,
        "evaluation.skip_prompts": 0,
        "seed": sampled["seed"],
    }
    if overrides.get("cluster.mode") == "async":  # this mode overlaps sampling and learning
        overrides["cluster.mode"] = "sync"
    config = make_config(settings, overrides, start.recipe or "the options", _OPTIONS)
    if not config.evaluation.num_prompts:
        raise UserError(f"{option('evaluation.num_prompts')}: expected at least 1 prompt, not 0")
    own_template = any(name.startswith(("prompt.template", "prompt.domain_templates")) for name in replaced)
    return EvaluationRequest(config, data, start.recipe is not None, own_template)


def _evaluate(
    checkpoint: str, request: EvaluationRequest, output_dir: str | Path | None, screen: Screen
) -> EvaluationResult:
    from brorl.distributed.remote_parts import build_cluster
    from brorl.evaluation.preparation import prepare_evaluation
    from brorl.evaluation.responses import ResponseStore

    def echo(line: str) -> None:
        screen.echo(line, is_command=True)

    inputs = prepare_evaluation(request)
    output = _folder(output_dir, inputs)
    store = ResponseStore(output)
    run_config = None if request.data else resolve_checkpoint(checkpoint).run_config
    try:
        with output_folder(output), RunDirectory(output).locked():
            store.check(inputs.settings)
            differences = _compare_with_own(run_config, inputs.settings) if run_config else []
            _announce(inputs, output, [*inputs.notes, *differences], echo)
            cluster = build_cluster(request.config, echo, learns=False, advice="Rerun the command to continue.")
            with ExitStack() as parts:
                if cluster is not None:
                    parts.enter_context(closing(cluster))
                stored = _sample(inputs, store, echo, screen.observe, cluster, parts)
            return _finish(inputs, stored, store, differences)
    except KeyboardInterrupt:
        done = store.num_stored
        hint = "" if output_dir else f" (it finds {output})"
        kept = f"{done} of {len(inputs.batches)} batches are stored"
        echo(f"\nstopped: {kept}; rerun the command to continue{hint}")
        raise KeyboardInterrupt(kept) from None


def _folder(output_dir: str | Path | None, inputs: EvaluationInputs) -> Path:
    """Return the given folder, or one named after the model, the checkpoint's run, and the settings."""
    if output_dir is not None:
        return Path(output_dir).expanduser()
    digest = blake2b(json.dumps(inputs.settings, sort_keys=True).encode(), digest_size=4).hexdigest()
    parts = [part for part in Path(inputs.request.config.model).parts if part != "/"]
    at = parts.index("checkpoints") if "checkpoints" in parts[1:-1] else None
    chosen = parts[-1:] if at is None else [parts[at - 1], *parts[at + 1 :]]
    label = re.sub(r"[^\w.-]+", "_", "-".join(chosen)) or "model"
    return RUNS / "evaluations" / f"{label}-{digest}"


def _announce(inputs: EvaluationInputs, output: Path, notes: Sequence[str], echo: Echo) -> None:
    """Print the settings."""
    settings = inputs.settings
    device = inputs.settings["device"]
    sets = ", ".join(f"{name} ({source['prompts']:,} prompts)" for name, source in settings["data"].items())
    drawn = f"temperature {settings['temperature']:g}, top-p {settings['top_p']:g}"
    drawn += "".join(f", {label} {settings[name]:,}" for name, label in _SHOWN_IF_SET.items() if name in settings)
    echo(f"brorl {brorl.__version__}: {settings['checkpoint']} on {device} ({settings['dtype']}), {sets}")
    echo(
        f"{settings['samples']:,} responses per prompt, {drawn}, at most {settings['max_new_tokens']:,} tokens each, "
        f"seed {settings['seed']}; folder {output}"
    )
    for note in notes:
        echo(note)


def _sample(
    inputs: EvaluationInputs,
    store: ResponseStore,
    echo: Echo,
    observe: Observe,
    cluster: RayCluster | None,
    parts: ExitStack,
) -> list[BatchCounts]:
    """Load the model and evaluate all batches that are not stored."""
    from brorl.assemble import build_evaluation
    from brorl.evaluation.responses import evaluate_batches
    from brorl.model.source import commit_of, find_model

    observe(Stage("loading", "model"))
    engine, evaluator, weights = build_evaluation(inputs, observe, cluster, parts.callback, echo)
    store.begin({**inputs.settings, "weights": weights})
    done = store.num_stored
    if done:
        echo(f"continuing: {done} of {len(inputs.batches)} batches are already stored")
    if done < len(inputs.batches):
        config = inputs.request.config
        commit = commit_of(find_model(config.model))
        RunDirectory(store.path).write_environment(config.device, model_commit=commit)
        environment = json.loads((store.path / "env.json").read_text("utf-8"))
        environment.pop("continued_from", None)
        store.add_session({"parts_before": done, **environment})
    return evaluate_batches(inputs.batches, evaluator, engine, store, echo)


def _finish(
    inputs: EvaluationInputs, stored: list[BatchCounts], store: ResponseStore, differences: list[str]
) -> EvaluationResult:
    """Summarize the results and write `evaluation.json`."""
    from brorl.evaluation.responses import EvaluationResult

    seconds_of = {batch.source: 0.0 for batch in inputs.batches}
    for batch, counts in zip(inputs.batches, stored, strict=True):
        seconds_of[batch.source] += counts.seconds
    prompts = [prompt for counts in stored for prompt in counts.prompts]
    result = EvaluationResult.of(
        prompts,
        inputs.request.config.evaluation.ks,
        seconds_of,
        path=store.path,
        settings=json.loads(store.settings_file.read_text("utf-8")),
        unreadable=inputs.unreadable,
        sessions=store.sessions(),
        differences=differences,
    )
    target = store.path / "evaluation.json"
    with storage_errors(target, "rerun the command"):
        replace_file(target, json.dumps(result.record(), indent=1).encode())
    return result


def _compare_with_own(run_config: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return a line on how the settings differ from those of the run's evaluations; empty if they do not."""
    config = resolve_config(run_config, {})
    evaluation = config.evaluation
    drawn = config.evaluated_sampling
    num_prompts = len(RunDirectory(run_config.parent).read_held_out())
    samples = 1 if evaluation.temperature == 0 else evaluation.rollouts_per_prompt
    here_prompts = sum(data["prompts"] for data in settings["data"].values())
    pairs = {
        "temperature": (f"{settings['temperature']:g}", f"{evaluation.temperature:g}"),
        "top-p": (f"{settings['top_p']:g}", f"{drawn.top_p:g}"),
        **{label: (f"{settings.get(name, 0):,}", f"{getattr(drawn, name):,}") for name, label in _SHOWN_IF_SET.items()},
        "length limit": (f"{settings['max_new_tokens']:,}", f"{drawn.max_new_tokens:,}"),
        "responses per prompt": (f"{settings['samples']:,}", f"{samples:,}"),
        "prompts": (f"{here_prompts:,}", f"{num_prompts:,}"),
        "skipped prompts": ("0", f"{evaluation.skip_prompts:,}"),
    }
    differing = [f"{setting} {here} (in training {own})" for setting, (here, own) in pairs.items() if here != own]
    line = f"the run's own evaluations used other settings, so their pass@k is not comparable: {', '.join(differing)}"
    return [line] if differing and num_prompts else []
