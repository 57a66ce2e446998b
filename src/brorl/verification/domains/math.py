r"""Verifier of mathematical answers: finds the answer in a response, and compares it with the reference.

    `So \boxed{\frac{1}{2}} km.`  ->  `\frac{1}{2} km`  ->  equal to the reference `0.5 km`?

This process compares equal strings, two integers, two choices, and a word with an integer. In killable workers,
`formula` reads and compares anything else, once per distinct reference and answer. One call has many pairs, because a
message costs more than a comparison. Answers of more than 2,000 characters are incorrect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf

from brorl.prompts.answer_forms import Box, find_last_box, has_open_box, surrounds_answer
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, NO_ANSWER, TOO_LONG, WRONG, Verdict, is_unverified, verdict_of
from brorl.verification.domains.denial import denial_after, denial_before
from brorl.verification.domains.marked_answer import MARKER, without_next_turn
from brorl.verification.domains.retraction import retraction
from brorl.verification.domains.units import leading_unit
from brorl.verification.sandbox.pool import LoadError, WorkerPool
from brorl.verification.sandbox.request import Reply
from brorl.verification.verifier import Pair, TrialResponses, VerdictCache

_READ = 80  # characters read on either side of a box
_OPERATOR = re.compile(
    r"(?:\\(?:cdot|times|div|pm|mp|sqrt|frac|binom)(?:\[[^][]*\])?|[/^]|\}\s*)\s*\{?$|\d+(?:\.\d+)?$"
)
_OPEN_FORMULA = re.compile(r"(?:\$|\\\(|\\\[)(?:(?!\$|\\\)|\\\]).)*$|[=<>]\s*\S*$")
_OPERATION = re.compile(
    r"(?<!\S)(minus|negative|twice|double|triple|half|(?:half|(?:square|cube) root|square|cube|reciprocal|opposite|"
    r"inverse|negation|complement|multiple|factorial|logarithm) of)$"
)
_DIGITS_ALONE = re.compile(r"[^A-Za-z]*\d[^A-Za-z]*")
_GLUED = re.compile(r"\.?\d[\d.]*(?<!\.)|[a-zA-Z](?![a-zA-Z'])")
_PART = re.compile(
    r"[^\S\n]*(?:\}\s*)*(\\?%|(?:\^|_\s*\{?\s*\d|\\(?:cdot|times|div|pi|sqrt|frac|pm|circ)(?![a-zA-Z])|"
    r"[*/+-]\s*(?=[\d(\\]|[a-zA-Z](?![a-zA-Z])))[^$\n,;=<>&]*)"
)
_WORD_BEHIND = re.compile(
    r"(?:[^\S\n]|\$|\\text\s*\{)*("
    r"(?:hundred|thousand|million|billion|trillion|dozen|percent|squared|cubed|factorial)\b|"
    r"(?:plus|minus|times|over|divided by)\s+\$?[\d\\][^\s$,;]*)"
)
_FORMULA_END = re.compile(r"\\[)\]]|\.(?!\d)|\\(?:q?quad|text|implies|Rightarrow)")


def with_operator_before(before: str, answer: str) -> str:
    r"""Return an answer with the sign or operator directly before its box: `-\boxed{42}` gives `-42`."""
    if operation := _OPERATION.search(before[-_READ:].rstrip(" \t\n$({\\").lower()):
        return f"{operation[1]} {answer}"
    is_apart = before[-1:].isspace()
    line = before[-_READ:].rpartition("\n")[2].rstrip(" \t")
    if line.endswith(("$", "\\(", "\\[")) and not line[:-1].endswith("\\"):
        line = line.removesuffix("$").removesuffix("\\(").removesuffix("\\[")
        if line[-1:] not in ("-", "\N{MINUS SIGN}"):
            return answer
    if line[-1:] in ("-", "\N{MINUS SIGN}"):
        return _with_minus(line[:-1], is_apart, answer)
    if not is_apart and (operator := _OPERATOR.search(line)) and (line[-1].isdigit() or _OPEN_FORMULA.search(line)):
        return f"{operator[0]} {answer}"
    return answer


def _with_minus(body: str, is_apart: bool, answer: str) -> str:
    is_dash = is_apart and (body[-1:].isspace() or not body)  # a dash in prose, or the mark of a list
    body = body.rstrip()
    in_formula = _OPEN_FORMULA.search(body) or _DIGITS_ALONE.fullmatch(body)
    if body.endswith("-") or (is_dash and not in_formula):
        return answer
    if in_formula and (body[-1:].isalnum() or body[-1:] in (")", "}", "]")):
        return f"{body.split()[-1]} - {answer}"
    return f"-{answer}" if re.fullmatch(r"[\d.,]+", answer) else f"-({answer})"


def with_unit_after(after: str, answer: str) -> tuple[str, int]:
    r"""Return an answer with the factor or unit after its box, and where that ends: `\boxed{10} km/s` -> `10 km/s`."""
    near = after[:_READ]
    if glued := _GLUED.match(near):
        return answer + glued[0], glued.end()
    if part := _PART.match(near):
        end = _FORMULA_END.search(part[1])
        length = end.start() if end else len(part[1])
        return f"{answer}{part[1][:length]}".rstrip(), part.start(1) + length
    if word := _WORD_BEHIND.match(near):
        return f"{answer} {word[1]}", word.end()
    if any(character.isalpha() for character in re.sub(r"\\[a-zA-Z]+", "", answer)):
        return answer, 0
    unit = leading_unit(near)
    return (f"{answer} {unit[0]}", unit[1]) if unit else (answer, 0)


_TAIL = 2_000
_TIDIED = 4_000  # no verifier reads a longer answer; each mark at its end takes a pass over it
_MAX_JOINED = 8  # boxes side by side, or one inside the other
_LONGEST_LABEL = 20
_MAX_JOINT = 40  # characters between two boxes that belong together
_JOINT = re.compile(r"\}((?:[\s$,;/]|\\[()\[\],;! ]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*)$")
_OR = re.compile(
    r"(?:[\s$(),]|\\[)\]])*\bor,?\s+(?:(?:equivalently|simply|in \w+ (?:form|notation)|as an? \w+|written as),?\s+)*"
    r"((?:about|approximately|roughly)\s+|\\approx\s*|\N{ALMOST EQUAL TO}\s*)?"
    r"(\$[^$\n]{1,30}\$|[-\d][\d./]*(?<!\.)%?)(?=[\s.,;)$]|$)"
)
_QUESTION = re.compile(r"(?:^|[.!?\n])\s*(?:so\s+)?(?:is|could|might|can|would|may|what if)\b[^.!?\n]*$", re.IGNORECASE)
_LABEL = re.compile(
    r"\b(?:pages?|pp?\.|steps?|sections?|chapters?|equations?|eqs?\.?|theorems?|lemmas?|figures?|figs?\.?|tables?|parts?|"
    r"examples?|exercises?|problems?|questions?|cases?|lines?|notes?|appendix|version|volume|no\.|item|rule|definition|"
    r"corollary|proposition|method|footnote|reference|ref\.?)[\s#(\[]*$",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$([^$\n]*(?:\\\$[^$\n]*)*[^\\$\n])\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
_VALUE = r"(?:minus\s+)?(?:\$[^$\n]{1,60}\$|\\\([^\n]{1,60}?\\\)|\$?[-+]?\d[\d,./]{0,30}(?<![,.])%?)"
# What follows a value and changes it: `34 if x is odd and 35 otherwise`, `34 to 36`, `34 minutes and 20 seconds`.
_CHANGED = re.compile(
    r"[^.,;!?\n()]{0,60}?\b(?:if|unless|otherwise|depending|provided|whenever|when\s+\$?\w\b)[^.\n]*|"
    rf"\s*(?:for|when|in)\b[^.\n]{{0,60}}?(?:\b(?:and|or)\b|,)\s*{_VALUE}\s*(?:for|when|in)\b[^.\n]*|"
    r"(?:(?:\s+[^\W\d_]+){0,3}?\s*(?:,?\s*\b(?:or|and|to|through)\s|[,\u2013\u2014~-])|(?:\s+[^\W\d_]+){1,3}?\s+of\s)\s*"
    rf"{_VALUE}(?:\s+[^\W\d_]+){{0,2}}(?=\s*(?:[.,;!?)\n]|\b(?:or|and|to)\b|$))[^.\n]*",
    re.IGNORECASE,
)
_BOUND = re.compile(r"\b(?:at (?:least|most)|up to|between|above|below|over|under|almost|nearly)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_NUMBER = re.compile(
    r"([-+]?[0-9][0-9,./]*)\s+(?!(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|or|and|to|plus|minus|times|over|divided|"
    r"mod|choose|percent|pct|hundred|thousand|million|billion)\b)[A-Za-z]{2,}.*"
)
# A number that no formula continues: not the `2` of `2 pi`, `2 (x+1)` or `2 1/2`.
_LEADING = re.compile(
    r"\**\$?([-+]?\d[\d,./]*(?<![.,])(?:\\?%)?)(?:\*\*)?(?![\w:_])"
    r"(?!\s*(?:[-+*/^=<>\u00b1\u00d7\u00b7\\\d]|\((?!(?:an?\s)?[a-z]{2})|and\s+an?\b|(?:ten|hundred|thousand|million)ths|"
    r"(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|mod|choose|pct|plus|minus|times|over|divided|\w)\b))"
)
_JOINED = re.compile(r"\s*,?\s*(?:or|and)?\s*")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*)?\.?[0-9]+(?:/[0-9]+)?(?:\s*\\?%)?")


def extract_answer(response: str, with_unit: bool = False) -> str | None:
    """Return the answer in a response as one line, without space, `$` and period around it; None if there is no answer.

    `with_unit` keeps the words after a number, which may be its unit; the last number alone is then no answer.
    """
    response = without_next_turn(response)
    box = find_last_box(response)
    if box is not None or has_open_box(response):
        return (_boxed(response, box) or None) if box else None
    tail = response[-_TAIL:]
    answer = _after_marker(tail, with_unit) or _last_formula(tail) or (None if with_unit else _last_number(tail))
    return (tidy(answer) or None) if answer else None


def _boxed(response: str, box: Box) -> str:
    """Return the content of the last box, with its sign, unit, and joined boxes, and with words that deny it."""
    answer, start = tidy(_content_of(box)), box.start
    for _ in range(_MAX_JOINED):
        before = response[max(start - _MAX_JOINT, 0) : start]
        joint = _JOINT.search(before) if "}" in before else None
        other = find_last_box(response[: start - len(joint[1])]) if joint else None
        if joint is None or other is None or other.end != start - len(joint[1]):
            break
        start = other.start
        if MARKER.search(f"{other.content}:"):
            continue  # this box holds only `The answer is`
        if tidy(_content_of(other)) != answer:
            answer = f"{tidy(_content_of(other))} {'or' if 'or' in joint[1] else ','} {answer}"
    if not answer:
        return ""
    after = response[box.end :]
    answer, length = with_unit_after(after, answer)
    signed = with_operator_before(response[:start], answer)
    return _in_context(response, start, box.end + length, signed, is_signed=signed != answer)


def _content_of(box: Box) -> str:
    r"""Return the content of a box; `\boxed{\boxed{4}}` gives `4`."""
    for _ in range(_MAX_JOINED):
        inner = find_last_box(box.content)
        if inner is None or box.content.strip() != box.content[inner.start : inner.end]:
            break
        box = inner
    return box.content


def _in_context(text: str, start: int, end: int, answer: str, is_signed: bool = False) -> str:
    """Return an answer with the words around it that deny it; `is_signed` says that the answer has its sign already."""
    before, after = denial_before(text[:start]), denial_after(text[end:])
    before = "" if is_signed and before.endswith("-") else before
    other = None if before else _OR.match(text[end : end + 2 * _MAX_JOINT])
    is_asked = text[end : end + 3].strip("$)} ").startswith("?")
    if other:
        found = " ".join((answer, r"\approx" if other[1] else "or", tidy(other[2])))
    elif before or after:
        found = f"{before} {answer} {after}".strip()
    else:
        is_asked = is_asked and _QUESTION.search(text[max(start - 2 * _MAX_JOINT, 0) : start]) is not None
        found = f"{answer} ?" if is_asked else answer
    taken_back = retraction(text[:start], answer, text[end:])
    return f"{found} or {tidy(taken_back)}" if taken_back else found


def tidy(answer: str) -> str:
    r"""Strip space, emphasis, `$`, `\(`, `\[`, and a period from up to 4,000 characters: `**$4$**.` -> `4`."""
    text = " ".join(answer.split())
    while len(text) <= _TIDIED:
        before = text
        text = text.strip().strip("*")
        if text.endswith((".", ",", ";")) and not text.endswith(("\\.", "\\,", "\\;", "...")):
            text = text[:-1]
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inner = text[len(opening) : -len(closing)]
            if len(text) >= 2 * len(opening) and text.startswith(opening) and text.endswith(closing):
                if opening[0] == "$" and inner.endswith("\\"):
                    continue  # an escaped dollar
                if closing not in inner:
                    text = inner
        if text == before:
            break
    return text


def _after_marker(tail: str, with_unit: bool) -> str | None:
    markers = list(MARKER.finditer(tail))
    if not markers:
        return None
    start = markers[-1].end()
    line = tail[start:].partition("\n")[0] or tail[start:]
    formula = _FORMULA.search(tail, start)
    if formula and formula.start() <= start + len(line):
        bound = _BOUND.search(tail, start, formula.start())
        return f"{bound[0]} {_content(formula)}" if bound else _beside(tail, *formula.span(), _content(formula))
    number = None if with_unit else _LEADING.match(tail, start)
    if number:
        return _beside(tail, *number.span(), number[1])
    sentence_end = _SENTENCE_END.search(tail, start)
    end = sentence_end.start() if sentence_end else len(tail)
    sentence = tail[start:end].strip().replace("$", "")
    return _in_context(tail, start, end, sentence) if sentence else None


def _beside(text: str, start: int, end: int, value: str) -> str:
    """Return a value without a box, with the words after it that change it: `34 dozen`, `34 to 36`."""
    changed = None if _OR.match(text, end) else _CHANGED.match(text, end)
    if changed:
        return f"{value}{changed[0]}"
    answer, length = with_unit_after(text[end:], value)
    rest = text[end + length : end + length + _READ].lstrip(" *$")
    if length and rest[:1].isdigit():  # 8 feet 3 inches
        return f"{answer} {rest.partition('.')[0]}"
    return f"{answer} ?" if rest.startswith("?") else _in_context(text, start, end + length, answer)


def _last_formula(tail: str) -> str | None:
    formulas = list(_FORMULA.finditer(tail))
    if not formulas:
        return None
    last = formulas[-1]
    answer = _beside(tail, *last.span(), _content(last))
    for before, after in zip(reversed(formulas[:-1]), reversed(formulas), strict=False):
        joint = tail[before.end() : after.start()]
        if not _JOINED.fullmatch(joint) or ("or" not in joint and _name_of(before) != _name_of(last)):
            break
        answer = f"{_content(before)} or {_content(last)}"
    return answer


def _name_of(formula: re.Match[str]) -> str:
    return _content(formula).rpartition("=")[0].strip()


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)


def _last_number(tail: str) -> str | None:
    for number in reversed(list(_NUMBER.finditer(tail))):
        before = tail[: number.start()]
        if not _LABEL.search(before[-_LONGEST_LABEL:]):
            return f"{denial_before(before)} {number[0]}".strip()
    return None


SEVERAL_ANSWERS = "no single answer"
MAX_ANSWER = 2_000
"""Characters of the longest answer that is compared."""
_AGREEMENT = "brorl.verification.domains.formula.agreement"  # only workers import it

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_WORD = re.compile(r"(?![iI]+$)[A-Za-z]{1,40}")  # no integer: a word, or a product of variables; `II` may be i times i
_CHOICE = re.compile(r"[A-J]")
# `B`, `(B)`, `B. because ...`: one letter, alone or set off by a bracket, period or colon; may be in \text{...}.
_CHOSEN = re.compile(
    r"(?:\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|boldsymbol)\s*\{)?\s*"
    r"(?:\(([A-Ja-j])\)|([A-Ja-j])[.):]|([A-Ja-j]))(?:(?<=[.):])[\s\\}].*|\s*\}?)"
)
_ANOTHER = re.compile(r"[).:\s]*(?:and\b|or\b|[,/;&])[\s(]*[A-Ja-j](?![A-Za-z])")


class MathVerifier:
    """Accepts answers that are mathematically equal to the reference.

    Args:
        pool: The workers that compare, with a limit of wall time for calls that do not stop on their own.
        cache_size: The cache keeps verdicts on this many pairs of reference and answer, 1 or more.
        limit_s: CPU seconds of a comparison, above 0; None for half of the pool's timeout. Unlike wall time, CPU time
            does not depend on the load of the machine.
    """

    def __init__(self, pool: WorkerPool, cache_size: int = 200_000, limit_s: float | None = None) -> None:
        self._cache = VerdictCache(cache_size)
        self._pool = pool
        pool.expect(_AGREEMENT)
        self._limit_s = pool.timeout_s / 2 if limit_s is None else limit_s
        if not self._limit_s > 0:
            raise ValueError(f"limit_s must be above 0, got {limit_s}")

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses. Verdicts of workers are kept, timeouts of CPU time too.

        The reasons are `correct`, `wrong answer`, `no answer`, `answer too long`, `no single answer`, `not parsed`,
        `timeout`, `out of memory`, `verifier crashed` and `unverified: ...`.
        """

        def find(prompt: Prompt, response: str) -> Verdict | str:
            answer = extract_answer(response)
            return verify_by_form(prompt.reference, answer) or answer or ""

        def decide(pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
            replies = self.compare([(tidy(reference), answer, None) for reference, answer in pairs])
            return [worker_verdict(answer, reply) for (_, answer), reply in zip(pairs, replies, strict=True)]

        return self._cache.verify_all(items, find, decide)

    def compare(self, pairs: Sequence[tuple[str, str, float | None]]) -> list[Reply]:
        """Compare references and answers with a tolerance in workers; see `agreement.agree_each`."""
        return self._pool.map(f"{_AGREEMENT}:agree_each", pairs, self._limit_s)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find the references that cannot be read, each distinct one once; a LoadError says that workers were lost."""
        doubtful = [r for r in dict.fromkeys(references) if not (_INTEGER.fullmatch(r) or _CHOICE.fullmatch(r))]
        around = set(filter(surrounds_answer, doubtful))
        unchecked = [r for r in doubtful if len(r) <= MAX_ANSWER and r not in around]
        good: set[str] = set()
        for _ in range(2):  # the second pass tries again what failed on a busy machine
            results = self._pool.map(f"{_AGREEMENT}:are_readable", [tidy(r) for r in unchecked], self._limit_s)
            good |= {reference for reference, result in zip(unchecked, results, strict=True) if result.value is True}
            if lost := [result.failure for result in results if is_unverified(result.failure or "")]:
                raise LoadError(f"cannot check reference answers ({lost[0]}); free memory and processes, then rerun")
            unchecked = [reference for reference, result in zip(unchecked, results, strict=True) if result.failure]
        unread, no_answer = "cannot be read as a mathematical expression", "contains an answer and is none"
        return {r: no_answer if r in around else unread for r in doubtful if r not in good}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return each reference in a box."""
        right, *wrong = (text if "\\boxed" in text else f"\\boxed{{{text}}}" for text in (reference, *others))
        return TrialResponses(right, wrong)


def worker_verdict(answer: str, reply: Reply) -> tuple[Verdict, float]:
    """Return the verdict in a worker's reply, and for how many seconds to keep it; failures are kept for 0 s."""
    if reply.failure is not None:
        return verdict_of(reply.failure, answer, reply.seconds), 0.0
    return verdict_of(str(reply.value), answer, reply.seconds), inf


def verify_by_form(reference: str, answer: str | None) -> Verdict | None:
    """Return the verdict if a missing or long answer, equal strings, integers or choices decide; None for a worker."""
    if answer is None:
        return verdict_of(NO_ANSWER)
    if len(answer) > MAX_ANSWER:
        return verdict_of(TOO_LONG)
    reference = reference.strip()
    equal = answer == reference and any(c.isalnum() for c in answer)
    differ = _INTEGER.fullmatch(reference) and (_INTEGER.fullmatch(answer) or _WORD.fullmatch(answer))
    if not equal and not differ:
        chosen = _CHOSEN.fullmatch(answer) if _CHOICE.fullmatch(reference) else None
        if chosen is None:
            return None
        letter = 1 if chosen[1] else 2 if chosen[2] else 3
        rest = answer[chosen.end(letter) :]
        if _ANOTHER.match(rest) or denial_after(rest) or retraction("", chosen[letter].upper(), rest):
            return verdict_of(SEVERAL_ANSWERS, answer)
        equal = chosen[letter].upper() == reference
    return verdict_of(CORRECT if equal else WRONG, answer)
