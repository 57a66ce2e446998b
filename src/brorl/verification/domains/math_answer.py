r"""Finds the answer in a math response, including adjacent text that changes it.

    `So $x = -\boxed{\frac{1}{2}}$ km.`  ->  `-(\frac{1}{2}) km`        `The answer is $3$ or $4$.`  ->  `3 or $4$`

The answer is in the last box; without a box, it follows the last `the answer is`, or is the last formula or number. It
includes the adjacent sign, operator or unit, then any nearby words that deny it, name a second value, or take it back.
With such words, it cannot equal a reference unless the second value is the same. An unclosed box gives no answer.
"""

from __future__ import annotations

import re

from brorl.prompts.answer_forms import Box, find_last_box, has_open_box
from brorl.verification.domains.denial import denial_after, denial_before
from brorl.verification.domains.formula.tokens import word_list
from brorl.verification.domains.marked_answer import MARKER, without_next_turn
from brorl.verification.domains.retraction import retraction
from brorl.verification.domains.units import leading_unit

_TAIL = 2_000  # characters read at the end of a response without a box
_READ = 80  # characters read on either side of an answer
_TIDIED = 4_000  # no verifier reads longer answers; each mark at the end takes a pass over the answer
_MAX_JOINED = 8  # adjacent or nested boxes
_MAX_JOINT = 40  # characters between two boxes that belong together
_MAX_LABEL_LENGTH = 20
_MINUS = ("-", "\N{MINUS SIGN}")

_NUMBER = r"[-+]?\d[\d,./]*(?<![,.])(?:\\?%)?"  # -1,234.5%
_VALUE = rf"(?:minus\s+)?(?:\$[^$\n]{{1,60}}\$|\\\([^\n]{{1,60}}?\\\)|\$?{_NUMBER})"  # $x+1$, \(x+1\), 4
_WORD = r"[^\W\d_]+"

# Before an answer.
_JOINT = re.compile(  # \boxed{3} or \boxed{4}
    r"\}((?: [\s$,;/] | \\[()\[\],;!\ ] | \\q?quad | \\text\s*\{\s*(?:and|or)\s*\} | \b(?:and|or)\b )*)$", re.VERBOSE
)
_OPERATION = re.compile(  # twice \boxed{4}, the square root of $\boxed{4}$
    r"""(?<!\S)(?: minus | negative | twice | double | triple | half
          | (?: half | square | cube | (?:square|cube)\ root | reciprocal | opposite | inverse | negation | complement
              | multiple | factorial | logarithm )\ of )$""",
    re.IGNORECASE | re.VERBOSE,
)
_OPERATOR = re.compile(  # \frac{1}{\boxed{4}}, 10^{\boxed{4}}, 3\boxed{4}
    r"(?: \\(?:cdot|times|div|pm|mp|sqrt|frac|binom)(?:\[[^][]*\])? | [/^] | \}\s* )\s*\{?$ | \d+(?:\.\d+)?$",
    re.VERBOSE,
)
_OPENING = re.compile(r"(?:(?<!\\)\$|\\[(\[])$")  # opens a formula that begins with the answer
_OPEN_FORMULA = re.compile(  # $50, x = 50, 50
    r"(?: \$ | \\\( | \\\[ ) (?: (?! \$ | \\\) | \\\] ) . )*$ | [=<>]\s*\S*$ | ^[^A-Za-z]*\d[^A-Za-z]*$", re.VERBOSE
)
_QUESTION = re.compile(  # could it be \boxed{4}?
    r"(?:^|[.!?\n])\s*(?:so\s+)?(?:is|could|might|can|would|may|what if)\b[^.!?\n]*$", re.IGNORECASE
)
_BOUND = re.compile(r"\b(?:at (?:least|most)|up to|between|above|below|over|under|almost|nearly)\b", re.IGNORECASE)
_LABELS = frozenset(  # page 7, pages 7, eq. 7: such numbers are not answers
    word_list(
        "appendix case chapter corollary definition eq eq. eqs. equation example exercise fig fig. figs. figure "
        "footnote item lemma line method no. note p. page part pp. problem proposition question ref ref. reference "
        "rule section step table theorem version volume"
    )
)

# After an answer.
_CONTINUATION = re.compile(
    r"""(?P<glued> \.?\d[\d.]*(?<!\.) | [a-zA-Z](?![a-zA-Z']) )                # \boxed{4}.5, \boxed{4}x
      | [^\S\n]* (?:\}\s*)* (?P<part>                                         # \boxed{4} \cdot 10^3
          \\?%
        | (?: \^ | _\s*\{?\s*\d | \\(?:cdot|times|div|pi|sqrt|frac|pm|circ)(?![a-zA-Z])
            | [*/+-]\s*(?=[\d(\\]|[a-zA-Z](?![a-zA-Z])) )
          (?: (?! \\[)\]] | \.(?!\d) | \\(?:q?quad|text|implies|Rightarrow) ) [^$\n,;=<>&] )* )
      | (?: [^\S\n] | \$ | \\text\s*\{ )* (?P<word>                            # \boxed{4} million, \boxed{4} plus 3
          (?:hundred|thousand|million|billion|trillion|dozen|percent|squared|cubed|factorial)\b
        | (?:plus|minus|times|over|divided\ by)\s+\$?[\d\\][^\s$,;]* )""",
    re.VERBOSE,
)
_SAME_AGAIN = re.compile(  # \boxed{\frac{1}{2}} (or 0.5), or equivalently $0.5$, or about 0.7
    rf"""(?:[\s$(),]|\\[)\]])* \bor,?\s+
         (?: (?:equivalently|simply|in\ \w+\ (?:form|notation)|as\ an?\ \w+|written\ as),?\s+ )*
         (?P<about> (?:about|approximately|roughly)\s+ | \\approx\s* | \N{{ALMOST EQUAL TO}}\s* )?
         (?P<value> \$[^$\n]{{1,30}}\$ | {_NUMBER} ) (?=[\s.,;)$]|$)""",
    re.VERBOSE,
)
_CHANGED = re.compile(
    rf"""[^.,;!?\n()]{{0,60}}?                                                # 34 if x is odd
         \b(?:if|unless|otherwise|depending|provided|whenever|when\s+\$?\w\b)[^.\n]*
      | \s*(?:for|when|in)\b[^.\n]{{0,60}}?                                   # 34 for n = 1 and 36 for n = 2
         (?:\b(?:and|or)\b|,)\s*{_VALUE}\s*(?:for|when|in)\b[^.\n]*
      | (?: (?:\s+{_WORD}){{0,3}}?\s*(?:,?\s*\b(?:or|and|to|through)\s|[,\u2013\u2014~-])   # 34 minutes and 20 seconds
          | (?:\s+{_WORD}){{1,3}}?\s+of\s )\s*                                # 34 percent of 50
         {_VALUE}(?:\s+{_WORD}){{0,2}} (?=\s*(?:[.,;!?)\n]|\b(?:or|and|to)\b|$)) [^.\n]*""",
    re.IGNORECASE | re.VERBOSE,
)

# An answer without a box.
_FORMULA = re.compile(
    r"""(?<!\\)\$\$(.+?)(?<!\\)\$\$                                           # $$x+1$$
      | (?<!\\)\$([^$\n]*(?:\\\$[^$\n]*)*[^\\$\n])\$(?!\d)                    # $x+1$, $\$12$
      | \\\((.+?)\\\) | \\\[(.+?)\\\]""",
    re.DOTALL | re.VERBOSE,
)
_LEADING_NUMBER = re.compile(  # of `**34** apples`, but not of `2 pi`, `2 (x+1)` or `2 1/2`, which are formulas
    rf"""\**\$? (?P<number>{_NUMBER}) (?:\*\*)? (?![\w:_])
         (?!\s*(?: [-+*/^=<>\u00b1\u00d7\u00b7\\\d] | \((?!(?:an?\s)?[a-z]{{2}}) | and\s+an?\b
                 | (?:ten|hundred|thousand|million)ths
                 | (?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|mod|choose|pct)\b
                 | (?:plus|minus|times|over|divided|\w)\b ))""",
    re.VERBOSE,
)
_ANY_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*)?\.?[0-9]+(?:/[0-9]+)?(?:\s*\\?%)?")  # 1,234, .5, 1/2, 50 %


def extract_answer(response: str, with_unit: bool = False) -> str | None:
    """Return a response's answer as one line, without surrounding space, `$` or period; None if there is no answer.

    `with_unit` keeps the words after a number, which may be its unit. The last number alone is then not an answer.
    """
    response = without_next_turn(response)
    if has_open_box(response):
        return _boxed(response) or None
    tail = response[-_TAIL:]
    answer = _after_marker(tail, with_unit) or _last_formula(tail) or ("" if with_unit else _last_number(tail))
    return tidy(answer) or None


def tidy(answer: str) -> str:
    r"""Strip space, emphasis, `$`, `\(`, `\[` and a period from up to 4,000 characters: `**$4$**.` -> `4`."""
    text, before = " ".join(answer.split()), ""
    while text != before and len(text) <= _TIDIED:
        before = text
        text = text.strip().strip("*")
        if text.endswith((".", ",", ";")) and not text.endswith(("\\.", "\\,", "\\;", "...")):
            text = text[:-1]
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            text = _without(text, opening, closing)
    return text


def _without(text: str, opening: str, closing: str) -> str:
    r"""Remove the formula marks around a string. `$3\$` ends with an escaped dollar, so it is unchanged."""
    inner = text[len(opening) : -len(closing)]
    is_around = len(text) >= 2 * len(opening) and text.startswith(opening) and text.endswith(closing)
    is_escaped = closing[0] == "$" and inner.endswith("\\")
    return inner if is_around and not is_escaped and closing not in inner else text


def _boxed(response: str) -> str:
    """Return the answer in the last box, with the boxes joined to it."""
    box = find_last_box(response)
    if box is None:
        return ""
    start, answer = _with_boxes_before(response, box)
    if not answer:
        return ""
    end, answer = _with_right(response, box.end, answer)
    start, answer = _with_left(response, start, answer)
    return _in_context(response, start, end, answer)


def _with_boxes_before(response: str, box: Box) -> tuple[int, str]:
    r"""Return where the last boxes begin, and their contents: `\boxed{3} or \boxed{4}` -> `3 or 4`."""
    start, answer = box.start, tidy(_content_of(box))
    for _ in range(_MAX_JOINED):
        joint = _JOINT.search(response, max(start - _MAX_JOINT, 0), start)
        other = find_last_box(response[: joint.start(1)]) if joint else None
        if joint is None or other is None or other.end != joint.start(1):
            break
        start, content = other.start, tidy(_content_of(other))
        if content != answer and not MARKER.search(f"{other.content}:"):  # `\boxed{The answer is} \boxed{4}`
            answer = f"{content} {'or' if 'or' in joint[1] else ','} {answer}"
    return start, answer


def _content_of(box: Box) -> str:
    r"""Return the content of a box: `\boxed{\boxed{4}}` -> `4`."""
    for _ in range(_MAX_JOINED):
        inner = find_last_box(box.content)
        if inner is None or box.content.strip() != box.content[inner.start : inner.end]:
            break
        box = inner
    return box.content


def _with_left(text: str, start: int, answer: str) -> tuple[int, str]:
    r"""Return an answer with the sign or operator directly before it, and where they begin: `-\boxed{4}` -> `-4`."""
    near = text[max(start - _READ, 0) : start]
    is_apart = near[-1:].isspace()
    line = near.rpartition("\n")[2].rstrip(" \t")
    outside = _OPENING.sub("", line)
    if operation := _OPERATION.search(near.rstrip(" \t\n$({\\")):
        sign, signed = operation[0], f"{operation[0].lower()} {answer}"
    elif outside.endswith(_MINUS):
        sign, signed = outside[-1], _with_minus(outside[:-1], is_apart, answer)
    elif is_apart or outside != line or not (operator := _OPERATOR.search(line)):
        return start, answer
    else:
        in_formula = line[-1].isdigit() or _OPEN_FORMULA.search(line)
        sign, signed = operator[0], f"{operator[0]} {answer}" if in_formula else answer
    return start if signed == answer else text.rfind(sign, 0, start), signed


def _with_minus(line: str, is_apart: bool, answer: str) -> str:
    """Return an answer with the minus sign that ends the line before it, ignoring dashes in prose and list bullets."""
    is_dash = is_apart and (not line or line[-1].isspace())
    line = line.rstrip()
    in_formula = _OPEN_FORMULA.search(line)
    if line.endswith("-") or (is_dash and not in_formula):
        return answer
    if in_formula and (line[-1].isalnum() or line[-1] in ")}]"):
        return f"{line.split()[-1]} - {answer}"
    return f"-{answer}" if re.fullmatch(r"[\d.,]+", answer) else f"-({answer})"


def _with_right(text: str, end: int, answer: str) -> tuple[int, str]:
    r"""Return an answer with the factor or unit directly after it, and where they end: `\boxed{4} km` -> `4 km`."""
    if more := _CONTINUATION.match(text, end, end + _READ):
        gap = " " if more["word"] else ""
        return more.end(), f"{answer}{gap}{more[str(more.lastgroup)]}".rstrip()
    has_letters = any(character.isalpha() for character in re.sub(r"\\[a-zA-Z]+", "", answer))
    unit = None if has_letters else leading_unit(text[end : end + _READ])
    return (end + unit[1], f"{answer} {unit[0]}") if unit else (end, answer)


def _in_context(text: str, start: int, end: int, answer: str) -> str:
    """Return an answer with the surrounding words that deny it, name a second value, ask, or take it back."""
    before, after = text[:start], text[end:]
    denied, alternative = denial_before(before), denial_after(after)
    again = None if denied else _SAME_AGAIN.match(text, end, end + _READ)
    if again:
        words = " ".join((answer, r"\approx" if again["about"] else "or", tidy(again["value"])))
    elif denied or alternative:
        words = f"{denied} {answer} {alternative}".strip()
    elif after[:3].strip("$)} ").startswith("?") and _QUESTION.search(before[-_READ:]):
        words = f"{answer} ?"
    else:
        words = answer
    taken_back = retraction(before, answer, after)
    return f"{words} or {tidy(taken_back)}" if taken_back else words


def _after_marker(tail: str, with_unit: bool) -> str:
    """Return the answer after the last `the answer is`: the formula in its line, a number, or its sentence."""
    markers = list(MARKER.finditer(tail))
    if not markers:
        return ""
    start = markers[-1].end()
    formula = _FORMULA.search(tail, start)
    if formula and "\n" not in tail[start : formula.start()]:
        bound = _BOUND.search(tail, start, formula.start())
        return f"{bound[0]} {_content(formula)}" if bound else _beside(tail, *formula.span(), _content(formula))
    number = None if with_unit else _LEADING_NUMBER.match(tail, start)
    if number:
        return _beside(tail, *number.span(), number["number"])
    sentence = re.split(r"[.!?](?=\s|$)|\n", tail[start:], maxsplit=1)[0]
    answer = sentence.strip().replace("$", "")
    return _in_context(tail, start, start + len(sentence), answer) if answer else ""


def _last_formula(tail: str) -> str:
    """Return the last formula, with any formula joined to it: `$x = 3$ or $x = 4$`."""
    formulas = list(_FORMULA.finditer(tail))
    if not formulas:
        return ""
    *_, before, last = formulas[0], *formulas
    joint = tail[before.end() : last.start()].strip(" \t\n,")
    is_joined = before.end() <= last.start() and joint in ("", "and", "or")
    if is_joined and (joint == "or" or _name_of(before) == _name_of(last)):
        return f"{_content(before)} or {_content(last)}"
    return _beside(tail, *last.span(), _content(last))


def _last_number(tail: str) -> str:
    """Return the last number that is not a label such as `page 7`."""
    for number in reversed(list(_ANY_NUMBER.finditer(tail))):
        before = tail[: number.start()]
        *_, word = "", *before[-_MAX_LABEL_LENGTH:].lower().rstrip(" \t\n#([").split()
        word = word.lstrip("*(")
        if _LABELS.isdisjoint((word, word.removesuffix("s"))):
            return f"{denial_before(before)} {number[0]}".strip()
    return ""


def _beside(text: str, start: int, end: int, value: str) -> str:
    """Return an unboxed value with the words after it that change it: `34 dozen`, `34 to 36`."""
    changed = None if _SAME_AGAIN.match(text, end) else _CHANGED.match(text, end)
    if changed:
        return f"{value}{changed[0]}"
    after, answer = _with_right(text, end, value)
    rest = text[after : after + _READ].lstrip(" *$")
    if after > end and rest[:1].isdigit():  # 8 feet 3 inches
        return f"{answer} {rest.partition('.')[0]}"
    return f"{answer} ?" if rest.startswith("?") else _in_context(text, start, after, answer)


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)


def _name_of(formula: re.Match[str]) -> str:
    """Return the left side of an equation; an empty string for any other formula."""
    return _content(formula).rpartition("=")[0].strip()
