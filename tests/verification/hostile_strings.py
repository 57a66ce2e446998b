r"""Long strings that make a quadratic pattern or loop slow: words that start a pattern, then a run, then an end.

In: a length. Out: strings such as `answer is` + 20,000 blanks + `(`. The words come from the patterns of the verifiers
themselves, so a new pattern is tried without a new line here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pkgutil import walk_packages
from random import Random
from typing import Any

from brorl.verification import domains, gym

STARTS = (
    "", "\\boxed{", "\\boxed{A", "\\boxed{1", "\\boxed{-", "\\boxed{\\frac{", "<answer>", "<think>", "</think>",
    "```python\n", "```python\nfrom", "```python\nfrom __future__", "```python\nfrom __future__ import",
    "```python\nfrom __future__ import (", "```python\nasync", "```python\ndef", "```python\nclass", "```python\nf",
    "```", "~~~", "answer is", "The answer is **", "answer is $", "answer: A", "**", "* ", "*", "- ", "<<", "[", '"',
    "{", "(A", "1", "1e", "1.", "-", "$", "$$", "\\(", "\\[", "Section ", "P.", "P.S", "A is", "So A", "B or ",
)  # fmt: skip
RUNS = (
    " ", "\t", "\n", "\r", "\n\n", " \n", "\u00a0", "\u3000", "\u2028", "\x0c", "(", ")", "()", "[", "]", "[]", "{",
    "}", "{}", "\\", "\\ ", "0", "9", "1 ", "1,", ",1", "1.", "1/", ".", ",", ";", ":", ". ", "-", "--", "+", "*",
    "**", "* ", "_", "/", "^", "=", "%", "&", "#", "!", "?", "`", "``` ", "```\n", "```python\n", "~", "~~~\n", '"',
    "'", "\\\"", "$", "$$", "$ ", "\\$", "$1", "\\(", "\\)", "\\[", "\\boxed{", "\\boxed{}", "\\fbox{1}", "{}{",
    "{1}", "\\text{", "\\frac{", "\\times", "10^", "a", "A", "a ", "A ", "A. ", "a.", "A's ", "I ", "e", "1e", "x",
    "or ", "A or ", "so ", "\n- ", "\n* ", "\n**A**", "**A** ", "(A) ", "(", "A is correct ", "A is correct. ",
    "answer is ", "answer ", "answer: A\n", "is ", "\u00e9", "\u0130", "\u0661", "\ufb01", "\u00b2", "\U0001f600",
    "\ud800", "<", ">", "<<", ">>", "<think>", "</think>", "<answer>", "</answer>", "from __future__ import ",
    "from ", "def f", "\nclass Solution", "f=", "***", "******", "P.S. ", "p. ", "[a]",
)  # fmt: skip
ENDS = (
    "", "(", ")", "}", "]", "x", "X", "1", ".", ",", "$", "\\", "\n", '"', "*", "\n```", "```", "</answer>", "\\)",
    "A",
)  # fmt: skip


@lru_cache(maxsize=1)
def literals() -> list[str]:
    """Return the literal parts of all compiled patterns of the verifiers of all domains, each once, sorted."""
    packages = [module for part in (domains, gym) for module in walk_packages(part.__path__, f"{part.__name__}.")]
    of_workers = ("gym.entries", "math_worker", "code_numpy")
    words: set[str] = set()
    for name in ("brorl.prompts.answer_forms", *(module.name for module in packages)):
        if name.endswith(of_workers):
            continue
        for pattern in _patterns([*vars(import_module(name)).values()]):
            words.update(_literals(re._parser.parse(pattern.pattern, pattern.flags)))  # type: ignore[attr-defined]
    return sorted(words)


def _patterns(value: Any) -> Iterator[re.Pattern[str]]:
    """Yield the compiled patterns of a module, also those in tuples and dicts."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _patterns(member)


def _literals(parsed: Any) -> Iterator[str]:
    """Yield the runs of literal characters of a parsed pattern."""
    run = ""
    for operation, argument in [*parsed, (None, None)]:
        if str(operation) == "LITERAL":
            run += chr(argument)
            continue
        if run:
            yield run
        run = ""
        for part in _parts(argument):
            yield from _literals(part)


def _parts(argument: Any) -> Iterator[Any]:
    """Yield the patterns within the argument of an operation."""
    if isinstance(argument, re._parser.SubPattern):  # type: ignore[attr-defined]
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _parts(item)


def random_parts(random: Random) -> tuple[str, str, str]:
    """Return the start, the unit of the run and the end of a hostile string."""
    word, other = random.choice(literals()), random.choice(literals())
    start = random.choice([random.choice(STARTS), random.choice(STARTS), word, f"\\boxed{{{word}"])
    run = random.choice([random.choice(RUNS), random.choice(RUNS), f"{other} ", f"{other}\n"])
    return start, run + random.choice(["", "", "", random.choice(RUNS)]), random.choice(ENDS)


def hostile_string(parts: tuple[str, str, str], length: int) -> str:
    """Return a string of about this many characters."""
    start, unit, end = parts
    return start + unit * (length // len(unit)) + end
