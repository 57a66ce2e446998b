"""Instructions as references, and layouts of instruction following on rows made by hand."""

import json
from typing import Any

import pytest

from brorl.prompts.instructions import KINDS, OPTIONAL, Instruction, Instructions
from brorl.prompts.layouts import text as layouts
from brorl.prompts.public_data import LAYOUTS
from brorl.prompts.row import DroppedRow
from each_row import each_row

GOOD: dict[str, Any] = {
    "keywords": ["a"], "keyword": "a", "frequency": 1, "relation": "at least", "forbidden_words": ["a"], "letter": "a",
    "let_frequency": 1, "let_relation": "less than", "language": "de", "num_sentences": 2, "num_paragraphs": 3,
    "num_words": 5, "nth_paragraph": 2, "first_word": "a", "num_placeholders": 1, "postscript_marker": "P.S.",
    "num_bullets": 2, "num_highlights": 1, "section_spliter": "Section", "num_sections": 2, "prompt_to_repeat": "Go.",
    "end_phrase": "End.", "capital_frequency": 1, "capital_relation": "at least",
}  # fmt: skip


def arguments(kind: str) -> dict[str, Any]:
    return {name: GOOD[name] for name in KINDS[kind] if name not in OPTIONAL}


@each_row("kind", KINDS)
def test_each_argument_is_needed_and_checked(kind: str) -> None:
    made = Instruction(kind, {**arguments(kind), "something else": None})  # tables fill cells with nulls
    assert Instructions.from_text(Instructions((made,)).to_text()).instructions == (made,)
    for name in arguments(kind):
        with pytest.raises(ValueError, match=f"has no {name} for {kind}"):
            Instruction(kind, {**arguments(kind), name: None})
        for bad in (True, {}, [], "", " ", -1, 1.5, float("nan"), [1]):
            with pytest.raises(ValueError, match=f"has an unusable argument of {kind}: {name} must be"):
                Instruction(kind, {**arguments(kind), name: bad})
    with pytest.raises(ValueError, match=f"has the unknown argument 'color' for {kind}"):
        Instruction(kind, {**arguments(kind), "color": "red"})


@each_row(
    ("kind", "changed", "problem"),
    [("keywords:frequency", {"relation": "more than"}, "relation must be one of less than, at least"),
     ("keywords:frequency", {"relation": "less than", "frequency": 0}, "which no response can satisfy"),
     ("keywords:letter_frequency", {"letter": "ab"}, "must be one character"),
     ("keywords:letter_frequency", {"letter": "\u0130"}, "must be one character"),
     ("language:response_language", {"language": "German"}, "must be one of af"),
     ("length_constraints:nth_paragraph_first_word", {"nth_paragraph": 4}, "nth_paragraph 4 above num_paragraphs 3"),
     ("length_constraints:nth_paragraph_first_word", {"first_word": "two words"}, "must be one word"),
     ("length_constraints:nth_paragraph_first_word", {"first_word": "don't"}, "must be one word without punctuation"),
     ("length_constraints:number_paragraphs", {"num_paragraphs": 0}, "must be between 1 and"),
     ("length_constraints:number_words", {"num_words": 10**9}, "must be between 0 and 1000000")],
)  # fmt: skip
def test_what_no_response_can_follow(kind: str, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Instruction(kind, {**arguments(kind), **changed})


def test_whole_numbers_may_be_stored_as_floats() -> None:
    assert Instruction("detectable_format:number_bullet_lists", {"num_bullets": 3.0}).arguments == {"num_bullets": 3}


WORDS = "length_constraints:number_words"


@each_row(
    ("kind", "given", "problem"),
    [("punctuation:no_commas", {}, "unknown instruction 'punctuation:no_commas'; did you mean punctuation:no_comma?"),
     ("nonsense", {}, "unknown instruction 'nonsense'; the kinds are keywords:existence, .*punctuation:no_comma"),
     (WORDS, {"num_word": 3, "num_words": 3, "relation": "at least"},
      r"'num_word' for .* \(its arguments: num_words \(a whole number\), relation \(one of less than, .*\)\); did you "
      "mean num_words"),
     (WORDS, {"num_words": 3}, r"has no relation for .* \(its arguments: num_words \(a wh"),
     ("punctuation:no_comma", {"color": 1}, r"\(its arguments: none\)"),
     ("detectable_format:constrained_response", {"option": ["a"]}, r"options \(a list of texts, optional\)")],
)  # fmt: skip
def test_unknown_names_have_the_nearest(kind: str, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Instruction(kind, given)


def test_an_unknown_argument_lists_the_allowed_ones() -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="color") as caught:
            Instruction(kind, {**arguments(kind), "color": 1})
        for name in KINDS[kind]:
            assert f"{name} (" in str(caught.value)


@each_row(
    ("text", "problem"),
    [("no_comma", "is not JSON text"), ("[1]", "input should be an object"),
     ('{"kinds": []}', "has no instructions|unknown key kinds"), ("{}", "has no instructions"),
     ('{"instructions": {"kind": "x"}}', "has {'kind': 'x'} as instructions"),
     ('{"instructions": [], "loose": 1}', "has 1 as loose"),
     ('{"instructions": ["punctuation:no_comma"]}', "has 'punctuation:no_comma' as instructions.0"),
     ('{"instructions": [{"num_words": 3}]}', "without a kind: {'num_words': 3}")],
)  # fmt: skip
def test_malformed_text_has_the_expected_form(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        Instructions.from_text(text)
    assert 'expected {"instructions": [{"kind": "length_constraints:number_words"' in str(caught.value)
    form = str(caught.value).partition("; expected ")[2]
    assert len(Instructions.from_text(form).instructions) == 1


def test_lists_of_kinds_and_arguments() -> None:
    made = Instructions.from_lists(["punctuation:no_comma", "startend:end_checker"], [None, {"end_phrase": " Bye "}])
    assert [instruction.arguments for instruction in made.instructions] == [{}, {"end_phrase": "Bye"}]
    with pytest.raises(ValueError, match="has 1 instructions with 2 lists of arguments"):
        Instructions.from_lists(["punctuation:no_comma"], [{}, {}])
    with pytest.raises(ValueError, match="arguments that are not a mapping"):
        Instructions.from_lists(["punctuation:no_comma"], ["x"])
    with pytest.raises(ValueError, match="has no instructions"):
        Instructions.from_lists([], [])


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
