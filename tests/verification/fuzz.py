"""Mutated responses for every domain, and whether a verifier returns the same verdicts for them twice.

In: the hand-made rows of examples/domains with known-good and known-bad responses. Out: mutations of them, and the
problems that a verifier has with them. The test runs some hundred, benchmarks/verification.py any number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from brorl.config.reading import make_config, read_recipe
from brorl.evaluation.questions import build_questions
from brorl.prompts.countdown import countdown_puzzles
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import COUNTDOWN_DOMAIN, Question
from brorl.verdict import OUT_OF_MEMORY, TIMEOUT, Verdict
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.verifier import Verifier

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "domains"
BATCH = 500

Item = tuple[Prompt, str]
Mutation = Callable[[Random, str], str]

DELIMITERS = (
    "\\boxed{", "}", "{", "```", "```python\n", "\n```", "<answer>", "</answer>", "</think>", "<think>", "$", "$$",
    "\\(", "\\)", "\\[", "\\]", "####", "Answer:", "The answer is ", '"', "'", "(", ")", "\\frac{", "\\text{",
    "\\left(", "\n\n", "***", "<<", ">>", "P.S.", "~~~", ",", ";", "\\", "%", "&", "#",
    "def f(x):\n    return ", "print(", "=", "-",
)  # fmt: skip
CHARACTERS = (
    "\0", "\ud800", "\udfff", "\ud83d", "\u202e",
    "\u200b", "\ufeff", "\u0301", "\U0001f600", "\U0010ffff", "\x1b[2J",
    "\r", "\x85", "\u2028", "\u0661", "\uff11", "\u00b2", "\u2212", "\u00a0", "\u0130", "\u00df", "\ufb01", "\t",
    "\x0c",
)  # fmt: skip
NUMBERS = (
    "9" * 400, "-" + "9" * 30, "1e999999", "1e-999999", "0x" + "f" * 99, "10**10**10", "9^{9^{9^{9}}}", "NaN", "inf",
    "0.1" + "0" * 300 + "1", "1/0", "\\frac{1}{0}", "1_000", "007", "-0", "1,000,000.5", "5000!", "\\infty",
)  # fmt: skip
PROGRAMS = (
    "import os\nos._exit(0)", "while True: pass", "exit()", "raise SystemExit(0)", "print(input())",
    "def f(*a): return a",
    "class A(int):\n    __eq__ = lambda *a: True", "import sys\nsys.setrecursionlimit(10**9)", "a = [0] * 10**10",
    "open('/etc/passwd').read()", "assert False", "from __future__ import annotations", "# coding: utf-7", "\\x00",
)  # fmt: skip
# Several answers in one: what a policy writes to be right in any case.
JOINTS = (
    " or ", ", ", "\n", " and ", "; ", " ", "/", " not ", " or maybe ", ", I think ", " as well as ", ", or option ",
    " = ",
)  # fmt: skip
CANDIDATES = (
    "A", "B", "(c)", "D)", "B (two)", "A = one", "I", "II", "III", "5", "6 days", "-1", "0.5", "1.6 \\times 10^{-19}",
    "[[0, 1], [1, 0]]", "yes", "Option C", "x = 3", "R U F", "F+1",
)  # fmt: skip
_ANSWER = re.compile(r"\\boxed\{([^{}]*)\}|<answer>(.*?)</answer>|(?:answer is|[Aa]nswer:)\s*([^\n]*)", re.DOTALL)


def _slice(random: Random, text: str, most: int = 40) -> tuple[int, int]:
    start = random.randint(0, len(text))
    return start, min(len(text), start + random.randint(0, most))


def _insertion(choices: Sequence[str], most: int = 3) -> Mutation:
    def insert(random: Random, text: str) -> str:
        for _ in range(random.randint(1, most)):
            place = random.randint(0, len(text))
            text = text[:place] + random.choice(choices) + text[place:]
        return text

    return insert


def _delete(random: Random, text: str) -> str:
    start, end = _slice(random, text)
    return text[:start] + text[end:]


def _repeat(random: Random, text: str) -> str:
    start, end = _slice(random, text)
    return text[:end] + text[start:end] * random.choice((1, 2, 50, 1000)) + text[end:]


def _swap_delimiters(random: Random, text: str) -> str:
    present = [delimiter for delimiter in DELIMITERS if delimiter in text]
    return text.replace(random.choice(present), random.choice(DELIMITERS), random.randint(1, 3)) if present else text


def _nest(random: Random, text: str) -> str:
    before, after = random.choice(
        (("\\boxed{", "}"), ("```python\n", "\n```"), ("<answer>", "</answer>"), ("{", "}"), ("(", ")"), ("[", "]"))
    )
    times = random.choice((1, 2, 3, 300))
    start, end = (0, len(text)) if random.random() < 0.5 else _slice(random, text)
    return text[:start] + before * times + text[start:end] + after * random.choice((times, times - 1)) + text[end:]


def _random_text(random: Random, text: str) -> str:
    start, end = _slice(random, text)
    made = "".join(chr(random.randrange(0x11_0000)) for _ in range(random.randint(1, 20)))
    return text[:start] + made + text[end:]


def _change_case(random: Random, text: str) -> str:
    return random.choice((text.upper(), text.lower(), text.swapcase(), text[::-1], text.replace(" ", "")))


def _join(random: Random, text: str) -> str:
    """Join the answer, or a number in the text, with another candidate before or after it."""
    places = [match.span(match.lastindex) for match in _ANSWER.finditer(text) if match.lastindex]
    places = places if places and random.random() < 0.7 else [match.span() for match in re.finditer(r"\d+", text)]
    start, end = random.choice(places or [(0, len(text))])
    parts = [text[start:end], *random.sample([*CANDIDATES, text[start:end]], random.randint(1, 3))]
    random.shuffle(parts)
    return text[:start] + random.choice(JOINTS).join(parts) + text[end:]


MUTATIONS: tuple[Mutation, ...] = (
    _delete, _repeat, _swap_delimiters, _nest, _random_text, _change_case, _insertion(DELIMITERS),
    _insertion(CHARACTERS), _insertion(NUMBERS), _insertion(PROGRAMS, 1), _insertion(CANDIDATES), _join,
)  # fmt: skip


class Seeds(NamedTuple):
    """What is mutated: prompts of one domain, each with responses."""

    domain: str
    items: tuple[Item, ...]


def seeds_of(domain: str) -> Seeds:
    """Return the hand-made responses of a domain.

    Raises:
        FileNotFoundError: If the domain has none.
    """
    if domain == COUNTDOWN_DOMAIN:
        return Seeds(domain, tuple(_countdown_items()))
    questions = questions_of(domain)
    return Seeds(domain, tuple((_prompt(questions[row["id"]]), row["response"]) for row in stored_responses(domain)))


def questions_of(domain: str) -> dict[str, Question]:
    """Return the questions of the recipe with a domain, by id; the recipes name their files from `ROOT`."""
    recipe = str(FOLDER / ("gym.yaml" if domain == "gym" else "recipe.yaml"))
    sources = build_questions(make_config(read_recipe(recipe), {}, recipe))
    return {question.id: question for source in sources for question in (*source.train, *source.held_out)}


def stored_responses(domain: str) -> list[dict[str, Any]]:
    """Return the hand-made rows of a domain: the id of a question, a response, and whether it is correct."""
    return [json.loads(line) for line in (FOLDER / "responses" / f"{domain}.jsonl").read_text("utf-8").splitlines()]


def _prompt(question: Question) -> Prompt:
    return Prompt(question.id, question.text, (1,), question.reference, question.domain)


def _countdown_items() -> list[Item]:
    references = [puzzle.reference for puzzle in countdown_puzzles(3, 5, range(10, 40))[:40]]
    verifier = CountdownVerifier()
    items = []
    for reference in references:
        made = verifier.trial_responses(reference, references[:3])
        prompt = Prompt(reference, "?", (1,), reference, COUNTDOWN_DOMAIN)
        items += [(prompt, response) for response in (made.right, *made.wrong)]
    return items


def mutations(seeds: Seeds, count: int, random: Random) -> list[Item]:
    """Return distinct mutated responses, each by one to four mutations; a tenth continue with another response."""
    made: dict[tuple[str, str], Item] = {}
    while len(made) < count:
        prompt, text = random.choice(seeds.items)
        if random.random() < 0.1:
            text += "\n" + random.choice(seeds.items)[1]
        for _ in range(random.randint(1, 4)):
            text = random.choice(MUTATIONS)(random, text)[:200_000]
        made.setdefault((prompt.id, text), (prompt, text))
    return list(made.values())


def problems(make_verifier: Callable[[], Verifier], items: Sequence[Item], random: Random) -> list[str]:
    """Verify twice, the second time in another order by a new verifier; return what went wrong.

    A response near a limit of time or memory may be on either side of it: such a pair of verdicts is no problem.
    """
    first = _verdicts(make_verifier(), items)
    order = list(range(len(items)))
    random.shuffle(order)
    again = _verdicts(make_verifier(), [items[i] for i in order])
    second = dict(zip(order, again, strict=True))
    failures = []
    for number, (item, one) in enumerate(zip(items, first, strict=True)):
        other = second[number]
        if one.unverified or other.unverified:
            failures.append(f"unverified: {one} {other} for {item[1][:300]!r}")
        elif not _limited(one) and not _limited(other) and _content(one) != _content(other):
            failures.append(f"{_content(one)} then {_content(other)} for {item[1][:300]!r}")
        if not isfinite(one.score) or (one.correct and one.score < 0.5):
            failures.append(f"{one} for {item[1][:300]!r}")
    return failures


def _verdicts(verifier: Verifier, items: Sequence[Item]) -> list[Verdict]:
    return [v for start in range(0, len(items), BATCH) for v in verifier.verify_all(items[start : start + BATCH])]


def _limited(verdict: Verdict) -> bool:
    return verdict.reason in (TIMEOUT, OUT_OF_MEMORY) or "timeout" in verdict.reason


def _content(verdict: Verdict) -> tuple[object, ...]:
    return verdict.correct, verdict.score, verdict.extracted, verdict.reason
