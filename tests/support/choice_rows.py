"""Rows of our own in the columns of the most used multiple-choice datasets, each with the text of its right option."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

_ASKED = (
    ("Which gas do plants take in?", ("oxygen", "carbon dioxide", "helium", "argon"), 1),
    ("Which of these is a prime number?", ("21", "27", "29", "33"), 2),
    ("What do bees make?", ("honey", "milk", "silk", "glass"), 0),
    ("Which planet is the largest?", ("Mars", "Venus", "Earth", "Jupiter"), 3),
    ("Which metal is liquid at room temperature?", ("iron", "mercury", "copper", "tin"), 1),
)
"""Questions with four options and the place of the right one, from 0; every place occurs."""


class Schema(NamedTuple):
    """The rows of one schema, and the text of the right option of each."""

    rows: list[dict[str, Any]]
    right: list[str]


_Make = Callable[[str, list[str], int], dict[str, Any]]  # of a question, its options and the place of the right one


def _rows(make: _Make) -> Schema:
    return Schema([make(q, list(o), r) for q, o, r in _ASKED], [o[r] for _, o, r in _ASKED])


def _pairs(make: _Make) -> Schema:
    """Rows with two options each, the right one in either place."""
    pairs = [(q, [o[r - 1], o[r]][:: 1 - 2 * (at % 2)], 1 - at % 2) for at, (q, o, r) in enumerate(_ASKED)]
    return Schema([make(*pair) for pair in pairs], [options[right] for _, options, right in pairs])


def _letters(options: list[str], template: str = "{}") -> dict[str, str]:
    return {template.format(letter): option for letter, option in zip("ABCD", options, strict=True)}


SCHEMAS: dict[str, Schema] = {
    "mmlu": _rows(lambda q, o, r: {"question": q, "subject": "facts", "choices": o, "answer": r}),
    "mmlu_csv": _rows(lambda q, o, r: {"question": q, **_letters(o), "answer": "ABCD"[r]}),
    "mmlu_pro_like": _rows(lambda q, o, r: {"question": q, "options": o, "answer": "ABCD"[r], "category": "facts"}),
    "ceval": _rows(lambda q, o, r: {"id": q[:5], "question": q, **_letters(o), "answer": "ABCD"[r], "explanation": ""}),
    "cmmlu": _rows(lambda q, o, r: {"Question": q, **_letters(o), "Answer": "ABCD"[r]}),
    "arc_numbers": _rows(
        lambda q, o, r: {"question": q, "opts": {"text": o, "label": ["1", "2", "3", "4"]}, "answerKey": str(r + 1)}
    ),
    "openbookqa": _rows(
        lambda q, o, r: {"question_stem": q, "choices": {"text": o, "label": [*"ABCD"]}, "answerKey": "ABCD"[r]}
    ),
    "commonsense_qa_raw": _rows(
        lambda q, o, r: {
            "question": {"stem": q, "choices": [{"label": c, "text": t} for c, t in zip("ABCD", o, strict=True)]},
            "answerKey": "ABCD"[r],
        }
    ),
    "medmcqa": _rows(
        lambda q, o, r: {
            "question": q,
            **{f"op{'abcd'[i]}": t for i, t in enumerate(o)},
            "cop": r,
            "choice_type": "single",
            "exp": "so",
        }
    ),
    "medmcqa_from_1": _rows(
        lambda q, o, r: {"question": q, **{f"op{'abcd'[i]}": t for i, t in enumerate(o)}, "cop": r + 1}
    ),
    "medqa": _rows(lambda q, o, r: {"question": q, "answer": o[r], "options": _letters(o), "answer_idx": "ABCD"[r]}),
    "medqa_pairs": _rows(
        lambda q, o, r: {
            "question": q,
            "answer_idx": "ABCD"[r],
            "options": [{"key": c, "value": t} for c, t in zip("ABCD", o, strict=True)],
        }
    ),
    "sciq_like": _rows(
        lambda q, o, r: {
            "question": q,
            "correct_answer": o[r],
            **{f"distractor{i}": t for i, t in enumerate([t for t in o if t != o[r]], 1)},
            "support": "It is known.",
            "n": 1,
        }
    ),
    "opentdb": _rows(
        lambda q, o, r: {"question": q, "correct_answer": o[r], "incorrect_answers": [t for t in o if t != o[r]]}
    ),
    "hellaswag": _rows(lambda q, o, r: {"ctx_a": q, "ctx_b": "", "ctx": q, "endings": o, "label": str(r)}),
    "ending_columns": _rows(lambda q, o, r: {"ctx": q, **{f"ending{i}": t for i, t in enumerate(o)}, "label": r}),
    "winogrande": _pairs(lambda q, o, r: {"sentence": q, "option1": o[0], "option2": o[1], "answer": str(r + 1)}),
    "piqa": _pairs(lambda q, o, r: {"goal": q, "sol1": o[0], "sol2": o[1], "label": r}),
    "social_iqa": _rows(
        lambda q, o, r: {
            "question": q,
            "answerA": o[0],
            "answerB": o[1],
            "answerC": o[2],
            "answerD": o[3],
            "label": str(r + 1),
        }
    ),
    "cosmos_qa": _rows(lambda q, o, r: {"question": q, **{f"answer{i}": t for i, t in enumerate(o)}, "label": r}),
    "truthful_qa": _rows(
        lambda q, o, r: {"question": q, "mc1_targets": {"choices": o, "labels": [int(i == r) for i in range(4)]}}
    ),
    "agieval": _rows(
        lambda q, o, r: {
            "passage": None,
            "question": q,
            "options": [f"({c}){t}" for c, t in zip("ABCD", o, strict=True)],
            "label": "ABCD"[r],
        }
    ),
    "agieval_query": _rows(
        lambda q, o, r: {
            "query": f"Q: {q} Answer Choices: {' '.join(f'({c}) {t}' for c, t in zip('ABCD', o, strict=True))}",
            "choices": [f"({c}) {t}" for c, t in zip("ABCD", o, strict=True)],
            "gold": [r],
        }
    ),
    "aqua": _rows(
        lambda q, o, r: {
            "question": q,
            "options": [f"{c}){t}" for c, t in zip("ABCD", o, strict=True)],
            "correct": "ABCD"[r],
        }
    ),
    "logiqa": _rows(lambda q, o, r: {"query": q, "options": o, "correct_option": r}),
    "race": _rows(lambda q, o, r: {"article": "Once upon a time.", "question": q, "options": o, "answer": "ABCD"[r]}),
    "big_bench": _rows(
        lambda q, o, r: {
            "inputs": q,
            "targets": [o[r]],
            "multiple_choice_targets": o,
            "multiple_choice_scores": [int(i == r) for i in range(4)],
        }
    ),
    "text_of_the_option": _rows(lambda q, o, r: {"question": q, "choices": o, "answer": o[r]}),
    "named_letters": _rows(lambda q, o, r: {"question": q, **_letters(o, "Option {}"), "answer": f"({'ABCD'[r]})"}),
    "lower_case": _rows(lambda q, o, r: {"question": q, **_letters(o, "option_{}"), "answer": "abcd"[r]}),
    "lists_as_text": _rows(lambda q, o, r: {"question": q, "choices": repr(o), "answer": str(r)}),
    "json_as_text": _rows(lambda q, o, r: {"prompt": q, "options": json.dumps(_letters(o)), "answer": "ABCD"[r]}),
}
"""The schemas by the name of a dataset that has it."""
