"""The one right answer of a dataset of Reasoning Gym, in its usual notations; Reasoning Gym is not needed."""

import json
import random

from brorl.prompts.gym_task import GymTask
from brorl.verification.domains.gym_answers import SEVERAL, in_plain_notation, is_own_answer
from brorl.verification.domains.marked_answer import writings
from each_row import each_row

GRID = "1 2\n3 4"
TIMES = "\N{MULTIPLICATION SIGN}"
# By dataset: its own answer, other writings of it, and other answers.
ANSWERS: dict[str, tuple[str, list[str], list[str]]] = {
    "leg_counting": (
        "1234",
        [
            "1234",
            "1,234",
            "1234.0",
            "+1234",
            "1234 legs",
            "600 + 634 = 1234",
            "The sum is 1234",
            "\N{MINUS SIGN}1234"[1:],
        ],
        [
            "1235",
            "-1234",
            "12345",
            "1234 or so",
            "not 1234",
            "1235 = 1234",
            "maybe 1234",
            "1234 5",
            "1234?",
            "",
            "1234 thousand",
            "It may be 1234",
            "1234, 5",
            "0.1234e4 or 5",
        ],
    ),
    "letter_jumble": ("in the end", ["in  the end", "IN THE END"], ["in the end of it", "in the", "in end the"]),
    "sentence_reordering": (
        "The Tate is it",
        ["The Tate is it", "The Tate is it."],
        ["the tate is it", "is it The Tate"],
    ),
    "binary_alternation": ("0", ["0", "0.0"], ["1", "False", "00 or 1", "null"]),
    "string_synthesis": ("0 1 0", ["0 1 0", "0  1 0"], ["0 1", "010", "0 1 0 0", "0 0 1"]),
    "rotate_matrix": (GRID, [GRID, " 1 2 \n 3  4\n", "1 2\r\n3 4"], ["1 2 3 4", "1 2\n4 3", "1 2\n3 4\n5 6", "12\n34"]),
    "game_of_life": (
        "[[0, 1], [1, 0]]",
        ["[[0,1],[1,0]]", "[[0, 1],\n [1, 0]]"],
        ["[[0, 0], [1, 0]]", "[[0, 1], [1, 0], [1]]", "[["],
    ),
    "number_sorting": (
        "['1.5', '7']",
        ["['1.5', '7']", '["1.5", "7"]', "[1.5, 7.0]"],
        ["[1.6, 7]", "['nan', '7']", "[7, 1.5]", "1.5, 7"],
    ),
    "codeio": (
        '{"a": [1, true]}',
        ['{"a":[1,true]}', "{'a': [1, True]}"],
        ['{"a": [1, 1]}', '{"a": [true, 1]}', '{"b": [1, true]}'],
    ),
    "game_of_life_halting": (
        "False",
        ["False", "false", "FALSE"],
        ["True", "0", "anything", "False or True", "not False"],
    ),
    "word_sorting": ("a, b", ["a, b", "a,b", "a , b"], ["a, b, c", "b, a", "a b"]),
    "advanced_geometry": (
        "(4.051, -5.487)",
        ["(4.051, -5.487)", "4.0510, -5.487"],
        ["(4.051, -5.487), 2.4", "(4.051, -5.488)", "4.051"],
    ),
    "coin_flip": (
        "0.171875",
        ["0.171875", "11/64", "0.1719", "17.1875%", r"\frac{11}{64}"],
        ["0", "0.1", "0.17", "1/0", "0.1718", "11/65"],
    ),
    "complex_arithmetic": (
        "3.0 - 2.0i",
        ["3.0 - 2.0i", "3-2i", "3 - 2j", "(3 - 2i)"],
        ["nan", "3 1 - 2i", "3 + 2i", "-3 + 2i", "3", "-2i"],
    ),
    "fraction_simplification": (
        r"$\frac{3}{4}$",
        [r"$\frac{3}{4}$", r"\dfrac{3}{4}", "3/4"],
        [r"\frac{6}{8}", "3/4 or 1/2", "4/3", "0.75"],
    ),
    "group_anagrams": (
        '[["ab", "ba"], ["c"]]',
        ['[["c"], ["ba", "ab"]]'],
        ['[["ab"], ["ba"], ["c"]]', '[["ab", "ba"]]', '["ab", "ba", "c"]'],
    ),
    "knights_knaves": (
        "Zoe is a knight, and Ed is a knave.",
        ["Zoe is a knight, and Ed is a knave.", "Ed is a knave and Zoe is a knight", "(Zoe, knight), (Ed, knave)"],
        ["Zoe is a knave, and Ed is a knight.", "Either Zoe is a knight, and Ed is a knave.", "Zoe is a knight"],
    ),
    "palindrome_partitioning": (
        '[["a", "a"], ["aa"]]',
        ['[["aa"], ["a", "a"]]'],
        ['[["aa"]]', '[["aa"], ["aa"], ["a", "a"]]', '[["a", "aa"]]'],
    ),
    "polynomial_equations": (
        "-3.625, 0.0",
        ["-3.625, 0.0", "0,-3.625"],
        ["-3.625, 0.0, 7", "-3.625", "3.625, 0.0", "nan, 0", "none"],
    ),
    "pool_matrix": ("4.5 4.5\n4.75 5.0", ["4.50 4.50\n4.75 5"], ["4.5 4.5\n4.76 5.0", "4.5 4.5 4.75 5.0"]),
    "power_function": (
        "9.360000138304076e-18",
        ["9.36e-18", r"9.36 \times 10^{-18}"],
        ["9.37e-18", "9.36e-17", "9.36", "9.36\n1e-18"],
    ),
    "prime_factorization": (
        f"2 {TIMES} 2 {TIMES} 3",
        [f"2 {TIMES} 2 {TIMES} 3", f"3 {TIMES} 2 {TIMES} 2", "2*2*3", f"12 = 2 {TIMES} 2 {TIMES} 3"],
        [f"2 {TIMES} 3", f"4 {TIMES} 3", "12", f"2 {TIMES} 2 {TIMES} 3 {TIMES} 1"],
    ),
    "time_intervals": (
        "5 days, 06:09",
        ["5 days, 06:09", "5 days, 6:09"],
        ["5 days", "6 days, 06:09", "5 days, 06:10", "06:09", "5, 06:09"],
    ),
}


def task(name: str, answer: str) -> GymTask:
    return GymTask(name, {"question": "?", "answer": answer, "metadata": {}})


@each_row("name", ANSWERS)
def test_notations_of_the_own_answer_and_others(name: str) -> None:
    own, same, others = ANSWERS[name]
    assert name not in SEVERAL
    assert [answer for answer in same if not is_own_answer(answer, task(name, own))] == []
    assert [answer for answer in others if is_own_answer(answer, task(name, own))] == []


@each_row("name", ANSWERS)
def test_marks_around_an_answer_do_not_count(name: str) -> None:
    own = ANSWERS[name][0]
    marked = [
        f"\\boxed{{{own}}}",
        f"**{own}**",
        f"`{own}`",
        f"```\n{own}\n```",
        f"The answer is {own}",
        f"Answer: **{own}**",
    ]
    marked += [] if own.endswith(".") else [f"{own}."]
    marked += [] if "$" in own else [f"$\\boxed{{{own}}}$"]
    assert [answer for answer in marked if not is_own_answer(answer, task(name, own))] == []


def test_an_answer_with_another_beside_it_is_none() -> None:
    for name, (own, _, others) in ANSWERS.items():
        for form in (
            "{x} or {y}",
            "{y} or {x}",
            "not {x}",
            "{x} is wrong",
            "maybe {x}",
            "{x}\n{y}",
            "{y}\n{x}",
            "{x}?",
        ):
            answer = form.format(x=own, y=others[0] or "7")
            assert not is_own_answer(answer, task(name, own)), (name, answer)


def test_an_entry_without_an_answer_has_none() -> None:
    assert not is_own_answer("", task("polynomial_equations", ""))
    assert not is_own_answer("None", GymTask("boxnet", {"question": "?", "answer": None, "metadata": {}}))


def test_writings_remove_one_mark_after_the_other() -> None:
    assert list(writings(r"**Answer: $\boxed{5}$.**")) == [
        r"**Answer: $\boxed{5}$.**",
        r"Answer: $\boxed{5}$.",
        r"$\boxed{5}$.",
        r"$\boxed{5}$",
        r"\boxed{5}",
        "5",
    ]
    assert list(writings("**A** and **B**"))[-1] != "A"
    assert in_plain_notation(f"3 {TIMES} x^2 \N{MINUS SIGN} 0.5") == "3 * x**2 - (05/10)"


def test_hostile_answers_end() -> None:
    chance = random.Random(0)
    pieces = [
        "[",
        "{",
        '"',
        "$",
        "**",
        "\\boxed{",
        "}",
        "1",
        ",",
        " ",
        "\n",
        "=",
        "is ",
        "x",
        ".",
        "/",
        "i",
        "-",
        ":",
        "days",
    ]
    for name, (own, _, _) in ANSWERS.items():
        for piece in pieces:
            assert is_own_answer(piece * 5_000, task(name, own)) in (True, False)
        for _ in range(20):
            text = "".join(chance.choice(pieces) for _ in range(200))
            assert is_own_answer(text, task(name, own)) == (text.strip() == own)
    assert json.loads("[" * 9 + "]" * 9) is not None
