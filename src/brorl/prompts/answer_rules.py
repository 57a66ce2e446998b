"""Rules that choose a file's verifier from its answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from brorl.errors import UserError, source_setting
from brorl.prompts.answer_forms import last_box, surrounds_answer
from brorl.prompts.countdown import is_countdown_reference
from brorl.prompts.question import COUNTDOWN_DOMAIN, MATH_DOMAIN, SCIENCE_DOMAIN

_MOSTLY = 0.9
_MAX_ANSWER_LENGTH = 200  # characters; anything longer is a solution, not an answer
_MAX_WORDS = 6  # a longer answer can be phrased in many ways
_MATH_WORDS = {"pi", "sqrt", "frac", "sin", "cos", "tan", "log", "exp", "inf", "and", "or"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}([/.-])\d{1,2}\1(?:19|20)\d\d")


def looks_mathematical(text: str) -> bool:
    """Return whether an answer is a number, a formula or an option letter, but not a date (a subtraction)."""
    if _is_solution(text) or _DATE.fullmatch(text):
        return False
    if "\\" in text or re.fullmatch(r"\(?[A-J]\)?", text):
        return True
    words = {word.lower() for word in re.findall(r"[A-Za-z]{2,}", text)}
    return words <= _MATH_WORDS and any(character.isdigit() for character in text)


def _is_short(text: str) -> bool:
    """Return whether an answer is short enough for a response to match it word for word."""
    return len(text.split()) <= _MAX_WORDS and len(text) <= _MAX_ANSWER_LENGTH and not _DATE.fullmatch(text)


def _is_solution(text: str) -> bool:
    return len(text) > _MAX_ANSWER_LENGTH or surrounds_answer(text)


class AnswerRule(NamedTuple):
    """A rule that chooses the verifier for answers of one form."""

    domain: str  # the verifier's domain
    fits: Callable[[str], bool]  # whether an answer has the form
    share: float  # minimum fraction of answers with the form
    reason: str  # shown to the user
    words: tuple[str, ...] = ()  # all possible answers


def _word_rule(*words: str) -> AnswerRule:
    reason = f"which compares {' and '.join(words)} as words, in upper or lower case"
    return AnswerRule(MATH_DOMAIN, lambda text: text.lower() in words, 1.0, reason, words)


_RULES = (
    AnswerRule(COUNTDOWN_DOMAIN, is_countdown_reference, 1.0, "the answers are puzzles such as `3 5 7 -> 22`"),
    _word_rule("yes", "no"),
    _word_rule("true", "false"),
    AnswerRule(MATH_DOMAIN, looks_mathematical, _MOSTLY, "the answers look like numbers or formulas"),
)
"""The first rule that fits decides."""


def find_domain(
    path: str, column: str, answers: Sequence[str], given: str | None = None
) -> tuple[str, str, tuple[str, ...]]:
    """Return the domain of a column's answers, the reason, and the possible answers if they are words such as yes, no.

    If no rule fits and no domain is given, a `UserError` explains what to do.
    """
    rule = next(
        (rule for rule in _RULES if answers and sum(map(rule.fits, answers)) >= rule.share * len(answers)), None
    )
    words = rule.words if rule else ()
    if given:
        return given, "as given", words
    if not answers:
        return MATH_DOMAIN, "there are no answers", ()
    if rule is None:
        raise _no_rule(path, column, answers)
    return rule.domain, rule.reason, words


def _no_rule(path: str, column: str, answers: Sequence[str]) -> UserError:
    """Return the error for answers that no rule fits."""
    solutions = [text for text in answers if _is_solution(text)]
    if solutions and all(last_box(text) is not None for text in solutions):
        return UserError(
            f"{path}: column {column!r} contains whole solutions with the answer in \\boxed{{}}; write the answers "
            f"to a different column and name it with {source_setting('answer_column')}"
        )
    strange = next(text for text in answers if not looks_mathematical(text))
    are_short = sum(map(_is_short, answers)) >= _MOSTLY * len(answers)
    science = f"{source_setting('domain', SCIENCE_DOMAIN)} to compare short texts, " if are_short else ""
    return UserError(
        f"{path}: the answers in column {column!r}, such as {strange[:60]!r}, do not look like numbers or formulas; "
        f"give {source_setting('domain', 'math')} if they are mathematics, {science}"
        f"{source_setting('domain', 'NAME')} with a verifier that you write (docs/how-to/verifiers.md), "
        "or name a different column with "
        f"{source_setting('answer_column')}"
    )
