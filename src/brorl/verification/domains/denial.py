r"""Finds words around an answer that take it back: `not \boxed{4}`, `I doubt the answer is 4`, `$4$ or $5$`.

A denial stands in the sentence of the answer, with nothing but words such as `the answer is` between them. Only the 200
characters beside the answer are read.
"""

from __future__ import annotations

import re

_READ = 200
_LONGEST_RELATION = 12
_WORDS = 16
_MARKS = " \t$*_:([{\\"
_RELATION = re.compile(
    r"(?:\\(?:neq?|not|notin|[lg]eq?(?:slant)?|[lg]t|ll|gg|pm|mp)\s?=?|(?<![a-z/<][a-z\d])(?<![-=>])[<>]=?|"
    r"[\u2260\u2264\u2265\u00b1]|[=$(]\s?-)$"
)
# Words between a denial and the answer.
_WORD = re.compile(r"\S+")
_BETWEEN = frozenset(
    _WORD.findall(
        "the a an final correct right best true answer option choice value number first is are was were be been being "
        "would should could can might will equal equals to that it its quite this say says said think thinks believe "
        "claim conclude write choose pick give put report sure certain i we my our ="
    )
)
_DENIALS = frozenset(
    _WORD.findall(
        "not never nor neither doubt doubtful unlikely hardly wrong incorrect false untrue worst cannot unsure whether "
        "pretend imagine if unless nobody who except than maybe perhaps possibly or exclude excludes excluded "
        "excluding eliminate eliminates eliminated eliminating reject rejects rejected rejecting refuse mistake "
        "mistaken error tempting suppose supposing assume assuming outside besides"
    )
)
_TWO_WORDS = re.compile(r"(?:rul(?:e|es|ed|ing) out|(?:any|every|no)thing but|least (?:likely|plausible|probable))")
_NOT = r"(?:\b(?:not|never|cannot)|n['\u2019]t)"
_AFFIRMATIONS = re.compile(
    r"(?:\b(?:no|without(?: a| any)?|beyond(?: a| any)?|little) (?:doubt|question)|\bnothing but|"
    r"\b(?:none|nothing|nobody|no one|no) (?:other|else)(?: \w+)? than|"
    rf"{_NOT} be (?:anything|any \w+) (?:other|else) than|{_NOT}(?: \w+)? doubt|"
    rf"{_NOT}(?: an?)? (?:wrong|incorrect|mistake|error))$"
)
# Before `is` and the answer to a question for what is not true: `the statement that is not true is B`.
_RELATIVE = re.compile(
    r"\b(?:that|which|what) (?:cannot|\w+n['\u2019]t|"
    r"(?:(?:is|are|was|were|be|can|could|should|does|do) )+(?:not )?\S+)$"
)
_SUPPOSITION, _CONDITIONAL = frozenset({"if", "were", "had"}), frozenset({"would", "could", "might"})
# What is said of the value, not of the answer: `which is not prime`, `not 6`, `is not the only one`.
_OF_VALUE = (
    r"(?!(?:\s+(?:an?|the|my|our|quite|really|actually|necessarily|always)\b)*+\s+"
    r"(?!(?:correct|right|true|valid|answer|solution|option|choice|final|best|it|so|what|sure|certain|confident|"
    r"possible|allowed|accept\w+)\b)(?:[a-z]{2}|[$(]*-?\d))"
)
_BESIDE = r"(?:[^\S\n]|[$*_()\]},;:-]|\\[)\],;! ]|\\q?quad(?![a-z]))*"
_AFTER = re.compile(
    rf"{_BESIDE}(?:\\(?:text|mbox|mathrm)\s*\{{\s*)?"
    r"(?:(?:that|this|it|which)\s+)?(?:(?:is|was|are|were|seems|looks|may|might|could|can|be)\s+)*(?:\w+ly\s+)?"
    rf"(?:(?:not{_OF_VALUE}|wrong|incorrect|false|untrue|nor|maybe|perhaps|possibly|alternatively|unless|"
    r"or(?!\s+(?:so|equivalently|simply)\b))\b|"
    rf"(?:is|was|are|does|do|ca|could|wo)n['\u2019]t\b{_OF_VALUE}|(?:al)?though\s+it\s+(?:may|might|could)\b|"
    r"and\s+(?=(?:\$[^$=<>\n]{1,40}\$|\\\([^=<>\n]{1,40}?\\\))\s*(?:[.,;!\n]|$))|\?[\s$]*(?:no|not|wait|actually|or)\b|\\(?:neq?|not|pm)(?![a-zA-Z])|\u2260)|"
    rf"[\s$*_)\]}}.,;:!]*(?:that|this|it)\s+(?:(?:is|was)\s+(?:not{_OF_VALUE}|wrong|incorrect|false)|"
    r"can(?:no|['\u2019])t\s+be\s+(?:right|correct|true|it))\b",
    re.IGNORECASE,
)


def _is_between(word: str) -> bool:
    is_adverb = word.endswith("ly") and word not in _DENIALS
    return word in _BETWEEN or is_adverb or (len(word) == 1 and not word.isdigit())


def denial_before(text: str) -> str:
    """Return the words at the end of a text that deny what follows it, or name another answer beside it."""
    line = text[-_READ:].rpartition("\n")[2].rstrip(_MARKS)
    if not line or line[-1] in ".!?":
        return ""
    relation = _RELATION.search(line, max(len(line) - _LONGEST_RELATION, 0))
    if relation and line.strip() != ">":  # a quotation in Markdown
        return relation[0]
    words = line.lower().rsplit(None, _WORDS)
    at = len(words)
    while at and _is_between(word := words[at - 1].strip("$*_")):
        at -= 1
    if _AFFIRMATIONS.search(" ".join(words[max(at - 6, 0) : at])):
        return ""
    if words[at:] and words[-1] in ("is", "are") and _RELATIVE.search(" ".join(words[max(at - 6, 0) : at])):
        return ""
    if at and (
        word in _DENIALS
        or word.endswith(("n't", "n\u2019t"))
        or _TWO_WORDS.fullmatch(" ".join(words[max(at - 2, 0) : at]))
        or not (_CONDITIONAL.isdisjoint(words[at:]) or _SUPPOSITION.isdisjoint(words[:at]))
    ):
        return " ".join(words[at - 1 :])
    return ""


def denial_after(text: str) -> str:
    """Return the words at the start of a text that deny what precedes it, or name another answer beside it."""
    denial = _AFTER.match(text[:_READ])
    return denial[0] if denial else ""
