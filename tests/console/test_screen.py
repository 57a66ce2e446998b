"""The screen: on a pipe, on a terminal, and in the log."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table
from rich.text import Text

import brorl
from brorl.activity import Stage
from brorl.console.screen import WIDTH, Screen

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def test_what_stays_is_in_the_log_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if the output were a terminal
    log = tmp_path / "run.log"
    with Screen() as screen:
        screen.observe(Stage("loading", "model"))
        screen.log_to(log)
        screen.echo(Text("in color", style="bold red"))
        table = Table("a", "b")
        table.add_row("[bold]1[/bold]", "2" * 150)
        screen.show(table)
    assert "\x1b" in capsys.readouterr().out
    text = log.read_text()
    assert text.startswith("in color\n")
    assert not CONTROL.search(text)
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_pipe_hears_at_once_and_then_whenever_nothing_was_said_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brorl.console.screen.QUIET_S", 0.05)
    log = tmp_path / "run.log"
    with Screen() as screen:
        assert capsys.readouterr().out == f"brorl {brorl.__version__}: starting\n"
        assert screen.console.width == WIDTH
        screen.log_to(log)
        screen.observe(Stage("loading", "model"))
        while not log.exists() or log.read_text().count("\n") < 3:
            time.sleep(0.01)
    said = log.read_text()
    assert capsys.readouterr().out == said
    assert set(said.splitlines()) == {"loading model for 0s"}
    screen.echo("afterwards")
    assert log.read_text() == said + "afterwards\n"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel of a notebook, as rich recognizes it; the list gets each text of the output that is updated."""
    texts: list[str] = []

    class Handle:
        def update(self, shown: dict[str, str], **_: bool) -> None:
            texts.append(shown["text/plain"])

    def display(shown: dict[str, str], **_: bool) -> Handle:
        texts.append(shown["text/plain"])
        return Handle()

    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel sets it
    return texts


def test_a_notebook_shows_each_line_once_and_one_line_that_changes(
    notebook: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.log"
    with Screen() as screen:
        screen.log_to(log)
        screen.observe(Stage("loading", "model"))
        screen.echo(Text("stays", style="bold"))
        while len(notebook) < 2:
            time.sleep(0.01)
        screen.ending = "finished 2 steps"
    assert capsys.readouterr().out == "stays\n"
    assert log.read_text() == "stays\n"
    first, *live, last = notebook
    assert first == f"brorl {brorl.__version__}: starting"
    assert {text.rpartition(" for ")[0] for text in live} == {f"brorl {brorl.__version__}: loading model"}
    assert last == f"brorl {brorl.__version__}: finished 2 steps"


def test_a_silent_screen_shows_nothing_in_a_notebook(notebook: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(silent=True) as screen:
        screen.echo("not said")
    assert (notebook, capsys.readouterr().out) == ([], "")


def test_a_full_disk_does_not_stop_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.log_to(tmp_path / "none" / "run.log")
    screen.answer_stop(True)
    assert "stopping now" in capsys.readouterr().out


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("why", [pytest.param("No space left on device", marks=pytest.mark.linux), "nobody reads it"])
def test_work_with_a_log_goes_on_without_its_output(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.log"
    output = os.fdopen(closed_pipe(), "w") if why == "nobody reads it" else Path("/dev/full").open("w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", output)
    screen = Screen()
    with pytest.raises((SystemExit, OSError)):
        screen.echo("there is no log yet")
    screen = Screen()
    screen.log_to(log)
    if why == "nobody reads it":  # rich has replaced the pipe
        os.dup2(closed_pipe(), output.fileno())
    screen.echo("one")
    screen.echo("two")
    assert log.read_text() == "one\ntwo\n"
    expected = f"brorl: the output is lost ({why}); the work continues, and its lines are in {log}\n"
    assert capsys.readouterr().err == expected
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    output.close()


def test_a_terminal_shows_one_line_that_changes_and_vanishes() -> None:
    """A real terminal ends up with the permanent lines and nothing else."""
    width = 60
    program = """
import sys, time
from brorl.activity import Decoding, Stage, Round, Step
from brorl.console.screen import Screen
with Screen() as screen:
    screen.observe(Step(1))
    screen.observe(Round(1, 2, 3, 16))
    screen.observe(Stage("generation"))
    for done in range(100):
        screen.observe(Decoding(done, 99_999, 10**9, 10**6))
        time.sleep(0.01)
    screen.echo("it stays " * 40)
"""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=theirs,
        env={**os.environ, "COLUMNS": str(width), "LINES": "30", "TERM": "xterm-256color"},
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 4096):
            output += chunk
    except OSError:  # how Linux tells the end of a terminal
        pass
    os.close(ours)
    assert child.wait() == 0
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", output.decode())]
    live = [line for line in shown if "step 1, sampling" in line]
    assert len(set(live)) > 2
    assert max(map(len, live)) <= width
    stays = [line for line in shown if "it stays" in line]
    assert max(len(line.rstrip()) for line in stays) <= width  # broken between words
    assert all(set(line.split()) == {"it", "stays"} for line in stays)
    assert b"\x1b[2K" in output[output.rindex(b"step 1, sampling") :]  # the line is erased
