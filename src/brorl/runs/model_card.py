"""The model card of a checkpoint: `README.md` in its folder, which the Hugging Face hub shows.

All numbers come from the run's records: its settings, `env.json` and `metrics.jsonl`. The card contains only measured
numbers, and no paths on this machine. The user chooses the license.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from brorl.format import counted, interval
from brorl.runs.checkpoint import CARD, EMA, FOR_RESUMING
from brorl.runs.run_directory import StoredRun, read_run
from brorl.runs.step_record import EvaluationRecord, total_cost
from brorl.storage import replace_file

_LICENSE = "# license: yours to choose; the licenses of the base model and the data must allow it"
_BASE_MODEL = "# base_model: its hub id, if it has one"
_RECIPE = (
    "prompt.", "sampling.", "rewards.", "advantage.", "phases", "dynamic_sampling.", "loss.", "importance.", "kl.",
    "reference.", "optimizer.", "lora.", "dtype", "seed",
)  # fmt: skip
_USERS = "rewards.terms"  # the user's functions, with their paths
_UNSET = ("null", "[]", "{}")

Weights = Literal["evaluation", "ema_evaluation"]  # key of their scores in a step record


def write_card(folder: Path, run: Path, step: int, weights: Weights = "evaluation") -> None:
    """Write the card for the weights after a step to their folder, unless the run's settings are missing."""
    record = read_run(run)
    if record.settings:
        replace_file(folder / CARD, model_card(record, step, weights).encode())


def upload_command(checkpoint: Path) -> str:
    """Return the command that uploads a checkpoint's model with its card."""
    present = [name for name in (*FOR_RESUMING, EMA) if (checkpoint / name).exists()]
    patterns = [f"{name}/*" if (checkpoint / name).is_dir() else name for name in present]
    excluded = [word for pattern in patterns for word in ("--exclude", pattern)]
    return shlex.join(["hf", "upload", "NAME/MODEL", str(checkpoint), ".", *excluded])


def model_card(run: StoredRun, step: int, weights: Weights = "evaluation") -> str:
    """Return the card for the weights after a step. `ema_evaluation` selects the averaged weights."""
    base, revision = _base(run)
    ending = ", averaged weights" if weights == "ema_evaluation" else ""
    cost = total_cost(record for record in run.records if record.step <= step)
    rows = {
        "base model": _linked(base, revision),
        "training data": ", ".join(map(_source, _sources(run, "data.sources"))),
        "rollouts per prompt (N)": run.settings["rollouts_per_prompt"],
        "prompts per step": run.settings["prompts_per_step"],
        "steps": f"{step:,}{ending}",
        "rollouts": f"{cost.samples:,} ({cost.sampled_tokens:,} tokens)",
        "advantage estimator": ", then ".join(f"`{estimator}`" for estimator in _estimators(run)),
    }
    if before := run.environment.get("continued_from"):
        rows["continued from"] = f"step {before['step']} of a different run, which this card does not describe"
    recipe = {k: v for k, v in run.settings.items() if k.startswith(_RECIPE) and not k.startswith(_USERS)}
    settings = "\n".join(f"{key}: {_one_line(value)}" for key, value in recipe.items() if value not in _UNSET)
    version = run.environment.get("packages", {}).get("brorl", "of unknown version")
    table = "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    return (
        f"---\n{_metadata(run, base)}\n---\n\n# {Path(base).name}, trained with brorl\n\n"
        f"{_linked(base)} after reinforcement learning from verifiable rewards with brorl {version}, a reproduction of "
        f"[BroRL](https://arxiv.org/abs/2510.01180).\n\n## Training\n\n| | |\n|---|---|\n{table}\n"
        f"<details><summary>Settings</summary>\n\n```yaml\n{settings}\n```\n\n</details>\n\n"
        f"## Evaluation\n\n{_evaluation(run, step, weights)}\n"
    )


def _metadata(run: StoredRun, base: str) -> str:
    """Return the metadata as YAML. It names only models and datasets that are on the hub."""
    from huggingface_hub import ModelCardData

    adapters = run.settings.get("lora.rank", "0") != "0"
    paths = [str(source.get("path", "")).partition("@")[0] for source in _sources(run, "data.sources")]
    data = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        datasets=list(dict.fromkeys(filter(_is_hub_id, paths))) or None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["brorl", "rlvr", "reinforcement-learning", *(["lora"] if adapters else [])],
    )
    relation = f"base_model_relation: {'adapter' if adapters else 'finetune'}"
    return f"{data.to_yaml()}\n{relation if _is_hub_id(base) else _BASE_MODEL}\n{_LICENSE}"


def _base(run: StoredRun) -> tuple[str, str | None]:
    """Return the name and revision of the model that training started from, possibly several runs ago."""
    name = run.settings["model"]
    environment = run.environment
    while before := environment.get("continued_from"):
        name = before.get("model", "another model")
        file = Path(before["checkpoint"]).parents[1] / "env.json"
        environment = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    path, _, revision = name.partition("@") if not Path(name).is_absolute() else (name, "", "")
    return path, environment.get("model_commit") or revision or None


def _is_hub_id(name: str) -> bool:
    """Return whether a name is a hub id (`OWNER/NAME`). Runs store folders by their absolute paths."""
    return not Path(name).is_absolute() and name.count("/") == 1


def _linked(name: str, revision: str | None = None, kind: str = "") -> str:
    """Return a model (or a dataset, with kind `datasets/`) as Markdown: a link, or the last part of a path."""
    if not _is_hub_id(name):
        return f"`{Path(name).name}`"
    return f"[{name}](https://huggingface.co/{kind}{name}){f' at `{revision}`' if revision else ''}"


def _sources(run: StoredRun, setting: str) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = json.loads(run.settings.get(setting, "[]"))
    return sources


def _source(source: Mapping[str, Any]) -> str:
    """Return a prompt source as Markdown, without its folder."""
    match source:
        case {"path": path}:
            name, _, revision = str(path).partition("@")
            return _linked(name if _is_hub_id(name) else path, revision, "datasets/")
        case {"gym": names}:
            return f"Reasoning Gym ({', '.join(names)})"
        case _:
            return f"{source.get('task', 'puzzles')} puzzles"


def _estimators(run: StoredRun) -> Iterator[str]:
    """Yield the estimator of each phase."""
    phases = json.loads(run.settings.get("phases", "[]"))
    yield from [phase["advantage"]["estimator"] for phase in phases] or [run.settings["advantage.estimator"]]


def _one_line(value: str) -> str:
    return json.dumps(value) if "\n" in value else value


def _evaluation(run: StoredRun, step: int, weights: Weights) -> str:
    """Return the scores before training and with these weights, with their intervals."""
    ends = {"before training": _scores(run, 0, "evaluation"), f"after step {step:,}": _scores(run, step, weights)}
    measured = {title: scores for title, scores in ends.items() if scores is not None}
    if not measured:
        return "These weights were not evaluated."
    *_, last = measured.values()
    lines = [("", *measured), ("---",) * (1 + len(measured))]
    for source in ("", *last.by_source):
        for k in last.pass_at:
            cells = (_cell(scores, source, k) for scores in measured.values())
            lines.append((f"{source} pass@{k}".lstrip(), *cells))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    prompts, responses = counted(last.num_prompts, "prompt"), counted(last.num_samples, "response")
    top_p, top_k = _evaluated(run, "top_p"), _evaluated(run, "top_k")
    least, longest = _evaluated(run, "min_new_tokens"), _evaluated(run, "max_new_tokens")
    kept = f"{top_p}{'' if top_k == '0' else f', top-k {top_k}'}"
    lengths = f"{'' if least == '0' else f'at least {least} and '}at most {longest}"
    missing = "" if len(measured) == len(ends) else "\n\nOther weights were not evaluated."
    return (
        f"Held-out pass@k with 95% intervals over {prompts} ({_held_out(run)}), {responses} each, temperature "
        f"{run.settings['evaluation.temperature']}, top-p {kept}, {lengths} tokens:\n\n{table}{missing}"
    )


def _evaluated(run: StoredRun, name: str) -> str:
    """Return an evaluation setting, which defaults to the sampling setting."""
    settings = (run.settings.get(f"{section}.{name}", "null") for section in ("evaluation", "sampling"))
    return next((value for value in settings if value not in _UNSET), "0")


def _held_out(run: StoredRun) -> str:
    """Return the sources of the held-out prompts."""
    own = ["held out of the training data"] if float(run.settings["data.held_out_fraction"]) else []
    return ", ".join([*own, *map(_source, _sources(run, "evaluation.sources"))])


def _cell(scores: EvaluationRecord, source: str, k: int) -> str:
    """Return pass@k with its interval, over all prompts or those of one source; "-" if it was not measured."""
    estimate = (scores.by_source.get(source, {}) if source else scores.pass_at).get(k)
    return interval(estimate) if estimate else "-"


def _scores(run: StoredRun, step: int, weights: Weights) -> EvaluationRecord | None:
    """Return the evaluation of the weights after a step."""
    evaluations = (getattr(record, weights) for record in run.records if record.weights_step == step)
    return next((evaluation for evaluation in evaluations if evaluation), None)
