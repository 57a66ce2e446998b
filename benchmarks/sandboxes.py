"""Sandboxes for untrusted Python programs: which attacks they hold, and trivial programs per second.

python benchmarks/sandboxes.py [--programs N] [--rounds N] [--no-attacks] [--sandboxes NAME,...]

`plain` is a subprocess without a sandbox and runs only the attacks that are harmless there. `bubblewrap` needs the
program `bwrap`, and `sandlock` the package `sandlock==0.9.0`; a sandbox that is not installed is left out. The attacks
are the whole programs of tests/verification/attacks: the other sandboxes do not call functions. Rates are medians of
rounds in turns, with two programs at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import table, timed

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "verification"))
from attacks.attack import Attack
from attacks.campaign import run as run_campaign
from attacks.catalog import CATEGORIES
from attacks.leftovers import inherit_orphans, remaining
from attacks.scene import SECRET_VARIABLE, scenes

from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Limits, Reply
from brorl.verification.sandbox.worker import Worker

TRIVIAL = "a, b = map(int, input().split())\nprint(a * b)\n"
MEMORY = 256 << 20
PYTHON = [f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}", "-I", "-S"]
NO_PROCESS_LIMIT = ("fork bomb", "forks that sleep", "raw fork", "raw clone3", "flood of threads")


class Ran(NamedTuple):
    """What came out of a program."""

    stdout: str
    failed: bool


Runner = Callable[[str, str, float], Ran]


def subprocess_runner(wrapper: Sequence[str]) -> Runner:
    """Return the runner that starts Python below a wrapper program."""

    def run(source: str, stdin: str, seconds: float) -> Ran:
        command = ["prlimit", f"--as={MEMORY}", *wrapper, *PYTHON, "-c", source]
        try:
            done = subprocess.run(command, input=stdin.encode(), capture_output=True, timeout=seconds)
        except (subprocess.TimeoutExpired, ValueError, OSError) as error:  # ValueError: a NUL in the source
            return Ran((getattr(error, "stdout", b"") or b"").decode("utf-8", "replace"), True)
        return Ran(done.stdout.decode("utf-8", "replace"), done.returncode != 0)

    return run


def bubblewrap() -> Runner:
    """Return the runner of bubblewrap with every namespace, no environment and no capabilities."""
    readable = [part for path in ("/usr", sys.base_prefix) for part in ("--ro-bind", path, path)]
    links = [part for name in ("lib", "lib64", "bin") for part in ("--symlink", f"usr/{name}", f"/{name}")]
    return subprocess_runner(
        ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", *readable,
         *links, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--"]
    )  # fmt: skip


def sandlock() -> Runner:
    """Return the runner of sandlock with the interpreter readable and nothing writable."""
    from sandlock import Sandbox

    readable = ["/usr", "/lib", "/lib64", sys.base_prefix]

    def run(source: str, stdin: str, seconds: float) -> Ran:
        box = Sandbox(fs_readable=readable, max_memory=MEMORY, max_processes=1, clean_env=True, no_coredump=True)
        preface = f"import io, sys; sys.stdin = io.StringIO({stdin!r})\n" if stdin else ""
        try:
            done = box.run([*PYTHON, "-c", preface + source], timeout=seconds)
        except (RuntimeError, ValueError) as error:
            return Ran(str(error), True)
        return Ran((done.stdout or b"").decode("utf-8", "replace"), not done.success)

    return run


def runners() -> dict[str, Runner]:
    """Return the other sandboxes that this machine has."""
    found = {"plain": subprocess_runner([])}
    if shutil.which("bwrap"):
        found["bubblewrap"] = bubblewrap()
    if importlib.util.find_spec("sandlock"):
        found["sandlock"] = sandlock()
    return found


def harm(name: str, run: Runner, attacks: Sequence[Attack]) -> dict[str, list[str]]:
    """Return the harm of each attack that was run, one after the other."""
    found = {}
    for attack in attacks:
        if name == "plain" and not attack.bites:
            continue
        if name == "bubblewrap" and attack.name in NO_PROCESS_LIMIT:
            found[attack.name] = ["has no limit of processes; not run"]
            continue
        with scenes((attack,)) as (scene,):
            ran = run(scene.source, attack.stdin, 0.5 if attack.must_fail else 3.0)
            found[attack.name] = scene.harm((ran.stdout,))
            if attack.must_fail and not ran.failed:
                found[attack.name].append("did not fail")
            if len(ran.stdout) > 1 << 24:
                found[attack.name].append("kept an endless output in the memory of the trainer")
            found[attack.name] += [f"left {line}" for line in remaining({scene.victim}, 1, 2.0)]
        print(name, attack.name, found[attack.name], file=sys.stderr, flush=True)
    return found


def rate(run: Runner, count: int) -> float:
    """Return programs per second, two at once."""
    inputs = [(i, i + 1) for i in range(count)]
    with ThreadPoolExecutor(2) as pool:
        done: list[Ran] = []
        texts = [f"{a} {b}\n" for a, b in inputs]
        seconds = timed(lambda: done.extend(pool.map(lambda text: run(TRIVIAL, text, 30.0), texts))).seconds
    assert [ran.stdout for ran in done] == [f"{a * b}\n" for a, b in inputs]
    return count / seconds


def own_rate(pool: ProgramPool, count: int) -> float:
    """Return programs per second of the fork server."""

    def judge(a: int, worker: Worker) -> Reply:
        return worker.run(TRIVIAL, f"{a} {a + 1}\n", Limits(seconds=30.0))

    replies: list[Any] = []
    seconds = timed(lambda: replies.extend(pool.run([partial(judge, a) for a in range(count)]))).seconds
    assert all(isinstance(r, Reply) and r.value == f"{a * (a + 1)}\n" for a, r in enumerate(replies))
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-attacks", action="store_true")
    parser.add_argument("--sandboxes", default="plain,bubblewrap,sandlock,landlock,seccomp")
    parsed = parser.parse_args()
    if SECRET_VARIABLE not in os.environ:  # /proc shows the environment with which a process started
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, SECRET_VARIABLE: "secret-of-the-benchmark"}
        )
    wanted = parsed.sandboxes.split(",")
    others = {name: run for name, run in runners().items() if name in wanted}
    own = [name for name in ("landlock", "seccomp") if name in wanted]
    rates: dict[str, list[float]] = {name: [] for name in (*others, *own)}
    pools = {name: ProgramPool(num_workers=2, sandbox=name) for name in own}
    for _ in range(parsed.rounds):
        for name, run in others.items():
            rates[name].append(rate(run, max(2, parsed.programs // 5)))
        for name, pool in pools.items():
            rates[name].append(own_rate(pool, parsed.programs))
    for pool in pools.values():
        pool.close()
    rows = [] if parsed.no_attacks else attack_rows(others, own)
    print(
        table(("", *rates), [*rows, ("trivial programs/s", *(f"{statistics.median(r):,.0f}" for r in rates.values()))])
    )


def attack_rows(others: dict[str, Runner], own: Sequence[str]) -> list[list[str]]:
    """Run all attacks and return held/run for each category and sandbox."""
    inherit_orphans()
    programs = {name: tuple(a for a in attacks if a.function is None) for name, attacks in CATEGORIES.items()}
    everything = tuple(attack for attacks in programs.values() for attack in attacks)
    found = {name: harm(name, run, everything) for name, run in others.items()}
    for name in own:
        outcome = run_campaign(name, everything)
        found[name] = outcome["harm"]  # type: ignore[assignment]
        print(name, outcome["strangers"], file=sys.stderr)
    rows = []
    for category, attacks in programs.items():
        cells = [category]
        for one in found.values():
            ran = [one[attack.name] for attack in attacks if attack.name in one]
            cells.append(f"{sum(not h for h in ran)}/{len(ran)}" if ran else "")
        if attacks:
            rows.append(cells)
    return rows


if __name__ == "__main__":
    main()
