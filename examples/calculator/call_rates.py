"""Show how often a model called the calculator for small and for large numbers, before and after training.

    brorl train calculator --output_dir runs/calculator
    python examples/calculator/call_rates.py runs/calculator

In: a run of the recipe `calculator`. Out: a table, by the digits of the factors, of the rollouts that the run stored in
its first step, which the untrained model sampled, and in its last ten.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

LAST_STEPS = 10


@dataclass(frozen=True)
class PromptCounts:
    """Rollouts of one prompt in one step."""

    digits: int  # of the longer factor
    rollouts: int
    calls: int  # rollouts that called the calculator
    correct: int
    correct_alone: int  # correct without a call

    @property
    def call_rate(self) -> float:
        """Fraction of the rollouts with a call."""
        return self.calls / self.rollouts


def counts_of_step(file: Path) -> list[PromptCounts]:
    """Count the stored rollouts of each prompt; a row is a distinct response and records who wrote each token."""
    rows = defaultdict[str, list[tuple[int, bool, bool]]](list)
    for row in pq.read_table(file, columns=["question", "count", "given", "correct"]).to_pylist():
        rows[row["question"]].append((row["count"], any(row["given"]), row["correct"]))
    return [
        PromptCounts(
            max(map(len, question.split("*"))),
            sum(count for count, _, _ in responses),
            sum(count for count, called, _ in responses if called),
            sum(count for count, _, correct in responses if correct),
            sum(count for count, called, correct in responses if correct and not called),
        )
        for question, responses in rows.items()
    ]


def before_and_after(run: Path) -> tuple[list[PromptCounts], list[PromptCounts]]:
    """Return the counts of the first step, and of the last ten."""
    files = sorted((run / "rollouts").glob("step-*.parquet"))
    last = [counts for file in files[-LAST_STEPS:] for counts in counts_of_step(file)]
    return counts_of_step(files[0]), last


def line(digits: int, prompts: Sequence[PromptCounts]) -> str:
    """Return a row of the table."""
    chosen = [prompt for prompt in prompts if prompt.digits == digits]
    rollouts, calls, correct, alone = (
        sum(getattr(prompt, name) for prompt in chosen) for name in ("rollouts", "calls", "correct", "correct_alone")
    )
    if not rollouts:
        return f"{digits:6}  {0:8,}"
    right_alone = f"{alone / (rollouts - calls):11.3f}" if calls < rollouts else f"{'-':>11}"
    return f"{digits:6}  {rollouts:8,}  {calls / rollouts:5.3f}  {correct / rollouts:5.3f}  {right_alone}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    for title, prompts in zip(("first step", f"last {LAST_STEPS} steps"), before_and_after(run), strict=True):
        print(f"{title}\ndigits  rollouts  calls  right  right alone")
        print("\n".join(line(digits, prompts) for digits in sorted({prompt.digits for prompt in prompts})))


if __name__ == "__main__":
    main()
