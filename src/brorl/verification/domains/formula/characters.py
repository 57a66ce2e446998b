"""Characters beyond ASCII, as the LaTeX that they stand for."""

# ruff: noqa: RUF001

from __future__ import annotations

import re
import unicodedata

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi phi chi psi omega "
    "Delta Gamma Sigma Phi Omega"
)
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "/",
        "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "≡": "\\equiv ",
        "∞": "\\infty ", "π": "\\pi ", "°": "\\degree ", "º": "\\degree ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ",
        "∩": "\\cap ", "∈": "\\in ", "∉": "\\notin ", "∅": "\\emptyset ", "√": "\\sqrt ", "∖": "\\setminus ",
        "⟨": "\\langle ", "⟩": "\\rangle ", "′": "'", "’": "'", "‘": "'", "″": "''", "“": '"', "”": '"', "∣": "|",
        "∠": "\\angle ", "∨": "\\lor ", "∧": "\\land ", "¬": "\\neg ", "→": "\\to ", "⇒": "\\Rightarrow ",
        "…": "\\ldots ", "⁄": "/", "∕": "/", "∶": ":", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}",
        "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "€": "\\euro ", "£": "\\pounds ", "¥": "\\yen ", "₹": "\\rupee ",
        "¢": "\\text{ cents}", "µ": "\\mu ", "~": " ", "\N{NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " ",
        "\N{NARROW NO-BREAK SPACE}": " ",
        **{char: f"\\frac{{{top}}}{{{under}}}" for char, top, under in zip(
            "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑", "11213123415113571", "23344555566788889", strict=True)},
        **{char: f"\\{name} " for char, name in zip("αβγδεζηθκλμνξρστφϕχψωΔΓΣΦΩ", _GREEK.split(), strict=True)},
    }
)  # fmt: skip
_STYLED = re.compile("[\U0001d400-\U0001d7ff\uff01-\uff5e]+")  # bold and wide letters, digits and marks
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_RAISED_TO, _LOWERED_TO = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n"), str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")


def in_latex(text: str) -> str:
    """Return a text with LaTeX for characters such as `½`, `²`, `≤` and bold digits."""
    text = _STYLED.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_RAISED_TO)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_LOWERED_TO)}}}", text)
    return text.translate(_CHARACTERS)
