r"""Finds the words directly before or after an answer that deny it or name an alternative.

    `It is not \boxed{4}`  ->  `not`        `\boxed{4} or maybe 5`  ->  `or`        `no doubt it is \boxed{4}`  ->  ``

The words before an answer become a shape, one letter per word: `There is no doubt that it is` is `xVnErbV`. The answer
is denied if the shape ends with a denial, ignoring words that can come in between, as in `not the correct answer is`.
"""

from __future__ import annotations

import re

from brorl.verification.domains.lexicon import Lexicon

_READ = 200
_LEXICON = Lexicon("""
N = denies, and negates a denial after it
not, never, nobody, cannot, *n't

n = negates a denial after it
no, none, nothing, without, beyond, little, impossible, unable

E = denies, and after a negation affirms: no doubt
doubt, wrong, incorrect, mistake, error

O = denies, and after a negation affirms: nothing other than
other than, else than

M = denies, and after a negation is an exact bound: no fewer than
fewer than, less than, more than, greater than, larger than, smaller than, lower than, higher than

D = denies
nor, neither, doubtful, unlikely, hardly, false, untrue, worst, unsure, whether, pretend, imagine, unless, who, except,
than, maybe, perhaps, possibly, or, exclude, excludes, excluded, excluding, eliminate, eliminates, eliminated,
eliminating, reject, rejects, rejected, rejecting, refuse, mistaken, tempting, suppose, supposing, assume, assuming,
outside, besides, rule out, rules out, ruled out, ruling out, anything but, everything but

f = denies, and supposes
if

S = supposes
were, had

c = follows from what is supposed
would, could, might

r = begins a relative clause
that, which, what

V = is, or another verb of a relative clause
is, are, was, be, can, should, does, do

b = can come between a denial and the answer
the, a, an, final, correct, right, true, best, answer, option, choice, value, number, first, been, being, will, equal,
equals, to, it, its, quite, this, say, says, said, think, thinks, believe, claim, conclude, write, choose, pick, give,
put, report, sure, certain, i, we, my, our, =, *ly
""")
_BETWEEN = "[bVrcS]"
_DENIED = re.compile(
    rf"[NEOMDf]{_BETWEEN}*$|"  # it is not the answer
    rf"[fS].*[^bVrcS].*c{_BETWEEN}*$"  # if it were odd, it would be
)
_AFFIRMED = re.compile(
    rf"[Nn].?E{_BETWEEN}*$|"  # there is no doubt that it is
    rf"[Nn].{{0,3}}O{_BETWEEN}*$|"  # it cannot be any number other than
    r"[Nn].*M$|"  # it cannot be done in fewer than
    rf"r(?:N|[VcS]+N?.){_BETWEEN}*V$"  # the number that is not even is
)
_MARKS = " \t$*_:([{\\"
_RELATION = re.compile(
    r"""(?: \\(?:neq?|not|notin|[lg]eq?(?:slant)?|[lg]t|ll|gg|pm|mp)\s?=?
          | (?<![a-z/<][a-z\d]) (?<![-=>]) [<>]=?   # not the end of an arrow or of a tag
          | [\u2260\u2264\u2265\u00b1]
          | [=$(]\s?-
        )$""",
    re.VERBOSE,
)
_ALTERNATIVE = re.compile(
    r"""(?: [^\S\n] | [$*_()\]},;:-] | \\[)\],;!\ ] | \\q?quad(?![a-z]) )*
        (?: \\(?:text|mbox|mathrm)\s*\{\s* )?
        (?: (?:is|are|may|might|could|can|be)\s+ )* (?:\w+ly\s+)?
        (?: (?:nor|maybe|perhaps|possibly|alternatively|unless|or(?!\s+(?:so|equivalently|simply)\b))\b
          | (?:al)?though\s+it\s+(?:may|might|could)\b
          | \\(?:neq?|not|pm)(?![a-zA-Z]) | \u2260
          | and\s+ (?= (?: \$[^$=<>\n]{1,40}\$ | \\\([^=<>\n]{1,40}?\\\) ) \s*(?:[.,;!\n]|$) )   # and $43$.
        )""",
    re.IGNORECASE | re.VERBOSE,
)


def denial_before(text: str) -> str:
    """Return the words at the end of the text that deny the next answer or name a different one; "" if none do.

    Examples:
        >>> denial_before("The answer is not ")
        'not'
    """
    line = text[-_READ:].rpartition("\n")[2].rstrip(_MARKS)
    if not line or line[-1] in ".!?":
        return ""
    relation = _RELATION.search(line)
    if relation and line.strip() != ">":  # `>` alone marks a quotation in Markdown
        return relation[0]
    shape, words = _shape(line)
    denial = None if _AFFIRMED.search(shape) else _DENIED.search(shape)
    return " ".join(words[denial.start() :]) if denial else ""


def denial_after(text: str) -> str:
    """Return the words at the start of the text that name an alternative to the answer before it; "" if none do.

    Examples:
        >>> denial_after(", or 43")
        ', or'
    """
    alternative = _ALTERNATIVE.match(text[:_READ])
    return alternative[0] if alternative else ""


def _shape(line: str) -> tuple[str, list[str]]:
    """Return one letter per word or phrase of a line, and the word or phrase that each letter stands for."""
    words = [word.strip("$*_") for word in line.lower().replace("\u2019", "'").split()]
    shape = ""
    phrases: list[str] = []
    at = 0
    while at < len(words):
        letter, length = _LEXICON.phrase(words, at)
        is_symbol = len(words[at]) == 1 and not words[at].isdigit()
        shape += "b" if is_symbol else letter
        phrases.append(" ".join(words[at : at + length]))
        at += length
    return shape, phrases
