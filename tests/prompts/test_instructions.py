"""Instructions: arguments of every kind, checked before training."""

from typing import Any

import pytest

from brorl.prompts.instructions import KINDS, OPTIONAL, Instruction, Instructions
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
     ("keywords:frequency", {"relation": "less than", "frequency": 0}, "which no response can follow"),
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


def test_unknown_names_have_the_nearest_and_the_allowed_ones() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "punctuation:no_commas",
            {},
            "unknown instruction 'punctuation:no_commas'; did you mean punctuation:no_comma?",
        ),
        ("nonsense", {}, "unknown instruction 'nonsense'; the kinds are keywords:existence, .*punctuation:no_comma"),
        (
            "length_constraints:number_words",
            {"num_word": 3, "num_words": 3, "relation": "at least"},
            r"'num_word' for .* \(its arguments: num_words \(a whole number\), relation \(one of less than, .*\)\); "
            "did you mean num_words",
        ),
        (
            "length_constraints:number_words",
            {"num_words": 3},
            r"has no relation for .* \(its arguments: num_words \(a wh",
        ),
        ("punctuation:no_comma", {"color": 1}, r"\(its arguments: none\)"),
        ("detectable_format:constrained_response", {"option": ["a"]}, r"options \(a list of texts, optional\)"),
    ]
    for kind, given, problem in cases:
        with pytest.raises(ValueError, match=problem):
            Instruction(kind, given)
    for kind in KINDS:
        with pytest.raises(ValueError, match="color") as caught:
            Instruction(kind, {**arguments(kind), "color": 1})
        for name in KINDS[kind]:
            assert f"{name} (" in str(caught.value)


@each_row(
    ("text", "problem"),
    [("no_comma", "is not JSON text"), ("[1]", "is a list, not an object"),
     ('{"kinds": []}', "has the keys 'kinds'"), ("{}", "has the keys none"),
     ('{"instructions": {"kind": "x"}}', "has {'kind': 'x'} as instructions, not a list"),
     ('{"instructions": [], "loose": 1}', "has 1 as loose, not true or false"),
     ('{"instructions": ["punctuation:no_comma"]}', "not a mapping with a kind: 'punctuation:no_comma'"),
     ('{"instructions": [{"num_words": 3}]}', "not a mapping with a kind: {'num_words': 3}")],
)  # fmt: skip
def test_malformed_text_has_the_expected_form(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        Instructions.from_text(text)
    assert 'expected {"instructions": [{"kind": "length_constraints:number_words"' in str(caught.value)
    form = str(caught.value).partition("expected ")[2]
    assert len(Instructions.from_text(form).instructions) == 1


def test_lists_of_kinds_and_arguments() -> None:
    made = Instructions.from_lists(["punctuation:no_comma", "startend:end_checker"], [None, {"end_phrase": " Bye "}])
    assert [one.arguments for one in made.instructions] == [{}, {"end_phrase": "Bye"}]
    with pytest.raises(ValueError, match="has 1 instructions with 2 lists of arguments"):
        Instructions.from_lists(["punctuation:no_comma"], [{}, {}])
    with pytest.raises(ValueError, match="arguments that are not a mapping"):
        Instructions.from_lists(["punctuation:no_comma"], ["x"])
    with pytest.raises(ValueError, match="has no instructions"):
        Instructions.from_lists([], [])
