"""Sets of Reasoning Gym's datasets by name, and the benchmarks made of them."""

from __future__ import annotations

from collections.abc import Mapping

from brorl.prompts.settings import ALL, PRORL, GymSource

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
