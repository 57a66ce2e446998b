"""Every command ends quietly where the reader of its output has closed the pipe, as `brorl ... | head -1` does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brorl.errors import CLOSED

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
CHECK = ["check", "quickstart", "--no-timing"]


def with_closed_output(*arguments: str) -> tuple[int, bytes]:
    """Run a command whose output nobody reads; return its exit code and its errors."""
    read, write = os.pipe()
    os.close(read)
    try:
        return with_output(write, *arguments)
    finally:
        os.close(write)


def with_output(descriptor: int, *arguments: str) -> tuple[int, bytes]:
    """Run a command that writes to a descriptor; return its exit code and its errors."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "brorl", *arguments]
    done = subprocess.run(command, stdout=descriptor, stderr=subprocess.PIPE, env=environment)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *(pytest.param(each, marks=pytest.mark.slow) for each in (["init", "a.jsonl"], CHECK))],
    ids=" ".join,
)
def test_a_closed_pipe_ends_a_command_without_a_traceback(arguments: list[str]) -> None:
    Path("a.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    assert with_closed_output(*arguments) == (CLOSED, b"")
    assert Path("mine.yaml").exists() == (arguments[0] == "init")  # its work was done


@pytest.mark.slow
def test_an_error_is_printed_though_the_output_is_closed() -> None:
    code, said = with_closed_output("init")
    assert code == 2
    assert said.startswith(b"brorl: the following arguments are required: DATA_FILE")


@pytest.mark.linux
def test_a_full_disk_below_the_output_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        code, said = with_output(full.fileno(), "--help")
    assert code == CLOSED
    assert said == b"brorl: No space left on device; free some space, or write the output elsewhere\n"
