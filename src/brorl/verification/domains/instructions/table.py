"""The check of each kind of instruction, and the strict and the loose reading of a response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from brorl.prompts.instructions import Instruction, Instructions
from brorl.verification.domains.instructions import amounts, formats, language

CHECKS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "keywords:existence": amounts.existence,
    "keywords:frequency": amounts.frequency,
    "keywords:forbidden_words": amounts.forbidden_words,
    "keywords:letter_frequency": amounts.letter_frequency,
    "language:response_language": language.response_language,
    "length_constraints:number_sentences": amounts.number_sentences,
    "length_constraints:number_paragraphs": amounts.number_paragraphs,
    "length_constraints:number_words": amounts.number_words,
    "length_constraints:nth_paragraph_first_word": amounts.nth_paragraph_first_word,
    "detectable_content:number_placeholders": formats.number_placeholders,
    "detectable_content:postscript": formats.postscript,
    "detectable_format:number_bullet_lists": formats.number_bullet_lists,
    "detectable_format:constrained_response": formats.constrained_response,
    "detectable_format:number_highlighted_sections": formats.number_highlighted_sections,
    "detectable_format:multiple_sections": formats.multiple_sections,
    "detectable_format:json_format": formats.json_format,
    "detectable_format:title": formats.title,
    "combination:two_responses": formats.two_responses,
    "combination:repeat_prompt": formats.repeat_prompt,
    "startend:end_checker": formats.end_checker,
    "startend:quotation": formats.quotation,
    "change_case:capital_word_frequency": amounts.capital_word_frequency,
    "change_case:english_capital": language.english_capital,
    "change_case:english_lowercase": language.english_lowercase,
    "punctuation:no_comma": formats.no_comma,
}


def broken(text: str, instructions: Instructions) -> list[Instruction]:
    """Return the instructions that a text does not follow; an empty text follows none.

    Args:
        text: The response.
        instructions: Its instructions, with the strict or the loose reading.
    """
    readings = list(dict.fromkeys(_loose(text))) if instructions.loose else [text]
    readings = [reading for reading in readings if reading.strip()]
    return [
        one
        for one in instructions.instructions
        if not any(CHECKS[one.kind](reading, one.arguments) for reading in readings)
    ]


def _loose(text: str) -> Iterator[str]:
    """Yield the text, and the text without its first line, its last line and both, each with and without asterisks."""
    lines = text.split("\n")
    for part in (text, *("\n".join(some).strip() for some in (lines[1:], lines[:-1], lines[1:-1]))):
        yield part
        yield part.replace("*", "")
