"""Verifier of instruction following: the 25 kinds of instructions of IFEval.

A response is correct if it follows all instructions. With partial credit, its score is the fraction that it follows.
The checks are plain functions of the text in this process, each linear in its length. No language model is used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from brorl.prompts.instructions import Instructions
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, NO_ANSWER, Verdict, verdict_of
from brorl.verification.domains.instructions.checks import (
    LANGUAGE_KINDS,
    broken,
    require_langdetect,
)
from brorl.verification.domains.instructions.compliant import compliant_response
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
        the kind of the first instruction that is not followed.

        Raises:
            UserError: If an instruction is about the language, and langdetect is not installed.
        """
        verdicts = [_verify(_instructions(prompt.reference), response) for prompt, response in items]
        if self._partial_credit:
            return verdicts
        return [replace(verdict, score=float(verdict.correct)) for verdict in verdicts]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that are not instructions.

        Raises:
            UserError: If an instruction is about the language, and langdetect is not installed.
        """
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
