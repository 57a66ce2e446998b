r"""Chemical formulas and names of elements, compared as text: `\text{H}_2\text{O}` is `H2O`, and `Co` is no `CO`.

A reference is chemistry if all of it is: a formula with its charge and state, the two sides of a reaction, a nuclide,
a hybrid orbital or an electron configuration. Letters of physics, such as `PV` or `P_1V_1`, are none.
"""

from __future__ import annotations

import re
from functools import lru_cache

from brorl.verification.domains.formula.tokens import in_latex

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
_MAX_CHARACTERS = 300
_WRITTEN = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\\(?:ce|text|textrm|textbf|mathrm|mathbf|operatorname|rm|mathsf)(?![a-zA-Z])", ""),
        (r"\\(?:left|right)(?![a-zA-Z])(?=[()\[\]])", ""),
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
_FONT = re.compile(r"\\(?:ce|text|textrm|textbf|mathrm|mathbf|operatorname|rm|mathsf|left|right)(?![a-zA-Z])")
_LEFT_SIDE = re.compile(r"^[^=<>]{1,40}(?<!<)=(?!>)")
_ELEMENT = "(?:" + "|".join(sorted(_ELEMENTS, key=len, reverse=True)) + ")"
_ATOMS = r"(?:[2-9]|[1-9]\d)?"
_PART = rf"(?:[(\[]*{_ELEMENT}{_ATOMS}(?:[)\]]{_ATOMS})*)+"
_SPECIES = re.compile(
    rf"(?P<count>\d{{1,3}}(?:/\d)?)? ?(?P<formula>{_PART}(?:\.\d*{_PART})?|e(?=[-^]))"
    r"(?:\^(?P<charge>\d?[-+]);|(?P<plain>\d?[-+])| (?P<apart>\d?[-+]))? ?(?:\((?:s|l|g|aq)\))?"
)
_PLUS = re.compile(r"(?<=[\w)\];])\+(?=[A-Z\d])")
# What each noble gas adds to the one before.
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
    """Whether an answer is the formula, reaction, nuclide, configuration or element of a reference that is one.

    None if the reference is something else. States of matter do not count, nor the order of the terms of a reaction.
    """
    right = _chemical_text(reference)
    if right is None or not ((right.isalpha() and right not in reference) or _is_evident(right)):
        return None
    return right == _chemical_text(_LEFT_SIDE.sub("", answer))


@lru_cache(maxsize=4096)
def _chemical_text(text: str) -> str | None:
    """Return chemistry in one notation; None for other text."""
    if len(text) > _MAX_CHARACTERS:
        return None
    text = in_latex(text)
    bare = _FONT.sub("", text).strip(" .{}$")
    if _HYBRID.fullmatch(re.sub(r"[{}^]", "", bare)):
        return re.sub(r"[{}^]", "", bare)
    return _SYMBOL_OF.get(bare.lower()) or _nuclide(text) or _orbitals(text) or _reaction(text)


def _nuclide(text: str) -> str | None:
    plain = re.sub(r"[\s{}$]", "", _FONT.sub("", text)).strip(".")
    for form in _NUCLIDE:
        match = form.fullmatch(plain)
        symbol = match["symbol"] if match else ""
        symbol = symbol if symbol in _ELEMENTS else _SYMBOL_OF.get(symbol.lower(), "")
        if match and symbol:
            number = str(list(_ELEMENTS).index(symbol) + 1)
            return f"^{match['mass']}{symbol}" if (match["number"] or number) == number else None
    return None


def _orbitals(text: str) -> str | None:
    plain = re.sub(r"\^\s*(?:\{\s*(\d{1,2})\s*\}|(1[0-4]|\d))(?=\D|[1-8][spdf]|$)", r"\1\2 ", _FONT.sub("", text))
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
    formula, charge = (
        match["formula"].replace("[", "(").replace("]", ")"),
        match["charge"] or match["plain"] or match["apart"] or "",
    )
    if (charge == match["plain"] and len(charge) == 1 and re.search(r"\w\d{2}$", formula)) or (
        charge == match["plain"] and len(charge) == 1 and re.fullmatch(rf"{_ELEMENT}\d", formula)
    ):  # SO42-
        formula, charge = formula[:-1], formula[-1] + charge
    count = "" if match["count"] in (None, "1") else match["count"]
    return f"{count}{formula}" + (f"^{charge.rjust(2, '1')}" if charge else "")


def _is_evident(chemistry: str) -> bool:
    """Whether text of chemistry can be nothing else: it has a small letter, a number, a charge, or C, H, N, O alone."""
    symbols = re.findall(_ELEMENT, chemistry)
    if chemistry[:1].isdigit() and ">" not in chemistry:  # `5 C` is a charge
        return False
    return not (chemistry.isalpha() and chemistry.isupper()) or (len(symbols) > 1 and set(symbols) <= _ORGANIC)
