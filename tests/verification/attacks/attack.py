"""One attack: the source of a hostile program, how it runs, and when it counts as contained.

Every attack is contained only if none of the scene's canaries notices it (`scene.py`) and no `BREACH` or secret leaves
the sandbox. The source finds these names defined, if it uses them:

    SECRET_FILE, NOTE_FILE, FOLDER   files of the trainer, and their folder
    VICTIM                           process id of another process of the same user
    PARENT, ADDRESS, LENGTH, FD      process id of the trainer; where its memory and its descriptors hold a secret
    PORT, UDP_PORT, SOCKET_FILE, ABSTRACT   sockets that the trainer listens on
    TOKEN, KEY                       a name and a number for new files and System V objects
    BREACH                           the text that an attack prints or returns when it has succeeded
    SERVER                           process id of the parent process
    syscall(x86_64, aarch64, ...)    a raw system call; the result, or minus the error number

The attacks of a category are in its file `*.attacks`: a line such as `@ call must_fail bites: what it tries` begins
each, and its source follows. Those whose sources are computed are in a module of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attack:
    """A hostile program.

    Attributes:
        name: What it tries, a few words, unique.
        source: Its source.
        function: Function that is called twice after loading; None runs the source as a program.
        must_fail: Whether a reply without a failure is a breach.
        bites: Whether it does harm where nothing confines it, on every Linux; only harmless ones may say so.
        stdin: Input of a program.
    """

    name: str
    source: str
    function: str | None = None
    must_fail: bool = False
    bites: bool = False
    stdin: str = ""


def program(name: str, source: str, *, must_fail: bool = False, bites: bool = False, stdin: str = "") -> Attack:
    """Return an attack by a whole program."""
    return Attack(name, source.lstrip("\n"), None, must_fail, bites, stdin)


def call(name: str, source: str, *, must_fail: bool = False, bites: bool = False) -> Attack:
    """Return an attack by a program with a function `f(x)` that is called."""
    return Attack(name, source.lstrip("\n"), "f", must_fail, bites)


def read_attacks(category: str) -> tuple[Attack, ...]:
    """Return the attacks of a file."""
    text = Path(__file__).with_name(f"{category}.attacks").read_text("utf-8")
    attacks = []
    for part in f"\n{text}".split("\n@ ")[1:]:
        head, _, source = part.partition("\n")
        words, _, name = head.partition(": ")
        kind, *flags = words.split()
        assert kind in ("program", "call"), head
        assert {*flags} <= {"must_fail", "bites"}, head
        function = "f" if kind == "call" else None
        attacks.append(Attack(name, source.strip("\n"), function, "must_fail" in flags, "bites" in flags))
    return tuple(attacks)
