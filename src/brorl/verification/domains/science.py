"""Verifier for science answers: multiple choice, numbers with units, chemistry, formulas.

A reference is the text of `Choices`, the text of `MeasuredAnswer`, or the answer as LaTeX or plain text. This process
compares options, chemistry and words. A worker compares everything else as for math, but with a tolerance. If an answer
has no unit, the reference's unit is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from brorl.prompts.prompt import Prompt
from brorl.prompts.science import Choices, MeasuredAnswer, read_science_reference
from brorl.verdict import CORRECT, NO_ANSWER, TOO_LONG, WRONG, Verdict, verdict_of
from brorl.verification.domains.choice import chosen_option
from brorl.verification.domains.formula.tokens import in_latex
from brorl.verification.domains.math import MAX_ANSWER, MathVerifier, worker_verdict
from brorl.verification.domains.math_answer import extract_answer, tidy
from brorl.verification.domains.units import parse_unit, without_markup
from brorl.verification.sandbox.pool import WorkerPool
from brorl.verification.verifier import Pair, TrialResponses, VerdictCache, malformed

_MAX_CHARACTERS = 300
_FONT = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|operatorname|rm|bf|it)(?![a-zA-Z])"
_MARKUP = re.compile(rf"{_FONT}|[{{}}$]|\\[,;:! ()]|~")
# A word is a pronounceable run of letters; other runs, such as `mgh`, are products of variables.
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
    """Accepts the correct option, or an answer that equals the reference.

    Args:
        pool: Workers that compare formulas.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._math = MathVerifier(pool)
        self._cache = VerdictCache(200_000)

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses. Workers' verdicts are cached, including CPU timeouts.

        The reasons are those of `MathVerifier` plus `not an option`, `several options` and `different unit`.
        """
        return self._cache.verify_all(items, _find, self._decide)

    def _decide(self, pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
        replies = self._math.compare([_call(*pair) for pair in pairs])
        return [worker_verdict(answer, reply) for (_, answer), reply in zip(pairs, replies, strict=True)]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that are malformed or whose value cannot be read as an expression."""
        problems = malformed(references, read_science_reference)
        read = {text: read_science_reference(text) for text in references if text not in problems}
        measured = {text: answer for text, answer in read.items() if isinstance(answer, MeasuredAnswer)}
        values = {text: as_measured(tidy(answer.value)) for text, answer in measured.items()}
        unread = self._math.check_references(list(values.values()))
        problems |= {reference: unread[value] for reference, value in values.items() if value in unread}
        return {reference: problems[reference] for reference in references if reference in problems}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the correct answer and the other answers, each in a box."""
        read = read_science_reference(reference)
        if isinstance(read, Choices):
            right = read.letter
            wrong = [letter for letter in read.letters if letter != right]
        else:
            right = read.value
            answers = map(read_science_reference, others)
            wrong = [answer.value for answer in answers if isinstance(answer, MeasuredAnswer)]
        return TrialResponses(f"\\boxed{{{right}}}", [f"\\boxed{{{text}}}" for text in wrong])


def _find(prompt: Prompt, response: str) -> Verdict | str:
    """Return the verdict if no worker is needed, otherwise the answer to send to a worker."""
    reference = read_science_reference(prompt.reference)
    if isinstance(reference, Choices):
        option, text, problem = chosen_option(response, reference)
        right = CORRECT if option == reference.right else WRONG
        return verdict_of(problem or (NO_ANSWER if option is None else right), text)
    value = tidy(reference.value)
    answer = extract_answer(response, with_unit=_WITH_WORDS.search(value) is not None)
    if answer is None or len(answer) > MAX_ANSWER:
        return verdict_of(NO_ANSWER if answer is None else TOO_LONG)
    same = True if answer == value and any(map(str.isalnum, answer)) else same_chemistry(value, answer)
    same = same_words(value, answer) if same is None else same
    if same is not True and any(answer == alias or same_words(alias, answer) for alias in map(tidy, reference.aliases)):
        same = True
    if same is None and as_range(value) and not as_range(answer):
        same = False
    return answer if same is None else verdict_of(CORRECT if same else WRONG, answer)


def _call(reference: str, answer: str) -> tuple[str, str, float]:
    """Return (reference, answer, tolerance) for a worker, with both strings as measured values."""
    measured = read_science_reference(reference)
    assert isinstance(measured, MeasuredAnswer)
    value = tidy(measured.value)
    if (value_range := as_range(value)) and (answer_range := as_range(answer)):
        value, answer = value_range, answer_range
    return as_measured(value), as_measured(answer), measured.tolerance


def same_words(reference: str, answer: str) -> bool | None:
    """Return whether an answer has the same words as its reference; None if the reference contains anything else."""
    right = _words(reference)
    return None if right is None else right == _words(answer)


def _words(text: str) -> str | None:
    r"""Return text that is only words, normalized: `The \text{North Pole}` -> `northpole`; None for other text.

    Inside `\text{...}`, any two letters form a word.
    """
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
    """Tidy a value: `pH 7` -> `7`, `2 M` -> `2 mol/L`, `36 km/h (10 m/s)` -> `36 km/h = 10 m/s`."""
    text = _COMMA_WORDS.sub(" ", _MOLAR.sub(" mol/L", _ACIDITY.sub("", text)))
    second = _SECOND.fullmatch(text)
    return f"{second[1]} = {second[2]}{second[3]}" if second and parse_unit(second[3]) else text


def as_range(text: str) -> str | None:
    """Return a range as a pair: `10 to 20 Hz` -> `(10 Hz, 20 Hz)`; None for other text."""
    ends = _RANGE.fullmatch(without_markup(text))
    low, high = (_WITH_UNIT.fullmatch(end) for end in ends.groups() if end) if ends else (None, None)
    if low is None or high is None or (len(high[3]) == 1 and parse_unit(high[3]) is None):
        return None
    if not (low[2] or high[2]) and float(low[1].replace(",", "")) >= float(high[1].replace(",", "")):
        return None
    return f"({low[1]}{low[2]} {low[3] or high[3]}, {high[1]}{high[2]} {high[3] or low[3]})"


_ELEMENTS: dict[str, str] = dict(
    re.findall(
        r"(\S+) (\S+)",
        "H hydrogen He helium Li lithium Be beryllium B boron C carbon N nitrogen O oxygen F fluorine "
        "Ne neon Na sodium Mg magnesium Al aluminum Si silicon P phosphorus S sulfur Cl chlorine Ar argon "
        "K potassium Ca calcium Sc scandium Ti titanium V vanadium Cr chromium Mn manganese Fe iron "
        "Co cobalt Ni nickel Cu copper Zn zinc Ga gallium Ge germanium As arsenic Se selenium Br bromine "
        "Kr krypton Rb rubidium Sr strontium Y yttrium Zr zirconium Nb niobium Mo molybdenum "
        "Tc technetium Ru ruthenium Rh rhodium Pd palladium Ag silver Cd cadmium In indium Sn tin "
        "Sb antimony Te tellurium I iodine Xe xenon Cs cesium Ba barium La lanthanum Ce cerium "
        "Pr praseodymium Nd neodymium Pm promethium Sm samarium Eu europium Gd gadolinium Tb terbium "
        "Dy dysprosium Ho holmium Er erbium Tm thulium Yb ytterbium Lu lutetium Hf hafnium Ta tantalum "
        "W tungsten Re rhenium Os osmium Ir iridium Pt platinum Au gold Hg mercury Tl thallium Pb lead "
        "Bi bismuth Po polonium At astatine Rn radon Fr francium Ra radium Ac actinium Th thorium "
        "Pa protactinium U uranium Np neptunium Pu plutonium Am americium Cm curium Bk berkelium "
        "Cf californium Es einsteinium Fm fermium Md mendelevium No nobelium Lr lawrencium "
        "Rf rutherfordium Db dubnium Sg seaborgium Bh bohrium Hs hassium Mt meitnerium Ds darmstadtium "
        "Rg roentgenium Cn copernicium Nh nihonium Fl flerovium Mc moscovium Lv livermorium "
        "Ts tennessine Og oganesson",
    )
)
_SYMBOL_OF = {name: symbol for symbol, name in _ELEMENTS.items()} | {
    "aluminium": "Al", "sulphur": "S", "caesium": "Cs",
}  # fmt: skip
_ORGANIC = frozenset("CHNOFSKB")
_WRITTEN = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\\(?:ce|text|textrm|textbf|mathrm|mathbf|operatorname|rm|mathsf|left|right)(?![a-zA-Z])", ""),
        (
            r"\\(?:(?:long)?(?:left)?rightarrow|(?:Long)?[Rr]ightarrow|to|rightleftharpoons)(?![a-zA-Z])"
            r"|[→⟶⇌⇄]|<=>|<->|-+>|=>",
            " > ",
        ),
        (r"\s*(?:\\(?:cdot|times|bullet)(?![a-zA-Z])|[·⋅•*])\s*", "."),
        (r"[\u2212\u2013]", "-"),
        (r"(?:\\[,;:! ]|~|\\q?quad(?![a-zA-Z])|\s)+", " "),
        (r"\^\s*(?:\{\s*(\d?)\s*([-+])\s*(\d?)\s*\}|(\d?)([-+])(?!\d))", r"^\1\3\4\2\5;"),
        (r"_\s*\{\s*(\d+)\s*\}|_\s*(\d)", r"\1\2"),
    )
)
_CHEMICAL_FONT = _WRITTEN[0][0]
_LEFT_SIDE = re.compile(r"^[^=<>]{1,40}(?<!<)=(?!>)")
_ELEMENT = "(?:" + "|".join(sorted(_ELEMENTS, key=len, reverse=True)) + ")"
_ATOMS = r"(?:[2-9]|[1-9]\d)?"
_PART = rf"(?:[(\[]*{_ELEMENT}{_ATOMS}(?:[)\]]{_ATOMS})*)+"
_SPECIES = re.compile(
    rf"(?P<count>\d{{1,3}}(?:/\d)?)? ?(?P<formula>{_PART}(?:\.\d*{_PART})?|e(?=[-^]))"
    r"(?:\^(?P<charge>\d?[-+]);|(?P<plain>\d?[-+])| (?P<apart>\d?[-+]))? ?(?:\((?:s|l|g|aq)\))?"
)
_PLUS = re.compile(r"(?<=[\w)\];])\+(?=[A-Z\d])")
# The orbitals that each noble gas adds to the previous one.
_CORES = {
    "He": "1s2", "Ne": "2s2 2p6", "Ar": "3s2 3p6", "Kr": "3d10 4s2 4p6", "Xe": "4d10 5s2 5p6",
    "Rn": "4f14 5d10 6s2 6p6",
}  # fmt: skip
_ORBITALS = re.compile(rf"(?:\[({_ELEMENT})\]\s?)?((?:[1-8][spdf](?:1[0-4]|\d)\s?)+)")
_ORBITAL = re.compile(r"[1-8][spdf](?:1[0-4]|\d)")
_HYBRID = re.compile(r"sp[23]?(?:d[23]?)?")
_NUCLIDE = (
    re.compile(rf"\^(?P<mass>\d{{1,3}})(?:_(?P<number>\d{{1,3}}))?-?(?P<symbol>{_ELEMENT})"),
    re.compile(rf"_(?P<number>\d{{1,3}})\^(?P<mass>\d{{1,3}})(?P<symbol>{_ELEMENT})"),
    re.compile(r"(?P<symbol>[A-Za-z]{1,13})-?(?P<number>)(?P<mass>(?<=-)\d{1,3}|(?<=[a-z]{4})\d{1,3})"),
)


def same_chemistry(reference: str, answer: str) -> bool | None:
    """Return whether an answer is the same formula, reaction, nuclide, configuration or element as its reference.

    None if the reference is something else. States of matter and the order of terms in a reaction are ignored.
    """
    right = _chemical_text(reference)
    if right is None or not ((right.isalpha() and right not in reference) or _is_evident(right)):
        return None
    return right == _chemical_text(_LEFT_SIDE.sub("", answer))


@lru_cache(maxsize=4096)
def _chemical_text(text: str) -> str | None:
    """Return chemistry in standard notation: `H_2O` -> `H2O`; None for other text."""
    if len(text) > _MAX_CHARACTERS:
        return None
    text = in_latex(text)
    bare = _CHEMICAL_FONT.sub("", text).strip(" .{}$")
    if _HYBRID.fullmatch(re.sub(r"[{}^]", "", bare)):
        return re.sub(r"[{}^]", "", bare)
    return _SYMBOL_OF.get(bare.lower()) or _nuclide(text) or _orbitals(text) or _reaction(text)


def _nuclide(text: str) -> str | None:
    plain = re.sub(r"[\s{}$]", "", _CHEMICAL_FONT.sub("", text)).strip(".")
    for form in _NUCLIDE:
        match = form.fullmatch(plain)
        symbol = match["symbol"] if match else ""
        symbol = symbol if symbol in _ELEMENTS else _SYMBOL_OF.get(symbol.lower(), "")
        if match and symbol:
            number = str(list(_ELEMENTS).index(symbol) + 1)
            return f"^{match['mass']}{symbol}" if (match["number"] or number) == number else None
    return None


def _orbitals(text: str) -> str | None:
    plain = re.sub(
        r"\^\s*(?:\{\s*(\d{1,2})\s*\}|(1[0-4]|\d))(?=\D|[1-8][spdf]|$)", r"\1\2 ", _CHEMICAL_FONT.sub("", text)
    )
    plain = " ".join(re.sub(r"[{}$]|\\[,;: ]", " ", plain).replace("[ ", "[").split()).strip(".")
    match = _ORBITALS.fullmatch(plain)
    if match is None:
        return None
    if match[1] and match[1] not in _CORES:
        return None
    cores = list(_CORES)[: list(_CORES).index(match[1]) + 1] if match[1] else []
    orbitals = _ORBITAL.findall(match[2]) + [orbital for gas in cores for orbital in _CORES[gas].split()]
    return "configuration " + " ".join(sorted(orbitals))


def _reaction(text: str) -> str | None:
    for pattern, written in _WRITTEN:
        text = pattern.sub(written, text)
    sides = []
    for side in re.sub(r"[{}$]", "", text).strip(" .").split(" > "):
        terms = side.split(" + ") if " + " in side else _PLUS.split(side)
        sides.append([_species(term.strip()) for term in terms])
    if len(sides) > 2 or any(None in side for side in sides):
        return None
    return " > ".join(" + ".join(sorted(term for term in side if term)) for side in sides)


def _species(text: str) -> str | None:
    match = _SPECIES.fullmatch(text)
    if match is None or match["formula"].count("(") != match["formula"].count(")"):
        return None
    formula = match["formula"].replace("[", "(").replace("]", ")")
    charge = match["charge"] or match["plain"] or match["apart"] or ""
    if charge == match["plain"] and len(charge) == 1 and re.search(rf"\w\d{{2}}$|^{_ELEMENT}\d$", formula):
        formula, charge = formula[:-1], formula[-1] + charge  # `SO42-` is SO4 with the charge 2-
    count = "" if match["count"] in (None, "1") else match["count"]
    return f"{count}{formula}" + (f"^{charge.rjust(2, '1')}" if charge else "")


def _is_evident(chemistry: str) -> bool:
    """Return whether text must be chemistry: a lowercase letter, digit or charge, or several of C H N O F S K B."""
    symbols = re.findall(_ELEMENT, chemistry)
    if chemistry[:1].isdigit() and ">" not in chemistry:  # `5 C` is a charge
        return False
    return not (chemistry.isalpha() and chemistry.isupper()) or (len(symbols) > 1 and set(symbols) <= _ORGANIC)
