"""One task of Reasoning Gym as a reference answer: the dataset, its settings, and the generated entry with exact types.

From its JSON text a verifier in another process scores answers exactly as the process that generated the entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, Self

import numpy as np

from brorl.errors import UserError
from brorl.prompts.prompt import read_json
from brorl.prompts.settings import ALL, PRORL, GymSource
from brorl.verification.sandbox.values import decode, encode

OUT_OF_DISTRIBUTION = ("acre", "boxnet", "game_of_life_halting")
"""Datasets that ProRL evaluated on and did not train on (arXiv 2505.24864, Table 3)."""
# The paper gives the number of 96, and 19 names. These are all 96 that Reasoning Gym had from 1 to 5 March 2025. The
# paper calls one `palindrome`, its name until 10 March; the held-out ones, and puzzle24 in its Figure 10, came from 5
# March on. They are those of 0.1.25 without these four, coin_flip, kakurasu, modulo_grid, path_star and survo.
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
    ALL: (),  # those of the installed version
    PRORL: tuple(_PRORL.split()),
}
"""Names of a set's datasets, in order."""

BENCHMARKS: Mapping[str, GymSource] = {
    source.label: source
    for source in (  # at indices that training does not reach; the shortest dataset has 5,000 entries
        GymSource(gym=(ALL,), name="gym", num_questions=530, first_index=4_000),  # about five of each
        GymSource(gym=OUT_OF_DISTRIBUTION, name="gym_ood", num_questions=300, first_index=4_000),
    )
}


GYM_DOMAIN = "gym"


_CONFIG: Any = {"extra": "forbid"}


@dataclass(frozen=True)
class GymTask:
    """A generated question with all that its scorer reads."""

    __pydantic_config__ = _CONFIG

    data_set: str  # name of the dataset in Reasoning Gym
    entry: Mapping[str, Any]  # the generated entry: `question`, `answer` and `metadata`
    # settings of the dataset that differ from its defaults, without `seed` and `size`; JSON values
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # seed of the dataset
    index: int = 0  # index of the entry

    @property
    def answer(self) -> str | None:
        """One right answer; None for a dataset that only checks answers."""
        answer = self.entry.get("answer")
        return None if answer is None else str(answer)

    def to_text(self) -> str:
        """Return the task as one line of JSON; ValueError if the entry has a value that is not of a builtin type."""
        entry = json.loads(encode(_builtin(self.entry)))
        return json.dumps({**vars(self), "entry": entry}, ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the text of a task; a ValueError has the problem."""
        task: Self = read_json(cls, text, "the text of a Reasoning Gym task")
        try:
            entry = decode(json.dumps(task.entry))
        except ValueError as error:
            raise ValueError(f"has an entry that cannot be read ({error})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict) or "answer" not in entry:
            raise ValueError("has an entry without answer or metadata")
        return replace(task, entry=entry)


def require_reasoning_gym() -> None:
    """Check that Reasoning Gym is installed, without importing it; UserError if it is not."""
    if find_spec("reasoning_gym") is None:
        raise UserError("the domain gym needs Reasoning Gym and a C compiler; run: pip install 'brorl[gym]'")


def _builtin(value: Any) -> Any:
    """Return a value without scalars of numpy, and with fractions, which no scorer reads, as text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Mapping):
        return {_builtin(key): _builtin(item) for key, item in value.items()}
    return type(value)(map(_builtin, value)) if type(value) in (list, tuple, set, frozenset) else value
