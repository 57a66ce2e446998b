"""Generates entries from Reasoning Gym datasets, and scores answers that pass a guard with the datasets' scorers.

Only worker processes load this file: importing it takes seconds, and answers determine how long a scorer runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import re
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import sympy
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from brorl.errors import nearest
from brorl.prompts.settings import ALL
from brorl.verification.domains.marked_answer import writings
from brorl.verification.gym.answers import GUARDS, is_own_answer
from brorl.verification.gym.task import SETS, SEVERAL, GymTask

_SIGNS = {
    "\N{MULTIPLICATION SIGN}": "*", "\N{MIDDLE DOT}": "*", "\\times": "*", "\\cdot": "*", "\N{DIVISION SIGN}": "/",
    "\\div": "/", "\N{MINUS SIGN}": "-", "^": "**", "->": "\u2192", "\\rightarrow": "\u2192", "\\to": "\u2192",
}  # fmt: skip
_DECIMAL = re.compile(r"(?<![\w.])(\d{1,20})\.(\d{1,20})(?![\w.])")
_OWN = ("size", "seed")  # dataset settings determined by the source's num_questions and seed
# The size of these datasets changes or limits their entries; the size of other datasets has no effect.
_SIZES = {"acre": 5_000, "gsm_symbolic": 1_000_000, "list_functions": 1_000_000, "word_ladder": 20_000}
_SIZE = 500
_PAGE = "docs/reference/gym.md"
_NOISE = 1e-9  # a score may exceed 1 by up to this rounding error
_CORRECT = 0.99
_MAX_PARTIAL = 0.98  # maximum score of an incorrect answer


def check_source(given: Sequence[str], configs: Mapping[str, Mapping[str, Any]]) -> list[str] | str:
    """Find a source's datasets by dataset or set name, and check their settings.

    Return the datasets' names, or what is wrong with the source, beginning with a setting (`config: ...`).
    """
    known = sorted(set(DATASETS) - {"composite"})  # combines other datasets, which a source can list itself
    names = known if ALL in given else list(dict.fromkeys(n for name in given for n in SETS.get(name, (name,))))
    for name in names:
        if name not in known:
            advice = nearest(name, known) or f"; {_PAGE} lists the {len(known)} names"
            return f"gym: {name!r} is not a Reasoning Gym dataset{advice}"
        if problem := _problem_of(name, configs.get(name, {})):
            return f"config: {name} {problem}; {_PAGE} lists the settings"
    unused = next((name for name in configs if name not in names), None)
    if unused is not None:
        return f"config: {unused!r} is not one of this source's datasets{nearest(unused, names)}"
    return names


def _problem_of(name: str, config: Mapping[str, Any]) -> str | None:
    """Return the problem with a dataset's settings; None if they are valid."""
    settings = DATASETS[name][1]
    types = {key: hint for key, hint in typing.get_type_hints(settings).items() if key not in _OWN}
    # Some settings are declared as int although their default is a float, or as a tuple of one string although the
    # default has several. A setting declared as a bare tuple can also be a string.
    types |= {field.name: float for field in dataclasses.fields(settings) if isinstance(field.default, float)}
    types |= {key: tuple[str, ...] for key, hint in types.items() if hint == tuple[str]}
    types |= {key: str | tuple for key, hint in types.items() if hint is tuple}
    for key, value in config.items():
        if key not in types:
            return f"has no setting {key!r} (settings: {', '.join(types) or 'none'}){nearest(key, types)}"
        try:  # also fails for a value of a type that JSON lacks, such as a date
            json.dumps(TypeAdapter(types[key]).validate_json(json.dumps(value), strict=True))
        except (ValidationError, PydanticUserError, TypeError):
            return f"has the setting {key}: {value!r}, which must be of type {inspect.formatannotation(types[key])}"
    try:
        if config:
            _made(name, json.dumps(config), 0, _SIZE)
    except Exception as error:  # each dataset checks its settings in its own way, mostly with assertions
        return f"rejects config = {dict(config)}: {' '.join(str(error).split()) or type(error).__name__}"
    return None


class GeneratedEntry(NamedTuple):
    """One generated entry, or why it was dropped."""

    question: str  # empty if dropped
    task: str  # the text of the entry's `GymTask`; empty if dropped
    dropped: str | None = None  # why the entry cannot be used


def generate(
    entries: Sequence[tuple[str, int]], configs: Mapping[str, Mapping[str, Any]], seed: int
) -> list[GeneratedEntry]:
    """Generate entries, each given by its dataset and index. `configs` maps datasets to settings."""
    return [_generated(name, configs.get(name, {}), seed, index) for name, index in entries]


def _generated(name: str, config: Mapping[str, Any], seed: int, index: int) -> GeneratedEntry:
    """Generate one entry. It does not depend on other entries, because the global random state is seeded first."""
    data_set = _made(name, json.dumps(config), seed, _SIZES.get(name, _SIZE))
    word = f"{name} {seed} {index}"
    random.seed(word)
    np.random.seed(crc32(word.encode()))  # noqa: NPY002 (the generators use this state)
    entry = data_set[index]
    try:
        text = GymTask(name, entry, config, seed, index).to_text()
    except ValueError as error:
        return GeneratedEntry("", "", str(error))
    task = GymTask.from_text(text)  # what a verifier will read
    if entry["answer"] is not None and not (task.answer or "").strip():
        return GeneratedEntry("", "", "the right answer is empty")
    if task.answer is not None and not score_task(task, task.answer.strip()).correct:
        return GeneratedEntry("", "", "the dataset's own answer is not accepted")
    return GeneratedEntry(entry["question"], text)


@lru_cache(maxsize=8)
def _made(name: str, config: str, seed: int, size: int) -> ProceduralDataset:
    """Create a dataset. `config` is JSON text."""
    data_set, settings = DATASETS[name]
    made: ProceduralDataset = data_set(settings(**json.loads(config), seed=seed, size=size))
    return made


class ScoredAnswer(NamedTuple):
    """An answer's score: 1.0 if it is right, otherwise partial credit below 1, or 0 with a problem."""

    correct: bool
    score: float
    problem: str | None = None


def in_plain_notation(text: str) -> str:
    """Return an answer with spaces collapsed and formulas in Python notation: `0.5*x^2` -> `(05/10)*x**2`."""
    text = _DECIMAL.sub(lambda number: f"({number[1]}{number[2]}/1{'0' * len(number[2])})", text)
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    return "\n".join(" ".join(row.split()) for row in text.strip().splitlines())


def score(reference: str, answer: str) -> ScoredAnswer:
    """Score any string as an answer to a `GymTask`; the reference is the task as JSON."""
    return score_task(GymTask.from_text(reference), answer)


def score_task(task: GymTask, answer: str) -> ScoredAnswer:
    """Score an answer: 0 with a problem if the scorer raises or does not return a number from 0 to 1."""
    if task.data_set not in SEVERAL and task.answer is not None:
        if is_own_answer(answer, task):
            return ScoredAnswer(True, 1.0)
        scored = _by_scorer(task, answer)
        return ScoredAnswer(False, 0.0, "not the dataset's answer") if scored.correct else scored
    first: ScoredAnswer | None = None
    for form in dict.fromkeys(normal(form) for form in writings(answer) for normal in (str, in_plain_notation)):
        scored = _by_scorer(task, form)
        if scored.correct:
            return scored
        first = first or scored
    return first or ScoredAnswer(False, 0.0)


def _by_scorer(task: GymTask, answer: str) -> ScoredAnswer:
    """Score an answer with the dataset's scorer if the dataset's guard admits it."""
    guard = GUARDS.get(task.data_set)
    if guard and not guard.admits(answer, task.entry):
        return ScoredAnswer(False, 0.0, "rejected by a guard")
    scorer = scorer_of(task.data_set, json.dumps(task.config))
    try:
        result = scorer.score_answer(answer=answer, entry=task.entry)
    except (MemoryError, OSError):  # infrastructure failures
        raise
    except Exception as error:
        return ScoredAnswer(False, 0.0, f"the scorer raised {type(error).__name__}")
    if isinstance(result, bool) or not isinstance(result, int | float) or not 0 <= result <= 1 + _NOISE:
        return ScoredAnswer(False, 0.0, f"the scorer returned {str(result)[:40]}")
    if result < _CORRECT:
        return ScoredAnswer(False, min(float(result), _MAX_PARTIAL))
    return ScoredAnswer(True, 1.0)


@lru_cache(maxsize=256)
def scorer_of(name: str, config: str) -> ProceduralDataset:
    """Return the named dataset in a form that can only score answers. `config` is JSON text."""
    data_set, settings = DATASETS[name]
    return _scorer_class_without_init(data_set)(settings(**json.loads(config), seed=0))


@lru_cache(maxsize=256)
def _scorer_class_without_init(data_set: type[ProceduralDataset]) -> Any:
    """Return a class that scores like a dataset but skips its constructor, which may spend 0.5 s reading files."""

    class Scorer(data_set):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            self.config, self.seed, self.size = config, config.seed, config.size
            if hasattr(config, "board_format_opts"):  # all that grid scorers use
                self.board_format_opts = config.board_format_opts

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            made = data_set(self.config)
            self.__dict__.update(made.__dict__)
            return getattr(made, name)

    return Scorer


def _load_the_rest() -> None:
    """Load what scorers would load on first use, because a confined process may be unable to read files."""
    sokoban, ladder = scorer_of("sokoban", "{}"), scorer_of("word_ladder", "{}")
    _ = sokoban._is_solved, ladder.word_sets
    x = sympy.Symbol("x")
    sympy.simplify(sympy.diff(sympy.parse_expr("x**2*exp(x)*cos(x)/2 + sqrt(2*x + 1)*log(x) + C"), x) - sympy.sin(x))


_load_the_rest()
