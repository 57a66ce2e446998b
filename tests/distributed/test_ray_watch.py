"""The watch on Ray's own processes, with sockets in their place."""

import socket
import threading
from typing import Any

import pytest

pytest.importorskip("ray")

from ray._private import worker

from brorl.distributed.ray_watch import RayProcess, RayWatch, send_messages_of_ray


def test_a_process_that_is_gone_is_reported_once() -> None:
    lost: list[str] = []
    happened = threading.Event()

    def on_loss(name: str) -> None:
        lost.append(name)
        happened.set()

    with socket.create_server(("127.0.0.1", 0)) as head, socket.create_server(("127.0.0.1", 0)) as here:
        watch = RayWatch([RayProcess("head", head.getsockname()), RayProcess("here", here.getsockname())], on_loss)
        assert not happened.wait(0.5)
        here.close()
        assert happened.wait(60.0)
        watch.close()
    assert lost == ["here"]


def test_a_head_may_come_back() -> None:
    lost: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = head.getsockname()
    watch = RayWatch([RayProcess("head", address, returns_within_s=3600.0)], lost.append)
    assert not threading.Event().wait(0.5)
    watch.close()
    assert lost == []


def test_messages_of_ray_go_to_the_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    noted: list[str] = []
    send_messages_of_ray(noted.append)
    message: dict[str, Any] = {"lines": ["A worker died"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(message, ignore_prefix=False)
    assert noted == ["A worker died"]
    assert capsys.readouterr().out == ""
