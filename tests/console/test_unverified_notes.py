"""The console's warnings about rollouts that could not be verified."""

import io
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from brorl.console.progress import TrainingProgress, notes, warnings
from brorl.console.screen import Screen
from brorl.cost import Budget
from made_up_runs import random_step, step_record

REASON = "unverified: a worker was lost"


def lossy(record: dict[str, Any], lost: int, rollouts: int = 1000) -> dict[str, Any]:
    sampling = record["sampling"] | {
        "samples": rollouts, "samples_unverified": lost, "unverified_reasons": {REASON: lost}, "groups_unverified": 0,
    }  # fmt: skip
    return record | {"sampling": sampling}


@pytest.mark.parametrize(("lost", "warns"), [(0, False), (10, False), (11, True), (1000, True)])
def test_more_than_one_percent_is_worth_a_warning(lost: int, warns: bool, rng: np.random.Generator) -> None:
    record = lossy(step_record(rng, 1, random_step(rng, 2, 8)), lost)
    lines = warnings(record)
    assert len(lines) == warns
    for note in lines:
        assert note.startswith(f"warning: {lost:,} of 1,000 rollouts could not be verified")
        assert REASON in note


def test_programs_that_were_cut_off_name_the_setting(rng: np.random.Generator) -> None:
    record = step_record(rng, 1, random_step(rng, 2, 8))
    assert warnings(record) == []
    record = record | {"sampling": record["sampling"] | {"verifier_cut_offs": 12}}
    (note,) = warnings(record)
    assert note.startswith("warning: 12 responses had used")
    assert "verification.batch_timeout_s" in note


def test_a_warning_comes_at_most_once_in_ten_steps(rng: np.random.Generator) -> None:
    screen = Screen()
    screen.console = Console(file=io.StringIO(), width=200, highlight=False)
    shown = TrainingProgress(40, Budget("steps", 40.0), screen)
    lossy_steps = {2, 3, 4, 11, 12, 13, 30}
    for step in range(1, 32):
        record = step_record(rng, step, random_step(rng, 2, 8))
        shown.show(lossy(record, 100) if step in lossy_steps else record)
    assert isinstance(screen.console.file, io.StringIO)
    lines = screen.console.file.getvalue().splitlines()
    warned, step = [], 0
    for line in lines:
        if found := re.match(r" *(\d+) +-?\d+\.\d{3} ", line):
            step = int(found[1])
        if "could not be verified" in line:
            warned.append(step)
    assert warned == [2, 12, 30]


def test_lost_evaluations_are_named() -> None:
    evaluation = {"num_prompts": 10, "num_samples": 8, "num_unverified": 3, "pass_at": {}}
    (line,) = notes({"step": 0, "evaluation": evaluation})
    assert line.startswith("warning: 3 of 80 responses to held-out prompts could not be verified")
    (line,) = notes({"step": 0, "evaluation_unverified": 80})
    assert line.startswith("warning: no evaluation: 80 responses could not be verified")
