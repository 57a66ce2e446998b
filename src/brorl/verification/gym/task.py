"""Reasoning Gym tasks, generated in worker processes as questions whose reference answer is a task.

A task consists of the dataset's name and settings, and the generated entry with exact types. Given a task as JSON, a
verifier in any process scores answers exactly as the process that generated the entry would. Questions are distinct,
and the same in every process. Questions from several datasets alternate.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np

from brorl.errors import UserError
from brorl.prompts.json_text import FORBID_UNKNOWN_KEYS, read_json
from brorl.prompts.question import GYM_DOMAIN, Question
from brorl.prompts.settings import ALL, PRORL, GymSource
from brorl.prompts.source_questions import SourceQuestions
from brorl.verification.sandbox.pool import VerifierCall, WorkerPool
from brorl.verification.sandbox.values import decode, encode

OUT_OF_DISTRIBUTION = ("acre", "boxnet", "game_of_life_halting")
"""Datasets that ProRL evaluated on but did not train on (arXiv 2505.24864, Table 3)."""
# The paper counts 96 datasets but names only 19. Reasoning Gym had these 96 from March 1 to 5, 2025. The paper names
# `palindrome`, which was renamed on March 10; the three held-out datasets, and puzzle24 in its Figure 10, were added
# from March 5 on. The list is version 0.1.25 without these four, coin_flip, kakurasu, modulo_grid, path_star and survo.
_PRORL = """
ab advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation binary_matrix
bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio color_cube_rotation
complex_arithmetic count_bits count_primes countdown course_schedule cryptarithm decimal_arithmetic
decimal_chain_sum dice emoji_mystery family_relationships figlet_font fraction_simplification futoshiki game_of_life
gcd graph_color group_anagrams gsm_symbolic intermediate_integration isomorphic_strings jugs knight_swap
knights_knaves largest_island lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle
manipulate_matrix maze mini_sudoku n_queens needle_haystack number_filtering number_format number_sequence
number_sorting palindrome_generation palindrome_partitioning polynomial_equations polynomial_multiplication
pool_matrix power_function prime_factorization products propositional_logic quantum_lock ransom_note rearc
rectangle_count rotate_matrix rotten_oranges rubiks_cube rush_hour self_reference sentence_reordering shortest_path
simple_equations simple_geometry simple_integration sokoban spell_backward spiral_matrix string_insertion
string_manipulation string_splitting string_synthesis sudoku syllogism time_intervals tower_of_hanoi tsumego
word_ladder word_sequence_reversal word_sorting zebra_puzzles
"""
SETS: Mapping[str, tuple[str, ...]] = {
    ALL: (),  # all datasets in the installed version
    PRORL: tuple(_PRORL.split()),
}
"""Names of the datasets in a set, in order."""

SEVERAL = frozenset(
    (
        "boxnet", "countdown", "cryptarithm", "graph_color", "intermediate_integration", "jugs", "kakurasu",
        "knight_swap", "n_queens", "palindrome_generation", "polynomial_multiplication", "propositional_logic",
        "puzzle24", "quantum_lock", "rubiks_cube", "rush_hour", "shortest_path", "simple_integration", "sokoban",
        "tower_of_hanoi", "word_ladder",
    )
)  # fmt: skip
"""Datasets whose questions can have several right answers."""

BENCHMARKS: Mapping[str, GymSource] = {
    source.label: source
    for source in (  # training never reaches these indices; the shortest datasets have 20,000 entries
        GymSource(gym=(ALL,), name="gym", num_questions=530, first_index=4_000),  # about five questions per dataset
        GymSource(gym=OUT_OF_DISTRIBUTION, name="gym_ood", num_questions=300, first_index=4_000),
    )
}


@dataclass(frozen=True)
class GymTask:
    """A generated question and everything that its scorer reads."""

    __pydantic_config__ = FORBID_UNKNOWN_KEYS

    data_set: str  # the dataset's name in Reasoning Gym: `leg_counting`
    entry: Mapping[str, Any]  # the generated `question`, `answer` and `metadata`
    # The dataset's settings that differ from their defaults, without `seed` and `size`: {"min_animals": 3}
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # the dataset's seed
    index: int = 0  # the entry's index in the dataset

    @property
    def answer(self) -> str | None:
        """One right answer; None for a dataset that only checks answers."""
        answer = self.entry.get("answer")
        return None if answer is None else str(answer)

    def to_text(self) -> str:
        """Return the task as one line of JSON; ValueError if a value in the entry is not of a built-in type."""
        entry = json.loads(encode(_builtin(self.entry)))
        return json.dumps({**vars(self), "entry": entry}, ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse a task from JSON; ValueError if it is malformed."""
        task: Self = read_json(cls, text, "the text of a Reasoning Gym task")
        try:
            entry = decode(json.dumps(task.entry))
        except ValueError as error:
            raise ValueError(f"has an entry that cannot be read ({error})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict) or "answer" not in entry:
            raise ValueError("has an entry without answer or metadata")
        return replace(task, entry=entry)


def require_reasoning_gym() -> None:
    """Check that Reasoning Gym is installed, without importing it; UserError if not."""
    if find_spec("reasoning_gym") is None:
        raise UserError("the domain gym needs Reasoning Gym and a C compiler; run: pip install 'brorl[gym]'")


def _builtin(value: Any) -> Any:
    """Convert NumPy scalars in a value to Python numbers, and fractions, which no scorer reads, to strings."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Mapping):
        return {_builtin(key): _builtin(item) for key, item in value.items()}
    return type(value)(map(_builtin, value)) if type(value) in (list, tuple, set, frozenset) else value


_CHECK_SOURCE, _GENERATE = (f"{Path(__file__).with_name('entries.py')}:{name}" for name in ("check_source", "generate"))
_TIMEOUT_S = 1800.0  # per call: some datasets take seconds per entry
_MEMORY_BYTES = 4 << 30
_ENTRIES_PER_CALL = 20

_Row = tuple[str, int, str, str, str | None]  # (dataset, index, question, task, why it was dropped)


def read_gym(source: GymSource, workers: int | None, location: str = "data.sources[]") -> SourceQuestions:
    """Generate a source's questions. Errors refer to the source as `location`.

    The questions are distinct, with ids `name:index`, or `name:data_set:index` if there are several datasets. If the
    verifier rejects an entry's own answer, the entry is dropped and counted. Raises a UserError if Reasoning Gym is not
    installed, if a dataset or a setting does not exist, or if no question is left.
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
            questions.setdefault(question.words, question)
    if not questions:
        raise UserError(
            f"{location}: no question from {source.label} can be used ({', '.join(dropped)}); raise num_questions, or "
            "change gym or config"
        )
    return SourceQuestions(
        source,
        list(questions.values()),
        num_rows=len(rows),
        num_repeated=len(rows) - dropped.total() - len(questions),
        dropped=dict(dropped),
    )


def _config_text(source: GymSource) -> str:
    """Return each dataset's settings, as JSON text."""
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
            f"config: values must be strings, numbers, booleans, null, lists or mappings ({error})"
        ) from error


@lru_cache(maxsize=32)  # a comparison reads the same sources once per run
def _rows(
    names_or_sets: tuple[str, ...], config: str, num_questions: int, first: int, seed: int, workers: int | None
) -> tuple[_Row, ...]:
    """Generate entries, one from each dataset in turn."""
    configs = json.loads(config)
    with WorkerPool(workers, _TIMEOUT_S, _MEMORY_BYTES) as pool:
        (result,) = pool.run([VerifierCall(_CHECK_SOURCE, (names_or_sets, configs))])
        if result.failure:
            raise UserError(f"Reasoning Gym cannot be used ({result.failure}); run: pip install 'brorl[gym]'")
        if isinstance(result.value, str):
            raise ValueError(result.value)
        names: list[str] = result.value
        entries = [(names[turn % len(names)], first + turn // len(names)) for turn in range(num_questions)]
        in_groups = sorted(entries)  # so that a worker creates few datasets
        replies = pool.map(_GENERATE, in_groups, configs, seed, at_once=_ENTRIES_PER_CALL)
    reply_of = dict(zip(in_groups, replies, strict=True))
    for (name, index), reply in reply_of.items():
        if reply.failure:
            raise ValueError(
                f"gym: {name} cannot generate question {index} ({reply.failure}); change first_index or config, or "
                "remove the dataset"
            )
    return tuple((name, index, *reply_of[name, index].value) for name, index in entries)
