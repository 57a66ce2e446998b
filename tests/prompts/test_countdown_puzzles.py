"""Countdown puzzles against brute force, and the prompts that they become."""

from collections import Counter
from fractions import Fraction
from itertools import combinations_with_replacement, permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import brorl
from brorl.prompts.countdown import CountdownPuzzle, countdown_puzzles, countdown_questions, split_countdown
from brorl.prompts.prompt import Prompt, Question
from brorl.prompts.rendering import render
from brorl.prompts.settings import PromptFormat
from each_row import each_row


def brute_force_values(numbers: tuple[int, ...]) -> set[Fraction]:
    """Values of every binary tree over every order of the numbers, one expression at a time."""

    def trees(leaves: tuple[Fraction, ...]) -> list[Fraction]:
        if len(leaves) == 1:
            return [leaves[0]]
        found = []
        for cut in range(1, len(leaves)):
            for a, b in product(trees(leaves[:cut]), trees(leaves[cut:])):
                found += [a + b, a - b, a * b] + ([a / b] if b else [])
        return found

    return {value for order in permutations(map(Fraction, numbers)) for value in trees(order)}


class TestCountdownPuzzles:
    @pytest.mark.parametrize(("num_numbers", "max_number"), [(1, 9), (2, 12), (3, 6), (4, 3)])
    def test_lists_exactly_the_solvable_puzzles(self, num_numbers: int, max_number: int) -> None:
        targets = range(60)
        expected = [
            CountdownPuzzle(numbers, target)
            for numbers in combinations_with_replacement(range(1, max_number + 1), num_numbers)
            for values in [brute_force_values(numbers)]
            for target in targets
            if Fraction(target) in values
        ]
        assert countdown_puzzles(num_numbers, max_number, targets) == expected

    def test_counts_solutions_that_need_a_fraction_on_the_way(self) -> None:
        """8 / (3 - 8 / 3) is the only way to 24 from 3 3 8 8."""
        assert CountdownPuzzle((3, 3, 8, 8), 24) in countdown_puzzles(4, 8, range(24, 25))


class TestCountdownPuzzle:
    @given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.integers(0, 10**9))
    def test_reference_reads_back(self, numbers: list[int], target: int) -> None:
        puzzle = CountdownPuzzle(tuple(sorted(numbers)), target)
        assert CountdownPuzzle.from_reference(puzzle.reference) == puzzle

    def test_text_is_as_documented(self) -> None:
        assert CountdownPuzzle((3, 5, 7), 22).text == "3 5 7 -> 22:"

    @each_row("reference", ["", "3 5 7", "3 5 7 = 22", "5 3 -> 8", "3 x -> 8", " -> 8"])
    def test_malformed_references_name_the_form(self, reference: str) -> None:
        with pytest.raises(ValueError, match="3 5 7 -> 22"):
            CountdownPuzzle.from_reference(reference)

    @pytest.mark.parametrize(("numbers", "target"), [((), 3), ((0, 2), 3), ((3, 2), 5), ((1, 2), -1)])
    def test_refuses_what_is_no_puzzle(self, numbers: tuple[int, ...], target: int) -> None:
        with pytest.raises(ValueError, match="numbers"):
            CountdownPuzzle(numbers, target)


class TestSplit:
    PUZZLES = countdown_puzzles(3, 10, range(1, 60))

    @given(st.floats(0, 1), st.integers(0, 2**32))
    @settings(max_examples=30, deadline=None)
    def test_no_multiset_is_on_both_sides_and_no_puzzle_is_lost(self, fraction: float, seed: int) -> None:
        train, held_out = split_countdown(self.PUZZLES, fraction, seed)
        assert {p.numbers for p in train}.isdisjoint({p.numbers for p in held_out})
        assert Counter(train + held_out) == Counter(self.PUZZLES)

    def test_fraction_is_met_over_multisets(self) -> None:
        multisets = [CountdownPuzzle(numbers, 1) for numbers in combinations_with_replacement(range(1, 31), 3)]
        fraction = len(split_countdown(multisets, 0.2, seed=5).held_out) / len(multisets)
        # 4960 draws at 0.2 have a standard deviation of 0.0057.
        assert abs(fraction - 0.2) < 0.025

    def test_side_does_not_depend_on_targets_or_other_puzzles(self) -> None:
        held_out = {p.numbers for p in split_countdown(self.PUZZLES, 0.3, 1).held_out}
        half = self.PUZZLES[::2]
        assert split_countdown(half, 0.3, 1).train == [p for p in half if p.numbers not in held_out]

    @given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
    @settings(max_examples=30, deadline=None)
    def test_a_larger_fraction_holds_out_all_that_a_smaller_one_does(self, one: float, other: float, seed: int) -> None:
        less, more = (set(split_countdown(self.PUZZLES, f, seed).held_out) for f in sorted((one, other)))
        assert less <= more

    def test_first_held_out_puzzles_are_a_fair_sample(self) -> None:
        """Over seeds, the first ones have the mean target of all: the order is no sorted order."""
        held_out = split_countdown(self.PUZZLES, 1.0, 0).held_out
        assert held_out != self.PUZZLES
        assert held_out == split_countdown(self.PUZZLES, 1.0, 0).held_out
        everything = [p.target for p in self.PUZZLES]
        firsts = [p.target for seed in range(100) for p in split_countdown(self.PUZZLES, 1.0, seed)[1][:20]]
        standard_error = np.std(everything) / np.sqrt(len(firsts))
        assert abs(np.mean(firsts) - np.mean(everything)) < 4 * standard_error


class TestQuestions:
    def test_questions_carry_text_and_reference(self) -> None:
        (question,) = countdown_questions([CountdownPuzzle((3, 5, 7), 22)])
        assert question == Question("countdown-3-5-7-to-22", "3 5 7 -> 22:", "3 5 7 -> 22", "countdown", "countdown")

    def test_ids_are_distinct(self) -> None:
        questions = countdown_questions(countdown_puzzles(3, 13, range(1, 100)))
        assert len({question.id for question in questions}) == len(questions)

    def test_prompts_are_the_bare_puzzles_as_the_shipped_tokenizer_spells_them(self, rng: np.random.Generator) -> None:
        tokenizer = AutoTokenizer.from_pretrained(Path(brorl.__file__).parent / "quickstart_model")
        every = countdown_puzzles(3, 7, range(1, 100))
        puzzles = [every[i] for i in rng.choice(len(every), 300, replace=False)]
        expected = [
            Prompt(
                f"countdown-{'-'.join(map(str, p.numbers))}-to-{p.target}",
                f"{p.reference}:",
                tuple(tokenizer(f"{p.reference}:")["input_ids"]),
                p.reference,
                "countdown",
                "countdown",
                f"{p.reference}:",
            )
            for p in puzzles
        ]
        assert render(countdown_questions(puzzles), PromptFormat(), tokenizer) == expected

    def test_a_prompt_without_tokens_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no tokens"):
            Prompt("p", "", (), "", "test")


class TestQuickstartModel:
    """The model folder that ships in the package, as far as the prompts go."""

    FOLDER = Path(brorl.__file__).parent / "quickstart_model"

    def test_its_tokenizer_reads_and_writes_every_countdown_text(self) -> None:
        tokenizer = AutoTokenizer.from_pretrained(self.FOLDER)
        text = "0123456789 -> 0123456789:(1+2)*3-4/5"
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id
        assert len(ids) == 1 + len(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
