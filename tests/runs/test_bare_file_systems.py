"""Runs on file systems without links, permissions, locks or fsync: nothing is lost, and a line says what is missing."""

import errno
import logging
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

import brorl.storage as storage
from bare_file_system import ERRORS, take_away
from brorl.api.arguments import resolve_checkpoint
from brorl.config.reading import make_config
from brorl.errors import StorageError
from brorl.runs.checkpoint import (
    INITIAL_STATE,
    best_checkpoint,
    discard_unfinished,
    find_damage,
    last_checkpoint,
    load_state,
    mark_best,
    save_checkpoint,
)
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import StepRecord
from brorl.storage import TemporaryFolder, storage_errors
from each_row import each_row
from run_support import SMALL, assert_same_run, command


def saved(folder: Path, step: int) -> Path:
    def save(temporary: Path) -> None:
        (temporary / "config.json").write_text("{}")

    state = type(INITIAL_STATE)(step, None)
    return save_checkpoint(folder, state, save, Mock())


@each_row("code", ERRORS)
def test_checkpoints_their_best_and_locks(
    code: int, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path_factory.mktemp("run")
    directory = RunDirectory(run)
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(storage, "_warned", set())
        take_away(patch, code)
        with directory.locked(), directory.locked():  # nothing can tell
            directory.append_metrics(StepRecord(step=0))
            for step in (1, 2, 3):
                saved(directory.checkpoints, step)
                mark_best(directory.checkpoints, min(step, 2))
            discard_unfinished(directory.checkpoints)
        TemporaryFolder.new(run, "brorl-").remove()
    best = directory.checkpoints / "step-000002"
    assert best_checkpoint(directory.checkpoints) == best
    assert (directory.checkpoints / "best").read_text() == best.name
    assert last_checkpoint(directory.checkpoints) == directory.checkpoints / "step-000003"
    assert find_damage(best) is None
    assert load_state(best).step == 2
    (run / "config.yaml").touch()
    assert make_config({"model": str(directory.checkpoints / "best")}, {}, "test").model == str(best)
    assert resolve_checkpoint(str(directory.checkpoints / "best")) == (str(best), run / "config.yaml")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (4 if code == errno.EINVAL else 5)  # fsync of files too
    reason = os.strerror(code)
    for line in (
        f"{directory.checkpoints} does not support symbolic links ({reason})",
        f"{directory.checkpoints} does not support permissions ({reason})",
        f"{run} does not support locks ({reason})",
        f"does not support fsync of folders ({reason})",
    ):
        assert any(line in warning for warning in lines), (line, lines)
    mark_best(directory.checkpoints, 3)  # with links again
    assert (directory.checkpoints / "best").is_symlink()
    assert best_checkpoint(directory.checkpoints) == directory.checkpoints / "step-000003"


@each_row(
    ("code", "fix"),
    [
        (errno.ENOSPC, "free disk space"),
        (errno.EDQUOT, "free disk space"),
        (errno.EACCES, "fix the permissions"),
        (errno.EROFS, "fix the permissions"),
        (errno.EIO, "check the file system"),
        (errno.ESTALE, "check the file system"),
    ],
)
def test_a_failed_write_names_its_cause_and_its_own_fix(code: int, fix: str, tmp_path: Path) -> None:
    error = OSError(code, os.strerror(code))
    with (
        pytest.raises(StorageError, match=rf"{os.strerror(code)}; {fix}, then resume the run$"),
        storage_errors(tmp_path),
    ):
        raise error
    with pytest.raises(
        StorageError, match=rf"{os.strerror(code)}\); the last complete one is none; {fix}, then: brorl"
    ):
        save_checkpoint(tmp_path, INITIAL_STATE, Mock(side_effect=error), Mock())


@each_row(
    ("code", "missing"),
    [(code, name) for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO) for name in ("fsync", "chmod", "symlink")],
)
def test_a_full_or_damaged_disk_is_an_error_in_each_operation(code: int, missing: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{code}-{missing}"
    first = saved(folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        take_away(patch, code, [missing])
        with pytest.raises(StorageError, match=os.strerror(code)):
            mark_best(folder, 1) if missing == "symlink" else saved(folder, 2)
    assert last_checkpoint(folder) == first


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EINVAL])
def test_a_run_and_its_resumption_are_those_of_a_usual_disk(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*SMALL, "--checkpoint_every=1", "--evaluation.keep_best=true", "--evaluation.every=1")
    usual, bare = tmp_path / "usual", tmp_path / "bare"
    assert command("train", *settings, "--steps=2", "--output_dir", usual).code == 0
    take_away(monkeypatch, code)
    assert command("train", *settings, "--steps=1", "--output_dir", bare).code == 0
    outcome = command("resume", bare, "--steps=2")
    assert outcome.code == 0, outcome.err
    best = bare / "checkpoints/best"
    assert best.read_text() == (usual / "checkpoints/best").readlink().name
    best.unlink()
    assert_same_run(bare, usual)
