"""Layouts of instruction following, on rows made by hand in the shape of the public datasets."""

import json
from typing import Any

import pytest

from brorl.prompts.instructions import Instruction, Instructions
from brorl.prompts.layouts import text as layouts
from brorl.prompts.layouts.table import LAYOUTS
from brorl.prompts.prompt import DroppedRow
from each_row import each_row

KINDS_OF_ROW = [
    "punctuation:no_comma",
    "detectable_format:number_highlighted_sections",
    "length_constraints:number_words",
]
EMPTY = dict.fromkeys(
    ["num_highlights", "relation", "num_words", "num_placeholders", "prompt_to_repeat", "keywords", "letter"]
)
KWARGS = [EMPTY, {**EMPTY, "num_highlights": 3}, {**EMPTY, "relation": "at least", "num_words": 300}]
MADE = (
    Instruction(KINDS_OF_ROW[0], {}),
    Instruction(KINDS_OF_ROW[1], {"num_highlights": 3}),
    Instruction(KINDS_OF_ROW[2], {"num_words": 300, "relation": "at least"}),
)
MESSAGES = [{"role": "user", "content": "Write a summary."}]
GOOGLE = {"key": 1000, "prompt": "Write a summary.", "instruction_id_list": KINDS_OF_ROW, "kwargs": KWARGS}
NEMOTRON = {"input": MESSAGES, "args": {"instruction_id_list": KINDS_OF_ROW, "instruction_kwargs": [None, *KWARGS[1:]]}}
ONE = [
    {
        "instruction_id": KINDS_OF_ROW,
        "kwargs": [None, {"num_highlights": 3}, {"relation": "at least", "num_words": 300}],
    }
]
MULTI = {
    "key": "a",
    "messages": MESSAGES,
    "ground_truth": str(ONE),
    "dataset": "ifeval",
    "constraint_type": "multi",
    "constraint": "...",
}


@each_row(
    ("layout", "row", "loose"),
    [("ifeval", GOOGLE, False), ("ifeval_loose", GOOGLE, True), ("nemotron_ifeval", NEMOTRON, False),
     ("nemotron_ifeval", {**NEMOTRON, "args": json.dumps(NEMOTRON["args"])}, False),
     ("if_multi_constraints", MULTI, False),
     ("if_multi_constraints", {**MULTI, "ground_truth": json.dumps(ONE)}, False),
     ("if_multi_constraints", {**MULTI, "ground_truth": json.dumps([json.dumps(ONE[0])])}, False)],
)  # fmt: skip
def test_rows_with_several_instructions(layout: str, row: dict[str, Any], loose: bool) -> None:
    fields = LAYOUTS[layout].question(row, 0)
    assert (fields.text, fields.domain) == ("Write a summary.", "ifeval")
    assert Instructions.from_text(fields.reference) == Instructions(MADE, loose)
    with pytest.raises(KeyError):
        LAYOUTS[layout].question({}, 0)


@each_row(
    ("layout", "row", "reason"),
    [("ifeval", {**GOOGLE, "instruction_id_list": ["keywords:start_end", *KINDS_OF_ROW[1:]]},
    layouts._UNKNOWN_KIND),
     ("ifeval", {**GOOGLE, "kwargs": [EMPTY, EMPTY, KWARGS[2]]}, layouts._UNUSABLE), ("ifeval", {**GOOGLE,
     "kwargs": []}, layouts._UNUSABLE),
     ("ifeval", {**GOOGLE, "instruction_id_list": [], "kwargs": []}, layouts._UNUSABLE), ("ifeval",
     {**GOOGLE, "prompt": " "}, "no question"),
     ("nemotron_ifeval", {**NEMOTRON, "input": MESSAGES * 2}, "more than one message")],
)  # fmt: skip
def test_dropped_rows(layout: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DroppedRow, match=reason):
        LAYOUTS[layout].question(row, 0)


@each_row(
    ("layout", "row"),
    [("ifeval", {**GOOGLE, "kwargs": "none"}), ("ifeval", {**GOOGLE, "prompt": 7}),
    ("nemotron_ifeval", {**NEMOTRON, "args": "x y"}),
     ("nemotron_ifeval", {**NEMOTRON, "args": "[1]"}), ("if_multi_constraints", {**MULTI,
     "ground_truth": "[1, 2]"})],
)  # fmt: skip
def test_rows_of_another_layout(layout: str, row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|neither"):
        LAYOUTS[layout].question(row, 0)
