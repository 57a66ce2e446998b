r"""Finds words around an answer that take it back: `not \boxed{4}`, `I doubt the answer is 4`, `$4$ or $5$`.

In: the text before or after an answer. Out: the words, or an empty string. Only 200 characters next to the answer are
read, so the time does not depend on the length of a response.
"""

from __future__ import annotations

import re

_READ = 200
_SPACE = r"(?:[\s$*_:(\[{]|\\[(\[,;! ])"
_BEFORE = re.compile(
    r"(?:(?:\b(?:not|never|no(?!\s*:)|nor|neither|doubt|doubtful|unlikely|hardly|wrong|incorrect|false|untrue|worst|least\s+\w+|"
    r"cannot|unsure|whether|if|unless|nobody|who|(?:any|every|no)thing\s+but|except|than|maybe|perhaps|possibly|or|"
    r"rul(?:e|es|ed|ing)\s+out|exclud(?:e|es|ed|ing)|eliminat(?:e|es|ed|ing)|reject(?:s|ed|ing)?)|n['\u2019]t)\b"
    r"(?:[\s*_]+(?:the|an?|final|correct|right|best|answer|option|choice|value|number|is|are|was|be|been|being|would|"
    r"should|could|can|will|equals?|equal|to|that|it|its|this|true|so|say|says|said|think|thinks|believe|claim|sure|certain|i|"
    r"we|my|our|[a-z]\s*=))*"
    r"|\b(?:if|were|had)\b[^.!?;\n]*\b(?:would|could|might)\s+be\b"
    r"|\\(?:neq?|not|notin|[lg]eq?(?:slant)?|[lg]t|ll|gg|pm|mp)(?![a-zA-Z])\s*=?|(?<![a-z/<][a-z])[<>]=?|[\u2260\u2264\u2265\u00b1]|[=$(]\s*-)"
    rf"{_SPACE}*$",
    re.IGNORECASE,
)
_BESIDE = r"(?:[^\S\n]|[$*_()\]},;:-]|\\[)\],;! ]|\\q?quad(?![a-z]))*"
_AFTER = re.compile(
    rf"{_BESIDE}(?:\\(?:text|mbox|mathrm)\s*\{{\s*)?"
    r"(?:(?:that|this|it|which)\s+)?(?:(?:is|was|are|were|seems|looks|may|might|could|can|be)\s+)*(?:\w+ly\s+)?"
    r"(?:(?:not|wrong|incorrect|false|untrue|nor|maybe|perhaps|possibly|alternatively|unless|"
    r"or(?!\s+(?:so|equivalently|simply)\b))\b|"
    r"(?:is|was|are|does|do|ca|could|wo)n['\u2019]t\b|(?:al)?though\s+it\s+(?:may|might|could)\b|"
    r"and\s+(?=\$|\\\()|\?[\s$]*(?:no|not|wait|actually|or)\b|\\(?:neq?|not|pm)(?![a-zA-Z])|\u2260)|"
    r"[\s$*_)\]}.,;:!]*(?:that|this|it)\s+(?:is|was)\s+(?:not\s+(?:correct|right|the)|wrong|incorrect|false)\b",
    re.IGNORECASE,
)


def denial_before(text: str) -> str:
    """Return the words at the end of a text that deny what follows it, or name another answer beside it."""
    found = _BEFORE.search(text[-_READ:].rpartition("\n")[2])
    return found[0] if found else ""


def denial_after(text: str) -> str:
    """Return the words at the start of a text that deny what precedes it, or name another answer beside it."""
    found = _AFTER.match(text[:_READ])
    return found[0] if found else ""
