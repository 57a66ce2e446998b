"""Verifier for instruction following: IFEval's 25 kinds of instructions.

A response is correct if it follows all instructions. With partial credit, its score is the fraction that it follows.
The checks are plain functions that run in this process, in linear time. Keywords are literal; the original treats them
as regular expressions and fails on `C++`. Where the original's pattern is quadratic, each line is searched separately,
with the same result.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, assert_never

from brorl.errors import UserError
from brorl.prompts.instructions import Instruction, Instructions, Relation
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, NO_ANSWER, Verdict, verdict_of
from brorl.verification.verifier import TrialResponses, malformed

_WORD = re.compile(r"\w+")
_LETTER = re.compile(r"[^\W\d_]")

_OPENERS = "([{\"'“\u2018«*_"
_CLOSERS = ")]}\"'”\u2019»*_`"
# Case matters: `sat` and `sun` are words, `Sat` and `Sun` are days.
_ABBREVIATIONS = re.compile(
    "(?:[Mm]rs?|[Mm]s|[Mm]essrs|[Dd]r|[Pp]rof|[Jj]r|[Ss]r|[Ll]td|[Cc]orp|[Bb]ros|[Vv]s|[Dd]ept|[Uu]niv|[Aa]ssn|[Bb]lvd)|"
    "Rev|Gen|Col|Capt|Lt|Sgt|Sen|Rep|Gov|St|Mt|Ft|Inc|Co|Cos|"
    "Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec|Mon|Tues?|Wed|Thu|Thurs|Fri|Sat|Sun|Ave|Rd|Ext|Vol|Figs?|Eqs?|Eds?|"
    "approx|est|ext|figs?|vol|eqs?|ca|cf|eds|al"
)
_INNER_PERIODS = re.compile(r"[^\W\d_](?:\.[^\W\d_])+")  # `e.g`, `U.S.A`: the last period is stripped first
_STARTER = re.compile(
    r"(?:the|this|that|these|those|he|she|it|we|they|you|i|an?|in|on|at|as|if|but|and|so|however|there|here|when|while|"
    r"what|who|why|how|my|our|your|his|her|its|their|some|many|most|after|before|since|for)\b",
    re.IGNORECASE,
)

# Separates tokens by Penn Treebank rules. A colon or comma before a digit belongs to a number.
_SEPARATOR = re.compile(r"""(?:[\s?!;@#$%&()\[\]{}<>"“”«»„\u2018\u2019`…]|--|\.\.\.|''|[:,](?!\d))+""")
_TWO_TOKENS = re.compile(
    r"(.*[^'])('S|'M|'D|'LL|'RE|'VE)|(.*)(N'T)|(CAN)(NOT)|(D')(YE)|(GIM|LEM)(ME)|(GON|WAN)(NA)|(GOT)(TA)|(MORE)('N)",
    re.DOTALL,
)


def count_words(text: str) -> int:
    """Return the number of runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Return the number of tokens that contain letters, none of them lowercase. `IT'S` is two tokens."""
    return sum(map(str.isupper, chain.from_iterable(map(_tokens, _SEPARATOR.split(text)))))


def _tokens(piece: str) -> list[str]:
    if not piece.isupper():
        return []
    match = _TWO_TOKENS.fullmatch(piece.rstrip("."))
    return [token for token in match.groups() if token] if match else [piece]


def count_sentences(text: str) -> int:
    """Return the number of sentences: runs with a letter that end at `.`, `!` or `?` before a space, or at the end.

    The original uses NLTK, whose sentence model must be downloaded. It counts `???` as three sentences and `1.` as one,
    which a policy learns to exploit within a few steps.
    """
    count = 0
    has_letter = False  # since the last end of a sentence
    for token, following in pairwise(chain(text.split(), [""])):
        has_letter = has_letter or _LETTER.search(token) is not None
        if has_letter and _ends_sentence(token, following):
            count += 1
            has_letter = False
    return count + has_letter


def _ends_sentence(token: str, following: str) -> bool:
    closed = token.rstrip(_CLOSERS)
    word = closed.rstrip(".!?…")
    end = closed[len(word) :]
    if "!" in end or "?" in end:
        return True
    if not end or not word or not following:
        return bool(end and word)
    starts = following.lstrip(_OPENERS)
    if len(end) > 1 or end == "…":
        return starts[:1].isupper()
    word = word.lstrip(_OPENERS)
    if len(word) == 1:
        return not word.isalpha() or word == "I"
    if _ABBREVIATIONS.fullmatch(word) or _INNER_PERIODS.fullmatch(word):
        return starts[:1].isupper() and _STARTER.match(starts) is not None
    return True


LANGUAGE_KINDS = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)
_READ_CHARACTERS = 10_000


def require_langdetect() -> None:
    """Raise a UserError if langdetect is not installed, without importing it."""
    if find_spec("langdetect") is None:
        raise UserError(
            "the data has instructions about languages, which require the package langdetect; run: pip install "
            "'brorl[ifeval]'"
        )


def detect(text: str) -> str | None:
    """Return the language code of the first 10,000 characters, such as `en`; None if the letters fit no known language.

    langdetect uses random numbers. Here, every detection starts from the same seed, and profiles are loaded in name
    order. langdetect ignores all-caps words, so text that is all caps is lowercased first. A response such as
    `123` never follows an instruction about languages; the original accepts it for every language.
    """
    text = text[:_READ_CHARACTERS]
    return _detect(text.lower() if text.isupper() else text)


@lru_cache(maxsize=64)  # several instructions may need the language of the same response
def _detect(text: str) -> str | None:
    from langdetect.lang_detect_exception import LangDetectException

    detector = _factory().create()
    detector.append(text)
    try:
        language = str(detector.detect())
    except LangDetectException:
        return None
    return None if language == detector.UNKNOWN_LANG else language


@lru_cache(maxsize=1)
def _factory() -> Any:
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.set_seed(0)
    profiles = sorted(Path(PROFILES_DIRECTORY).iterdir())
    factory.load_json_profile([path.read_text("utf-8") for path in profiles if not path.name.startswith((".", "_"))])
    return factory


_POSTSCRIPTS = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_MAX_JSON_DEPTH = 100  # far below Python's recursion limit, part of which the caller may have used
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # an unclosed string takes the rest, which is read only once
_QUOTES_AND_MARKS = re.compile(r"[.,?!'\"]")


def _holds(count: int, relation: Relation, bound: int) -> bool:
    """Return whether a count satisfies a relation. `around` allows a difference of a tenth of the bound, at least 1."""
    match relation:
        case "less than":
            return count < bound
        case "at least":
            return count >= bound
        case "at most":
            return count <= bound
        case "exactly":
            return count == bound
        case "around":
            return abs(count - bound) <= max(round(bound / 10), 1)
        case _:
            assert_never(relation)


def _count(pattern: str, text: str, flags: int = 0) -> int:
    return sum(1 for _ in re.finditer(pattern, text, flags))


def _whole_word(word: str) -> str:
    r"""Return a pattern with a word boundary at each end that allows one: `\bword\b`, `\bC\+\+`."""
    left, right = (r"\b" if re.match(r"\w", end) else "" for end in (word[0], word[-1]))
    return f"{left}{re.escape(word)}{right}"


def _paragraphs(text: str, num_paragraphs: int, divider: str = "***") -> bool:
    """Return whether dividers separate exactly this many paragraphs. Only the first and the last may be empty."""
    paragraphs = [part.strip() for part in text.split(divider)]
    return all(paragraphs[1:-1]) and len(list(filter(None, paragraphs))) == num_paragraphs


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether the nth of this many paragraphs starts with the word. As in the original, n counts empty ones."""
    paragraphs = [part.strip() for part in text.split("\n\n")]
    if len(list(filter(None, paragraphs))) != num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split(maxsplit=1)
    word = _QUOTES_AND_MARKS.split(words[0].lstrip("'").lstrip('"'), maxsplit=1)[0] if words else None
    return word is not None and word.lower() == first_word.lower()


def _bullets(text: str, num_bullets: int) -> bool:
    """Return whether exactly this many lines have a bullet, `* x` or `- x`. A line of dashes counts."""
    patterns = (r"^[^\S\n]*\*[^*].*$", r"^[^\S\n]*-.*$")
    return sum(_count(pattern, text, re.MULTILINE) for pattern in patterns) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    """Return whether at least this many parts are highlighted: `*x*` or `**x**`."""
    single = sum(1 for match in re.finditer(r"\*[^\n*]*\*", text) if match[0].strip("*").strip())
    double = sum(1 for match in re.finditer(r"\*\*[^\n*]*\*\*", text) if match[0][2:-2].strip())
    return single + double >= num_highlights


def _has_title(line: str) -> bool:
    """Return whether a line has a title: `<<title>>`."""
    start, end = line.find("<<"), line.rfind(">>")
    return start >= 0 and start + 3 <= end and line[start:end].lstrip("<").rstrip(">").strip() != ""


def _placeholders(line: str) -> int:
    """Return the number of placeholders in a line: `[name]`."""
    count = 0
    end = -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
        count += 1
    return count


def _postscript(text: str, postscript_marker: str) -> bool:
    """Return whether the postscript marker occurs, in upper or lower case. `P. S.` counts as `P.S.`."""
    marker = postscript_marker.lower()
    return re.search(_POSTSCRIPTS.get(marker, re.escape(marker)), text.lower()) is not None


def _is_json(text: str) -> bool:
    """Return whether the whole text is JSON, possibly in a code block. Any value counts, up to 100 levels deep."""
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    text = text.removesuffix("```").strip()
    if text.count("[") + text.count("{") > _MAX_JSON_DEPTH:
        brackets = re.findall(r"[\[\]{}]", _STRING.sub("", text))
        if max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > _MAX_JSON_DEPTH:
            return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _one_option(text: str, options: Sequence[str] = _ANSWERS) -> bool:
    """Return whether exactly one of the options occurs. The original accepts a response with all of them."""
    named = [option for option in options if option in text]
    # An option that occurs inside a longer option is not a second one.
    return len(named) - sum(any(option != other and option in other for other in named) for option in named) == 1


def _two_responses(text: str) -> bool:
    """Return whether six asterisks separate exactly two different responses."""
    parts = [part.strip() for part in text.split("******")]
    responses = list(filter(None, parts))
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def _quoted(text: str) -> bool:
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


# A check takes the response, and its instruction's arguments by name. Case is ignored where the original ignores it. A
# keyword may be part of a word; a forbidden word is a whole word.
CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(
        re.search(re.escape(keyword), text, re.IGNORECASE) for keyword in keywords
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: _holds(
        _count(re.escape(keyword), text, re.IGNORECASE), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(_whole_word(word), text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _holds(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda text, language: detect(text) == language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _holds(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _holds(count_words(text), relation, num_words),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        sum(map(_placeholders, text.split("\n"))) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _one_option,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        _count(re.escape(section_spliter) + r"\s?\d+", text) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text: any(map(_has_title, text.split("\n"))),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.lower())
    ),
    "startend:end_checker": lambda text, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.lower()),
    "startend:quotation": lambda text: _quoted(text.strip()),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _holds(
        count_capital_words(text), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and detect(text) == "en",
    "change_case:english_lowercase": lambda text: text.islower() and detect(text) == "en",
    "punctuation:no_comma": lambda text: "," not in text,
}


def broken(text: str, instructions: Instructions) -> list[Instruction]:
    """Return the instructions that a response follows neither strictly nor loosely: all of them if it is empty."""
    readings = list(dict.fromkeys(_loose(text))) if instructions.loose else [text]
    readings = [reading for reading in readings if reading.strip()]
    return [
        instruction
        for instruction in instructions.instructions
        if not any(CHECKS[instruction.kind](reading, **instruction.arguments) for reading in readings)
    ]


def _loose(text: str) -> Iterator[str]:
    """Yield the response whole and without its first line, its last line or both; each with and without asterisks."""
    lines = text.split("\n")
    shorter = ("\n".join(kept).strip() for kept in (lines[1:], lines[:-1], lines[1:-1]))
    for reading in (text, *shorter):
        yield reading
        yield reading.replace("*", "")


TOO_LONG = "response too long"
BROKEN = "not followed"  # followed by the first such instruction: `not followed: punctuation:no_comma`

_MAX_CHARACTERS = 200_000  # the slowest check takes 0.1 s
_PLAIN = "This is a short answer to the question that was asked here."


class InstructionsVerifier:
    """Accepts responses that follow all instructions of their prompt.

    Args:
        partial_credit: Whether the score is the fraction of instructions that a response follows, instead of 1 or 0.
    """

    def __init__(self, partial_credit: bool = False) -> None:
        self._partial_credit = partial_credit

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify (prompt, response) pairs one by one.

        The reasons are `correct`, `no answer`, `response too long` (over 200,000 characters) and `not followed: ` plus
        the kind of the first such instruction. Raises a UserError if an instruction needs langdetect and it is not
        installed.
        """
        verdicts = [_verify(_instructions(prompt.reference), response) for prompt, response in items]
        if self._partial_credit:
            return verdicts
        return [replace(verdict, score=float(verdict.correct)) for verdict in verdicts]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that are not instructions. Raises a UserError if langdetect is needed but not installed."""
        return malformed(references, _instructions)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return a plain sentence, `certain` if it follows all instructions, and responses that follow few of them."""
        del others  # a response to other instructions may follow these too
        instructions = _instructions(reference)
        return TrialResponses(_PLAIN, ["No, NEVER.", ""], certain=not broken(_PLAIN, instructions))


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
