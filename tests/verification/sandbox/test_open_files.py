"""The limit of open files: raised where the workers need it, and an error where it cannot be raised.

Each test runs in a process of its own, since a limit stays lowered.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.linux

NUM_WORKERS = 8
PROGRAMS = f"""
from brorl.verification.sandbox.request import Limits
from brorl.verification.sandbox.pool import ProgramPool
from functools import partial
def judge(number, worker):
    worker.load("def f(x): return x", Limits(600.0), "one")
    worker.load("def f(x): return x + 1", Limits(600.0), "two")
    return tuple(worker.call("f", (number,), Limits(600.0), name).value for name in ("one", "two"))
with ProgramPool({NUM_WORKERS}, "unsafe") as pool:
    outputs = pool.run([partial(judge, number) for number in range({2 * NUM_WORKERS})])
    assert outputs == [(number, number + 1) for number in range({2 * NUM_WORKERS})], outputs
"""
FUNCTIONS = f"""
from brorl.verification.sandbox.pool import VerifierCall, WorkerPool
with WorkerPool({NUM_WORKERS}, timeout_s=600.0) as pool:
    replies = pool.run([VerifierCall("math:factorial", (number,)) for number in range({2 * NUM_WORKERS})])
    assert [result.failure for result in replies] == [None] * {2 * NUM_WORKERS}, replies
"""
LIMITED = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    exec({source!r})
except Exception as error:
    print(type(error).__name__, error)
else:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def outcome(source: str, soft: int, hard: int, tmp_path: Path) -> str:
    script = tmp_path / "limited.py"
    script.write_text(LIMITED.format(source=source, soft=soft, hard=hard))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [FUNCTIONS, pytest.param(PROGRAMS, marks=pytest.mark.slow)], ids=["calls", "programs"]
)
def test_a_low_soft_limit_is_raised_and_one_that_suffices_stays(source: str, tmp_path: Path) -> None:
    soft, hard = map(int, outcome(source, 20, 1024, tmp_path).split())
    assert 20 + 12 * NUM_WORKERS <= soft <= hard == 1024
    assert outcome(source, 512, 512, tmp_path) == "512 512"


def test_a_hard_limit_that_is_too_low_is_an_error(tmp_path: Path) -> None:
    message = outcome(FUNCTIONS, 20, 40, tmp_path)
    assert message.startswith(f"UserError {NUM_WORKERS} verification workers need ")
    assert "but this process can open 40; raise the hard limit with `ulimit -n " in message
    assert message.endswith("or set verification.workers to a smaller number")
