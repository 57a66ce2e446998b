r"""The option that a response concludes, beside remarks on the other options: by hand."""

import pytest

from brorl.prompts.choices import Choices
from brorl.verification.domains.choice_extraction import choose

GASES = Choices(("helium", "argon", "neon", "krypton"), 2)
LIST = (
    "- **A. helium**: glows pink, so it is wrong.\n- **B. argon**: wrong.\n- **C. neon**: glows red. Correct!\n"
    "- **D. krypton**: glows white, so it is wrong.\n\n"
)


def letter_of(response: str, choices: Choices = GASES) -> str | None:
    place = choose(response, choices).place
    return None if place is None else choices.letters[place]


@pytest.mark.parametrize(
    "end",
    ["Therefore, C is correct.", "Therefore, option C is the correct answer.", "So C. neon is correct.",
     "Thus, the correct choice would be C.", "Thus option C is correct.", "Hence, C.", "So C", "C is the best option.",
     "Therefore, **C** is correct.", "Among the options, C is right.", "Among the options: C", "C is the answer.",
     "Only C is correct.",
     "We conclude that C is correct."],
)  # fmt: skip
def test_a_conclusion_decides_over_a_list_of_the_options(end: str) -> None:
    assert letter_of(LIST + end) == "C"
    assert letter_of(LIST.replace("**", "") + end) == "C"


def test_a_list_of_all_options_names_none() -> None:
    assert letter_of(LIST) is None
    assert letter_of("Option A is correct.\nOption B is correct.\nOption C is correct.") is None
    assert letter_of("A. helium is right.\nC. neon is right.") is None


@pytest.mark.parametrize(
    ("response", "letter"),
    [("C. neon is correct.\n\nA. helium is incorrect.\nB. argon is incorrect.\nD. krypton is incorrect.", "C"),
     ("It glows.\nC. neon is wrong", None), ("It glows.\nC) is wrong", None), ("It glows.\nC: incorrect", None),
     ("**C** is incorrect.", None), ("**C. neon**: wrong", None), ("**C. neon** is not the answer.", None),
     ("The wrong answer is C.", None), ("The incorrect option is C.", None), ("The least likely answer is C", None),
     ("The worst choice is C", None), ("The correct answer is C.\n\nNote: a common wrong answer is B.", "C"),
     ("C is not correct.", None), ("It is unlikely that C is correct.", None), ("B and C are correct.", None),
     ("[B]; C. neon is correct.", None), ("Argon, neon is correct.", None), ("Option B, or C. neon is right.", None),
     ("A, being light, is wrong. So C is correct.", "C"),
     ("B or C is correct.", None), ("C is correct. B is correct.", None), ("C is correct, and B is correct.", None),
     ("A is wrong, so C is correct.", "C"), ("Neon glows red; thus C. neon is right.", "C"),
     ("C is correct because B is too light.", "C"), ("neon is the correct answer.", "C"),
     ("B. neon is correct.", None), ("C. neon is right next to B. argon.", None)],
)  # fmt: skip
def test_predicates(response: str, letter: str | None) -> None:
    assert letter_of(response) == letter


@pytest.mark.parametrize(
    ("response", "letter"),
    [("The answer is C. Options A, B, and D are incorrect.", "C"),
     ("The correct answer is C, but many students choose B.", "C"),
     ("The answer is C. A, B and D are wrong.", "C"), ("**Answer: B.** Options A, C, and D are incorrect.", "B"),
     ("**B** is correct. A, C, and D are wrong.", "B"), ("Answer: B. The other options (A, C, D) are incorrect.", "B"),
     ("Answer: B. Neither C nor D applies.", "B"), ("Answer: B. This rules out A and C.", "B"),
     ("The answer is C, eliminating A and B.", "C"), ("The answer is C. Note that A and B are wrong.", "C"),
     ("The answer is (C) neon because (A) helium and (B) argon are wrong.", "C"),
     ("The correct answer is **C. neon** (not **B. argon**).", "C")],
)  # fmt: skip
def test_remarks_that_other_options_are_wrong_are_no_hedge(response: str, letter: str) -> None:
    assert letter_of(response) == letter


@pytest.mark.parametrize(
    "response",
    ["The answer is C or B", "Answer: B, I think C", "Answer: A or maybe B", "Answer: B. Or C, A is wrong.",
     "Answer: B or C, A is wrong", "Answer: B. C or A. D is wrong.", "Answer: B, but maybe C",
     "Answer: B, but C is fine",
     "The answer is C. B is correct, A is wrong.", "The answer is C. Perhaps B, A is wrong.",
     "**C** is correct. B is also correct.", "The answer is C or B rather than A", "C is correct, or B.",
     "So C or B.", "C! B!", '"C" or "B"', "<answer>C</answer> <answer>B</answer>", "<answer>C or B</answer>",
     "The answer is neon (C) or argon (B)."],
)  # fmt: skip
def test_candidates_beside_remarks_name_no_option(response: str) -> None:
    assert letter_of(response) is None


def test_the_word_not_is_not_the_option_no() -> None:
    assert letter_of("The answer is B, not A.", Choices(("yes", "no"), 1)) == "B"
    assert letter_of("The answer is A, not B.", Choices(("yes", "no"), 1)) == "A"
    assert letter_of("Answer: B: no", Choices(("yes", "no"), 1)) == "B"


@pytest.mark.parametrize(
    "response",
    ["Thus option C is correct.", "C is the answer.", "The answer is clearly C.", "The answer is therefore C.",
     "The answer is probably C.", "The answer is indeed C.", "The answer would be C.", "The answer should be C.",
     "The answer must be C.", "The answer is C rather than B", "The answer is C (not B)", "The answer is C \u2014 neon",
     'The answer is "C".', "<answer>C</answer>", "<answer>\nC\n</answer>", "The answer is neon (C).", "C!"],
)  # fmt: skip
def test_frequent_forms(response: str) -> None:
    assert letter_of(response) == "C"


def test_text_before_the_letter_of_another_option_is_a_contradiction() -> None:
    assert choose("The answer is neon (B).", GASES).problem == "letter and text of different options"
    assert choose("The answer is C \u2014 argon", GASES).problem == "letter and text of different options"


@pytest.mark.parametrize(
    ("response", "letter"),
    [(r"\boxed{\text{B}}, \boxed{\text{C}}", None), (r"\boxed{\text{B}} or \boxed{C}", None),
     (r"\fbox{\text{B}} \fbox{\text{C}}", None), (r"\boxed{\text{C}}, \boxed{\textbf{C}}", "C"),
     (r"\boxed{\text{B}}" "\n\n" r"\boxed{\text{C}}", "C")],
)  # fmt: skip
def test_boxes_with_markup_in_one_paragraph(response: str, letter: str | None) -> None:
    assert letter_of(response) == letter


@pytest.mark.parametrize(
    "piece",
    ["C is correct. ", "so C is correct ", "C is correct, so ", "answer is C. A is wrong. ", '"C" ', "<answer>C ",
     "not (", "**C** is wrong ", "- **C** no\n", "neon (C) ", r"\boxed{\text{", r"\boxed{\text{B}} ", "answer is not "],
)  # fmt: skip
def test_long_responses_end(piece: str) -> None:
    choose(piece * (400_000 // len(piece)), GASES)
