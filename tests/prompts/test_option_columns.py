"""Multiple choice in schemas of public datasets: the options are in the prompt, and the right letter is accepted."""

import re
from pathlib import Path
from typing import Any

import pytest

from brorl.errors import UserError
from brorl.prompts.file_questions import read_source
from brorl.prompts.guess import Guess, guess_meaning
from brorl.prompts.question import Question
from brorl.prompts.science import Choices, read_science_reference
from brorl.prompts.settings import FileSource
from brorl.verification.domains.choice import chosen_option
from choice_rows import SCHEMAS, Schema
from data_files import write_rows

OPTIONS = {"A": "iron", "B": "air", "C": "salt"}
FLAT = [
    name for name, schema in SCHEMAS.items() if not any(isinstance(v, list | dict) for v in schema.rows[0].values())
]


def choices_of(question: Question) -> Choices:
    choices = read_science_reference(question.reference)
    assert isinstance(choices, Choices)
    return choices


def check_rows(path: str, schema: Schema) -> None:
    guess = guess_meaning(path)
    questions = read_source(guess.source).questions
    assert (guess.domain, len(questions)) == ("science", len(schema.rows))
    for question, right in zip(questions, schema.right, strict=True):
        choices = choices_of(question)
        for letter, option in zip(choices.letters, choices.options, strict=True):
            assert re.search(rf"(^|\(| ){letter}[.)] {re.escape(option)}$", question.text, re.M) or (
                f"({letter}) {option}" in question.text
            )
            chosen = chosen_option(f"So \\boxed{{{letter}}}.", choices)
            assert (chosen.option == choices.right) == (option == right)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_options_and_the_right_one_are_found(tmp_path: Path, name: str, suffix: str) -> None:
    check_rows(write_rows(tmp_path / f"rows{suffix}", SCHEMAS[name].rows), SCHEMAS[name])


@pytest.mark.parametrize("name", FLAT)
def test_a_table_of_text_says_the_same(tmp_path: Path, name: str) -> None:
    check_rows(write_rows(tmp_path / "rows.csv", SCHEMAS[name].rows), SCHEMAS[name])


def mmlu(*answers: Any) -> list[dict[str, Any]]:
    return [
        {"question": f"{i}?", "choices": ["red", "blue", "pink", "gray"], "answer": a} for i, a in enumerate(answers)
    ]


@pytest.mark.parametrize(("answers", "first"), [((2, 1, 3, 0), 0), ((2, 1, 3, 4), 1), (("0", "1"), 0), ((1.0, 4.0), 1)])
def test_an_index_counts_from_what_occurs(tmp_path: Path, answers: tuple[Any, ...], first: int) -> None:
    source = guess_meaning(write_rows(tmp_path / "rows.jsonl", mmlu(*answers))).source
    assert source.first_option == first
    right = [choices_of(q).options[choices_of(q).right] for q in read_source(source).questions]
    assert right == [["red", "blue", "pink", "gray"][int(answer) - first] for answer in answers]


def test_the_row_that_decides_may_come_late(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", mmlu(*[2] * 300, 4))
    assert guess_meaning(path).source.first_option == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            mmlu(1, 2, 3),
            "could be an index from 0 or from 1: neither 0 nor the number of options occurs; give `first_option`",
        ),
        (
            [{"question": "1 + 1?", "choices": ["1", "2", "3"], "answer": "2"}],
            "could be the text or the index of an option; give `first_option`",
        ),
        (
            mmlu("red or blue", "pink"),
            "choices looks like the options of multiple-choice questions, and no column names",
        ),
        ([{"question": "Which?", **OPTIONS, "answer": "x"}], "A to C look like the options"),
    ],
)
def test_what_is_not_clear_is_refused(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=re.escape(said)):
        guess_meaning(path)


def test_what_is_given_is_not_guessed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", mmlu(1, 2, 3))
    for first, right in ((0, ["blue", "pink", "gray"]), (1, ["red", "blue", "pink"])):
        questions = read_source(guess_meaning(path, first_option=first).source).questions
        assert [choices_of(q).options[choices_of(q).right] for q in questions] == right
    odd = write_rows(tmp_path / "odd.jsonl", [{"question": "Which?", "x": "iron", "y": "air", "z": "x", "w": "air"}])
    guess = guess_meaning(odd, answer_column="w", options_column=["x", "y"])
    assert (guess.source.options_column, guess.source.answer_column) == (("x", "y"), "w")
    assert guess_meaning(path, domain="math").source.options_column == ()


@pytest.mark.parametrize(
    "row",
    [
        {"question": "3 + 4?", "a": 3, "b": 4, "answer": "7"},
        {"question": "3 + 4?", "answer": "7", "tags": ["sums", "easy"]},
        {"question": "3 + 4?", "answer": "1", "tags": ["sums", "easy"]},
        {"question": "3 + 4?", "answer": "7", "answers": ["7", "seven"]},  # spellings of one answer
        {"question": "3 + 4?", "answer": "7", "solutions": ["7", "3 + 4 = 7"]},
        {"problem": "3 + 4?", "answer": "7", "step1": "3 + 4", "step2": "7"},
        {"prompt": [{"role": "user", "content": "3 + 4?"}], "reward_model": {"ground_truth": "7", "style": "rule"}},
    ],
)
def test_other_columns_are_no_options(tmp_path: Path, row: dict[str, Any]) -> None:
    source = guess_meaning(write_rows(tmp_path / "rows.jsonl", [row])).source
    assert (source.options_column, source.domain) == ((), "math")


GOOD = {"question": "Which is a gas?", **OPTIONS, "answer": "B"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": None}, "answer is null; fill it in or delete the row"),
        ({"answer": " "}, "answer is empty; fill it in or delete the row"),
        ({"answer": "D"}, "answer is 'D', which is neither the label nor the text of one of the 3 options; fix"),
        ({"answer": 1}, "set first_option to 0 or 1 if it is an index; fix"),
        ({"A": "B", "answer": "B"}, "could mean two of the 3 options"),
        ({"B": "iron", "answer": "A"}, "has two equal options (in A to C)"),
        ({"B": None}, "A to C is ['iron', None, 'salt'], not 2 to 26 options"),
        ({"question": " "}, "question is empty; fill it in or delete the row"),
    ],
)
def test_a_row_without_a_right_option_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, {**GOOD, "question": "Which?", **row}])
    source = FileSource(path=path, prompt_column="question", options_column=("A", "B", "C"), domain="science")
    with pytest.raises(UserError, match=r"rows.jsonl line 2:? ") as caught:
        read_source(source)
    assert said in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_options_that_look_like_lists_stay_texts(tmp_path: Path, suffix: str) -> None:
    texts = ["[0, 1]", "(0, 1)", "{1,2}", "['\\d', 2]"]
    for answers in ("ABCD", texts):
        rows = [
            {"question": f"{i}?", **dict(zip("ABCD", texts, strict=True)), "answer": a} for i, a in enumerate(answers)
        ]
        guess = guess_meaning(write_rows(tmp_path / f"rows{suffix}", rows))
        right = [choices_of(q).options[choices_of(q).right] for q in read_source(guess.source).questions]
        assert right == texts
        two = [{"question": f"{i}?", "option1": "[0, 1]", "option2": "[1, 0]", "answer": a} for i, a in enumerate("12")]
        guess = guess_meaning(write_rows(tmp_path / f"two{suffix}", two))
        right = [choices_of(q).options[choices_of(q).right] for q in read_source(guess.source).questions]
        assert right == ["[0, 1]", "[1, 0]"]


@pytest.mark.parametrize("value", [[0, 1], {"a": 1}, [[1], [2]]])
def test_a_value_that_is_no_text_is_no_option(tmp_path: Path, value: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{**GOOD, "A": value}])
    with pytest.raises(UserError, match="not 2 to 26 options"):
        read_source(FileSource(path=path, prompt_column="question", options_column=("A", "B", "C"), domain="science"))


def test_a_conversation_has_its_context_and_options_in_the_last_message(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which is a gas?"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": turns, "passage": "Hm.", **OPTIONS, "answer": "B"}])
    (question,) = read_source(guess_meaning(path).source).questions
    assert question.messages[0].content == "Be brief."
    assert question.messages[1].content.startswith("Hm.\n\nWhich is a gas?\n\nA. ")


def test_trailing_empty_options_are_none(tmp_path: Path) -> None:
    rows = [{**GOOD, "D": "ice"}, {**GOOD, "question": "Which is not?", "answer": "A", "D": None}]
    guess: Guess = guess_meaning(write_rows(tmp_path / "rows.parquet", rows))
    assert [len(choices_of(q).options) for q in read_source(guess.source).questions] == [4, 3]
