"""The cost of verification: verdicts per second by domain, hostile answers, and a fuzz run.

python benchmarks/verification.py [--workers N]
python benchmarks/verification.py --fuzz 100000 [--workers N] [--seed S]
python benchmarks/verification.py --neighbors [--workers N]
python benchmarks/verification.py --sleepers 512 [--workers N] [--batch-timeout S]

Rates of math are ratios to math-verify called in this process, in the same run. Rates of the domains are of the
hand-made responses in examples/domains, each verified once. The hostile answers are those of the tests. Memory is the
peak resident memory of a worker during its work.

The neighbors are honest programs beside programs whose threads hash without the GIL, in a cgroup of their own where the
system allows one (as root): in the root cgroup the kernel's autogroups share a core by program, elsewhere by thread.
A second table has wrong answers whose threads stay busy after their calls, while test code of 0.5 s runs.
The sleepers are answers that sleep until a limit ends them, with one honest program after each eight.

The fuzz run verifies mutated responses of every domain twice and exits with 1 if two verdicts differ. A domain whose
packages are not installed is left out.
"""

import argparse
import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from harness import table, timed
from math_verify import parse, verify

from brorl.prompts.code_tests import CodeTests, StdinCases, TestCode
from brorl.prompts.prompt import Prompt
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.domains.math import MathVerifier
from brorl.verification.domains.verifiers import DOMAINS
from brorl.verification.sandbox.pool import ProgramPool, WorkerPool, Workers
from brorl.verification.sandbox.request import Limits, Reply
from brorl.verification.sandbox.worker import Worker

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "verification" / "domains"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "verification"))
from fuzz import ROOT, mutations, problems, seeds_of
from nasty_answers import RESPONSES

MIB = 1 << 20
FORM = 20_000
ALGEBRA = 600
PROGRAMS = 2_000
PART = 2_000  # responses of the fuzz run that are made and verified together
HASHING = """import hashlib, threading
data = bytes(1 << 22)
def spin():
    while True: hashlib.sha256(data)
for _ in range({threads} - 1): threading.Thread(target=spin, daemon=True).start()
spin()"""
HONEST = "def f(x): return x * x"
WRONG = """import hashlib, time, _thread
def work():
    time.sleep(0.05)
    {work}
def f(x):
    if x == 1:
        for _ in range(40): _thread.start_new_thread(work, ())
    return x * x if x < 2 else 0"""
IDLE = {
    "none": "return",
    "40 that hash": "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "40 that sleep 0.1 ms at a time": "while True: time.sleep(0.0001)",
}
NEEDS = {"ifeval": "langdetect", "gym": "reasoning_gym"}


def prompt(reference: str) -> Prompt:
    return Prompt(reference, "?", (1,), reference, "math")


def integers(count: int, random: Random) -> list[tuple[Prompt, str]]:
    """Long responses that end in a boxed integer, half of them right."""
    text = "Let us compute this step by step. " * 60
    return [
        (prompt(str(n)), rf"{text}\boxed{{{n + random.randint(0, 1)}}}")
        for n in (random.randint(0, 10**6) for _ in range(count))
    ]


def fractions(count: int, random: Random) -> list[tuple[Prompt, str]]:
    """Answers that need algebra: reduced against not reduced, all distinct."""
    found = {}
    while len(found) < count:
        a, b, k = random.randint(1, 999), random.randint(2, 999), random.randint(2, 9)
        found[a, b] = (
            prompt(rf"\frac{{{a}}}{{{b}}}"),
            rf"\boxed{{\frac{{{a * k}}}{{{b * k + random.randint(0, 1)}}}}}",
        )
    return list(found.values())


def duplicates(count: int, random: Random) -> list[tuple[Prompt, str]]:
    """Many responses to few prompts with few answers each, as a policy gives them: different texts, equal answers."""
    asked = [(prompt(rf"\frac{{{a}}}{{7}}"), a) for a in random.sample(range(1, 999), 40)]
    items = []
    for number in range(count):
        one, a = random.choice(asked)
        k = random.randint(1, 3)
        answer = rf"\frac{{{a * k}}}{{{7 * k + random.randint(0, 1)}}}"
        items.append((one, rf"Attempt {number}. We reduce the fraction. \boxed{{{answer}}}"))
    return items


def alone(items: list[tuple[Prompt, str]]) -> float:
    """Verdicts per second of math-verify in this process, the reference parsed once per item, on the boxed answer."""
    answers = [(p.reference, text[text.rindex(r"\boxed") :]) for p, text in items]

    def verify_each() -> None:
        for texts in answers:
            verify(*(parse(f"${text}$", parsing_timeout=None) for text in texts), timeout_seconds=None)

    return len(items) / timed(verify_each).seconds


def through(verifier: MathVerifier, items: list[tuple[Prompt, str]]) -> float:
    return len(items) / timed(lambda: verifier.verify_all(items)).seconds


class PeakMemory(threading.Thread):
    """Watches the peak of resident memory of this process's children, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._stop_asked = 0, threading.Event()

    def run(self) -> None:
        """Watch until told to stop."""
        while not self._stop_asked.wait(0.002):
            for task in Path("/proc/self/task").iterdir():
                for pid in (task / "children").read_text("ascii").split():
                    self.peak = max(self.peak, resident(int(pid)))

    def end(self) -> int:
        """Stop, and return the peak."""
        self._stop_asked.set()
        self.join()
        return self.peak


def resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    except OSError:
        return 0
    return max((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), default=0)


def rates(num_workers: int) -> None:
    random = Random(0)
    alone(fractions(20, random))  # what math-verify loads at its first use
    with WorkerPool(num_workers) as pool:
        MathVerifier(pool).verify_all(fractions(40, random))
        by_form, by_algebra = integers(FORM, random), fractions(ALGEBRA, random)
        rows = [
            ("integers, here", through(MathVerifier(pool), by_form), alone(by_form[:ALGEBRA])),
            (f"fractions, {num_workers} workers", through(MathVerifier(pool), by_algebra), alone(by_algebra)),
        ]
        verifier = MathVerifier(pool)
        verifier.verify_all(by_algebra)
        rows.append(("fractions, again", through(verifier, by_algebra), rows[-1][2]))
    cells = ((name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:,.1f}") for name, ours, theirs in rows)
    print(table(("answers", "verdicts/s", "math-verify in one process", "ratio"), cells))


def nasty() -> None:
    rows = []
    for name, response in RESPONSES.items():
        with WorkerPool(num_workers=1) as pool:
            verifier = MathVerifier(pool)
            verifier.verify_all([(prompt("2/7"), r"\boxed{0.25}")])
            memory = PeakMemory()
            memory.start()
            started = time.perf_counter()
            (verdict,) = verifier.verify_all([(prompt("2/7"), response)])
            rows.append((name, verdict.reason, time.perf_counter() - started, memory.end() / MIB))
    columns = ("hostile answer", "reason", "wall time, s", "peak memory of the worker, MiB")
    print("\n" + table(columns, ((*row[:2], f"{row[2]:.3f}", f"{row[3]:.0f}") for row in rows)))
    worst = (max(row[i] for row in rows) for i in (2, 3))
    print("\n{} answers; the worst took {:.2f} s and {:.0f} MiB".format(len(rows), *worst))


def programs(num_workers: int) -> None:
    """Print trivial programs per second."""

    def judge(number: int, worker: Worker) -> Reply:
        return worker.run("print(int(input()) + 1)", f"{number}\n", Limits(seconds=30.0))

    with ProgramPool(num_workers) as pool:
        level = pool.require().name
        pool.run([partial(judge, 0)] * num_workers)
        replies: list[Any] = []
        judges = [partial(judge, n) for n in range(PROGRAMS)]
        seconds = timed(lambda: replies.extend(pool.run(judges))).seconds
    assert all(isinstance(r, Reply) and r.value == f"{n + 1}\n" for n, r in enumerate(replies))
    print(f"\n{PROGRAMS / seconds:,.0f} trivial programs/s on {num_workers} workers at the level {level}")


def domains() -> list[str]:
    """Return the domains whose packages are installed."""
    return [name for name in sorted(DOMAINS) if importlib.util.find_spec(NEEDS.get(name, "brorl")) is not None]


def by_domain(num_workers: int) -> None:
    """Print answers per second of each domain, and of math where most answers repeat."""
    random = Random(0)
    items_of = {f"{name}, hand-made responses": (name, list(seeds_of(name).items)) for name in domains()}
    items_of["math, 240 answers repeated"] = ("math", duplicates(FORM, random))
    rows = []
    with Workers(WorkerPool(num_workers), ProgramPool(num_workers)) as workers:
        for label, (name, items) in items_of.items():
            DOMAINS[name](workers).verify_all(items[:2])  # starts the processes
            seconds = timed(partial(DOMAINS[name](workers).verify_all, items)).seconds
            rows.append((label, f"{len(items):,}", f"{len(items) / seconds:,.0f}"))
    print("\n" + table((f"responses, {num_workers} workers", "number", "answers/s"), rows))


@contextlib.contextmanager
def own_cgroup() -> Iterator[str]:
    """Move this process to a cgroup of its own while inside; yield where it is."""
    for root in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        group = root / f"brorl-{os.getpid()}"
        try:
            if root.name != "cpu":
                (root / "cgroup.subtree_control").write_text("+cpu")
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            continue
        try:
            yield f"cgroup {group}"
        finally:
            (root / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    yield "no cgroup of its own could be made"


def code_item(answer: str, number: int) -> tuple[Prompt, str]:
    """Return a program that is to print 1, and differs from the others by its number."""
    question = Prompt("q", "?", (1,), CodeTests(StdinCases(("",), ("1",))).to_text(), "code")
    return question, f"```python\n{answer}\n# {number}\n```"


def neighbors(num_workers: int) -> None:
    """Print how many honest programs are correct beside hashing threads."""
    started = time.process_time()
    sum(i * i for i in range(1_000_000))
    loops = int(400_000 / (time.process_time() - started))  # 0.4 s of processor time
    honest = f"sum(i * i for i in range({loops}))\nprint(1)"
    with own_cgroup() as where:
        print(f"{where}, {num_workers} workers, {len(os.sched_getaffinity(0))} cores\n")
        rows = []
        for threads in (0, 8, 24, 60):
            hostile = [code_item(HASHING.format(threads=threads), n) for n in range(6 if threads else 0)]
            items = [*hostile, *(code_item(honest, n) for n in range(12))]
            items = [items[i] for i in sorted(range(len(items)), key=lambda i: (i % max(len(hostile), 1), i))]
            with ProgramPool(num_workers) as pool:
                verifier, began = CodeVerifier(pool, timeout_s=1.5), time.perf_counter()
                verdicts = verifier.verify_all(items)
            found = Counter(v.reason for item, v in zip(items, verdicts, strict=True) if item not in hostile)
            correct, seconds = found.pop("correct", 0), time.perf_counter() - began
            rows.append((threads, f"{correct} of 12", dict(found) or "", f"{seconds:.1f}"))
    print(table(("threads", "honest programs correct", "other verdicts on them", "s"), rows))


def busy_after_calls(num_workers: int) -> None:
    """Print the verdicts on 12 honest answers and 8 wrong ones whose threads run while the test code does."""
    started = time.process_time()
    sum(i * i for i in range(1_000_000))
    loops = int(500_000 / (time.process_time() - started))  # 0.5 s of processor time
    tests = (
        f"found = [f(i) for i in range(2)]\nfor _ in range(20): sum(j * j for j in range({loops // 20}))\n"
        "assert found == [0, 1]\nassert f(2) == 4"
    )
    reference = CodeTests(TestCode("f", tests)).to_text()
    question = Prompt("q", "?", (1,), reference, "code")
    with own_cgroup() as where:
        print(f"\n{where}, {num_workers} workers, {len(os.sched_getaffinity(0))} cores\n")
        rows = []
        for name, work in IDLE.items():
            sources = [HONEST] * 12
            for number in range(8):
                sources.insert(2 * number, WRONG.format(work=work))
            items = [(question, f"```python\n{source}\n# {i}\n```") for i, source in enumerate(sources)]
            with ProgramPool(num_workers, batch_timeout_s=60.0) as pool:
                verifier, began = CodeVerifier(pool, timeout_s=0.5), time.perf_counter()
                verdicts = verifier.verify_all(items)
            seconds = time.perf_counter() - began
            pairs = [*zip(verdicts, sources, strict=True)]
            correct = sum(verdict.correct for verdict, source in pairs if source == HONEST)
            wrong = Counter(verdict.reason for verdict, source in pairs if source != HONEST)
            rows.append((name, f"{correct} of 12", dict(wrong), f"{seconds:.1f}"))
    print(table(("threads of the wrong answers", "honest answers correct", "verdicts on the wrong ones", "s"), rows))


def sleepers(count: int, num_workers: int, batch_timeout_s: float | None) -> None:
    """Print the wall time of answers that sleep almost to the limit in each of ten cases, and the verdicts."""
    limit_s = 0.2
    tests = CodeTests(StdinCases(("",) * 10, ("1",) * 10)).to_text()
    question = Prompt("q", "?", (1,), tests, "code")
    items = []
    for number in range(count):
        items.append((question, f"```python\nimport time\ntime.sleep({0.9 * limit_s})\nprint(1)  # {number}\n```"))
        if number % 8 == 7:
            items.append((question, f"```python\nprint(1)  # honest {number}\n```"))
    options = {} if batch_timeout_s is None else {"batch_timeout_s": batch_timeout_s}
    with ProgramPool(num_workers, **options) as pool:
        verifier = CodeVerifier(pool, timeout_s=limit_s)
        verifier.verify_all([code_item("print(1)", 0)])
        began = time.perf_counter()
        verdicts = verifier.verify_all(items)
        seconds = time.perf_counter() - began
    for what, honest in (("sleepers", False), ("honest programs", True)):
        found = Counter(v.reason for (_, text), v in zip(items, verdicts, strict=True) if ("honest" in text) == honest)
        print(f"{sum(found.values())} {what}: {dict(found)}")
    print(f"{seconds:.1f} s of wall time on {num_workers} workers, {limit_s:g} s per case, time of all: {options}")


def fuzz(count: int, num_workers: int, seed: int) -> int:
    """Verify mutated responses of every domain twice; return the number of problems."""
    random = Random(seed)
    found = 0
    rows = []
    with Workers(WorkerPool(num_workers), ProgramPool(num_workers)) as workers:
        for name in domains():
            fraction, wrong, started = count // len(domains()), 0, time.perf_counter()
            for start in range(0, fraction, PART):
                items = mutations(seeds_of(name), min(PART, fraction - start), random)
                here = problems(lambda name=name: DOMAINS[name](workers), items, random)
                wrong += len(here)
                for problem in here:
                    print(f"{name}: {problem}", file=sys.stderr, flush=True)
            rows.append((name, f"{fraction:,}", wrong, f"{time.perf_counter() - started:,.0f}"))
            found += wrong
    print(f"seed {seed}\n\n{table(('domain', 'responses', 'problems', 's'), rows)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fuzz", type=int, metavar="N", help="verify N mutated responses over all domains instead")
    parser.add_argument("--neighbors", action="store_true", help="run honest programs beside hashing threads instead")
    parser.add_argument("--sleepers", type=int, metavar="N", help="verify N answers that sleep instead")
    parser.add_argument("--batch-timeout", type=float, metavar="S", help="time of all sleepers (default: the pool's)")
    parser.add_argument("--seed", type=int, default=None, help="of the fuzz run (default: a new one)")
    parsed = parser.parse_args()
    logging.disable(logging.CRITICAL)
    os.chdir(ROOT)  # the example recipes name their files from here
    if parsed.fuzz is not None:
        seed = int.from_bytes(os.urandom(4)) if parsed.seed is None else parsed.seed
        sys.exit(1 if fuzz(parsed.fuzz, parsed.workers, seed) else 0)
    if parsed.sleepers:
        sleepers(parsed.sleepers, parsed.workers, parsed.batch_timeout)
        return
    if parsed.neighbors:
        neighbors(parsed.workers)
        busy_after_calls(parsed.workers)
        return
    rates(parsed.workers)
    by_domain(parsed.workers)
    programs(parsed.workers)
    nasty()


if __name__ == "__main__":
    main()
