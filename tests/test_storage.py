"""Temporary folders of killed processes are removed; those in use, new ones, and those of other programs stay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brorl.storage import TemporaryFolder, remove_abandoned

pytestmark = pytest.mark.linux
PREFIX = "brorl-test-"


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from brorl.storage import TemporaryFolder;"
        "print(TemporaryFolder.new(Path(sys.argv[1]), sys.argv[2]).path, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, str(tmp_path), PREFIX]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == -9, made.stderr
    used = TemporaryFolder.new(tmp_path, PREFIX)
    killed, used_path = Path(made.stdout.strip()), used.path
    other, new = tmp_path / f"{PREFIX}without-lock", tmp_path / f"{PREFIX}new"
    for folder in (other, new):
        folder.mkdir()
    (new / "used").touch()
    for folder in (killed, used_path, other):
        os.utime(folder, (0, 0))
    remove_abandoned(tmp_path, PREFIX)
    assert not killed.exists()
    assert used_path.exists()
    assert other.exists()
    assert new.exists()
    assert used.descriptor is not None
    os.close(used.descriptor)
    remove_abandoned(tmp_path, PREFIX)
    assert not used_path.exists()
