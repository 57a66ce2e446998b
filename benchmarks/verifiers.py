"""What verification costs: verdicts per second, and the worst that nasty answers do to a worker.

python benchmarks/verifiers.py [--workers N]

Rates are ratios to math-verify called in this process, in the same run. The nasty answers are those of the tests;
memory is the peak of resident memory of a worker, read while it works.
"""

import argparse
import logging
import sys
import threading
import time
from pathlib import Path
from random import Random

from math_verify import parse, verify

from brorl.prompts.prompt import Prompt
from brorl.verify.domains.math import MathVerifier
from brorl.verify.sandbox.pool import WorkerPool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "verify" / "domains"))
from nasty_answers import RESPONSES

MIB = 1 << 20
FORM = 20_000
ALGEBRA = 600


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


def alone(items: list[tuple[Prompt, str]]) -> float:
    """Verdicts per second of math-verify in this process, the reference parsed once per item, on the boxed answer."""
    answers = [(p.reference, text[text.rindex(r"\boxed") :]) for p, text in items]
    started = time.perf_counter()
    for reference, answer in answers:
        verify(parse(f"${reference}$", parsing_timeout=None), parse(f"${answer}$", parsing_timeout=None), timeout_seconds=None)  # fmt: skip  # noqa: E501
    return len(items) / (time.perf_counter() - started)


def through(verifier: MathVerifier, items: list[tuple[Prompt, str]]) -> float:
    started = time.perf_counter()
    verifier.verify_all(items)
    return len(items) / (time.perf_counter() - started)


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
    print("| answers | verdicts/s | math-verify in one process | ratio |")
    print("| --- | --- | --- | --- |")
    for name, ours, theirs in rows:
        print(f"| {name} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:,.1f} |")


def nasty() -> None:
    print("\n| nasty answer | reason | wall time, s | peak memory of the worker, MiB |")
    print("| --- | --- | --- | --- |")
    worst_s = worst_bytes = 0.0
    for name, response in RESPONSES.items():
        with WorkerPool(num_workers=1) as pool:
            verifier = MathVerifier(pool)
            verifier.verify_all([(prompt("2/7"), r"\boxed{0.25}")])
            memory = PeakMemory()
            memory.start()
            started = time.perf_counter()
            (verdict,) = verifier.verify_all([(prompt("2/7"), response)])
            seconds, peak = time.perf_counter() - started, memory.end()
        worst_s, worst_bytes = max(worst_s, seconds), max(worst_bytes, peak)
        print(f"| {name} | {verdict.reason} | {seconds:.3f} | {peak / MIB:.0f} |", flush=True)
    print(f"\n{len(RESPONSES)} answers; the worst took {worst_s:.2f} s and {worst_bytes / MIB:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    logging.disable(logging.CRITICAL)
    rates(parser.parse_args().workers)
    nasty()


if __name__ == "__main__":
    main()
