"""How an evaluation of a run differs from the evaluations that the run made of itself in training.

In: the settings of the evaluation and the run's config. Out: lines for a person: each setting that differs, and the
command that repeats the run's own evaluation. Nothing is measured here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brorl.errors import UserError


def compare_with_own(name: str, run_config: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return by what an evaluation differs from the run's own, and the command that repeats that one.

    Args:
        name: The run or checkpoint, as it was named on the command line.
        run_config: The run's config.
        settings: Settings of the evaluation, as it stores them.

    Returns:
        Two lines; none if nothing differs, or the run evaluates nothing.
    """
    from brorl.config.reading import make_config, read_recipe
    from brorl.runs.run_directory import RunDirectory

    config = make_config(read_recipe(str(run_config)), {}, str(run_config))
    try:
        num_prompts = len(RunDirectory(run_config.parent).read_held_out())
    except UserError:  # a run that was made before these were written
        return []
    if not num_prompts:
        return []
    evaluation = config.evaluation
    greedy = evaluation.temperature == 0
    own = {
        "temperature": f"{evaluation.temperature:g}",
        "top-p": f"{evaluation.top_p:g}",
        "length limit": f"{evaluation.max_new_tokens or config.sampling.max_new_tokens:,}",
        "responses a prompt": f"{1 if greedy else evaluation.num_samples:,}",
        "prompts": f"{num_prompts:,}",
    }
    here = {
        "temperature": f"{settings['temperature']:g}",
        "top-p": f"{settings['top_p']:g}",
        "length limit": f"{settings['max_new_tokens']:,}",
        "responses a prompt": f"{settings['samples']:,}",
        "prompts": f"{sum(data['prompts'] for data in settings['data'].values()):,}",
    }
    differing = [
        f"{setting} {here[setting]} (in training {own[setting]})" for setting in own if own[setting] != here[setting]
    ]
    if not differing:
        return []
    options = ["--temperature", own["temperature"], "--top-p", own["top-p"]]
    options += ["--samples", "1"] if greedy else ["--samples", str(evaluation.num_samples)]
    options += ["--ks", "1" if greedy else ",".join(map(str, evaluation.ks))]
    options += ["--evaluation.num_prompts", str(evaluation.num_prompts)]
    return [
        f"the run's own evaluations had other settings, so their pass@k is another number: {', '.join(differing)}",
        f"the settings of the run's own evaluations: {shlex.join(['brorl', 'eval', name, *options])}",
    ]
