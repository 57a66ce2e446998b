"""Stored rollouts come back as they were, and damaged files are told from whole ones."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brorl.algorithms.groups import Group
from brorl.errors import UserError
from brorl.runs import stored_rollouts
from brorl.runs.run_directory import RunDirectory
from brorl.runs.stored_rollouts import read_groups, step_list, stored_steps
from made_up_runs import random_step
from tree_invariants import check_tree

STEP = 7


@pytest.fixture
def stored(tmp_path: Path, rng: np.random.Generator) -> list[Group]:
    made = random_step(rng, num_groups=5, num_rollouts=20)
    RunDirectory(tmp_path).write_responses("rollouts", STEP, made)
    return made


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 1024])
def test_groups_come_back_as_they_were(
    tmp_path: Path, stored: list[Group], rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rollouts, "_ROWS_PER_BATCH", rows_at_a_time)
    groups = list(read_groups(tmp_path, STEP))
    assert len(groups) == len(stored)
    assert groups[1].prompt.id == groups[2].prompt.id  # two groups of one prompt, one after the other, stay two
    for group, made in zip(groups, stored, strict=True):
        check_tree(group.tree)
        assert group.tree.prompt_ids == ()
        for name in ("token", "parent", "count", "leaf", "leaf_count", "finished"):
            assert np.array_equal(getattr(group.tree, name), getattr(made.tree, name)), name
        assert np.array_equal(group.tree.logprob, made.tree.logprob.astype(np.float32), equal_nan=True)
        said = [(v.correct, v.score, v.extracted, v.reason) for v in made.verdicts]
        assert [(v.correct, v.score, v.extracted, v.reason) for v in group.verdicts] == said
        assert group.texts == tuple(made.texts)
        assert np.array_equal(group.reward_L, made.reward_L)
        assert (group.prompt.id, group.prompt.text) == (made.prompt.id, made.prompt.text)
        assert group.prompt.domain == made.prompt.domain
        assert group.prompt.question == made.prompt.question != group.prompt.text
        assert group.num_correct == made.num_correct
        cut = sum(count for done, count in zip(made.tree.finished, made.tree.leaf_count, strict=True) if not done)
        assert group.tree.num_truncated == cut


def test_steps_are_those_with_a_whole_file(tmp_path: Path) -> None:
    assert stored_steps(tmp_path) == []
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name in ("step-000010.parquet", "step-000009.parquet", "step-1000000.parquet", ".step-000011.parquet.tmp", "x"):
        (folder / name).touch()
    assert stored_steps(tmp_path) == [9, 10, 1000000]


def test_a_step_that_sampled_nothing_has_no_groups(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_responses("rollouts", 3, [])
    assert list(read_groups(tmp_path, 3)) == []


@pytest.mark.usefixtures("stored")
def test_a_step_that_is_not_stored_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains no rollouts of step 3; it has step 7$"):
        list(read_groups(tmp_path, 3))


def _reversed(table: pa.Table) -> pa.Table:
    return table.take(list(range(table.num_rows))[::-1])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda t: t.drop_columns(["reason"]), "it has no column reason"),
        (lambda t: t.slice(1), "do not add up"),
        (lambda t: t.slice(0, t.num_rows - 1), "do not add up"),
        (_reversed, "are not in tree order"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, rng: np.random.Generator, harm, said: str) -> None:  # type: ignore[no-untyped-def]
    made = random_step(rng, num_groups=1, num_rollouts=40)
    assert made[0].tree.num_responses > 2
    RunDirectory(tmp_path).write_responses("rollouts", STEP, made)
    file = tmp_path / "rollouts" / f"step-{STEP:06d}.parquet"
    pq.write_table(harm(pq.read_table(file)), file)
    with pytest.raises(UserError, match=said) as error:
        list(read_groups(tmp_path, STEP))
    assert "\n" not in str(error.value)
    assert "step-000007.parquet" in str(error.value)


@pytest.mark.usefixtures("stored")
def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rollouts" / f"step-{STEP:06d}.parquet"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"does not contain a run's rollouts") as error:
        list(read_groups(tmp_path, STEP))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "none"),
        ([3], "step 3"),
        ([3, 4, 5], "steps 3 to 5"),
        ([10, 20, 30, 40], "4 steps from 10 to 40, each 10 after the one before"),
        ([1, 3, 4], "steps 1, 3, 4"),
        ([*range(0, 60, 2), 61, 70], "steps 0, 2, 4, 6, 8, 10, ..., 58, 61, 70"),
    ],
)
def test_step_list(steps: list[int], words: str) -> None:
    assert step_list(steps) == words
