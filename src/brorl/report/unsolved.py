"""Responses of a step in which nothing was solved, for a first look: is it the format, the verifier or the difficulty?

In: a run directory that stores the step's rollouts. Out: a few lines of text, with every character that would act on a
terminal written out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from brorl.report.visible_text import visible_text
from brorl.runs.stored_rollouts import StoredGroup, read_groups, stored_steps

_PROMPT, _RESPONSE = 240, 480  # characters shown


def unsolved_examples(run: Path, step: int, number: int = 2) -> list[str]:
    """Return lines that show the most frequent response to the first prompts of a step, and how to see more.

    Args:
        run: The run directory.
        step: The step.
        number: How many prompts.

    Returns:
        The lines; none if a rollout of the step was correct, or the step is not stored.
    """
    if step not in stored_steps(run):
        return []
    shown: list[StoredGroup] = []
    for group in read_groups(run, step):
        if group.num_correct:
            return []
        if len(shown) < number:
            shown.append(group)
    lines = [line for place, group in enumerate(shown, 1) for line in _example(place, group)]
    return [*lines, f"\nmore of them: brorl samples {run} --step {step}"] if lines else []


def _example(place: int, group: StoredGroup) -> list[str]:
    i = int(np.argmax(group.tree.leaf_count))
    verdict = group.verdicts[i]
    extracted = "none found" if verdict.extracted is None else visible_text(verdict.extracted, one_line=True)
    reference = "not stored" if group.reference is None else visible_text(group.reference, one_line=True)
    count = f"{group.tree.leaf_count[i]} of {group.tree.num_rollouts} rollouts"
    return [
        f"\nexample {place}, prompt: {_end(group.prompt, _PROMPT)}",
        f"response ({count}): {_end(group.texts[i], _RESPONSE)}",
        f"extracted answer: {extracted}; reference answer: {reference}; verdict: {verdict.reason}",
    ]


def _end(text: str, size: int) -> str:
    """Return the end of a text, where its answer stands."""
    text = text.strip()
    return visible_text(text if len(text) <= size else f"... {text[-size:]}")
