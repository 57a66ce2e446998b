"""A headless Chromium that tests drive over the DevTools protocol, through a pipe, with the standard library alone.

In: the path of a page. Out: values of expressions, what the page asked of any network, what it logged, screenshots.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import pytest

MISSING = "no Chromium: apt-get install chromium"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The protocol's pipes are the browser's file descriptors 3 and 4. They are moved out of the way first.
_START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE_S = 60.0  # a bound that ends a hung browser; nothing is measured by it


def chromium_or_skip() -> str:
    """Return the path of a Chromium; where there is none, skip, or fail if BRORL_REQUIRE_CHROMIUM is set."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found:
        return found
    if os.environ.get("BRORL_REQUIRE_CHROMIUM") == "1":
        pytest.fail(MISSING)
    pytest.skip(MISSING)


class Chromium:
    """One browser with one page; it starts while the test goes on, until the first call."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="brorl-chromium-", ignore_cleanup_errors=True)
        command_read, self._command = os.pipe()
        self._answers, answer_write = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable, "-S", "-c", _START, str(command_read), str(answer_write), program, "--headless=new",
                "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
                "--disable-extensions", "--disable-background-networking", "--disable-component-update",
                "--no-first-run", "--disable-dev-shm-usage", "--window-size=1400,900", "about:blank",
            ],
            pass_fds=(command_read, answer_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_read)
        os.close(answer_write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._command)
        os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol for the page and return its result."""
        if self._session is None:
            target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
            self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self._ask(f"{domain}.enable", {})
        return self._ask(method, parameters)

    def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._command, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        end = monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], max(end - monotonic(), 0))[0], "Chromium does not answer"
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, page: Path) -> None:
        """Open a page from its file, forget earlier events, and wait until the page says that it is ready."""
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset?.ready === 'yes'")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = monotonic() + _PATIENCE_S
        while not self.value(condition):
            assert monotonic() < end, f"never came true: {condition}"

    def choose(self, select_id: str, value: str) -> None:
        """Choose an option as a user does."""
        self.value(
            f"(() => {{ const s = document.getElementById({json.dumps(select_id)}); s.value = {json.dumps(value)};"
            "s.dispatchEvent(new Event('change')); })()"
        )

    def press(self, key: str) -> None:
        """Press a key such as `ArrowDown` in what has the focus."""
        code = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def set_width(self, width: int, height: int = 900) -> None:
        """Set the width of the page in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer_dark(self, dark: bool) -> None:
        """Set what the system prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path, whole: bool = True) -> None:
        """Write a picture of the page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def requests(self) -> list[str]:
        """Return every address that the page asked for, apart from itself and what it holds in itself."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("file://", "data:", "blob:"))]

    def files_opened(self) -> list[str]:
        """Return every file that the page asked for, itself included."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent if url.startswith("file://")]

    def complaints(self) -> list[str]:
        """Return errors and warnings of the page: thrown, logged, or of a policy that was broken."""
        said = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                said.append(json.dumps(params["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                said.append(json.dumps(params["args"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                said.append(params["entry"]["text"])
        return said
