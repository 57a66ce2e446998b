"""Options in an order of their own, and layouts of science on rows made by hand."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from brorl.prompts.public_data import LAYOUTS
from brorl.prompts.row import DroppedRow, row_question
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
     "has 1 as answer"),
     ('{"options": "ab", "answer": "A"}', "has 'ab' as options"), ('{"options": ["a", "b"]}', "has no answer")],
)  # fmt: skip
def test_malformed_choices(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_science_reference(text)


@each_row(
    ("text", "problem"),
    [('{"value": " ", "tolerance": 0}', "empty"), ('{"value": "1", "tolerance": 0.6}', "between"),
     ('{"value": "1", "tolerance": true}', "has True as tolerance"),
     ('{"value": 1, "tolerance": 0}', "has 1 as value"),
     ('{"value": "1", "error": 2}', "has the unknown key error; .*or the value alone")],
)  # fmt: skip
def test_malformed_measured_answers(text: str, problem: str) -> None:
    made = MeasuredAnswer("9.81 m/s^2", 0.05)
    assert read_science_reference(made.to_text()) == made
    with pytest.raises(ValueError, match=problem):
        read_science_reference(text)


@pytest.mark.parametrize("text", ["B", "1", "[" * 100_000, "{" * 100_000, '{"a'])
def test_other_text_is_an_answer_without_a_tolerance(text: str) -> None:
    assert read_science_reference(text) == MeasuredAnswer(text)


GPQA_ROW = {
    "Pre-Revision Question": "old", "Question": "Which gas is lightest?\n", "Correct Answer": "Helium\n",
    "Incorrect Answer 1": "Neon",
    "Incorrect Answer 2": "Argon ", "Incorrect Answer 3": "Krypton", "Explanation": "It is.",
    "Subdomain": "Chemistry (general)",
    "Record ID": "rec0", "High-level domain": "Chemistry",
}  # fmt: skip
MMLU_PRO_ROW = {
    "question_id": 70, "question": "What is 2 + 3?", "options": ["4", "5", "6", "7", "8", "9", "10", "11", "12", "13"],
    "answer": "B",
    "answer_index": 1, "cot_content": "", "category": "math", "src": "ori_mmlu",
}  # fmt: skip
ARC_ROW = {
    "id": "Mercury_1", "question": "Which is a gas?", "choices": {"text": ["iron", "air", "salt"], "label": ["1", "2",
    "3"]}, "answerKey": "2",
}  # fmt: skip
SCIQ_ROW = {
    "question": "What is the least dangerous radioactive decay?", "distractor3": "zeta decay",
    "distractor1": "beta decay",
    "distractor2": "gamma decay", "correct_answer": "alpha decay", "support": "All radioactive decay is dangerous.",
}  # fmt: skip
SCIBENCH_ROW = {
    "problem_text": "Predict the pressure.", "answer_latex": " 50.7", "answer_number": "50.7",
    "unit": "$\\mathrm{atm}$ ",
    "source": "atkins", "problemid": " e1.17(a)(a)", "comment": " ",
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "row", "right", "number"),
    [("gpqa", GPQA_ROW, "Helium", 4), ("mmlu_pro", MMLU_PRO_ROW, "5", 10), ("arc", ARC_ROW, "air", 3),
     ("sciq", SCIQ_ROW, "alpha decay", 4)],
)  # fmt: skip
def test_questions_with_options(layout: str, row: dict[str, Any], right: str, number: int) -> None:
    places = set()
    for seed in range(30):
        fields = LAYOUTS[layout].question(row, seed)
        choices = read_science_reference(fields.reference)
        assert choices.options[choices.right] == right
        assert len(choices.options) == number
        assert f"\n{choices.letter}. {right}" in fields.text
        assert fields.domain == "science"
        assert fields == LAYOUTS[layout].question(dict(reversed(row.items())), seed)
        places.add(choices.right)
    assert len(places) > 2
    with pytest.raises(KeyError):
        LAYOUTS[layout].question({}, 0)


@each_row(
    ("layout", "row", "reason"),
    [("gpqa", {**GPQA_ROW, "Incorrect Answer 1": "Helium"}, "two equal options"),
     ("gpqa", {**GPQA_ROW, "Incorrect Answer 1": None}, "an empty option"),
     ("gpqa", {**GPQA_ROW, "Question": " "}, "no question"),
     ("mmlu_pro", {**MMLU_PRO_ROW, "answer": "C"}, "answer and answer_index name different options"),
     ("mmlu_pro", {**MMLU_PRO_ROW, "options": "ABC"}, "no 2 to 26 options"),
     ("arc", {**ARC_ROW, "choices": ["iron"]}, "no 2 to 26 options"),
     ("arc", {**ARC_ROW, "answerKey": "D"}, "no answer"),
     ("scibench", {**SCIBENCH_ROW, "answer_number": ""}, "no answer")],
)  # fmt: skip
def test_dropped_rows(layout: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DroppedRow, match=f"^{reason}$"):
        LAYOUTS[layout].question(row, 0)


def test_a_row_of_another_layout() -> None:
    with pytest.raises(ValueError, match="question must be a string, got list"):
        LAYOUTS["sciq"].question({**SCIQ_ROW, "question": ["?"]}, 0)


@each_row(
    ("solution", "answer"),
    [(r"We get $v = 3$, so \boxed{3\ \text{m/s}}.", r"3\ \text{m/s}"), ("Long.\nThe answer is 42 J. Done.", "42 J"),
     ("Text.\n**Final Answer:** $5 \\times 10^3$ Pa", "5 \\times 10^3$ Pa"), ("$2.5 \\mathrm{~eV}$",
     "2.5 \\mathrm{~eV}"),
     ("(B)", None), ("Because it is so.", None), ("First 1.\nThen 2.", None), ("The answer is yes.", None), ("", None),
     ("x" * 200 + " = 1", None), (r"\boxed{helium}", None)],
)  # fmt: skip
def test_scp_keeps_solutions_with_a_short_answer(solution: str, answer: str | None) -> None:
    row = {"domain": "physics", "problem": "How fast?", "matched_solution": solution, "o1_solution": "..."}
    if answer:
        assert LAYOUTS["scp_116k"].question(row, 0) == row_question("How fast?", answer, "science")
    else:
        with pytest.raises(DroppedRow, match="no short answer in the solution"):
            LAYOUTS["scp_116k"].question(row, 0)


def test_scibench_has_a_tolerance() -> None:
    fields = LAYOUTS["scibench"].question(SCIBENCH_ROW, 0)
    assert read_science_reference(fields.reference) == MeasuredAnswer("50.7 \\mathrm{atm}", 0.05)
