"""Countdown puzzles against brute force, and the prompts that they become."""

from fractions import Fraction
from hashlib import blake2b
from itertools import combinations_with_replacement, permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import brorl
from brorl.prompts.countdown import CountdownPuzzle, countdown_puzzles, countdown_questions, split_countdown
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Question
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
    @pytest.mark.parametrize(
        ("num_numbers", "max_number"), [(1, 9), (2, 12), (3, 6), pytest.param(4, 3, marks=pytest.mark.slow)]
    )
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

    @pytest.mark.slow
    @given(st.floats(0, 1), st.integers(0, 2**32))
    def test_the_side_is_a_hash_of_the_numbers_alone(self, fraction: float, seed: int) -> None:
        def is_held_out(puzzle: CountdownPuzzle) -> bool:
            key = f"countdown split {seed}: {' '.join(map(str, puzzle.numbers))}"
            return int(blake2b(key.encode(), digest_size=8).hexdigest(), 16) < fraction * 2**64

        train, held_out = split_countdown(self.PUZZLES, fraction, seed)
        assert train == [p for p in self.PUZZLES if not is_held_out(p)]
        kept = [p for p in self.PUZZLES if is_held_out(p)]
        assert held_out == [kept[i] for i in np.random.default_rng(seed).permutation(len(kept))]


class TestQuestions:
    def test_questions_carry_text_and_reference(self) -> None:
        (question,) = countdown_questions([CountdownPuzzle((3, 5, 7), 22)])
        assert question == Question("countdown-3-5-7-to-22", "3 5 7 -> 22:", "3 5 7 -> 22", "countdown", "countdown")

    @pytest.mark.slow
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
