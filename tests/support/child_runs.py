"""`brorl` commands in child processes, which may be harmed on the way.

One server forks them all. It runs as long as the test session, imports torch when the first test needs it, and makes a
command cost half a second instead of five. This file is its program too. A harm waits for an event in the child, such
as the opening of a file, and then kills the child, interrupts it, tears a write in two or limits the size of files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from run_support import Outcome

_ADDRESS = "BRORL_TEST_FORK_SERVER"


@dataclass(frozen=True)
class Harm:
    """What happens to a child, and when.

    Attributes:
        action: `kill`, `interrupt` (SIGINT), `terminate` (SIGTERM), `terminate all` (SIGTERM to the processes of its
            session too), `tear` (write half of a metrics line, then kill), or `limit` (no file may grow beyond `size`
            bytes from then on, which is how a full disk looks).
        event: Regular expression for the event, `open MODE PATH`, `rename TO`, `unlink PATH`, `half PATH` (half of what
            `torch.save` writes is written), `update N` (the optimizer did N updates), `sample N` (the engine is called
            for the N-th time) or `call N`.
        nth: Which of the events that match.
        size: Bytes, for `limit`.
    """

    action: str
    event: str
    nth: int = 1
    size: int = 0


class ForkServer:
    """The server, as the test session sees it. The processes of the session find it through the environment."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp()
        address = f"{self._folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            )
        os.environ[_ADDRESS] = address

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder)


class Child:
    """A command in a process forked from the server.

    Args:
        folder: Its working directory.
        arguments: Those of the command.
        harms: What happens to it.
        count_calls: Whether to count its calls of Python functions.
        log: File for its output and errors; None to return them with the outcome. At most 64 KiB are returned.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str | Path,
        harms: Sequence[Harm] = (),
        count_calls: bool = False,
        log: Path | None = None,
    ) -> None:
        job = {
            "folder": str(folder),
            "arguments": [str(a) for a in arguments],
            "harms": [asdict(h) for h in harms],
            "count_calls": count_calls,
            "log": str(log) if log else None,
        }
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[_ADDRESS])
        self._answers = self._socket.makefile()
        self._socket.sendall(json.dumps(job).encode() + b"\n")
        self.pid: int = json.loads(self._answers.readline())

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait for its end.

        Raises:
            TimeoutError: If it runs on.
        """
        self._socket.settimeout(timeout_s)
        with self._socket, self._answers:
            return Outcome(**json.loads(self._answers.readline()))


class ChildRuns:
    """Runs commands in children, one after the other, with one working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str | Path, harms: Sequence[Harm] = (), count_calls: bool = False) -> Outcome:
        """Run a command, and harm it."""
        return Child(self.folder, *arguments, harms=harms, count_calls=count_calls).wait()


def _serve(listener: socket.socket) -> None:
    """Fork a process for every connection until the session closes this one's input."""
    is_ready = False
    while True:
        readable, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in readable:
            return
        connection, _ = listener.accept()
        if not is_ready:
            _import_everything()
            is_ready = True
        if not os.fork():
            listener.close()
            _answer(connection)
            os._exit(0)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _import_everything() -> None:
    import gc
    from functools import lru_cache
    from multiprocessing import forkserver, resource_tracker, util  # noqa: F401

    import pyarrow.parquet
    import rich._emoji_codes  # noqa: F401
    import ruamel.yaml  # noqa: F401
    import torch
    import torch.utils.serialization.config
    import transformers.models.llama.modeling_llama  # noqa: F401

    import brorl.assemble
    import brorl.config.reading
    import brorl.console.progress
    import brorl.evaluation.questions
    import brorl.trackers
    from brorl.model.load import load_model, load_tokenizer

    torch.set_num_threads(1)
    load_tokenizer("quickstart")  # fills caches of transformers
    load_model("quickstart", torch.device("cpu"), torch.float32)
    pyarrow.Table.from_pylist([{"imports": "pandas, where it is installed"}])
    brorl.evaluation.questions.countdown_puzzles = puzzles = lru_cache(brorl.evaluation.questions.countdown_puzzles)
    for max_number in (5, 7):  # those of the tests
        puzzles(3, max_number, range(1, 100))
    util.spawnv_passfds = _fork_program
    gc.collect()
    gc.freeze()  # children neither search what was there before, nor copy its pages


def _answer(connection: socket.socket) -> None:
    """Run the command that a connection requests, and send its process and its outcome."""
    file = connection.makefile("rw")
    job = json.loads(file.readline())
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    child = os.fork()
    if not child:
        connection.close()
        outputs = writers[:2] if job["log"] is None else (os.open(job["log"], os.O_WRONLY | os.O_CREAT),) * 2
        for descriptor, target in zip((os.open(os.devnull, os.O_RDONLY), *outputs), range(3), strict=True):
            os.dup2(descriptor, target)
        _run(job, writers[2])
    file.write(f"{child}\n")
    file.flush()
    _, status = os.waitpid(child, 0)
    for descriptor in writers:
        os.close(descriptor)
    out, err, calls = (os.read(descriptor, 1 << 16).decode() for descriptor in readers)
    outcome = Outcome(os.waitstatus_to_exitcode(status), out, err, int(calls or 0))
    file.write(json.dumps(outcome._asdict()) + "\n")
    file.flush()


def _run(job: dict[str, Any], calls: int) -> NoReturn:
    """Be the command, and write to the descriptor `calls` how many functions it called."""
    from brorl.cli import main

    os.setsid()
    os.chdir(job["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 99
    try:
        harms = [Harm(**h) for h in job["harms"]]
        watch = _Watch(harms)
        sys.addaudithook(watch.on_event)
        if job["count_calls"] or any(h.event.startswith("call") for h in harms):
            sys.setprofile(watch.on_call)
        code = main(job["arguments"])
        sys.setprofile(None)
        os.write(calls, str(watch.calls).encode())
    except BaseException:  # a traceback is what the tests look for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_program(_path: str, arguments: list[str], passed: Sequence[int]) -> int:
    """Replace `multiprocessing.util.spawnv_passfds`: its programs are forks too, and find their imports made."""
    child = os.fork()
    if child:
        return child
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        kept = sorted({0, 1, 2, *passed})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        exec(arguments[-1], {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


class _Watch:
    """Sees the child's events and does the harm."""

    def __init__(self, harms: list[Harm]) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from brorl.rollout.native_engine import NativeEngine

        self.calls = 0
        self._harms = harms
        self._at_call = {int(h.event.split()[1]): h for h in harms if h.event.startswith("call")}
        self._seen = [0] * len(harms)
        self._updates = self._samples = 0
        self._sample = NativeEngine.sample
        NativeEngine.sample = lambda engine, *arguments: self._on_sample(engine, *arguments)  # type: ignore[method-assign]
        self._save = torch.save
        torch.save = self._save_in_two_halves
        register_optimizer_step_post_hook(self._on_update)

    def on_event(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            self._on(f"open {values[1]} {values[0]}", values[0])
        elif event == "os.rename":
            self._on(f"rename {values[1]}")
        elif event == "os.remove":
            self._on(f"unlink {values[0]}")

    def on_call(self, _frame: Any, event: str, _value: Any) -> None:
        if event == "call":
            self.calls += 1
            if self.calls in self._at_call:
                self._do(self._at_call[self.calls], None)

    def _save_in_two_halves(self, value: Any, file: BinaryIO) -> None:
        if not any(h.event.startswith("half") for h in self._harms):
            return self._save(value, file)
        buffer = io.BytesIO()
        self._save(value, buffer)
        content, half = buffer.getvalue(), len(buffer.getvalue()) // 2
        file.write(content[:half])
        file.flush()
        self._on(f"half {file.name}")
        file.write(content[half:])
        return None

    def _on_update(self, *_: Any) -> None:
        self._updates += 1
        self._on(f"update {self._updates}")

    def _on_sample(self, engine: Any, *arguments: Any) -> Any:
        self._samples += 1
        self._on(f"sample {self._samples}")
        return self._sample(engine, *arguments)

    def _on(self, text: str, path: Any = None) -> None:
        for i, harm in enumerate(self._harms):
            if re.search(harm.event, text):
                self._seen[i] += 1
                if self._seen[i] == harm.nth:
                    self._do(harm, path)

    def _do(self, harm: Harm, path: Any) -> None:
        match harm.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "tear":
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(descriptor, b'{"step": 4, "sampling": {"rou')
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "terminate all":
                for process in Path("/proc").glob("[0-9]*"):
                    with contextlib.suppress(ProcessLookupError):
                        if os.getsid(int(process.name)) == os.getpid():
                            os.kill(int(process.name), signal.SIGTERM)
            case "limit":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (harm.size, harm.size))
            case _:
                raise ValueError(f"there is no action {harm.action}")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
