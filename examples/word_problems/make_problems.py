"""Make a small file of math word problems, one JSON object per line, with answers as in GSM8K.

    python examples/word_problems/make_problems.py

This writes `problems.jsonl` next to this file: 300 problems with different texts, one or two steps of arithmetic, whole
numbers up to 30 and some decimals and fractions. The same seed gives the same bytes.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import NamedTuple

PROBLEMS = Path(__file__).with_name("problems.jsonl")
LARGEST = 30  # of all answers: a tiny model must see every number often

NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jack", "Kim", "Leo", "Mia", "Noah", "Olga",
         "Paul")  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "keys", "marbles", "pears", "pencils", "plums",
          "shells", "stamps", "stones", "toys", "tickets")  # fmt: skip
HOLDERS = ("bags", "boxes", "baskets", "jars", "rows", "shelves")


class Problem(NamedTuple):
    """A question, the line of reasoning, and the answer as text."""

    question: str
    reasoning: str
    answer: str


def gain(rng: Random) -> Problem:
    """Add two numbers."""
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 15), rng.randint(2, 15)
    verb = rng.choice(("finds", "buys", "gets", "wins"))
    question = f"{name} has {a} {thing} and {verb} {b} more. How many {thing} does {name} have now?"
    return Problem(question, f"{a} + {b} = {a + b}", str(a + b))


def loss(rng: Random) -> Problem:
    """Subtract a number."""
    name, thing, a = rng.choice(NAMES), rng.choice(THINGS), rng.randint(5, LARGEST)
    b = rng.randint(1, a - 1)
    verb = rng.choice(("loses", "sells", "gives away", "uses"))
    question = f"{name} has {a} {thing} and {verb} {b}. How many {thing} are left?"
    return Problem(question, f"{a} - {b} = {a - b}", str(a - b))


def difference(rng: Random) -> Problem:
    """Compare two people."""
    (first, second), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    b = rng.randint(1, 15)
    a = b + rng.randint(1, 15)
    question = f"{first} has {a} {thing}. {second} has {b}. How many more {thing} does {first} have than {second}?"
    return Problem(question, f"{a} - {b} = {a - b}", str(a - b))


def groups(rng: Random) -> Problem:
    """Multiply."""
    thing, holder, a = rng.choice(THINGS), rng.choice(HOLDERS), rng.randint(2, 10)
    b = rng.randint(2, LARGEST // a)
    question = f"There are {a} {holder} with {b} {thing} each. How many {thing} are there?"
    return Problem(question, f"{a} * {b} = {a * b}", str(a * b))


def sharing(rng: Random) -> Problem:
    """Divide without a remainder."""
    name, thing, each, friends = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 10), rng.randint(2, 4)
    question = f"{name} shares {each * friends} {thing} fairly among {friends} friends. How many does each friend get?"
    return Problem(question, f"{each * friends} / {friends} = {each}", str(each))


def gain_then_loss(rng: Random) -> Problem:
    """Add, then subtract."""
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 15), rng.randint(2, 15)
    c = rng.randint(1, a + b - 1)
    question = f"{name} has {a} {thing}, buys {b} more and then sells {c}. How many {thing} are left?"
    return Problem(question, f"{a} + {b} - {c} = {a + b - c}", str(a + b - c))


def groups_and_more(rng: Random) -> Problem:
    """Multiply, then add."""
    name, thing, holder = rng.choice(NAMES), rng.choice(THINGS), rng.choice(HOLDERS)
    a, b = rng.randint(2, 5), rng.randint(2, 5)
    c = rng.randint(1, LARGEST - a * b)
    question = f"{name} has {a} {holder} of {b} {thing} and {c} loose {thing}. How many {thing} is that?"
    return Problem(question, f"{a} * {b} + {c} = {a * b + c}", str(a * b + c))


def two_kinds(rng: Random) -> Problem:
    """Add two amounts, one of them given by its difference from the other."""
    (first, second), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, more = rng.randint(2, 10), rng.randint(1, 10)
    question = f"{first} has {a} {thing}. {second} has {more} more than {first}. How many do they have together?"
    return Problem(question, f"{a} + {a} + {more} = {2 * a + more}", str(2 * a + more))


def change(rng: Random) -> Problem:
    """Multiply by a price in half units, then subtract: the answer is sometimes a decimal."""
    name, thing, halves, number = rng.choice(NAMES), rng.choice(THINGS), rng.randint(1, 9), rng.randint(2, 4)
    price, paid = Fraction(halves, 2), rng.choice((20, 30))
    left = paid - price * number
    question = f"{name} buys {number} {thing} at ${decimal(price)} each and pays with ${paid}. "
    question += "How many dollars come back?"
    return Problem(question, f"{paid} - {number} * {decimal(price)} = {decimal(left)}", decimal(left))


def halving(rng: Random) -> Problem:
    """Divide by two: a decimal for every odd number."""
    first, second = rng.sample(NAMES, 2)
    a = rng.randint(3, 30)
    question = f"{first} and {second} split ${a} evenly. How many dollars does {first} get?"
    return Problem(question, f"{a} / 2 = {decimal(Fraction(a, 2))}", decimal(Fraction(a, 2)))


def share_left(rng: Random) -> Problem:
    """State a part of a whole as a fraction."""
    name, thing, whole = rng.choice(NAMES), rng.choice(THINGS), rng.choice((3, 4, 5, 6, 8, 10))
    taken = rng.randint(1, whole - 1)
    left = Fraction(whole - taken, whole)
    question = f"{name} gives away {taken} of {whole} {thing}. What fraction of the {thing} is left?"
    return Problem(question, f"1 - {taken}/{whole} = {left}", str(left))


TEMPLATES: tuple[Callable[[Random], Problem], ...] = (
    gain, loss, difference, groups, sharing, gain_then_loss, groups_and_more, two_kinds, change, halving, share_left,
)  # fmt: skip


def decimal(value: Fraction) -> str:
    """Return halves as 3 or 3.5."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.1f}"


def draw_problems(seed: int) -> Iterator[Problem]:
    """Yield problems endlessly; every template is drawn equally often, and no text appears twice."""
    rng = Random(seed)
    seen: set[str] = set()
    while True:
        problem = rng.choice(TEMPLATES)(rng)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def problem_lines(number: int, seed: int) -> str:
    """Return problems as JSONL."""
    lines = []
    for _, problem in zip(range(number), draw_problems(seed), strict=False):
        row = {"question": problem.question, "answer": f"{problem.reasoning}\n#### {problem.answer}"}
        lines.append(json.dumps(row))
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=PROBLEMS)
    options = parser.parse_args()
    options.out.write_text(problem_lines(options.number, options.seed), "utf-8", newline="\n")
    print(f"wrote {options.number} problems to {options.out}")


if __name__ == "__main__":
    main()
