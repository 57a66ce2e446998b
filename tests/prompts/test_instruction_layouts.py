"""Layouts of instruction following, on rows made by hand in the shape of the public datasets."""

import json
from typing import Any

import pytest

from brorl.prompts.instructions import KINDS, OPTIONAL, Instruction, Instructions
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
NULLS = dict.fromkeys(["N", "quantifier", "end_phrase", "keyword_list", "word", "forbidden_words", "letter", "i",
"first_word",
                       "postscript_marker", "options", "section_splitter", "original_prompt"])  # fmt: skip


def rlvr(**truth: Any) -> dict[str, Any]:
    return {
        "messages": MESSAGES,
        "ground_truth": json.dumps({**NULLS, **truth}),
        "dataset": "ifeval",
        "constraint_type": "x",
        "constraint": "x",
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
     ("nemotron_ifeval", {**NEMOTRON, "input": MESSAGES * 2}, "more than one message"),
     ("rlvr_ifeval", {**rlvr(func_name="validate_title"), "messages": []}, "no question"),
     ("rlvr_ifeval", rlvr(func_name="validate_haiku"), layouts._UNKNOWN_KIND), ("rlvr_ifeval",
     rlvr(func_name="validate_placeholders"), layouts._UNUSABLE)],
)  # fmt: skip
def test_dropped_rows(layout: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DroppedRow, match=reason):
        LAYOUTS[layout].question(row, 0)


@each_row(
    ("layout", "row"),
    [("ifeval", {**GOOGLE, "kwargs": "none"}), ("ifeval", {**GOOGLE, "prompt": 7}),
    ("nemotron_ifeval", {**NEMOTRON, "args": "x y"}),
     ("nemotron_ifeval", {**NEMOTRON, "args": "[1]"}), ("if_multi_constraints", {**MULTI,
     "ground_truth": "[1, 2]"}),
     ("rlvr_ifeval", {**MULTI, "ground_truth": "{}"})],
)  # fmt: skip
def test_rows_of_another_layout(layout: str, row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|neither"):
        LAYOUTS[layout].question(row, 0)


@each_row(
    ("truth", "kind", "arguments"),
    [({"func_name": "verify_keyword_frequency", "word": "fox", "N": 3}, "keywords:frequency", {"keyword": "fox",
    "frequency": 3, "relation": "exactly"}),
     ({"func_name": "verify_paragraph_count", "N": 5}, "length_constraints:number_paragraphs", {"num_paragraphs": 5,
     "divider": "* * *"}),
     ({"func_name": "validate_word_constraint", "N": 50, "quantifier": "around"}, "length_constraints:number_words",
     {"num_words": 50, "relation": "around"}),
     ({"func_name": "validate_paragraphs", "N": 4, "first_word": "The", "i": 2},
     "length_constraints:nth_paragraph_first_word",
      {"num_paragraphs": 4, "nth_paragraph": 2, "first_word": "The"}),
     ({"func_name": "verify_postscript", "postscript_marker": "P.S."}, "detectable_content:postscript",
     {"postscript_marker": "P.S."}),
     ({"func_name": "validate_sections", "N": 3, "section_splitter": "Section"}, "detectable_format:multiple_sections",
      {"section_spliter": "Section", "num_sections": 3}),
     ({"func_name": "validate_lowercase"}, "change_case:english_lowercase", {}),
     ({"func_name": "validate_choice", "options": ["yes", "no"]}, "detectable_format:constrained_response",
     {"options": ("yes", "no")})],
)  # fmt: skip
def test_functions_of_rlvr_ifeval(truth: dict[str, Any], kind: str, arguments: dict[str, Any]) -> None:
    fields = LAYOUTS["rlvr_ifeval"].question(rlvr(**truth), 0)
    made = Instructions.from_text(fields.reference)
    assert made == Instructions((Instruction(kind, arguments),))


def test_rlvr_ifeval_covers_every_kind() -> None:
    assert {kind for kind, _, _ in layouts._FUNCTIONS.values()} == set(KINDS)
    for kind, names, fixed in layouts._FUNCTIONS.values():
        assert {*KINDS[kind]} - OPTIONAL <= {*names.values(), *fixed}
