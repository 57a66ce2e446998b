"""The one right answer of a dataset of Reasoning Gym, in its usual notations; Reasoning Gym is not needed."""

import json
import random
from pathlib import Path

from brorl.verification.domains.marked_answer import writings
from brorl.verification.gym.answers import is_own_answer
from brorl.verification.gym.task import SEVERAL, GymTask
from each_row import each_row

TIMES = "\N{MULTIPLICATION SIGN}"


def read_answers() -> dict[str, tuple[str, list[str], list[str]]]:
    """Return by dataset its own answer, other writings of it, and other answers; `⏎` is a line end."""
    answers: dict[str, tuple[str, list[str], list[str]]] = {}
    for line in Path(__file__).with_name("gym_answers.cases").read_text("utf-8").splitlines():
        mark, text = line[:1], line[2:].replace("⏎", "\n").replace("␍", "\r")
        match mark:
            case "#":
                name = text
            case "=":
                answers[name] = (text, [], [])
            case _:
                answers[name]["=+-".index(mark)].append(text)  # type: ignore[union-attr]
    return answers


ANSWERS = read_answers()


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


def test_hostile_answers_end() -> None:
    chance = random.Random(0)
    pieces = [*'[{"$},\n=x./i-: 1', "**", "\\boxed{", "is ", "days"]
    for name, (own, _, _) in ANSWERS.items():
        for piece in pieces:
            assert is_own_answer(piece * 5_000, task(name, own)) in (True, False)
        for _ in range(20):
            text = "".join(chance.choice(pieces) for _ in range(200))
            assert is_own_answer(text, task(name, own)) == (text.strip() == own)
    assert json.loads("[" * 9 + "]" * 9) is not None
