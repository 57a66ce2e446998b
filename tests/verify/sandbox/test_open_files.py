"""The limit of open files: raised where the workers need it, and an error where it cannot be raised.

Each test runs in a process of its own, since a limit stays lowered.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.linux

NUM_WORKERS = 8
POOLS = {
    "programs": f"""
from brorl.verification.sandbox.replies import Limits
from brorl.verification.sandbox.pool import ProgramPool
from functools import partial
pool = ProgramPool({NUM_WORKERS}, "unsafe")
def judge(number, worker):
    worker.load("def f(x): return x", Limits(600.0), "one")
    worker.load("def f(x): return x + 1", Limits(600.0), "two")
    return tuple(worker.call("f", (number,), Limits(600.0), name).value for name in ("one", "two"))
def work(pool=pool):
    found = pool.run([partial(judge, number) for number in range({2 * NUM_WORKERS})])
    assert found == [(number, number + 1) for number in range({2 * NUM_WORKERS})], found
""",
    "functions": f"""
from brorl.verification.sandbox.pool import VerifierCall
from brorl.verification.sandbox.pool import WorkerPool
pool = WorkerPool({NUM_WORKERS}, timeout_s=600.0)
def work(pool=pool):
    found = pool.run([VerifierCall("math:factorial", (number,)) for number in range({2 * NUM_WORKERS})])
    assert [result.failure for result in found] == [None] * {2 * NUM_WORKERS}, found
""",
}
BOTH = f"""
{POOLS["programs"]}
programs, work_of_programs = pool, work
{POOLS["functions"]}
def work(work_of_functions=work):
    for _ in range(2):
        work_of_programs()
        between()
        work_of_functions()
"""
POOLS["both"] = BOTH + "    programs.close()\ndef between(): pass\n"
POOLS["one after the other"] = (
    BOTH.replace("        work_of_functions()", "        work_of_functions()\n        pool.close()")
    + "def between(): programs.close()\n"
)
LIMITED = """
import os, resource
{pool}
if __name__ == "__main__":
    opened = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
    try:
        work()
    except Exception as error:
        print(type(error).__name__, error)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft >= opened + {least}, soft
        assert hard == {hard}
        print("worked")
    pool.close()
"""


def outcome(pool: str, soft: int, hard: int, tmp_path: Path, least: int = 0) -> str:
    script = tmp_path / "limited.py"
    script.write_text(LIMITED.format(pool=POOLS[pool], soft=soft, hard=hard, least=least))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("pool", "per_worker"),
    [("functions", 4), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("programs", 6), ("both", 10)))],
)
def test_a_low_soft_limit_is_raised(pool: str, per_worker: int, tmp_path: Path) -> None:
    assert outcome(pool, 20, 1024, tmp_path, least=per_worker * NUM_WORKERS) == "worked"


@pytest.mark.parametrize("pool", ["programs", "functions"])
def test_a_hard_limit_that_is_too_low_is_an_error(pool: str, tmp_path: Path) -> None:
    found = outcome(pool, 20, 40, tmp_path)
    assert found.startswith(f"UserError {NUM_WORKERS} verification workers need ")
    assert "but this process can open 40; raise the hard limit with `ulimit -n " in found
    assert found.endswith("or set verification.workers to a smaller number")


@pytest.mark.slow
def test_a_hard_limit_that_suffices_for_one_pool_alone(tmp_path: Path) -> None:
    """Each pair of workers needs 10 files, and the process 16 others: more than the limit, unlike for either pool."""
    most = 11 * NUM_WORKERS
    found = outcome("both", 20, most, tmp_path)
    assert found.startswith(f"UserError {2 * NUM_WORKERS} verification workers need ")
    assert f"but this process can open {most}; raise the hard limit" in found
    assert outcome("one after the other", 20, most, tmp_path) == "worked"


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_limit_that_suffices_stays(pool: str, tmp_path: Path) -> None:
    assert outcome(pool, 512, 512, tmp_path) == "worked"
