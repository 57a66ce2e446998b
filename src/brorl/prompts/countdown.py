"""Countdown puzzles, the built-in task: make a target from given numbers. A seeded split holds out sets of numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, combinations_with_replacement, compress, permutations
from math import gcd
from typing import Self

import numpy as np

from brorl.prompts.question import COUNTDOWN_DOMAIN, Question
from brorl.seeds import uniform_hash

# A reduced fraction as (numerator, denominator), with a positive denominator. Ten times as fast as Fraction.
_Rational = tuple[int, int]


@dataclass(frozen=True)
class CountdownPuzzle:
    """Make `target` from `numbers`, each used exactly once, with + - * / and parentheses.

    Division is exact: intermediate results are rational (8 / (3 - 8 / 3) = 24 is a solution).
    """

    numbers: tuple[int, ...]  # positive integers in ascending order; repeats allowed, at least one
    target: int  # the integer to reach, 0 or more

    def __post_init__(self) -> None:
        if not self.numbers or min(self.numbers) < 1 or self.target < 0:
            raise ValueError(
                "a countdown puzzle has positive numbers and a target of 0 or more, "
                f"got numbers {self.numbers} and target {self.target}"
            )
        if tuple(sorted(self.numbers)) != self.numbers:
            raise ValueError(f"the numbers must ascend; pass {tuple(sorted(self.numbers))}, not {self.numbers}")

    @property
    def reference(self) -> str:
        """The puzzle on one line, `3 5 7 -> 22`. `from_reference` parses it."""
        return f"{' '.join(map(str, self.numbers))} -> {self.target}"

    @property
    def text(self) -> str:
        """The model's prompt, `3 5 7 -> 22:`, directly followed by the response."""
        return f"{self.reference}:"

    @property
    def solution(self) -> str | None:
        """An expression that reaches the target, such as `(3*5)+7`; None if there is none."""
        expression = _expression([(Fraction(number), str(number)) for number in self.numbers], self.target)
        return expression[1:-1] if expression and expression.startswith("(") else expression

    @classmethod
    @lru_cache(maxsize=4096)
    def from_reference(cls, reference: str) -> Self:
        """Parse the one-line form of a puzzle. Any other string raises a `ValueError`."""
        numbers, arrow, target = reference.partition(" -> ")
        try:
            if not arrow:
                raise ValueError
            return cls(tuple(int(number) for number in numbers.split(" ")), int(target))
        except ValueError as error:
            raise ValueError(
                f"{reference!r} is not a countdown reference; write ascending numbers and the target like '3 5 7 -> 22'"
            ) from error


def is_countdown_reference(reference: str) -> bool:
    """Return whether `CountdownPuzzle.from_reference` can parse the string."""
    try:
        CountdownPuzzle.from_reference(reference)
    except ValueError:
        return False
    return True


def _expression(terms: Sequence[tuple[Fraction, str]], target: int) -> str | None:
    """Combine terms pairwise in every possible way until the one remaining term equals the target."""
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, j in permutations(range(len(terms)), 2):
        (a, left), (b, right) = terms[i], terms[j]
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        made = [(a - b, "-"), *([(a / b, "/")] if b else []), *([(a + b, "+"), (a * b, "*")] if i < j else [])]
        for value, sign in made:
            expression = _expression([*rest, (value, f"({left}{sign}{right})")], target)
            if expression:
                return expression
    return None


def countdown_puzzles(num_numbers: int, max_number: int, targets: range) -> list[CountdownPuzzle]:
    """List all solvable puzzles: every multiset of `num_numbers` (1 to 5) numbers, with every target it can reach.

    Numbers are 1 to `max_number`. Each additional number makes this about a hundred times slower.
    """
    reachable: dict[tuple[int, ...], frozenset[_Rational]] = {}
    puzzles: list[CountdownPuzzle] = []
    for numbers in combinations_with_replacement(range(1, max_number + 1), num_numbers):
        values = _reachable_values(numbers, reachable)
        reached = sorted(value for value, denominator in values if denominator == 1 and value in targets)
        puzzles += [CountdownPuzzle(numbers, target) for target in reached]
    return puzzles


def _reachable_values(
    numbers: tuple[int, ...], memo: dict[tuple[int, ...], frozenset[_Rational]]
) -> frozenset[_Rational]:
    """Return the values of all expressions that use each number once, by dynamic programming over `memo`."""
    if len(numbers) == 1:
        return frozenset({(numbers[0], 1)})
    if numbers in memo:
        return memo[numbers]
    values: set[_Rational] = set()
    rest = range(1, len(numbers))  # the first number is always on the left
    chosen = [places for size in range(len(numbers) - 1) for places in combinations(rest, size)]
    splits = {
        ((numbers[0], *(numbers[i] for i in on_left)), tuple(numbers[i] for i in rest if i not in on_left))
        for on_left in chosen
    }
    for left, right in splits:
        right_values = _reachable_values(right, memo)
        for a, b in _reachable_values(left, memo):
            for c, d in right_values:
                ad, bc, bd = a * d, b * c, b * d
                made = [(ad + bc, bd), (ad - bc, bd), (bc - ad, bd), (a * c, bd), (ad, bc), (bc, ad)]
                for numerator, denominator in made:
                    if denominator:
                        divisor = gcd(numerator, denominator) * (1 if denominator > 0 else -1)
                        values.add((numerator // divisor, denominator // divisor))
    memo[numbers] = frozenset(values)
    return memo[numbers]


def split_countdown(
    puzzles: Sequence[CountdownPuzzle], held_out_fraction: float, seed: int
) -> tuple[list[CountdownPuzzle], list[CountdownPuzzle]]:
    """Split distinct puzzles into training and held-out puzzles, by a hash of their multiset of numbers.

    Training never sees held-out multisets. The held-out puzzles are shuffled with the seed, so the first k are a
    uniform sample.
    """
    keys = [f"countdown split {seed}: {' '.join(map(str, puzzle.numbers))}" for puzzle in puzzles]
    is_held_out = [uniform_hash(key) < held_out_fraction * 2**64 for key in keys]
    held_out = list(compress(puzzles, is_held_out))
    order = np.random.default_rng(seed).permutation(len(held_out))
    train = [puzzle for puzzle, out in zip(puzzles, is_held_out, strict=True) if not out]
    return train, [held_out[i] for i in order]


def countdown_questions(puzzles: Iterable[CountdownPuzzle], source: str = COUNTDOWN_DOMAIN) -> list[Question]:
    """Turn puzzles into questions for `source`, in order."""
    return [
        Question(
            f"{source}-{'-'.join(map(str, puzzle.numbers))}-to-{puzzle.target}",
            puzzle.text, puzzle.reference, COUNTDOWN_DOMAIN, source,
        )
        for puzzle in puzzles
    ]  # fmt: skip
