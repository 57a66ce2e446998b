r"""The option that a response names by a strict grammar: by hand, and attacks."""

import random

import numpy as np
import pytest

from brorl.prompts.science import Choices
from brorl.verification.domains.choice import choose
from each_row import each_row

NOBLE = Choices(("helium", "neon gas", "a photon", "42 kg"), 1)
TEN = Choices(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 1)


def letter_of(response: str, choices: Choices = NOBLE) -> str | None:
    option = choose(response, choices).option
    return None if option is None else choices.letters[option]


@each_row(
    ("response", "letter"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(b)}", "B"),
        (r"\boxed{B. neon gas}", "B"),
        (r"\boxed{\textbf{(C) a photon}}", "C"),
        (r"\boxed{neon gas}", "B"),
        (r"\boxed{Neon  Gas.}", "B"),
        (r"\boxed{42\ \text{kg}}", "D"),
        (r"\boxed{A}" "\n\nNo, " r"\boxed{B}", "B"),
        (r"\boxed{\text{B} = \text{neon gas}}", "B"),
        (r"\boxed{\text{C}}, \boxed{\textbf{C}}", "C"),
        (r"\boxed{\text{B}}" "\n\n" r"\boxed{\text{C}}", "C"),
        (r"Answer is $\boxed{B}$", "B"),
        ("The answer is (C).", "C"),
        ("Answer: B", "B"),
        ("**Answer:** B", "B"),
        ("Answer: **B**", "B"),
        ("The correct answer is **(B) neon gas**.", "B"),
        ("The answer is a photon.", "C"),
        ("The answer is A photon", "C"),
        ("The answer is A", "A"),
        (r"the final answer is: $\text{D}$", "D"),
        ("answer: c", "C"),
        ("The answer is B, neon gas", "B"),
        ("Answer: C: a photon", "C"),
        ("choice: [C]", "C"),
        ("**Final Answer**\n\nB", "B"),
        ("The answer is A.\nWait. The answer is B.", "B"),
        ('The answer is "C".', "C"),
        ("It glows, so the answer is B.", "B"),
        ("It glows. Hence, the best answer is B", "B"),
        ("Hm.\n<answer>C</answer>", "C"),
        ("<answer>\nC\n</answer>", "C"),
        ("So **B**", "B"),
        ("B", "B"),
        ("b", "B"),
        ("(d)", "D"),
        ("C!", "C"),
        ("neon gas", "B"),
        ("**B**: neon gas", "B"),
        ("B(neon gas)", "B"),
        ("Option B", "B"),
        ("B [neon gas]", "B"),
        ("C is correct.", "C"),
        ("Hence, option C is the right answer.", "C"),
        ("It glows. Therefore, C is the answer.", "C"),
        ("I think the answer is C.", "C"),
        ("I believe that the correct option is C", "C"),
        ("The answer is C, not A.", "C"),
        ("The answer is C, since A and B are too heavy.", "C"),
        ("The answer is clearly C", "C"),
        ("Since it glows, the answer is C.", "C"),
        ("Neon gas is correct.", "B"),
        (r"\boxed{\text{Answer: C}}", "C"),
        (r"\boxed{\text{The correct answer is C}}", "C"),
        ("A is incorrect. C is correct.", "C"),
    ],
)
def test_named_options(response: str, letter: str) -> None:
    assert (letter_of(response), choose(response, NOBLE).problem) == (letter, None)


@each_row(
    ("response", "problem"),
    [
        (r"\boxed{A} or \boxed{B}", "several options"),
        (r"\boxed{A}" "\n" r"\boxed{B}", "several options"),
        (r"\boxed{\text{B}}, \boxed{\text{C}}", "several options"),
        (r"\fbox{\text{B}} \fbox{\text{C}}", "several options"),
        ("The answer is A. The answer is B.", "several options"),
        ("The answer is A. The answer is\nB", "several options"),
        (r"\boxed{A or B}", "not an option"),
        (r"\boxed{A, B}", "not an option"),
        (r"\boxed{AB}", "not an option"),
        (r"\boxed{E}", "not an option"),
        (r"\boxed{E. neon gas}", "not an option"),
        (r"\boxed{43 kg}", "not an option"),
        (r"\boxed{}", "not an option"),
        (r"\boxed{B. helium}", "not an option"),
        (r"\boxed{B (helium)}", "not an option"),
        ("Answer: A/B/C/D", "not an option"),
        ("Answer: (A)(B)", "not an option"),
        ("Answer: A) B) C)", "not an option"),
        ("Answer: B & C", "not an option"),
        ("Answer: B, maybe also C", "not an option"),
        ("Answer: B-C", "not an option"),
        ("Answer: B helium", "not an option"),
        ("The answer is B - helium", "not an option"),
        ("The answer is not B", "not an option"),
        ("The answer is either A or B", "not an option"),
        ("Answer: A B C D", "not an option"),
        ("Answer: B. Or C, A is wrong.", "not an option"),
        ("Answer: B\nI am sure.", "not an option"),
        ("The answer is neon gas (B) or helium (A).", "not an option"),
        ("<answer>C or B</answer>", "not an option"),
        ("<answer>C</answer> <answer>B</answer>", "not an option"),
        ("A, B, C, D", None),
        ("**A** and **B**", None),
        ("A. helium B. neon gas C. a photon D. 42 kg", None),
        ("A. helium\nB. neon gas", None),
        ("**A**\n**B**", None),
        ("I think B", None),
        ("", None),
        (" \n", None),
        ("Both A and B", None),
        ("It depends.", None),
        ("C is wrong", None),
        ("C is not correct.", None),
        ("A or C is correct.", None),
        ("I doubt C is correct.", None),
        ("Is C correct?", None),
        ("C is correct, or B.", None),
        ("A\nC is correct.", "several options"),
        ("B is correct. C is correct.", "several options"),
        ("C is correct? No.", None),
        ("A. neon gas is correct", None),
        ("The answer is B, not B.", "not an option"),
        ("The answer is C because it may be B.", "not an option"),
        ("C: incorrect", None),
        ("The wrong answer is C.", None),
        ("The least likely answer is C", None),
        ("It is false: the answer is C.", None),
        ("If it glows, the answer is C.", None),
        ("C! B!", None),
        ('"C" or "B"', None),
        ("So C or B.", None),
        ("Who said that the answer is C", None),
    ],
)
def test_hedges_and_prose_name_no_option(response: str, problem: str | None) -> None:
    assert (letter_of(response), choose(response, NOBLE).problem) == (None, problem)


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
        chosen = {choose(response, Choices(NOBLE.options, right)) for right in range(4)}
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
        assert choose(response, TEN).option is None, response


@each_row(
    "piece",
    ["\\boxed{", "\\boxed{A}", "The answer is ", "**", "**A** ", "A or ", "(", " ", "\n", "Answer: A, ", "\ud800\x00",
     "$",
     ", so the answer is C", '"C" ', "\n<answer>C ", r"\boxed{\text{", r"\boxed{\text{B}} ", "{}"],
)  # fmt: skip
def test_hostile_responses_end(piece: str) -> None:
    choose(piece * (1_000_000 // len(piece)), NOBLE)
