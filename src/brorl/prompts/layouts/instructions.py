"""Layouts of public datasets of instruction following.

A row is dropped if one of its instructions is not one of the 25 kinds of IFEval, or lacks an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brorl.format import short_repr
from brorl.prompts.instructions import INSTRUCTIONS_DOMAIN, KINDS, Instructions
from brorl.prompts.layouts.layout import Cells, DroppedRow, question_of
from brorl.prompts.question import Question
from brorl.prompts.row_files import decoded

_UNKNOWN_KIND = "an instruction that is not one of the 25 kinds of IFEval"
_UNUSABLE = "an instruction with missing or unusable arguments"

# RLVR-IFeval: each function with its kind, our name of each of its arguments, and arguments that its prompts state.
_FUNCTIONS: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, str]]] = {
    name: (
        kind,
        {theirs: ours for theirs, is_named, ours in (one.partition(":") for one in arguments.split(", ")) if is_named},
        {ours: text for ours, is_text, text in (one.partition("=") for one in arguments.split(", ")) if is_text},
    )
    for name, kind, arguments in (
        ("verify_keywords", "keywords:existence", "keyword_list:keywords"),
        ("verify_keyword_frequency", "keywords:frequency", "word:keyword, N:frequency, relation=exactly"),
        ("validate_forbidden_words", "keywords:forbidden_words", "forbidden_words:forbidden_words"),
        ("verify_letter_frequency", "keywords:letter_frequency",
         "letter:letter, N:let_frequency, let_relation=exactly"),
        ("validate_response_language", "language:response_language", "language:language"),
        ("verify_paragraph_count", "length_constraints:number_paragraphs", "N:num_paragraphs, divider=* * *"),
        ("validate_word_constraint", "length_constraints:number_words", "N:num_words, quantifier:relation"),
        ("verify_sentence_constraint", "length_constraints:number_sentences", "N:num_sentences, quantifier:relation"),
        ("validate_paragraphs", "length_constraints:nth_paragraph_first_word",
         "N:num_paragraphs, first_word:first_word, i:nth_paragraph"),
        ("verify_postscript", "detectable_content:postscript", "postscript_marker:postscript_marker"),
        ("validate_placeholders", "detectable_content:number_placeholders", "N:num_placeholders"),
        ("verify_bullet_points", "detectable_format:number_bullet_lists", "N:num_bullets"),
        ("validate_title", "detectable_format:title", ""),
        ("validate_choice", "detectable_format:constrained_response", "options:options"),
        ("validate_highlighted_sections", "detectable_format:number_highlighted_sections", "N:num_highlights"),
        ("validate_sections", "detectable_format:multiple_sections",
         "N:num_sections, section_splitter:section_spliter"),
        ("validate_json_format", "detectable_format:json_format", ""),
        ("validate_repeat_prompt", "combination:repeat_prompt", "original_prompt:prompt_to_repeat"),
        ("validate_two_responses", "combination:two_responses", ""),
        ("validate_uppercase", "change_case:english_capital", ""),
        ("validate_lowercase", "change_case:english_lowercase", ""),
        ("validate_frequency_capital_words", "change_case:capital_word_frequency",
         "N:capital_frequency, quantifier:capital_relation"),
        ("validate_end", "startend:end_checker", "end_phrase:end_phrase"),
        ("validate_quotation", "startend:quotation", ""),
        ("validate_no_commas", "punctuation:no_comma", ""),
    )
}  # fmt: skip


def _question(prompt: Any, kinds: Any, arguments: Any, loose: bool = False) -> Question:
    """Return the question of a row with a list of kinds and a list of their arguments."""
    if not isinstance(kinds, list | tuple) or not isinstance(arguments, list | tuple):
        types = f"{type(kinds).__name__} and {type(arguments).__name__}"
        raise ValueError(f"the kinds of instructions and their arguments must be two lists, got {types}")
    text = _prompt(prompt)
    if any(kind not in KINDS for kind in kinds):
        raise DroppedRow(_UNKNOWN_KIND)
    try:
        return question_of(text, Instructions.from_lists(kinds, arguments, loose).to_text(), INSTRUCTIONS_DOMAIN)
    except ValueError:
        raise DroppedRow(_UNUSABLE) from None


def _prompt(value: Any) -> str:
    """Return the text of a prompt, or of a conversation of one message."""
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise DroppedRow("more than one message" if value else "no question")
        value = value[0].get("content") if isinstance(value[0], Mapping) else value[0]
    if not isinstance(value, str):
        raise ValueError(f"the prompt must be a string or a list of one message, got {type(value).__name__}")
    return value


def ifeval(row: Cells, _seed: int, loose: bool = False) -> Question:
    """Read the lists of IFEval."""
    return _question(row["prompt"], row["instruction_id_list"], row["kwargs"], loose)


def nemotron(row: Cells, _seed: int) -> Question:
    """Read the lists of IFEval inside `args`."""
    arguments = _mapping(row["args"], "args", "instruction_id_list", "instruction_kwargs")
    return _question(row["input"], arguments["instruction_id_list"], arguments["instruction_kwargs"])


def multi_constraints(row: Cells, _seed: int) -> Question:
    """Read the lists of IFEval inside `ground_truth`, which can be a list of one mapping."""
    truth = decoded(row["ground_truth"])
    truth = truth[0] if isinstance(truth, list) and len(truth) == 1 else truth
    truth = _mapping(truth, "ground_truth", "instruction_id", "kwargs")
    return _question(row["messages"], truth["instruction_id"], truth["kwargs"])


def rlvr(row: Cells, _seed: int) -> Question:
    """Read one function with its arguments."""
    truth = _mapping(row["ground_truth"], "ground_truth", "func_name")
    if truth["func_name"] not in _FUNCTIONS:
        raise DroppedRow(_UNKNOWN_KIND)
    kind, names, fixed = _FUNCTIONS[truth["func_name"]]
    arguments = {**fixed, **{ours: truth.get(theirs) for theirs, ours in names.items()}}
    return _question(row["messages"], [kind], [arguments])


def _mapping(value: Any, column: str, *keys: str) -> Mapping[str, Any]:
    """Return a mapping with some keys, which may be stored as the text of JSON or of a Python literal."""
    found = decoded(value)
    if not isinstance(found, Mapping) or not {*keys} <= {*found}:
        raise ValueError(f"{column} must contain one mapping with {' and '.join(keys)}, got {short_repr(value)}")
    return found
