"""What programs can use of Python: the same modules, threads and stacks at every level."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from judges import LIMITS, ended

from brorl.verification.sandbox.inside.fork_server import _EXTENSIONS
from brorl.verification.sandbox.inside.landlock import landlock_version
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Limits

pytestmark = pytest.mark.linux

LEVELS = ["landlock", "seccomp", "unsafe"]
WITHOUT_A_DISPLAY_OR_NETWORK = {"_tkinter", "nis", "tkinter", "turtle"}
IMPORT = """
import importlib, sys, warnings
warnings.simplefilter('ignore')
failed = []
for name in input().split():
    try: importlib.import_module(name)
    except ImportError: failed.append(name)
print(*failed)
"""


@pytest.fixture(scope="module", params=LEVELS)
def pool(request: pytest.FixtureRequest) -> Iterator[ProgramPool]:
    if request.param == "landlock" and not landlock_version():
        pytest.skip("the kernel has no Landlock")
    with ProgramPool(1, request.param) as pool:
        yield pool


def unconfined(names: str) -> set[str]:
    """Return the modules that this Python cannot import."""
    command = [sys.executable, "-S", "-B", "-c", IMPORT]
    done = subprocess.run(command, input=names, capture_output=True, text=True, check=True, cwd="/")
    return {*done.stdout.split()}


def confined(pool: ProgramPool, names: str) -> set[str]:
    reply = ended(pool, IMPORT, names)
    assert reply.failure is None
    return {*reply.value.split()}


def test_modules_that_link_libraries_of_the_system_are_imported(pool: ProgramPool) -> None:
    names = "zlib base64 gzip bz2 lzma secrets zipfile sqlite3 ssl uuid crypt curses readline"
    assert confined(pool, names) == unconfined(names)


def test_parts_of_packages_are_imported(pool: ProgramPool) -> None:
    names = "concurrent.futures.thread concurrent.futures.process encodings.cp1252 xml.dom.minidom email.mime.text"
    assert confined(pool, f"{names} importlib.resources unittest.mock no_such.module") == {"no_such.module"}


@pytest.mark.slow
def test_every_module_of_the_standard_library_is_imported(pool: ProgramPool) -> None:
    """As unconfined, except those that are documented. `antigravity` opens a browser."""
    names = " ".join(sorted(sys.stdlib_module_names - {"antigravity", "this"}))
    expected = unconfined(names)
    assert confined(pool, names) - expected <= WITHOUT_A_DISPLAY_OR_NETWORK
    assert expected <= confined(pool, names)


@pytest.mark.slow
def test_every_file_of_the_standard_library_is_imported(pool: ProgramPool) -> None:
    folder = Path(_EXTENSIONS).parent
    paths = [path.relative_to(folder).with_suffix("") for path in sorted(folder.rglob("*.py"))]
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3"}
    modules = [path for path in paths if all(part.isidentifier() for part in path.parts)]
    names = " ".join(
        ".".join(path.parts).removesuffix(".__init__")
        for path in modules
        if not excluded & {*path.parts} and path.name != "__main__" and path.parts[0] not in ("this", "antigravity")
    )
    different = confined(pool, names) - unconfined(names)
    assert {name.partition(".")[0] for name in different} <= WITHOUT_A_DISPLAY_OR_NETWORK


DEEP = """
import sys, threading
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
sys.setrecursionlimit(1 << 20)
threading.stack_size(512 << 20)
thread = threading.Thread(target=lambda: print(depth(1 << 16)))
thread.start(); thread.join()
"""


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        (DEEP, "65536"),
        ("import concurrent.futures as c\nwith c.ThreadPoolExecutor(8) as e: print(sum(e.map(abs, range(9))))", "36"),
        ("import asyncio\nasync def f(): return await asyncio.to_thread(abs, -1)\nprint(asyncio.run(f()))", "1"),
    ],
    ids=["a stack of 512 MiB", "ThreadPoolExecutor", "asyncio"],
)
def test_threads_work(pool: ProgramPool, source: str, printed: str) -> None:
    reply = ended(pool, source, limits=Limits(LIMITS.seconds, memory_bytes=1 << 30))
    assert (reply.failure, reply.value) == (None, f"{printed}\n")


def test_the_limit_that_keeps_a_thread_from_starting_is_named(pool: ProgramPool) -> None:
    assert ended(pool, DEEP, limits=Limits(LIMITS.seconds, memory_bytes=1 << 29)).failure == "out of memory"
    many = "import threading\nwhile True: threading.Thread(target=threading.Event().wait, daemon=True).start()"
    assert ended(pool, many, limits=Limits(LIMITS.seconds, memory_bytes=1 << 31)).failure == "too many threads"


@pytest.mark.parametrize(
    "source",
    [
        "import multiprocessing as m\nwith m.Pool(2) as p: print(sum(p.map(abs, range(9))))",
        "import concurrent.futures as c\nwith c.ProcessPoolExecutor(2) as e: print(sum(e.map(abs, range(9))))",
    ],
    ids=["Pool", "ProcessPoolExecutor"],
)
def test_pools_of_processes_are_denied(pool: ProgramPool, source: str) -> None:
    reply = ended(pool, source)
    if pool.sandbox == "unsafe":
        assert (reply.failure, reply.value) == (None, "36\n")
    else:
        assert str(reply.failure).startswith("PermissionError: ")
