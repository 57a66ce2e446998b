"""The command after a comparison: the one that its result asks for."""

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
from comparisons import synthetic

from brorl.comparison.answer import next_command
from brorl.comparison.results import results_of
from brorl.comparison.scores import Comparison
from brorl.evaluation.paired import SeedsNeeded


def in_folder(comparison: Comparison, folder: Path) -> Comparison:
    """The same comparison with runs in a folder."""
    arms = []
    for index, arm in enumerate(comparison.arms):
        runs = [replace(run, path=str(folder / f"arms/{index}/seed-{run.seed}")) for run in arm.runs]
        arms.append(replace(arm, runs=tuple(runs)))
    return replace(comparison, arms=tuple(arms))


def test_a_shown_difference_is_checked_for_longer(tmp_path: Path) -> None:
    comparison = in_folder(synthetic(np.random.default_rng(0), lift={0: 0.0, 1: 2.0}), tmp_path)
    _, following = next_command(results_of(comparison), tmp_path)
    recipes = [str(tmp_path / f"arms/{i}/seed-0.yaml") for i in (0, 1)]
    assert shlex.split(following) == [
        "brorl", "compare", *recipes, "--match", "seconds", "--budget", "80", "--seeds", "3", "--eval-points", "3",
    ]  # fmt: skip


def test_arms_that_are_not_matched_get_a_larger_budget(tmp_path: Path) -> None:
    comparison = in_folder(synthetic(np.random.default_rng(0), overshoot={1: 0.2}), tmp_path)
    _, following = next_command(results_of(comparison), tmp_path)
    assert "--budget 80" in following


def test_a_difference_that_is_not_shown_gets_more_seeds_or_more_prompts(tmp_path: Path) -> None:
    comparison = in_folder(synthetic(np.random.default_rng(0), lift={0: 1.0, 1: 1.0}), tmp_path)
    results = results_of(comparison)
    assert results.pair is not None
    assert results.pair[1].conclusion == "no difference shown"
    for seeds, enough, command in (  # 40 prompts of two sources
        (9, True, f"brorl compare {tmp_path} --seeds 9"),
        (9, False, "--budget 40 --seeds 9 --eval-points 3 --evaluation.num_prompts 20"),
        (2, False, "--budget 40 --seeds 3 --eval-points 3 --evaluation.num_prompts 20"),
        (3, True, "--budget 80 --seeds 3"),
    ):
        needed = replace(results, seeds_needed={"N=512": SeedsNeeded(0.02, seeds, 40, enough)})
        assert command in next_command(needed, tmp_path)[1]
