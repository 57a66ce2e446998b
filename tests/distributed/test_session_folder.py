"""Folders of killed runs are removed; those in use, new ones, and those of other programs stay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brorl.distributed.session_folder import new_session_folder, remove_abandoned

pytestmark = pytest.mark.linux


def test_the_folder_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from brorl.distributed.session_folder import new_session_folder;"
            "print(new_session_folder().path, flush=True); os.kill(os.getpid(), 9)",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == -9, made.stderr
    used = new_session_folder()
    killed, used_path = Path(made.stdout.strip()), Path(used.path)
    for folder in (killed, used_path):
        folder.rename(tmp_path / folder.name)
    killed, used_path = tmp_path / killed.name, tmp_path / used_path.name
    other, new = tmp_path / "brorl-ray-without-lock", tmp_path / "brorl-ray-new"
    for folder in (other, new):
        folder.mkdir()
    (new / "used").touch()
    for folder in (killed, used_path, other):
        os.utime(folder, (0, 0))
    remove_abandoned(tmp_path)
    assert not killed.exists()
    assert used_path.exists()
    assert other.exists()
    assert new.exists()
    assert used.descriptor is not None
    os.close(used.descriptor)
    remove_abandoned(tmp_path)
    assert not used_path.exists()
