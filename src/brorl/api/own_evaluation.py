"""Compares the settings of an evaluation with those of the run's own evaluations during training.

In: the settings of the evaluation and the run's config. Out: lines with the settings that differ, and the command that
repeats the run's own evaluation. This module measures nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brorl.api.settings import resolve_config
from brorl.errors import UserError
from brorl.runs.run_directory import RunDirectory


def compare_with_own(name: str, run_config: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the differences from the run's own evaluations, and the command that repeats them.

    Args:
        name: The run or checkpoint, as the user named it.
        run_config: The run's config.
        settings: Settings of the evaluation, as its folder stores them.

    Returns:
        Two lines; none if nothing differs, or the run evaluates nothing.
    """
    config = resolve_config(run_config, {})
    try:
        num_prompts = len(RunDirectory(run_config.parent).read_held_out())
    except UserError:  # older versions did not store the held-out prompts
        return []
    if not num_prompts:
        return []
    evaluation = config.evaluation
    greedy = evaluation.temperature == 0
    samples, ks = (1, (1,)) if greedy else (evaluation.num_samples, evaluation.ks)
    limit = evaluation.max_new_tokens or config.sampling.max_new_tokens
    here_prompts = sum(data["prompts"] for data in settings["data"].values())
    pairs = {
        "temperature": (f"{settings['temperature']:g}", f"{evaluation.temperature:g}"),
        "top-p": (f"{settings['top_p']:g}", f"{evaluation.top_p:g}"),
        "length limit": (f"{settings['max_new_tokens']:,}", f"{limit:,}"),
        "responses per prompt": (f"{settings['samples']:,}", f"{samples:,}"),
        "prompts": (f"{here_prompts:,}", f"{num_prompts:,}"),
    }
    differing = [f"{setting} {here} (in training {own})" for setting, (here, own) in pairs.items() if here != own]
    if not differing:
        return []
    options = ["--temperature", pairs["temperature"][1], "--top-p", pairs["top-p"][1], "--samples", str(samples)]
    options += ["--ks", ",".join(map(str, ks)), "--evaluation.num_prompts", str(evaluation.num_prompts)]
    return [
        f"the run's own evaluations had other settings, so their pass@k is another number: {', '.join(differing)}",
        f"the settings of the run's own evaluations: {shlex.join(['brorl', 'eval', name, *options])}",
    ]
