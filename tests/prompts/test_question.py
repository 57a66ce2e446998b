"""Questions, and a split that depends on their words alone."""

import json
import subprocess
import sys
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.prompts.question import Message, Question
from brorl.prompts.source_questions import drop_evaluated, split_held_out
from each_row import each_row
from error_names import check_names


def ask(text: str, name: str = "") -> Question:
    return Question(f"q:{name or text}", text, "1", "math", "s")


QUESTIONS = [ask(f"How much is {i} + {i * i}?") for i in range(400)]


@pytest.mark.slow
@given(st.floats(0, 1), st.integers(0, 2**63))
def test_every_question_is_on_one_side_in_order(fraction: float, seed: int) -> None:
    train, held_out = split_held_out(QUESTIONS, fraction, seed)
    assert train == [q for q in QUESTIONS if q not in set(held_out)]
    assert sorted([*train, *held_out], key=QUESTIONS.index) == QUESTIONS


def test_side_and_order_depend_on_the_words_alone(rng: np.random.Generator) -> None:
    train, held_out = split_held_out(QUESTIONS, 0.3, 1)
    chosen = rng.permutation(400)[:250]
    others = [Question(f"other:{i}", QUESTIONS[i].text, "2", "code", "other") for i in chosen]
    new_train, new_held_out = split_held_out([ask("new"), *others], 0.3, 1)
    texts = {q.text for q in others}
    assert {q.text for q in new_train} - {"new"} == texts & {q.text for q in train}
    assert [q.text for q in new_held_out if q.text != "new"] == [q.text for q in held_out if q.text in texts]


def test_white_space_and_system_messages_do_not_move_a_question() -> None:
    """Otherwise a copy of a held-out question in another source would be trained on."""
    plain = [Question(f"p{i}", f"What is {i} + 1?", "1", "math") for i in range(200)]
    copies = [
        *(Question(f"n{q.id}", f" {q.text.replace(' ', '  ')}\n", "1", "math") for q in plain),
        *(Question(f"m{q.id}", "", "1", "math", messages=(Message("user", q.text),)) for q in plain),
        *(
            Question(f"s{q.id}", "", "1", "math", messages=(Message("system", "Be brief."), Message("user", q.text)))
            for q in plain
        ),
    ]
    held_out = {q.id for q in split_held_out(plain, 0.3, 5)[1]}
    assert {q.id[1:] for q in split_held_out(copies, 0.3, 5)[1]} == held_out
    kept, dropped = drop_evaluated(copies, [q for q in plain if q.id in held_out])
    assert dropped == 3 * len(held_out)
    assert not {q.id[1:] for q in kept} & held_out


def test_side_and_order_are_the_documented_hash_in_another_process_too(rng: np.random.Generator) -> None:
    texts = ["a", "日本", "\\frac{1}{2} {x}\n", *(q.text for q in QUESTIONS)]
    fraction, seed = float(rng.random()), int(rng.integers(2**63))
    code = (
        "import json, sys; from brorl.prompts.source_questions import *; "
        "questions = [Question(t, t, '1', 'd') for t in json.loads(sys.argv[1])]; "
        "found = split_held_out(questions, float(sys.argv[2]), int(sys.argv[3]))[1]; "
        "print(json.dumps([q.text for q in found]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, json.dumps(texts), str(fraction), str(seed)],
        env={"PYTHONHASHSEED": "5", "PYTHONPATH": ":".join(sys.path)}, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip

    def draw(text: str) -> float:
        words = " ".join(text.split())
        return int(blake2b(f"question split {seed}: {words}".encode(), digest_size=8).hexdigest(), 16) / 2**64

    assert json.loads(out) == sorted((text for text in texts if draw(text) < fraction), key=draw)
    assert split_held_out(QUESTIONS, 0, seed) == (QUESTIONS, [])
    assert split_held_out(QUESTIONS, 1, seed)[0] == []


@each_row(
    ("fields", "named"),
    [
        ({}, ("exactly one of text and messages", "text ''", "0 messages")),
        ({"text": "a", "messages": (Message("user", "a"),)}, ("text 'a'", "1 messages")),
        ({"messages": (Message("user", "a"), Message("assistant", "b"))}, ("the role 'assistant'", "user's turn")),
    ],
)
def test_a_question_asks_one_thing(fields: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="question 'q'") as caught:
        Question(**{"id": "q", "text": "", "reference": "1", "domain": "math", **fields})
    check_names(caught.value, *named)


def test_conversations_are_told_apart_by_their_turns() -> None:
    turns = [[("system", "ab"), ("user", "c")], [("system", "a"), ("user", "bc")], [("user", "ab"), ("user", "c")]]
    keys = {Question("q", "", "1", "d", "", tuple(Message(*turn) for turn in talk)).key for talk in turns}
    assert len(keys) == 3


def test_what_is_evaluated_is_dropped_from_training_whatever_its_id(rng: np.random.Generator) -> None:
    chosen = set(rng.permutation(400)[:150].tolist())
    evaluated = [Question(f"test:{i}", QUESTIONS[i].text, "2", "code", "test") for i in chosen]
    kept, num_dropped = drop_evaluated(QUESTIONS, [*evaluated, ask("new")])
    assert kept == [q for i, q in enumerate(QUESTIONS) if i not in chosen]
    assert num_dropped == 150
