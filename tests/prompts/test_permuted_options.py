"""Choices and measured answers: permutations by the row and the seed, and their JSON text."""

import json
from collections import Counter

import numpy as np
import pytest

from brorl.prompts.science import Choices, MeasuredAnswer, read_science_reference
from each_row import each_row

OPTIONS = ("helium", "neon", "argon", "krypton")


def test_a_row_has_one_order_and_rows_have_different_ones(rng: np.random.Generator) -> None:
    places: Counter[int] = Counter()
    orders = set()
    seed = int(rng.integers(1 << 30))
    for row in range(800):
        made = Choices.permuted(OPTIONS, 2, f"question {row}", seed)
        assert made == Choices.permuted(OPTIONS, 2, f"question {row}", seed)
        assert made.options[made.right] == "argon"
        assert sorted(made.options) == sorted(OPTIONS)
        places[made.right] += 1
        orders.add(made.options)
    assert len(orders) == 24
    assert max(places.values()) < 300  # 200 each; 300 is 8 standard deviations away
    other = [Choices.permuted(OPTIONS, 2, f"question {row}", seed + 1).options for row in range(50)]
    assert other != [Choices.permuted(OPTIONS, 2, f"question {row}", seed).options for row in range(50)]


def test_the_order_does_not_depend_on_the_order_of_the_data(rng: np.random.Generator) -> None:
    for row in range(100):
        mixed = [int(at) for at in rng.permutation(4)]
        one = Choices.permuted(OPTIONS, 2, f"q{row}", 7)
        other = Choices.permuted([OPTIONS[at] for at in mixed], mixed.index(2), f"q{row}", 7)
        assert one == other


@pytest.mark.parametrize("last", ["All of the above", "none of these.", "None of the above", "both of the above"])
def test_options_about_the_others_stay_last(last: str) -> None:
    for row in range(40):
        made = Choices.permuted([last, *OPTIONS], 0, f"q{row}", 0)
        assert made.options[-1] == last
        assert made.right == 4


@pytest.mark.parametrize("option", ["A and B", "both (A) and (C)", "A, B and C", "Neither A nor B", "A or D only"])
def test_options_that_name_letters_keep_the_order(option: str) -> None:
    for row in range(20):
        made = Choices.permuted([*OPTIONS, option], 1, f"q{row}", 0)
        assert made.options == (*OPTIONS, option)
        assert made.right == 1


def test_text_and_lines() -> None:
    made = Choices(OPTIONS, 1)
    assert (made.letters, made.letter) == ("ABCD", "B")
    assert json.loads(made.to_text()) == {"options": list(OPTIONS), "answer": "B"}
    assert read_science_reference(made.to_text()) == made
    assert made.under("Which? ") == "Which?\n\nA. helium\nB. neon\nC. argon\nD. krypton"


@each_row(
    ("text", "problem"),
    [('{"options": ["a"], "answer": "A"}', "has 1 options"), ('{"options": ["a", " a"], "answer": "A"}', "equal"),
     ('{"options": ["a", " "], "answer": "A"}', "empty"), ('{"options": ["a", "b"], "answer": "C"}',
     "has the answer 'C'"),
     ('{"options": ["a", "b"], "answer": "a"}', "has the answer 'a'"), ('{"options": ["a", "b"], "answer": 1}',
     "has 1 as answer, not text"),
     ('{"options": "ab", "answer": "A"}', "not a list"), ('{"options": ["a", "b"]}', "has the keys 'options' ")],
)  # fmt: skip
def test_malformed_choices(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_science_reference(text)


@each_row(
    ("text", "problem"),
    [('{"value": " ", "tolerance": 0}', "empty"), ('{"value": "1", "tolerance": 0.6}', "between"),
     ('{"value": "1", "tolerance": true}', "has True as tolerance, not a number"),
     ('{"value": 1, "tolerance": 0}', "has 1 as value, not text"),
     ('{"value": "1"}', "has the keys 'value'.*or the value alone")],
)  # fmt: skip
def test_malformed_measured_answers(text: str, problem: str) -> None:
    made = MeasuredAnswer("9.81 m/s^2", 0.05)
    assert read_science_reference(made.to_text()) == made
    with pytest.raises(ValueError, match=problem):
        read_science_reference(text)


@pytest.mark.parametrize("text", ["B", "1", "[" * 100_000, "{" * 100_000, '{"a'])
def test_other_text_is_an_answer_without_a_tolerance(text: str) -> None:
    assert read_science_reference(text) == MeasuredAnswer(text)
