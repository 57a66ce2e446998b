"""The questions of Reasoning Gym: a source's settings to questions, generated in worker processes.

The questions are distinct, and the same in every process; those of several datasets take turns.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from brorl.errors import UserError
from brorl.prompts.file_questions import SourceReading
from brorl.prompts.prompt import Question
from brorl.prompts.settings import GymSource
from brorl.verification.gym.task import GYM_DOMAIN, require_reasoning_gym
from brorl.verification.sandbox.pool import VerifierCall, WorkerPool

_CHECK, _GENERATE = (f"{Path(__file__).with_name('entries.py')}:{name}" for name in ("check", "generate"))
_TIMEOUT_S = 1800.0  # of one call: some datasets take seconds for an entry
_MEMORY_BYTES = 4 << 30
_ENTRIES_PER_CALL = 20

_Row = tuple[str, int, str, str, str | None]  # dataset, index, question, task, why it was dropped


def read_gym(source: GymSource, workers: int | None, location: str = "data.sources[]") -> SourceReading:
    """Generate the questions of a source, which errors name by its location.

    The questions are distinct, with the ids `name:index`, or `name:data_set:index` if there are several datasets.
    Entries whose own answer is not accepted by the verifier are dropped and counted. A UserError, if Reasoning Gym is
    not installed, a dataset or a setting does not exist, or nothing is left.
    """
    require_reasoning_gym()
    try:
        config = _config_text(source)
        rows = _rows(source.gym, config, source.num_questions, source.first_index, source.seed, workers)
    except ValueError as error:
        raise UserError(f"{location}.{error}") from error
    dropped = Counter(why for *_, why in rows if why)
    several = len({name for name, *_ in rows}) > 1
    questions: dict[str, Question] = {}
    for name, index, text, task, why in rows:
        key = f"{source.label}:{name}:{index}" if several else f"{source.label}:{index}"
        if not why:
            question = Question(key, text, task, GYM_DOMAIN, source.label)
            questions.setdefault(question.asked, question)
    if not questions:
        raise UserError(
            f"{location}: no question of {source.label} can be used ({', '.join(dropped)}); raise num_questions, or "
            "change gym or config"
        )
    repeated = len(rows) - dropped.total() - len(questions)
    return SourceReading(list(questions.values()), len(rows), repeated, dict(dropped))


def _config_text(source: GymSource) -> str:
    """Return the settings by dataset as JSON text."""
    configs = {source.gym[0]: source.config} if source.is_single else source.config
    for name, config in configs.items():
        if not isinstance(config, dict):
            raise ValueError(
                f"config: with several datasets the keys must be their names, got {name}: {config!r}; write "
                "config: {leg_counting: {min_animals: 3}}"
            )
    try:
        return json.dumps(configs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"config: its values must be strings, numbers, booleans, null, lists or mappings ({error})"
        ) from error


@lru_cache(maxsize=32)  # a comparison reads the same sources for every run
def _rows(
    given: tuple[str, ...], config: str, number: int, first: int, seed: int, workers: int | None
) -> tuple[_Row, ...]:
    """Generate the entries of all datasets in turn."""
    configs: dict[str, dict[str, Any]] = json.loads(config)
    with WorkerPool(workers, _TIMEOUT_S, _MEMORY_BYTES) as pool:
        (result,) = pool.run([VerifierCall(_CHECK, (given, configs, first, number))])
        if result.failure:
            raise UserError(f"Reasoning Gym cannot be used ({result.failure}); run: pip install 'brorl[gym]'")
        if isinstance(result.value, str):
            raise ValueError(result.value)
        names: list[str] = result.value
        fractions = [len(range(location, number, len(names))) for location in range(len(names))]
        parts = [
            (name, start, min(_ENTRIES_PER_CALL, fraction - start))
            for name, fraction in zip(names, fractions, strict=True)
            for start in range(0, fraction, _ENTRIES_PER_CALL)
        ]
        calls = [
            VerifierCall(_GENERATE, (name, configs.get(name, {}), seed, first + start, size))
            for name, start, size in parts
        ]
        rows_of: dict[tuple[int, str], _Row] = {}
        for (name, start, size), result in zip(parts, pool.run(calls), strict=True):
            if result.failure:
                last = first + start + size - 1
                raise ValueError(
                    f"gym: {name} cannot generate its questions {first + start} to {last} ({result.failure}); change "
                    "first_index or config, or remove the dataset"
                )
            for turn, row in enumerate(result.value, start):
                rows_of[turn, name] = (name, first + turn, *row)
    return tuple(rows_of[turn, name] for turn in range(fractions[0]) for name in names if (turn, name) in rows_of)
