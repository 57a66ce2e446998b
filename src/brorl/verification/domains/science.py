"""Verifier of scientific answers: multiple choice, numbers with units, formulas.

A reference is the text of `Choices`, the text of `MeasuredAnswer`, or the answer as LaTeX or plain text. Options,
chemistry and words are compared here. A worker compares anything else as the verifier of mathematics does, with the
tolerance. An answer without a unit is read in the unit of the reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from brorl.prompts.prompt import Prompt
from brorl.prompts.science import Choices, MeasuredAnswer, read_science_reference
from brorl.verdict import CORRECT, NO_ANSWER, TOO_LONG, WRONG, Verdict, verdict_of
from brorl.verification.domains.chemistry import same_chemistry
from brorl.verification.domains.choice import choose
from brorl.verification.domains.math import MAX_ANSWER, MathVerifier, worker_verdict
from brorl.verification.domains.math_extraction import extract_answer, tidy
from brorl.verification.domains.units import parse_unit, without_markup
from brorl.verification.sandbox.pool import WorkerPool
from brorl.verification.verdict_cache import Pair, VerdictCache
from brorl.verification.verifier import TrialResponses, malformed

_MAX_CHARACTERS = 300
_FONT = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|operatorname|rm|bf|it)(?![a-zA-Z])"
_MARKUP = re.compile(rf"{_FONT}|[{{}}$]|\\[,;:! ()]|~")
# A run of letters that can be pronounced; others, such as `mgh`, are products of variables.
_WORD = (
    r"(?:(?=[A-Za-z]*[aeiouyAEIOUY])(?:[A-Z]?[a-z]{2,}|[A-Z]{4,})|(?=[A-Z]*[AEOU])[A-Z]{3}|"
    r"(?i:up|no|on|we|us|ii|iv|vi))"
)
_IS_WORD = re.compile(rf"(?<![A-Za-z]){_WORD}(?![A-Za-z])")
_ARTICLE = re.compile(
    r"^(?:it|they)(?: is| are|'s|'re)?\b ?|^(?:to|towards?|due|in) (?=the\b|north|south|east|west|left|right)|"
    r"\b(?:the|an?)\b ?",
    re.IGNORECASE,
)
_FUNCTIONS = frozenset(
    re.findall(r"\S+", "sin cos tan exp log sqrt arcsin arccos arctan sinh cosh tanh csc sec cot max min mod")
)
_ACIDITY = re.compile(rf"^(?:{_FONT}\s*\{{)?pO?H\}}?(?:\s*(?:is|of|:))?\s+(?=\d)")
_MOLAR = re.compile(rf"(?<=[\d}}])\s*(?:{_FONT}\s*\{{\s*M\s*\}}|M)$")
_COMMA_WORDS = re.compile(r"(?<=[\w})°%]),\s+(?=[a-z]{2,}[^\d,;=]*$)")
_SECOND = re.compile(r"(.*\S) \(((?:[-+.,\d\s*^{}]|\\times)*\d[\s~]*)([^\d()].*)\)")
_RANGE = re.compile(
    r"(?:from )?(\d[^\u2013\u2014:]*?)(?: to |\s*[\u2013\u2014]\s*|(?<=\d)--?(?=\d)| --? )(\d[^\u2013\u2014:]*)|"
    r"between (\d.*?) and (\d.*)"
)
_WITH_UNIT = re.compile(r"(\d[\d,]*(?:\.\d+)?)((?: ?[x*] ?10 ?\^ ?[-(\d]+\)?)?) ?([^\W\d_].*|[°%].*|)")
_WITH_WORDS = re.compile(r"\d.*[^\W\d_]|[%°:]")


class ScienceVerifier:
    """Accepts the right option, or an answer that equals the reference.

    Args:
        pool: The workers that compare formulas.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._math = MathVerifier(pool)
        self._cache = VerdictCache(200_000)

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses. The verdicts of workers are kept, with the timeouts of their CPU time.

        The reasons are those of mathematics, `not an option`, `several options` and `another unit`.
        """
        return self._cache.verify_all(items, _find, self._decide)

    def _decide(self, pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
        replies = self._math.compare([_call(*pair) for pair in pairs])
        return [worker_verdict(answer, reply) for (_, answer), reply in zip(pairs, replies, strict=True)]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that are malformed, or that cannot be read as an expression."""
        problems = malformed(references, read_science_reference)
        read = {text: read_science_reference(text) for text in references if text not in problems}
        values = {text: as_measured(tidy(one.value)) for text, one in read.items() if isinstance(one, MeasuredAnswer)}
        unread = self._math.check_references(list(values.values()))
        problems |= {reference: unread[value] for reference, value in values.items() if value in unread}
        return {reference: problems[reference] for reference in references if reference in problems}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the right answer in a box, and other answers."""
        read = read_science_reference(reference)
        if isinstance(read, Choices):
            right, wrong = read.letter, [letter for letter in read.letters if letter != read.letter]
        else:
            answers = [other for other in map(read_science_reference, others) if isinstance(other, MeasuredAnswer)]
            right, wrong = read.value, [other.value for other in answers]
        return TrialResponses(f"\\boxed{{{right}}}", [f"\\boxed{{{text}}}" for text in wrong])


def _find(prompt: Prompt, response: str) -> Verdict | str:
    """Return the verdict if a response decides it, else the answer that a worker compares."""
    reference = read_science_reference(prompt.reference)
    if isinstance(reference, Choices):
        option, text, problem = choose(response, reference)
        right = CORRECT if option == reference.right else WRONG
        return verdict_of(problem or (NO_ANSWER if option is None else right), text)
    value = tidy(reference.value)
    answer = extract_answer(response, with_unit=_WITH_WORDS.search(value) is not None)
    if answer is None or len(answer) > MAX_ANSWER:
        return verdict_of(NO_ANSWER if answer is None else TOO_LONG)
    same = True if answer == value and any(map(str.isalnum, answer)) else same_chemistry(value, answer)
    same = same_words(value, answer) if same is None else same
    if same is None and as_range(value) and not as_range(answer):
        same = False
    return answer if same is None else verdict_of(CORRECT if same else WRONG, answer)


def _call(reference: str, answer: str) -> tuple[str, str, float]:
    """Return what a worker compares: both as measured values, and the tolerance."""
    measured = read_science_reference(reference)
    assert isinstance(measured, MeasuredAnswer)
    value, given = tidy(measured.value), answer
    if (right := as_range(value)) and (other := as_range(answer)):
        value, given = right, other
    return as_measured(value), as_measured(given), measured.tolerance


def same_words(reference: str, answer: str) -> bool | None:
    """Whether an answer has the words of a reference that has words alone; None for another reference."""
    right = _words(reference)
    return None if right is None else right == _words(answer)


def _words(text: str) -> str | None:
    r"""Return words alone (in `\text{...}` any two letters) in small letters, without markup, articles and space."""
    if len(text) > _MAX_CHARACTERS:
        return None
    plain = " ".join(re.sub(r"[-\u2010\u2011\u2013/]", " ", _MARKUP.sub(" ", text)).split()).strip(" .,;!\"'")
    if not re.fullmatch(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*(?:,? [^\W\d_]+(?:['\u2019][^\W\d_]+)*)*", plain):
        return None
    runs = plain.replace(",", "").split()
    upright = re.search(_FONT, text) is not None and any(len(run) > 1 for run in runs)
    if not upright and not any(
        (_IS_WORD.fullmatch(run) and run not in _FUNCTIONS) or not run.isascii() for run in runs
    ):
        return None
    return _ARTICLE.sub("", plain.casefold()).replace("\u2019", "'").replace(" ", "")


def as_measured(text: str) -> str:
    """Return a value without `pH` before it and a comma before its words; `36 km/h (10 m/s)` becomes an equation."""
    text = _COMMA_WORDS.sub(" ", _MOLAR.sub(" mol/L", _ACIDITY.sub("", text)))
    second = _SECOND.fullmatch(text)
    return f"{second[1]} = {second[2]}{second[3]}" if second and parse_unit(second[3]) else text


def as_range(text: str) -> str | None:
    """Return both ends of a range with their unit, as the pair `(10 Hz, 20 Hz)`; None for other text."""
    ends = _RANGE.fullmatch(without_markup(text))
    low, high = (_WITH_UNIT.fullmatch(end) for end in ends.groups() if end) if ends else (None, None)
    if low is None or high is None or (len(high[3]) == 1 and parse_unit(high[3]) is None):
        return None
    if not (low[2] or high[2]) and float(low[1].replace(",", "")) >= float(high[1].replace(",", "")):
        return None
    return f"({low[1]}{low[2]} {low[3] or high[3]}, {high[1]}{high[2]} {high[3] or low[3]})"
