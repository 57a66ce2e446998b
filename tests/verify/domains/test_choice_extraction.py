r"""The option that a response names: by hand, and attacks."""

import random

import numpy as np
import pytest

from brorl.prompts.choices import Choices
from brorl.verification.domains.choice_extraction import choose

NOBLE = Choices(("helium", "neon gas", "a photon", "42 kg"), 1)


@pytest.mark.parametrize(
    ("response", "letter"),
    [(r"\boxed{B}", "B"), (r"\boxed{\text{B}}", "B"), (r"\boxed{(b)}", "B"), (r"\boxed{B. neon gas}", "B"),
     (r"\boxed{\textbf{(C) a photon}}", "C"), (r"\boxed{neon gas}", "B"), (r"\boxed{Neon  Gas.}", "B"),
     (r"\boxed{42\ \text{kg}}", "D"), (r"\boxed{A}" "\n\nNo, " r"\boxed{B}", "B"), ("The answer is (C).", "C"),
     ("the answer is C because B is wrong", "C"), ("Answer: B", "B"), ("**Answer:** B", "B"), ("Answer: **B**", "B"),
     ("The correct answer is **(B) neon gas**.", "B"), ("The answer is a photon.", "C"), ("The answer is A photon",
     "C"),
     ("The answer is A", "A"), (r"the final answer is: $\text{D}$", "D"), ("So **B**", "B"), ("B", "B"), ("b", "B"),
     ("(d)", "D"), ("neon gas", "B"), ("Thus\nB. neon gas", "B"), ("Option B is correct.", "B"), ("answer: c", "C"),
     ("The answer is B, neon gas", "B"), ("Answer: C: a photon", "C"), (r"Answer is $\boxed{B}$", "B"),
     ("The answer is D. 42 kg since A is light", "D"), ("**B**: neon gas", "B"), ("**Final Answer**\n\nB", "B"),
     ("The answer is A.\nWait. The answer is B.", "B"), ("Answer: B. The gas glows.", "B"), ("choice: [C]", "C")],
)  # fmt: skip
def test_named_options(response: str, letter: str) -> None:
    found = choose(response, NOBLE)
    assert (found.place, found.problem) == (NOBLE.letters.index(letter), None)


@pytest.mark.parametrize(
    ("response", "problem"),
    [(r"\boxed{A or B}", "several options"), (r"\boxed{A, B}", "several options"), (r"\boxed{AB}", "not an option"),
     (r"\boxed{A} or \boxed{B}", "several options"), (r"\boxed{A}" "\n" r"\boxed{B}", "several options"),
     ("Answer: A/B/C/D", "several options"), ("Answer: (A)(B)", "several options"), ("A, B, C, D", "several options"),
     ("Answer: A) B) C)", "several options"), ("**A** and **B**", "several options"), ("Answer: B & C",
     "several options"),
     ("The answer is A. The answer is B.", "several options"), ("Answer: B, maybe also C", "several options"),
     ("A. helium B. neon gas C. a photon D. 42 kg", "several options"), ("Answer: B-C", "several options"),
     (r"\boxed{E}", "not an option"), (r"\boxed{E. neon gas}", "not an option"), (r"\boxed{43 kg}", "not an option"),
     (r"\boxed{}", "not an option"), (r"\boxed{B. helium}", "letter and text of different options"),
     ("The answer is B - helium", "letter and text of different options"),
     ("Answer: B helium", "letter and text of different options"), ("I think B", None), ("The answer is not B", None),
     ("The answer is either A or B", None), ("", None), (" \n", None), ("Both A and B", None), ("It depends.", None),
     ("Answer: A B C D", None)],
)  # fmt: skip
def test_hedges_and_nonsense_name_no_option(response: str, problem: str | None) -> None:
    found = choose(response, NOBLE)
    assert (found.place, found.problem) == (None, problem)


def test_options_that_are_letters() -> None:
    blood = Choices(("A", "B", "AB", "O"), 2)
    for response, place in [("Answer: AB", 2), ("Answer: C", 2), ("Answer: C. AB", 2), (r"\boxed{A. A}", 0), ("O",
    None),
                            (r"\boxed{A. B}", None)]:  # fmt: skip
        assert choose(response, blood).place == place, response


def test_options_of_one_digit_are_named_by_their_text() -> None:
    numbers = Choices(("4", "6", "8", "9"), 1)
    for response, place in [(r"\boxed{6}", 1), ("The answer is 9.", 3), (r"\boxed{B}", 1), (r"\boxed{7}", None),
                            (r"\boxed{A. 6}", None)]:  # fmt: skip
        assert choose(response, numbers).place == place, response


def test_case_decides_where_options_differ_by_it() -> None:
    power = Choices(("5 mW", "5 MW"), 0)
    assert [choose(f"\\boxed{{{text}}}", power).place for text in ("5 mW", "5 MW", "5 mw")] == [0, 1, None]


def test_no_response_is_right_for_two_questions(rng: np.random.Generator) -> None:
    # Whatever a policy writes, it names at most one option, and which one is right does not matter.
    chance = random.Random(int(rng.integers(1 << 30)))
    pieces = ["A", "B", "C", "D", "E", " ", " or ", " and ", ",", "/", "\\boxed{", "}", "**", "(", ")", ".", "\n",
    "\n\n",
              "answer is ", "Answer: ", "helium", "neon gas", "a photon", "42 kg", "$", "\\text{", "not ",
              "b", " is correct", " is wrong", "So ",
              "<answer>", "</answer>", '"', " (not ", "!", " is the answer"]  # fmt: skip
    named = 0
    for _ in range(5000):
        response = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 14)))
        found = {choose(response, Choices(NOBLE.options, right)) for right in range(4)}
        assert len(found) == 1
        named += found.pop().place is not None
    assert named > 500


TEN = Choices(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 1)


@pytest.mark.parametrize(
    ("response", "letter"),
    [("The answer is B, I think", "B"), ("Answer: B, I believe.", "B"), ("Answer: B. I am sure.", "B"),
     ("The answer is I", "I"), ("Answer: I. nine", "I"), (r"\boxed{B (two)}", "B"), (r"\boxed{B=two}", "B"),
     (r"\boxed{B = two}", "B"), (r"\boxed{\text{B} = \text{two}}", "B"), ("Answer: B (two)", "B"), ("B(two)", "B"),
     ("Answer: B [two]", "B"), ("**B (two)**", "B"), ("Answer: B, A bird has two legs", "B"),
     ("Answer: B\nExplanation: this option is the best of all.", "B"),
     ("The answer is B.\nThis answer is consistent with the data.", "B"),
     ("Answer: B\nThe last option is not ten but eleven", "B"), ("Answer: B. Option C is wrong.", "B"),
     ("The answer is B because C or D would be more", "B"), ("Answer: B, not C", "B")],
)  # fmt: skip
def test_letters_in_sentences(response: str, letter: str) -> None:
    found = choose(response, TEN)
    assert (found.place, found.problem) == (TEN.letters.index(letter), None)


@pytest.mark.parametrize(
    "response",
    ["The answer is B, I", "The answer is B, I or C", r"\boxed{B, I}", r"\boxed{B (one)}", r"\boxed{B = one}",
     r"\boxed{B (two), C (three)}", r"\boxed{B = two, C = three}", r"\boxed{(b) or (c)}", "Answer: (b), (c)",
     "The answer is B, I think C", "Answer: B as well as C", "Answer: B. Also C.", "Answer: B, but C is also right",
     "Answer: B. two or three", "Answer: B, possibly three or four", "Answer: B) two C) three", "Answer: b) c) d)",
     "Answer: B\nThe answer is either C or D", "Answer: B\nThe correct option is perhaps C",
     "Answer: B\nAnother answer is clearly three or so", "Answer: B or c", "Answer: B. C is the answer, too",
     "Answer: B\nAlternative answer: maybe (c)", "Answer: B, A possibly", "Answer: B and/or C", "Answer: B; C; D"],
)  # fmt: skip
def test_lists_in_sentences_name_no_option(response: str) -> None:
    assert choose(response, TEN).place is None


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
    joints = [" or ", ", ", " and ", "/", " & ", "; ", ", or ", " and also ", ", maybe ", " or possibly ", " "]
    places = [
        r"\boxed{{{}}}",
        "The answer is {}",
        "Answer: {}",
        "**Answer:** {}",
        "So\n{}",
        "So {}",
        "<answer>{}</answer>",
        "The answer would be {}",
        "{} is correct.",
        "Therefore, {} is the answer.",
        "The correct option is {}.",
    ]
    for _ in range(3000):
        parts = [chance.choice(forms).format(TEN.letters[at], TEN.options[at]) for at in chance.sample(range(10), 2)]
        response = chance.choice(places).format(chance.choice(joints).join(parts))
        assert choose(response, TEN).place is None, response


@pytest.mark.parametrize(
    "response",
    ["\\boxed{" * 150_000, "\\boxed{A}" * 100_000, "answer is " * 100_000, "**" * 500_000, "**A** " * 150_000,
    "A or " * 200_000,
     "(" * 1_000_000, " " * 1_000_000, "\n" * 1_000_000, "Answer: " + "A, " * 300_000, "\ud800\x00" * 300_000,
     "$" * 1_000_000,
     "\\boxed{" + "{" * 500_000 + "}" * 500_001],
)  # fmt: skip
def test_hostile_responses_end(response: str) -> None:
    choose(response, NOBLE)


def letter_of(response: str, choices: Choices) -> str | None:
    place = choose(response, choices).place
    return None if place is None else choices.letters[place]


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


def test_a_negative_quantity_is_not_its_opposite() -> None:
    speeds = Choices(("-2 m/s", "-4 m/s", "2 m/s", "4 m/s"), 0)
    assert letter_of("A. -2 m/s.", speeds) == "A"
    assert choose("C. -2 m/s", speeds).problem == "letter and text of different options"
