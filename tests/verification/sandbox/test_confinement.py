"""Every level withstands its attacks, for every kind of user, and the filter allows exactly what it lists."""

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import brorl
from brorl.errors import UserError
from brorl.verification.sandbox import level as level_module
from brorl.verification.sandbox.inside.landlock import landlock_version
from brorl.verification.sandbox.inside.seccomp import ALWAYS, SOMETIMES, make_filter
from brorl.verification.sandbox.level import Attack, Level, choose_level, probe_level
from brorl.verification.sandbox.pool import ProgramPool

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def verdict(program: bytes, number: int, architecture: int, arguments: tuple[int, ...] = ()) -> int:
    """Run a filter as the kernel does: an interpreter of its five instructions."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", program))
    place, loaded = 0, 0
    while True:
        code, if_true, if_false, operand = steps[place]
        place += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                loaded &= operand
            case 0x15:
                place += if_true if loaded == operand else if_false
            case 0x35:
                place += if_true if loaded >= operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.fixture(params=[*ARCHITECTURES])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("reading", [False, True])
def test_calls_that_are_not_listed_fail(machine: str, reading: bool, rng: np.random.Generator) -> None:
    column, architecture = ARCHITECTURES[machine]
    program = make_filter(reading, machine)
    always = {numbers[column] for numbers in ALWAYS.values()} - {None}
    sometimes = {numbers[column] for numbers in SOMETIMES.values()} - {None}
    assert not always & sometimes
    for number in range(600):
        for _ in range(3):
            arguments = tuple(int(a) for a in rng.integers(1 << 33, 1 << 63, 6))  # no null pointer, no small constant
            action = verdict(program, number, architecture, arguments)
            if number in always:
                assert action == ALLOW
            elif number not in sometimes:
                assert action == EPERM


def test_other_architectures_are_killed(machine: str) -> None:
    program = make_filter(True, machine)
    own = ARCHITECTURES[machine][1]
    for other in (0x40000003, 0x40000028, *(a for _, a in ARCHITECTURES.values() if a != own)):  # i386, ARM
        assert verdict(program, 0, other) == KILL
    assert verdict(program, 0x40000000, own) == KILL  # x32
    assert verdict(program, 0x40000000 + 59, own) == KILL
    with pytest.raises(OSError, match="no system-call table for 'riscv64'"):
        make_filter(True, "riscv64")


THREAD = 0x3D0F00  # the flags of the C library's pthread_create
CASES = {
    "clone": [((THREAD,), ALLOW), ((0x11,), EPERM), ((0x01200011,), EPERM), ((0x4111,), EPERM)]
    + [((THREAD & ~(1 << bit),), EPERM) for bit in (8, 10, 16)]  # of its own: memory, descriptors, a process
    + [((THREAD | 1 << bit,), EPERM) for bit in (7, 12, 13, 14, 17, 23, 25, 26, 27, 28, 29, 30)],
    "close_range": [((3, 9, 0), ALLOW), ((3, 9, 4), ALLOW), ((3, 9, 2), EPERM), ((3, 9, 6), EPERM)],
    "mmap": [((0, 4096, 3, 0x22), ALLOW), ((1 << 40, 4096, 5, 0x812), ALLOW), ((0, 4096, 1, 0x01), ALLOW)]
    + [((0, 4096, 3, flags), EPERM) for flags in (0x21, 0x23, 0x03, 0x28, 0x20, 0x31)],  # shared and anonymous
    "clone3": [((0, 0), ENOSYS), ((1 << 40, 88), ENOSYS)],
    "fcntl": [((1, command, 5), ALLOW) for command in (0, 1, 2, 3, 1030)]
    + [((1, 4, 0o4000), ALLOW), ((1, 4, 0o20000), EPERM), ((1, 4, 0o24000), EPERM)]
    + [((1, command, 99), EPERM) for command in (5, 6, 8, 10, 15, 1024, 1026, 1031, 1033)],
    "ioctl": [((0, request), ALLOW) for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)]
    + [((0, request), EPERM) for request in (0x5412, 0x5452, 0x8901, 0x8902, 0x40045431, 0x5402)],
    "prlimit64": [
        *[((0, 7, 0, 1 << 40), ALLOW), ((0, 3, 1 << 40, 0), ALLOW)],
        *[((0, 0, 1 << 40, 0), EPERM), ((0, 0, 1 << 32, 0), EPERM), ((7, 7, 0, 1), EPERM), ((7, 3, 1, 0), EPERM)],
    ],
    "setrlimit": [((3, 1 << 40), ALLOW), ((0, 1 << 40), EPERM), ((9, 1 << 40), EPERM)],
    "socketpair": [((1, 1, 0), ALLOW), ((1, 1 | 0o2004000, 0), ALLOW), ((1, 2, 0), EPERM), ((2, 1, 0), EPERM)],
    "sendto": [((3, 1 << 40, 5, 0, 0, 0), ALLOW), ((3, 0, 5, 0, 1 << 40, 16), EPERM), ((3, 0, 5, 0, 99, 16), EPERM)],
}


@pytest.mark.parametrize("name", CASES)
def test_calls_with_conditions(machine: str, name: str) -> None:
    column, architecture = ARCHITECTURES[machine]
    number = SOMETIMES[name][column]
    assert number is not None
    for reading in (False, True):
        for arguments, expected in CASES[name]:
            assert verdict(make_filter(reading, machine), number, architecture, arguments) == expected, arguments


def test_files_are_opened_for_reading_at_most(machine: str) -> None:
    column, architecture = ARCHITECTURES[machine]
    for flags in (0, os.O_CLOEXEC, os.O_NONBLOCK, os.O_DIRECTORY, os.O_NOFOLLOW):
        for name, arguments in (("open", (1 << 40, flags)), ("openat", (0xFFFFFF9C, 1 << 40, flags))):
            number = SOMETIMES[name][column]
            if number is not None:
                assert verdict(make_filter(True, machine), number, architecture, arguments) == ALLOW
                assert verdict(make_filter(False, machine), number, architecture, arguments) == EPERM
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_WRONLY | os.O_CREAT, 0o20200000 | os.O_RDWR):
        number = SOMETIMES["openat"][column]
        assert number is not None
        assert verdict(make_filter(True, machine), number, architecture, (0, 0, flags)) == EPERM


@pytest.mark.parametrize(("column", "header"), [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")])
def test_the_numbers_are_those_of_the_headers(column: int, header: str) -> None:
    """64-bit ARM has the generic numbers."""
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("no kernel headers")
    words = (line.split() for line in path.read_text().splitlines() if line.startswith("#define __NR"))
    numbers = {parts[1]: parts[2] for parts in words if len(parts) > 2}  # some name another number
    for name, number in {**ALWAYS, **SOMETIMES}.items():
        if number[column] is not None:
            expected = numbers[f"__NR_{name}"]
            assert str(number[column]) == numbers.get(expected, expected), name


@pytest.mark.linux
@pytest.mark.parametrize("name", ["landlock", "seccomp"])
def test_a_level_withstands_its_attacks(name: str) -> None:
    if name == "landlock" and not landlock_version():
        pytest.skip("the kernel has no Landlock")
    level = probe_level(name)
    assert level.problem is None
    assert len(level.attacks) >= 10
    assert all(attack.contained for attack in level.attacks), level


PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
from brorl.verification.sandbox.level import probe_level
for name in sys.argv[2:]:
    print(name, probe_level(name).problem, len(probe_level(name).attacks))
"""


@pytest.mark.linux
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "options",
    [
        ["--reuid=12345", "--regid=12345", "--clear-groups"],
        pytest.param(["--bounding-set=-all", "--inh-caps=-all"], marks=pytest.mark.slow),
        pytest.param(["--bounding-set=-kill", "--inh-caps=-all"], marks=pytest.mark.slow),
    ],
    ids=["ordinary user", "root without capabilities", "root that cannot signal others"],
)
def test_every_level_holds_for_other_users(options: list[str], tmp_path: Path) -> None:
    """In a copy of the sandbox's modules, since the checkout and this Python may be private to root."""
    python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
    version = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
    if shutil.which("setpriv") is None or tuple(map(int, version.stdout.split())) < (3, 11):
        pytest.skip("needs setpriv and a Python 3.11 that every user can run")
    with_sources = Path("/tmp") / tmp_path.name  # pytest's folders are private
    shutil.copytree(Path(brorl.__file__).parent / "verification/sandbox", with_sources / "brorl/verification/sandbox")
    try:
        for file in ("__init__.py", "errors.py", "verification/__init__.py"):
            shutil.copy(Path(brorl.__file__).parent / file, with_sources / "brorl" / file)
        subprocess.run(["chmod", "-R", "a+rX", str(with_sources)], check=True)
        names = ["landlock", "seccomp"] if landlock_version() else ["seccomp"]
        command = ["setpriv", *options, python, "-B", "-c", PROBE, str(with_sources), *names]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"HOME": "/tmp"})
        assert done.stdout.split("\n")[:-1] == [f"{name} None 12" for name in names], done
    finally:
        shutil.rmtree(with_sources)


def test_the_strongest_level_that_holds_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"landlock": "the kernel has no Landlock", "seccomp": None}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(level_module, "probe_level", lambda name: Level(name, (), held[name]))
    assert choose_level("auto").name == "seccomp"
    assert choose_level("unsafe").name == "unsafe"
    with pytest.raises(UserError, match=r"\(landlock: the kernel has no Landlock\).*verification.sandbox: unsafe"):
        choose_level("landlock")
    held["seccomp"] = "start a process: started process 7"
    with pytest.raises(UserError, match=r"no sandbox .* works on this machine .*; seccomp: start a process"):
        choose_level("auto")
    held["landlock"] = None
    assert choose_level("auto").name == "landlock"


@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows"), ("freebsd14", "freebsd14")])
def test_other_systems_do_not_run_untrusted_code(monkeypatch: pytest.MonkeyPatch, system: str, name: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    for wish in ("auto", "landlock", "seccomp"):
        with pytest.raises(UserError, match=f"untrusted code cannot run on {name}.*verification.sandbox: unsafe"):
            ProgramPool(1, wish).require()
    assert ProgramPool(1, "unsafe").require().name == "unsafe"


@pytest.mark.linux
def test_an_attack_that_succeeds_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the filter and without Landlock, the attacks get through, and the probe notices each."""
    monkeypatch.setattr(level_module, "probe_level", level_module.probe_level.__wrapped__)
    level = level_module.probe_level("unsafe")
    assert level.problem is not None
    through = {attack.name for attack in level.attacks if not attack.contained}
    assert through >= {
        "read /etc/passwd",
        "overwrite a file",
        "start a process",
        "signal the trainer",
        "execute a program",
    }
    assert all(isinstance(attack, Attack) for attack in level.attacks)


@pytest.mark.linux
def test_a_long_path_of_temporary_files_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    level = level_module.probe_level.__wrapped__("seccomp")
    assert level.problem is None
    assert len(level.attacks) >= 10


@pytest.mark.linux
def test_attacks_that_cannot_be_prepared_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a loopback interface."""

    def fail(*_: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", fail)
    monkeypatch.setattr(level_module, "probe_level", level_module.probe_level.__wrapped__)
    problem = "could not prepare its attacks ([Errno 99] Cannot assign requested address)"
    assert level_module.probe_level("seccomp") == Level("seccomp", (), problem)
    with pytest.raises(UserError, match=r"no sandbox .* seccomp: could not prepare its attacks"):
        choose_level("auto")
