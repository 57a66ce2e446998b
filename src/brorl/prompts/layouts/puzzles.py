"""Layouts of public puzzle datasets."""

from __future__ import annotations

from brorl.format import listed, short_repr
from brorl.prompts.countdown import CountdownPuzzle
from brorl.prompts.layouts.text import asked_text
from brorl.prompts.question import COUNTDOWN_DOMAIN, Question
from brorl.prompts.row import Cells, decoded, row_question


def countdown(row: Cells, _seed: int) -> Question:
    """Read the numbers and the target of a countdown puzzle. If the row has a prompt, keep it."""
    numbers = decoded(row["nums"])
    target = row["target"]
    if isinstance(target, str) and target.strip().isdecimal():  # in a CSV file
        target = int(target)
    if not isinstance(numbers, list) or not all(isinstance(n, int) for n in (*numbers, target)):
        raise ValueError(
            f"nums must be a list of whole numbers and target a whole number, got {short_repr(numbers)} and "
            f"{short_repr(target)}"
        )
    puzzle = CountdownPuzzle(tuple(sorted(numbers)), target)
    listed_numbers = listed([str(number) for number in numbers])
    rules = "Use each number exactly once, with +, -, *, / and parentheses."
    asked = f"Make {target} from the numbers {listed_numbers}. {rules} Put your final expression within \\boxed{{}}."
    return row_question(asked_text(row["prompt"]) if "prompt" in row else asked, puzzle.reference, COUNTDOWN_DOMAIN)
