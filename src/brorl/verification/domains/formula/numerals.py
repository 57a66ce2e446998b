"""Written numbers: `1.5e8`, `1011_2`, `5th`, `0.333...`, `forty-two`."""

from __future__ import annotations

from fractions import Fraction

from brorl.verification.domains.formula.expressions import Based, Form, Number
from brorl.verification.domains.formula.tokens import UnreadableError, word_list

_ONES = word_list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = word_list("twenty thirty forty fifty sixty seventy eighty ninety")
NUMERALS = dict(zip(_ONES, range(20), strict=True)) | dict(zip(_TENS, range(20, 100, 10), strict=True))
MAGNITUDES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_DENOMINATORS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1_000,
}  # fmt: skip
_MAX_EXPONENT = 4_000


def number_of(text: str) -> Number:
    """Return the number for digits with an optional point or exponent: `1.5e8`."""
    mantissa, _, power = text.lower().partition("e")
    if abs(int(power or 0)) > _MAX_EXPONENT:
        raise UnreadableError("too large")
    mantissa = mantissa.removesuffix(".")
    if not mantissa:
        raise UnreadableError("no digits")
    return Number(Fraction(mantissa) * Fraction(10) ** int(power or 0), not text.removesuffix(".").isdigit())


def based_of(digits: str, base: str) -> Form:
    """Return a number in the given base, `1011_2` or `1011_{two}`; in base ten, an ordinary number."""
    base = base.strip("()").removeprefix("base")
    if not (base.isdigit() or base in NUMERALS) or not digits.isdigit():
        raise UnreadableError("not a base")
    radix = int(base[:3]) if base.isdigit() else NUMERALS[base]
    return number_of(digits) if radix == 10 else Based(digits, radix)


def ordinal_of(number: Number, suffix: str) -> Number:
    """Return the number for an ordinal: 5 for `5th`."""
    last = int(number.value) % 100
    ending = "th" if 10 < last < 14 else {1: "st", 2: "nd", 3: "rd"}.get(last % 10, "th")
    if number.value.denominator != 1 or suffix != ending:
        raise UnreadableError("not an ordinal")
    return Number(number.value)


def repeating_of(text: str, period: str) -> Number:
    """Return the number whose last digits repeat: `0.3` and `3` give 1/3."""
    whole, _, fixed = text.partition(".")
    if not period.isdigit() or "e" in text.lower():
        raise UnreadableError("no repeating digits")
    under = (10 ** len(period) - 1) * 10 ** len(fixed)
    return Number(Fraction(int(whole + fixed + period) - int(whole + fixed), under))


def spelled_number(text: str) -> Fraction | None:
    """Return the number that words spell: `forty-two`, `negative three`, `one and a half`, `three quarters`."""
    words = text.casefold().replace("-", " ").split()
    if words[:1] in (["negative"], ["minus"]):
        value = spelled_number(" ".join(words[1:]))
        return None if value is None else -value
    denominator = _DENOMINATORS.get(words[-1].removesuffix("s")) if words else None
    if denominator is None:
        return _whole(words)
    *before, last = words[:-1] or ["a"]
    if "and" in before:  # `two and a half`
        at = before.index("and")
        whole = _whole(before[:at])
        numerator = _whole([*before[at + 1 :], last])
    else:
        whole = None if before else Fraction(0)
        numerator = _whole([last])
    return None if whole is None or numerator is None else whole + numerator / denominator


def _whole(words: list[str]) -> Fraction | None:
    """Return the whole number that words spell; None for other words."""
    if words in (["a"], ["an"]):
        return Fraction(1)
    if not words or words[-1] in ("a", "an"):
        return None
    total = 0  # value of the words up to the last magnitude: 2,000 in `two thousand three hundred`
    part = 0
    last = 1_000  # the value of the word before, which must be larger: `twenty three`, but not `three twenty`
    largest = 10**15
    for at, word in enumerate(words):
        number = 1 if at == 0 and word in ("a", "an") else NUMERALS.get(word)
        scale = MAGNITUDES.get(word)
        if number is not None and number < last and not 10 <= last < 20 and (number < 10 or last >= 100):
            part += number
            last = max(number, 1)
        elif word == "hundred" and 0 < part < 100:
            part *= 100
            last = 100
        elif scale and word != "hundred" and part and scale < largest:
            total += part * scale
            part, last, largest = 0, 1_000, scale
        elif not (word == "and" and 0 < at < len(words) - 1):
            return None
    return Fraction(total + part)
