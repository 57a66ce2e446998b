"""What the user reads when processes of Ray die, without Ray."""

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("ray")

from ray._private import worker

from brorl.distributed.connection import send_messages_of_ray


def test_messages_of_ray_go_to_the_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    noted: list[str] = []
    send_messages_of_ray(noted.append)
    message: dict[str, Any] = {"lines": ["A worker died"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(message, ignore_prefix=False)
    assert noted == ["A worker died"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("end", "expected"), [("os._exit(1)", "go on with this\n"), ("words.withdraw()", "")])
def test_the_exit_message_of_a_process_that_is_ended(end: str, expected: str) -> None:
    program = "\n".join(
        [
            "import os",
            "from brorl.distributed.connection import ExitMessage",
            "words = ExitMessage('go on with this')",
            end,
        ]
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr) == ("", expected)
