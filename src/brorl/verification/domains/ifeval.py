"""Verifier of instruction following: the 25 kinds of instructions of IFEval.

A response is correct if it follows all instructions. With partial credit, its score is the fraction that it follows.
The checks are plain functions of the text in this process, each linear in its length. No language model is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from brorl.prompts.instructions import Instructions
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, NO_ANSWER, Verdict, verdict_of
from brorl.verification.domains.ifeval_checks import (
    LANGUAGE_KINDS,
    broken,
    require_langdetect,
)
from brorl.verification.verifier import TrialResponses, malformed

TOO_LONG = "response too long"
BROKEN = "not followed"  # followed by the first instruction: `not followed: punctuation:no_comma`

_MAX_CHARACTERS = 200_000  # 0.1 s for the slowest check


class InstructionsVerifier:
    """Accepts responses that follow all instructions of their prompt.

    Args:
        partial_credit: Score the fraction of instructions that a response follows, not 1 or 0.
    """

    def __init__(self, partial_credit: bool = False) -> None:
        self._partial_credit = partial_credit

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify pairs of a prompt and a response, one after the other.

        The reasons are `correct`, `no answer`, `response too long` (over 200,000 characters) and `not followed: ` with
        the kind of the first instruction that is not followed. Languages need langdetect, else a UserError.
        """
        verdicts = [_verify(_instructions(prompt.reference), response) for prompt, response in items]
        if self._partial_credit:
            return verdicts
        return [replace(verdict, score=float(verdict.correct)) for verdict in verdicts]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that are not instructions; a UserError says that langdetect is needed."""
        return malformed(references, _instructions)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return a response that follows the instructions where one is easily made, and ones that follow few."""
        del others  # a response to other instructions may well follow these
        instructions = _instructions(reference)
        right = compliant_response(instructions)
        return TrialResponses(right, ["No, NEVER.", ""], certain=not broken(right, instructions))


@lru_cache(maxsize=4096)
def _instructions(reference: str) -> Instructions:
    instructions = Instructions.from_text(reference)
    if any(instruction.kind in LANGUAGE_KINDS for instruction in instructions.instructions):
        require_langdetect()
    return instructions


def _verify(instructions: Instructions, answer: str) -> Verdict:
    start = time.perf_counter()
    if not answer.strip():
        return verdict_of(NO_ANSWER, seconds=time.perf_counter() - start)
    if len(answer) > _MAX_CHARACTERS:
        return verdict_of(TOO_LONG, seconds=time.perf_counter() - start)
    wrong = broken(answer, instructions)
    total = len(instructions.instructions)
    reason = f"{BROKEN}: {wrong[0].kind}" if wrong else CORRECT
    return Verdict(not wrong, (total - len(wrong)) / total, None, reason, time.perf_counter() - start)


Arguments = Mapping[str, Any]

_SENTENCE = "this is a short answer to the question that was asked here"


def compliant_response(instructions: Instructions) -> str:
    """Return a text that is meant to follow all instructions."""
    of: dict[str, list[Arguments]] = {}
    for instruction in instructions.instructions:
        of.setdefault(instruction.kind.rpartition(":")[2], []).append(instruction.arguments)
    if "json_format" in of:
        return json.dumps({"answer": " ".join(_keywords(of))})
    text = _arranged(_sentences(of), _lines(of), of)
    if "english_lowercase" in of:
        text = text.lower()
    if "english_capital" in of:
        text = text.upper()
    return f'"{text}"' if "quotation" in of else text


def _at_least(of: Mapping[str, Sequence[Arguments]], kind: str, bound: str, relation: str = "relation") -> int:
    """Return the least number that all instructions of a kind allow."""
    bounded = (arguments for arguments in of.get(kind, ()) if arguments.get(relation) not in ("less than", "at most"))
    return max((arguments[bound] for arguments in bounded), default=0)


def _keywords(of: Mapping[str, Sequence[Arguments]]) -> list[str]:
    words = [keyword for arguments in of.get("existence", ()) for keyword in arguments["keywords"]]
    for arguments in of.get("frequency", ()):
        words += [arguments["keyword"]] * _at_least({"frequency": [arguments]}, "frequency", "frequency")
    for arguments in of.get("letter_frequency", ()):
        words += [arguments["letter"]] * _at_least(
            {"letter_frequency": [arguments]}, "letter_frequency", "let_frequency", "let_relation"
        )
    words += ["WORD"] * _at_least(of, "capital_word_frequency", "capital_frequency", "capital_relation")
    return words


def _sentences(of: Mapping[str, Sequence[Arguments]]) -> str:
    """Return the running text, with the wanted words and sentences."""
    words = [*_keywords(of), *("[name]" for _ in range(_at_least(of, "number_placeholders", "num_placeholders")))]
    wanted = max(_at_least(of, "number_sentences", "num_sentences"), 1)
    text = ". ".join([" ".join([_SENTENCE, *words]), *[_SENTENCE] * (wanted - 1)]) + "."
    for arguments in of.get("constrained_response", ()):
        text = arguments.get("options", ("My answer is yes.",))[0]
    missing = _at_least(of, "number_words", "num_words") - len(text.split())
    padding = f" {_SENTENCE}" * -(-missing // len(_SENTENCE.split()))
    return f"{text[:-1]}{padding}."


def _lines(of: Mapping[str, Sequence[Arguments]]) -> list[str]:
    """Return the lines around the running text."""
    lines = ["<<title>>"] if "title" in of else []
    for arguments in of.get("multiple_sections", ()):
        lines += [f"{arguments['section_spliter']} {number + 1}" for number in range(arguments["num_sections"])]
    lines += ["* a point"] * _at_least(of, "number_bullet_lists", "num_bullets")
    highlights = _at_least(of, "number_highlighted_sections", "num_highlights")
    return lines + ([" ".join(["so *a part*"] * highlights)] if highlights else [])


def _arranged(text: str, lines: Sequence[str], of: Mapping[str, Sequence[Arguments]]) -> str:
    """Join the running text and the lines, divided and ended as wanted."""
    text = "\n".join([*lines, text])
    for arguments in of.get("number_paragraphs", ()):
        text = f"\n{arguments.get('divider', '***')}\n".join([text, *["More."] * (arguments["num_paragraphs"] - 1)])
    for arguments in of.get("nth_paragraph_first_word", ()):
        paragraphs = [text, *["More."] * (arguments["num_paragraphs"] - 1)]
        paragraphs[arguments["nth_paragraph"] - 1] = (
            f"{arguments['first_word']} {paragraphs[arguments['nth_paragraph'] - 1]}"
        )
        text = "\n\n".join(paragraphs)
    if "two_responses" in of:
        text = f"{text}\n******\nAnother one."
    ends = [arguments["postscript_marker"] + " More." for arguments in of.get("postscript", ())]
    starts = [arguments["prompt_to_repeat"] for arguments in of.get("repeat_prompt", ())]
    return "\n".join([*starts, text, *ends, *(arguments["end_phrase"] for arguments in of.get("end_checker", ()))])
