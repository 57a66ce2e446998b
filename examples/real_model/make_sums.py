"""Make arithmetic questions for a pretrained model: training and held-out rows, one JSON object per line.

    python examples/real_model/make_sums.py FOLDER

This writes `train.jsonl` and `held_out.jsonl`, and a harder half, `hard_train.jsonl` and `hard_held_out.jsonl`. An easy
question adds 2 to 4 small numbers; a hard one has numbers up to 99, and also differences and products. No expression
appears twice. The same seed gives the same bytes.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

NUM_TRAIN, NUM_HELD_OUT = 4_000, 512


def easy(rng: Random) -> str:
    """Draw 2 numbers up to 50, 3 up to 15 or 4 up to 9, to add."""
    count = rng.randint(2, 4)
    return expression(rng, count, "+", {2: 50, 3: 15, 4: 9}[count])


def hard(rng: Random) -> str:
    """Draw 2 to 4 numbers up to 99, to add, subtract and multiply."""
    return expression(rng, rng.randint(2, 4), "+-*", 99)


def expression(rng: Random, count: int, signs: str, largest: int) -> str:
    """Draw numbers from 1 on, and a sign before each but the first."""
    numbers = [rng.randint(1, largest) for _ in range(count)]
    return str(numbers[0]) + "".join(f" {rng.choice(signs)} {number}" for number in numbers[1:])


def distinct(draw: Callable[[Random], str], rng: Random, taken: set[str]) -> list[str]:
    """Draw the expressions of a half in random order, none of them taken before, and mark them as taken."""
    drawn: list[str] = []
    while len(drawn) < NUM_TRAIN + NUM_HELD_OUT:
        expression = draw(rng)
        if expression not in taken:
            taken.add(expression)
            drawn.append(expression)
    rng.shuffle(drawn)
    return drawn


def row(drawn: str) -> str:
    """Return a line of JSON with the question and its answer."""
    return json.dumps({"question": f"What is {drawn}?", "answer": str(eval(drawn))}) + "\n"  # drawn by this file alone


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rng, taken = Random(options.seed), set[str]()
    for draw, prefix in ((easy, ""), (hard, "hard_")):
        lines = [row(drawn) for drawn in distinct(draw, rng, taken)]
        for name, part in (("train", lines[:NUM_TRAIN]), ("held_out", lines[NUM_TRAIN:])):
            (options.folder / f"{prefix}{name}.jsonl").write_text("".join(part), "utf-8", newline="\n")
    print(f"wrote {NUM_TRAIN} training and {NUM_HELD_OUT} held-out questions of each half to {options.folder}")


if __name__ == "__main__":
    main()
