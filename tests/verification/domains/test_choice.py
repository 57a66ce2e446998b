r"""The option that a response names by a strict grammar: by hand, and attacks."""

import random

import numpy as np
import pytest

from brorl.prompts.science import Choices
from brorl.verification.domains.choice import chosen_option
from case_tables import table
from each_row import each_row

NOBLE = Choices(("helium", "neon gas", "a photon", "42 kg"), 1)
TEN = Choices(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 1)


def letter_of(response: str, choices: Choices = NOBLE) -> str | None:
    option = chosen_option(response, choices).option
    return None if option is None else choices.letters[option]


@each_row(*table(__file__, "named_options"))
def test_named_options(response: str, letter: str) -> None:
    assert (letter_of(response), chosen_option(response, NOBLE).problem) == (letter, None)


@each_row(*table(__file__, "hedges_and_prose_name_no_option"))
def test_hedges_and_prose_name_no_option(response: str, problem: str | None) -> None:
    assert (letter_of(response), chosen_option(response, NOBLE).problem) == (None, problem)


@each_row(
    ("options", "response", "letter"),
    [(("A", "B", "AB", "O"), "Answer: AB", "C"), (("A", "B", "AB", "O"), "Answer: C. AB", "C"),
     (("A", "B", "AB", "O"), r"\boxed{A. A}", "A"), (("A", "B", "AB", "O"), "O", None),
     (("A", "B", "AB", "O"), r"\boxed{A. B}", None), (("4", "6", "8", "9"), r"\boxed{6}", "B"),
     (("4", "6", "8", "9"), "The answer is 9.", "D"), (("4", "6", "8", "9"), r"\boxed{7}", None),
     (("4", "6", "8", "9"), r"\boxed{A. 6}", None), (("5 mW", "5 MW"), r"\boxed{5 MW}", "B"),
     (("5 mW", "5 MW"), r"\boxed{5 mW}", "A"), (("5 mW", "5 MW"), r"\boxed{5 mw}", None),
     (("yes", "no"), "Answer: B: no", "B"),
     (("-2 m/s", "-4 m/s", "2 m/s"), "A. -2 m/s.", "A"), (("-2 m/s", "-4 m/s", "2 m/s"), "C. -2 m/s", None),
     (TEN.options, "The answer is I", "I"), (TEN.options, "Answer: I. nine", "I"),
     (TEN.options, "The answer is B, I", None)],
)  # fmt: skip
def test_texts_that_look_like_letters_numbers_or_each_other(
    options: tuple[str, ...], response: str, letter: str | None
) -> None:
    assert letter_of(response, Choices(options, 0)) == letter


@pytest.mark.parametrize("minus", ["-", "\N{MINUS SIGN}"])
@pytest.mark.parametrize(
    ("response", "letter"),
    [("The answer is A. -1", "A"), ("**A. -1**", "A"), (r"\boxed{A. -1}", "A"), ("Answer: A. $-1$", "A"),
     ("(A) -1", "A"), ("A) -1", "A"), ("The answer is B. -1", None), (r"\boxed{B. -1}", None),
     ("Answer: B = -1", None), ("Answer: A = -1", "A"), ("Answer: A (-1)", "A"), ("Answer: A - 1", None),
     ("Answer: B - 1", "B"), ("\\boxed{\N{MINUS SIGN}1}", "A"), (r"\boxed{-1}", "A"), ("Answer: A -1", "A")],
)  # fmt: skip
def test_a_minus_sign_is_no_dash(minus: str, response: str, letter: str | None) -> None:
    assert letter_of(response, Choices((f"{minus}1", "1", "0", "2"), 0)) == letter


def test_no_response_is_right_for_two_questions(rng: np.random.Generator) -> None:
    # Whatever a policy writes, it names at most one option, and which one is right does not matter.
    chance = random.Random(int(rng.integers(1 << 30)))
    pieces = ["A", "B", "C", "D", "E", " ", " or ", " and ", ",", "/", "\\boxed{", "}", "**", "(", ")", ".", "\n",
    "\n\n", "The answer is ", "Answer: ", "helium", "neon gas", "a photon", "42 kg", "$", "\\text{", "not ", "b",
    " is correct", "So ", "<answer>", "</answer>", '"', "!"]  # fmt: skip
    named = 0
    for _ in range(2000):
        response = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 8)))
        chosen = {chosen_option(response, Choices(NOBLE.options, right)) for right in range(4)}
        assert len(chosen) == 1
        named += chosen.pop().option is not None
    assert named > 120


def test_no_list_of_two_options_scores(rng: np.random.Generator) -> None:
    """Every form of two different options in one statement, in every place of a statement."""
    chance = random.Random(int(rng.integers(1 << 30)))
    forms = [
        "{}",
        "({})",
        "{})",
        "{}.",
        "[{}]",
        "{0} ({1})",
        "{0}. {1}",
        "{0} = {1}",
        "**{}**",
        r"\text{{{}}}",
        "Option {}",
    ]
    joints = [" or ", ", ", " and ", "/", " & ", "; ", ", or ", " and also ", ", maybe ", " or possibly ", " ", "\n"]
    places = [r"\boxed{{{}}}", "The answer is {}", "Answer: {}", "**Answer:** {}", "So\n{}", "So {}",
    "<answer>{}</answer>",
              "{}", "{} is correct.", "Therefore, the answer is {}."]  # fmt: skip
    for _ in range(3000):
        parts = [chance.choice(forms).format(TEN.letters[at], TEN.options[at]) for at in chance.sample(range(10), 2)]
        response = chance.choice(places).format(chance.choice(joints).join(parts))
        assert chosen_option(response, TEN).option is None, response
