"""Layouts of public datasets of mathematics.

The instructions that some authors put around a problem are removed. A row without one answer that can be verified is
dropped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from brorl.prompts.boxed import last_box
from brorl.prompts.layouts.layout import Cells, DroppedRow, Fields

_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'
_EURUS_AFTER = "Present the answer in LaTex format: \\boxed{Your answer}"


def _fields(problem: Any, answer: Any) -> Fields:
    """Return the fields of a problem with its answer: text, or a number."""
    if problem is None or (isinstance(problem, str) and not problem.strip()):
        raise DroppedRow("no problem")
    if not isinstance(problem, str):
        raise ValueError(f"the problem must be a string, got {type(problem).__name__}")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise ValueError(f"the answer must be a string or a number, got {type(answer).__name__}")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if answer is None or not str(answer).strip():
        raise DroppedRow("no answer")
    return Fields(problem.strip(), str(answer).strip(), "math")


def problem_and_answer(row: Cells, _seed: int) -> Fields:
    """Read the columns `problem` and `answer`."""
    return _fields(row["problem"], row["answer"])


def gsm8k(row: Cells, _seed: int) -> Fields:
    """Read the number after `####`."""
    _, marker, answer = str(row["answer"]).rpartition("####")
    if not marker:
        raise DroppedRow("no #### before the answer")
    return _fields(row["question"], _THOUSANDS.sub("", answer))


def boxed_solution(row: Cells, _seed: int) -> Fields:
    """Read the last box of the solution."""
    answer = last_box(str(row["solution"]))
    if answer is None:
        raise DroppedRow("no \\boxed{} in the solution")
    return _fields(row["problem"], answer)


def open_math_reasoning(row: Cells, _seed: int) -> Fields:
    """Read rows whose answer is the author's, not a proof or the majority of a model's answers."""
    if row["problem_type"] != "has_answer_extracted":
        raise DroppedRow("no answer by the author of the problem")
    return _fields(row["problem"], row["expected_answer"])


def dapo(row: Cells, _seed: int) -> Fields:
    """Read a problem without the instructions around it."""
    problem = last_turn(row["prompt"]).strip()
    if problem.startswith(_DAPO_BEFORE):
        problem = problem.partition("\n\n")[2]
    return _fields(problem.removesuffix(_DAPO_AFTER), ground_truth(row))


def eurus2(row: Cells, _seed: int) -> Fields:
    """Read rows of mathematics without the instruction after the problem."""
    _check_ability(row)
    return _fields(last_turn(row["prompt"]).strip().removesuffix(_EURUS_AFTER), ground_truth(row))


def skywork(row: Cells, _seed: int) -> Fields:
    """Read rows of mathematics with one accepted answer."""
    _check_ability(row)
    text = ground_truth(row)
    try:
        answers = ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"reward_model.ground_truth must be a list of answers as text, got {str(text)[:60]!r}"
        ) from error
    if not isinstance(answers, list):
        raise ValueError(f"reward_model.ground_truth must be a list of answers, got {type(answers).__name__}")
    distinct = list(dict.fromkeys(str(answer).strip() for answer in answers))
    if len(distinct) > 1:
        raise DroppedRow("several accepted answers")
    return _fields(last_turn(row["prompt"]), distinct[0] if distinct else None)


def _check_ability(row: Cells) -> None:
    if row["ability"] != "math":
        raise DroppedRow(f"the ability is {row['ability']}, not math")


def last_turn(prompt: Any) -> str:
    """Return the text of the last message of a conversation, a list of messages, each with `role` and `content`.

    Raises:
        ValueError: If it is not one.
    """
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if not isinstance(last, Mapping) or not isinstance(last.get("content"), str) or last.get("role") != "user":
        raise ValueError("prompt must be a list of messages, the last one by the user")
    return str(last["content"])


def ground_truth(row: Cells) -> Any:
    """Return the ground truth of a row in the layout of verl.

    Raises:
        ValueError: If the row has none.
    """
    model = row["reward_model"]
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        raise ValueError("reward_model must be an object with the key ground_truth")
    return model["ground_truth"]
