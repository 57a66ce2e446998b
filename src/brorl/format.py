"""Numbers, intervals, durations and commands as short text: one set of formats for the whole package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import floor, inf, isfinite, isnan, log10
from pathlib import Path


@dataclass(frozen=True)
class Estimate:
    """A number with a 95% interval. The function that computes the interval documents its method and coverage.

    A single evaluation has intervals over prompts (`brorl.evaluation.pass_at_k`). A comparison usually has t intervals
    over prompts and seeds (`brorl.evaluation.paired`).
    """

    value: float  # usually a mean over prompts
    low: float
    high: float


def interval(estimate: Estimate, digits: int = 3, *, sign: str = "", end_digits: int | None = None) -> str:
    """Return a value with its interval, with `digits` decimals: 0.412 [0.380, 0.444].

    A non-finite value becomes "-". If an end is NaN, the interval is omitted. An infinite upper end becomes "no end".
    With sign="+", positive numbers also show their sign.
    """
    if not isfinite(estimate.value):
        return "-"
    value = f"{estimate.value:{sign}z,.{digits}f}"
    if isnan(estimate.low) or isnan(estimate.high):
        return value
    decimals = digits if end_digits is None else end_digits
    low, high = (f"{end:{sign}z,.{decimals}f}" for end in (estimate.low, estimate.high))
    return f"{value} [{low}, {'no end' if estimate.high == inf else high}]"


def signed(estimate: Estimate, digits: int = 3) -> str:
    """Return a signed difference with its interval: +0.031 [-0.002, +0.064]."""
    return interval(estimate, digits, sign="+")


def plain(value: float, digits: int = 3) -> str:
    """Return a number without an exponent, to `digits` significant digits; the integer part is never rounded.

    Examples: 1,120; 40; 12.5; 0.351; 0.0000123.
    """
    if not isfinite(value) or value == 0:
        return f"{value:.0f}"
    decimals = max(digits - 1 - floor(log10(abs(value))), 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def exact(value: float) -> str:
    """Return a number for a command line: all digits, no exponent, no separators."""
    return f"{Decimal(repr(float(value))):f}".removesuffix(".0")


def short(count: float) -> str:
    """Return a count to three digits: 870, 12.3k, 1.23M."""
    for limit, size, suffix in ((999.5, 1.0, ""), (999.5e3, 1e3, "k"), (999.5e6, 1e6, "M"), (inf, 1e9, "G")):
        if count < limit:
            scaled = count / size
            digits = 0 if scaled >= 99.95 or (size == 1 and scaled == round(scaled)) else 1 if scaled >= 9.995 else 2
            return f"{scaled:,.{digits}f}{suffix}"
    raise ValueError(f"a count must be finite, got {count}")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, plural unless the number is 1: 1 run, 3 runs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened to at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def shortened(text: str, length: int = 100) -> str:
    """Return text on one line, truncated to a length, with control characters escaped."""
    return visible_text(text if len(text) <= length else f"{text[: length - 3]}...", one_line=True)


def duration(seconds: float) -> str:
    """Return a waiting or elapsed time: 45s, 3m05s, 2h07m."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"


def in_seconds(text: str | float) -> float | None:
    """Return a time such as 90, 90s, 30m or 8h in seconds; None for any other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([smh]?)\s*", str(text))
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else None


def short_time(seconds: float) -> str:
    """Return a measured time to three digits: 61.9 s, 320 s, 12.3 min, 13.2 h."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 599.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7197 else f"{seconds / 3600:,.1f} h"


def memory_size(num_bytes: float) -> str:
    """Return a memory size: 120 MiB, 1.5 GiB."""
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"


def probability(value: float) -> str:
    """Return a probability to two significant digits, with an exponent below 0.0001: 0.012, 5.5e-30, < 1e-99."""
    return plain(value, 2) if value >= 1e-4 or not isfinite(value) else p_value(value).replace("below", "<")


def p_value(p: float) -> str:
    """Return a p-value: three decimals from 0.001 up, two significant digits below."""
    if not isfinite(p):
        return "-"
    if p >= 0.001:
        return f"{p:.3f}"
    if p < 1e-99:
        return "below 1e-99"
    mantissa, exponent = f"{p:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def listed(words: Sequence[str]) -> str:
    """Join words for a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


_ACTING = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, formats (directions, zero width), lone surrogates, separators


def visible_text(text: str, one_line: bool = False) -> str:
    r"""Return text with control characters escaped; `one_line` also escapes line ends and tabs: `\n`, `\t`."""
    kept = "" if one_line else "\n\t"
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _ACTING and c not in kept else c for c in text
    )


def shell_command(*arguments: object) -> str:
    """Return a shell line that runs a command of this installation, such as `brorl resume 'my run'`."""
    return " ".join([command_name(), *(shlex.quote(str(argument)) for argument in arguments)])


def command_name() -> str:
    """Return `brorl` if the shell finds this installation, else the path of its script or `PYTHON -m brorl`."""
    script = Path(sys.executable).with_name("brorl")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m brorl"
    in_path = shutil.which("brorl")
    if in_path is not None and Path(in_path).samefile(script):
        return "brorl"
    here = script.is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(script) if here else str(script))
