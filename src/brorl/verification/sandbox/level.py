"""The confinement levels, and the test that determines which of them hold on this machine.

A level is used only after it has withstood real attacks. At `landlock`, a program can read the standard library and
nothing else. At `seccomp`, it cannot open any file. `unsafe` limits only time and memory.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from brorl.errors import UserError
from brorl.verification.sandbox.inside.confinement import LANDLOCK, SECCOMP, UNSAFE
from brorl.verification.sandbox.request import Limits, Undecided
from brorl.verification.sandbox.server import PreloadError, ServerSettings
from brorl.verification.sandbox.worker import JudgeRun, Worker

AUTO = "auto"
_LADDER = (LANDLOCK, SECCOMP)
_LIMITS = Limits(seconds=30.0)
_SYSTEMS = {"darwin": "macOS", "win32": "Windows"}
_DENIED = ("PermissionError", "OSError")  # the kernel denied the attack
# Each attack is an expression. It raises OSError if the attack fails, and otherwise returns what the attacker got.
_ATTACKER = """
import ctypes, os, socket, sys

def call(name, *arguments):
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def connect(family, address):
    with socket.socket(family) as client:
        client.connect(address)
    return "connected"

def fork():
    if os.fork() == 0:
        os._exit(0)
    return os.wait()

def attack(expression):
    return str(eval(expression))
"""


@dataclass(frozen=True)
class Attack:
    """One attempt to break out."""

    name: str  # such as `read /etc/passwd`
    contained: bool  # whether the attempt failed, as it should
    detail: str  # the exception, or what the attack got


@dataclass(frozen=True)
class Level:
    """A confinement level, and the attacks tried against it on this machine."""

    name: str  # `landlock`, `seccomp` or `unsafe`
    attacks: tuple[Attack, ...]  # empty for `unsafe`, and if the level could not be set up
    problem: str | None  # why the level does not hold; None if it holds


def choose_level(requested: str) -> Level:
    """Return the requested level or, for `auto`, the strongest that holds. Raises a UserError if none holds here."""
    if requested == UNSAFE:
        return Level(UNSAFE, (), None)
    if sys.platform != "linux":
        raise UserError(
            f"untrusted code cannot run on {_SYSTEMS.get(sys.platform, sys.platform)}: the sandbox needs Linux; use "
            "Linux, or set verification.sandbox: unsafe to run model-generated code with your files and network"
        )
    problems = []
    for name in _LADDER if requested == AUTO else (requested,):
        level = probe_level(name)
        if level.problem is None:
            return level
        problems.append(f"{name}: {level.problem}")
    raise UserError(
        f"no sandbox for untrusted code works on this machine ({'; '.join(problems)}); use Linux 5.13 or later on "
        "x86-64 or 64-bit ARM with seccomp, or set verification.sandbox: unsafe to run model-generated code with your "
        "files and network (`brorl doctor` shows the attacks)"
    )


@cache
def probe_level(name: str) -> Level:
    """Attack the `landlock` or `seccomp` level, once per process, and return the outcome."""
    with ExitStack() as targets:
        try:
            attacks = targets.enter_context(_targets())
        except OSError as error:
            return Level(name, (), f"could not prepare its attacks ({error})")
        idle: list[Worker] = []
        try:
            (outcome,) = JudgeRun([partial(_attack, attacks)], ServerSettings(name), idle, 1).run()
        except PreloadError as error:
            return Level(name, (), str(error))
        finally:
            for worker in idle:
                worker.close()
    if isinstance(outcome, Undecided):
        return Level(name, (), outcome.reason)
    broken = [attack for attack in outcome if not attack.contained]
    problem = f"{broken[0].name}: {broken[0].detail}" if broken else None
    return Level(name, tuple(outcome), problem)


@contextmanager
def _targets() -> Iterator[dict[str, str]]:
    """Create the targets and yield the attacks on them: name -> expression to evaluate after `_ATTACKER`."""
    me = os.getpid()
    short = "/tmp" if os.access("/tmp", os.W_OK) else None  # a Unix socket path has at most 107 bytes
    with (
        tempfile.TemporaryDirectory(dir=short) as folder,
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_server(("127.0.0.1", 0)) as tcp,
    ):
        directory = Path(folder)
        directory.chmod(0o777)  # access must be denied by the sandbox, not by file permissions
        secret = directory / "secret"
        door = directory / "door"
        secret.write_text("secret", encoding="utf-8")
        secret.chmod(0o666)
        unix.bind(str(door))
        door.chmod(0o777)
        unix.listen()
        address = tcp.getsockname()
        yield {
            "read /etc/passwd": "open('/etc/passwd').read(40)",
            "read a user's file": f"open({str(secret)!r}).read(40)",
            "read the trainer's environment": f"open('/proc/{me}/environ', errors='replace').read(40)",
            "overwrite a file": f"open({str(secret)!r}, 'w').write('written from the sandbox')",
            "create a file": f"open({str(directory / 'new')!r}, 'w').write('written from the sandbox')",
            "connect to a Unix socket": f"connect(socket.AF_UNIX, {str(door)!r})",
            "connect to a port": f"connect(socket.AF_INET, {address!r})",
            "start a process": "fork()",
            "signal the trainer": f"os.kill({me}, 0)",
            "trace the trainer": f"call('ptrace', 0x4206, {me}, None, None)",  # PTRACE_SEIZE does not stop it
            "set up io_uring": "call('syscall', 425, 1, ctypes.create_string_buffer(120))",
            "execute a program": "os.execv(sys.executable, [sys.executable])",
        }


def _attack(attacks: dict[str, str], worker: Worker) -> list[Attack]:
    """Try the attacks in one confined process. An attack is contained only if it ends in a system error."""
    loaded = worker.load(_ATTACKER, _LIMITS)
    outcomes = []
    for name, expression in attacks.items():
        reply = worker.call("attack", (expression,), _LIMITS)
        failure = reply.failure or loaded.failure
        contained = failure is not None and failure.partition(":")[0] in _DENIED
        outcomes.append(Attack(name, contained, failure or str(reply.value)))
    return outcomes
