"""The scorers of Reasoning Gym, behind the guards: a task and an answer in, a score out.

Only worker processes load this file: its import takes seconds, and scorers run for as long as an answer asks for.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from brorl.verification.domains.marked_answer import writings
from brorl.verification.gym.answers import SEVERAL, in_plain_notation, is_own_answer
from brorl.verification.gym.guards import GUARDS, UNGUARDED
from brorl.verification.gym.task import GymTask

_NOISE = 1e-9  # of a score above 1
_CORRECT = 0.99
_MAX_PARTIAL = 0.98  # the most partial credit of an answer that is not correct


class ScoredAnswer(NamedTuple):
    """The score of an answer: 1.0 for a right one, partial credit below 1 for others, or why there is none."""

    correct: bool
    score: float
    problem: str | None = None


def score(reference: str, answer: str) -> ScoredAnswer:
    """Score any string as an answer to the text of a `GymTask`.

    A scorer that raises, or returns no number from 0 to 1, gives a score of 0 with the problem.
    """
    return score_task(GymTask.from_text(reference), answer)


def score_task(task: GymTask, answer: str) -> ScoredAnswer:
    """Score an answer to a task; see `score`."""
    if task.data_set not in SEVERAL and task.answer is not None:
        if is_own_answer(answer, task):
            return ScoredAnswer(True, 1.0)
        found = _by_scorer(task, answer)
        return ScoredAnswer(False, 0.0, "not the answer of the dataset") if found.correct else found
    first: ScoredAnswer | None = None
    for form in dict.fromkeys(normal(form) for form in writings(answer) for normal in (str, in_plain_notation)):
        found = _by_scorer(task, form)
        if found.correct:
            return found
        first = first or found
    return first or ScoredAnswer(False, 0.0)


def _by_scorer(task: GymTask, answer: str) -> ScoredAnswer:
    """Score an answer with the dataset's scorer behind its guard."""
    guard = GUARDS.get(task.data_set, UNGUARDED)
    if not guard.admits(answer, task.entry):
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
    """Return a dataset that scores answers, by its name and the JSON text of its settings."""
    data_set, settings = DATASETS[name]
    return _scorer_class_without_init(data_set)(settings(**json.loads(config), seed=0))


@lru_cache(maxsize=256)
def _scorer_class_without_init(data_set: type[ProceduralDataset]) -> Any:
    """Return a class that scores like a dataset without its constructor, which can read files for half a second."""

    class Scorer(data_set):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            self.config, self.seed, self.size = config, config.seed, config.size
            if hasattr(config, "board_format_opts"):  # all that the scorers of grids use
                self.board_format_opts = config.board_format_opts

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            made = data_set(self.config)
            self.__dict__.update(made.__dict__)
            return getattr(made, name)

    return Scorer


def _load_the_rest() -> None:
    """Load what scorers load at their first use: a confined process may be unable to read files."""
    sokoban, ladder = scorer_of("sokoban", "{}"), scorer_of("word_ladder", "{}")
    _ = sokoban._is_solved, ladder.word_sets
    x = sympy.Symbol("x")
    sympy.simplify(sympy.diff(sympy.parse_expr("x**2*exp(x)*cos(x)/2 + sqrt(2*x + 1)*log(x) + C"), x) - sympy.sin(x))


_load_the_rest()
