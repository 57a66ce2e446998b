"""The canaries of an attack: files, a process, sockets, memory. They notice whether an attack reached them.

In: an attack. Out: its source with the names that it uses defined, and afterwards the harm that it did. All checks are
made by this process, which the attack cannot change; an attack's own words count only against it.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attacks.attack import Attack

SECRET_VARIABLE = "BRORL_ATTACK_SECRET"  # the trainer's environment has a secret under this name
_RAW_CALL = """
import ctypes as _c, platform as _p, os as _o
_libc = _c.CDLL(None, use_errno=True)
_libc.syscall.restype = _c.c_long
def syscall(x86_64, aarch64, *arguments):
    _c.set_errno(0)
    number = x86_64 if _o.uname().machine == 'x86_64' else aarch64
    result = _libc.syscall(_c.c_long(number), *(_c.c_long(a) if type(a) is int else a for a in arguments))
    return -_c.get_errno() if result == -1 else result
"""


class Scene:
    """Canaries for one attack; made when its source uses them."""

    def __init__(self, attack: Attack, root: Path) -> None:
        self.attack = attack
        self.token = secrets.token_hex(8)
        self.breach = f"breach{secrets.token_hex(8)}"
        self.secret = f"secret{secrets.token_hex(12)}"
        self.folder = root / self.token
        self._memory = ctypes.create_string_buffer(self.secret.encode())
        self._victim: subprocess.Popen[bytes] | None = None
        self._victim_before: object = None
        self._descriptor: int | None = None
        self._sockets: dict[str, socket.socket] = {}
        self._files_before: dict[str, object] = {}
        self.source = self._defined() + attack.source

    @property
    def victim(self) -> int | None:
        """Process id of the victim, None without one."""
        return None if self._victim is None else self._victim.pid

    def harm(self, texts: tuple[str, ...]) -> list[str]:
        """Return what the attack reached, as short texts; empty if it is contained.

        Args:
            texts: Everything that came out of the sandbox: outputs, values, failures.
        """
        harms = []
        out = "\n".join(texts)
        if self.breach in out:
            harms.append("did what it should not be able to do")
        environment = os.environ.get(SECRET_VARIABLE)
        if self.secret in out or (environment and environment in out):
            harms.append("read a secret")
        if self._memory.raw[:-1] != self.secret.encode():
            harms.append("wrote memory of the trainer")
        if self._files_before and _files(self.folder) != self._files_before:
            harms.append("changed files")
        if self._victim is not None and _state(self._victim) != self._victim_before:
            harms.append("changed another process")
        harms += [f"connected to {name}" for name, target in self._sockets.items() if _has_news(target)]
        harms += _left_objects(self.token)
        return harms

    def close(self) -> None:
        """Remove all canaries."""
        if self._victim is not None:
            self._victim.kill()
            self._victim.wait()
        if self._descriptor is not None:
            os.close(self._descriptor)
        for target in self._sockets.values():
            target.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in _left_files(self.token):
            path.unlink(missing_ok=True)

    def _defined(self) -> str:
        makers = {
            "SECRET_FILE": lambda: str(self._files() / "secret.txt"),
            "NOTE_FILE": lambda: str(self._files() / "note.txt"),
            "FOLDER": lambda: str(self._files()),
            "TOKEN": lambda: self.token,
            "KEY": lambda: int(self.token[:7], 16),
            "BREACH": lambda: self.breach,
            "VICTIM": self._start_victim,
            "PARENT": os.getpid,
            "ADDRESS": lambda: ctypes.addressof(self._memory),
            "LENGTH": lambda: len(self.secret),
            "FD": self._open_descriptor,
            "PORT": lambda: self._listen("TCP", socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1],
            "UDP_PORT": lambda: self._listen("UDP", socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1],
            "SOCKET_FILE": lambda: self._listen("Unix", socket.AF_UNIX, f"{self._files()}/socket").getsockname(),
            "ABSTRACT": lambda: self._listen("abstract", socket.AF_UNIX, f"\0{self.token}").getsockname()[1:].decode(),
        }
        lines = [
            f"{name} = {make()!r}" for name, make in makers.items() if re.search(rf"\b{name}\b", self.attack.source)
        ]
        if re.search(r"\bSERVER\b", self.attack.source):
            lines.append("SERVER = __import__('os').getppid()")
        if "syscall(" in self.attack.source:
            lines.append(_RAW_CALL)
        if self.folder.exists():
            self._files_before = _files(self.folder)
        return "\n".join(lines) + "\n" if lines else ""

    def _files(self) -> Path:
        if not self.folder.exists():
            self.folder.mkdir()
            (self.folder / "secret.txt").write_text(self.secret, "ascii")
            (self.folder / "secret_module.py").write_text(f"SECRET = {self.secret!r}\n", "ascii")
            (self.folder / "note.txt").write_text("a note", "ascii")
        return self.folder

    def _start_victim(self) -> int:
        self._victim = subprocess.Popen(["sleep", "1000"], env={"A": self.secret, "PATH": os.environ["PATH"]})
        self._victim_before = _state(self._victim)
        return self._victim.pid

    def _open_descriptor(self) -> int:
        self._descriptor = os.open(self._files() / "secret.txt", os.O_RDONLY)
        return self._descriptor

    def _listen(self, name: str, family: socket.AddressFamily, address: object) -> socket.socket:
        target = socket.socket(family, socket.SOCK_DGRAM if name == "UDP" else socket.SOCK_STREAM)
        target.bind(address)
        if name != "UDP":
            target.listen()
        target.setblocking(False)
        self._sockets[name] = target
        return target


@contextmanager
def scenes(attacks: tuple[Attack, ...]) -> Iterator[list[Scene]]:
    """Make the canaries of some attacks in a new folder, and remove them in the end."""
    with tempfile.TemporaryDirectory(prefix="brorl-attacks-", ignore_cleanup_errors=True) as root:
        made: list[Scene] = []
        try:
            for attack in attacks:
                made.append(Scene(attack, Path(root)))  # noqa: PERF401 (those made are removed if one fails)
            yield made
        finally:
            for scene in made:
                scene.close()


def _files(folder: Path) -> dict[str, object]:
    """Return what can be told of the files of a folder, except the times of reading."""
    states: dict[str, object] = {}
    if not folder.exists():
        return states
    for path in [folder, *folder.rglob("*")]:
        if "__pycache__" in path.parts:
            continue
        about = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        attributes = tuple(os.listxattr(path, follow_symlinks=False)) if hasattr(os, "listxattr") else ()
        changed = about.st_mtime_ns if path != folder else 0
        states[str(path)] = (about.st_mode, about.st_nlink, about.st_uid, about.st_gid, changed, content, attributes)
    return states


def _state(victim: subprocess.Popen[bytes]) -> object:
    """Return what others can change of a process: life, stop, tracer, priority, limits, processors."""
    if victim.poll() is not None:
        return "dead"
    pid = victim.pid
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    lines = {key: value.strip() for key, _, value in (line.partition(":") for line in status.splitlines())}
    stopped = lines["State"][0] in "Tt"
    limits = tuple(resource.prlimit(pid, number) for number in range(16))
    score = Path(f"/proc/{pid}/oom_score_adj").read_text("ascii")
    scheduling = (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), os.sched_getaffinity(pid))
    return stopped, lines["TracerPid"], limits, score, str(scheduling), os.getpgid(pid), os.getsid(pid)


def _has_news(target: socket.socket) -> bool:
    try:
        if target.type == socket.SOCK_DGRAM:
            target.recv(1)
        else:
            target.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _left_files(token: str) -> list[Path]:
    folders = [
        Path(name)
        for name in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", str(Path.home()))
        if os.access(name, os.R_OK)
    ]
    return [path for folder in folders for path in folder.glob(f"*{token}*") if path.is_file() or path.is_symlink()]


def _left_objects(token: str) -> list[str]:
    """Return the files and System V objects that carry the name of an attack."""
    leftovers = [f"left {path.parent}/..." for path in _left_files(token)]
    key = str(int(token[:7], 16))
    for kind in ("shm", "msg", "sem"):
        table = Path(f"/proc/sysvipc/{kind}")
        if table.exists() and any(line.split()[0] == key for line in table.read_text("ascii").splitlines()):
            leftovers.append(f"left a System V object ({kind})")
    return leftovers
