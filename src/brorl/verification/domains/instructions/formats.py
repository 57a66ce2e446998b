"""Instructions about the format of a response: lists, sections, titles, JSON, its start and its end.

In: a response's text and the arguments of the instruction. Out: whether the text follows it. All checks are linear in
the length of the text. Where a pattern of the original is quadratic, each line is searched, with the same result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

Arguments = Mapping[str, Any]

_STAR_BULLET = re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE)
_DASH_BULLET = re.compile(r"^[^\S\n]*-.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*[^\n*]*\*\*")
_POSTSCRIPTS = {"p.p.s": re.compile(r"p\.\s?p\.\s?s"), "p.s.": re.compile(r"p\.\s?s\.")}
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_RESPONSE_DIVIDER = "******"
_MAX_JSON_DEPTH = 100  # below Python's recursion limit, whose room depends on the caller
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # one that never closes takes the rest: it is read once
_BRACKET = re.compile(r"[\[\]{}]")


def number_bullet_lists(text: str, arguments: Arguments) -> bool:
    """There are exactly as many lines with a bullet as wanted: `* x` or `- x`; a line of dashes is one too."""
    found = sum(1 for pattern in (_STAR_BULLET, _DASH_BULLET) for _ in pattern.finditer(text))
    return found == int(arguments["num_bullets"])


def number_highlighted_sections(text: str, arguments: Arguments) -> bool:
    """At least as many parts as wanted are highlighted, as `*x*` or `**x**`."""
    single = sum(1 for match in _HIGHLIGHT.finditer(text) if match[0].strip("*").strip())
    double = sum(1 for match in _DOUBLE_HIGHLIGHT.finditer(text) if match[0][2:-2].strip())
    return single + double >= int(arguments["num_highlights"])


def multiple_sections(text: str, arguments: Arguments) -> bool:
    """The section mark with a number, such as `Section 1`, occurs at least as often as wanted."""
    found = re.finditer(re.escape(arguments["section_spliter"]) + r"\s?\d+", text)
    return sum(1 for _ in found) >= int(arguments["num_sections"])


def title(text: str, arguments: Arguments) -> bool:
    """A line has a title, as `<<title>>`."""
    del arguments
    return any(_title(line) for line in text.split("\n"))


def _title(line: str) -> str:
    start, end = line.find("<<"), line.rfind(">>")
    return line[start:end].lstrip("<").rstrip(">").strip() if start >= 0 and start + 3 <= end else ""


def number_placeholders(text: str, arguments: Arguments) -> bool:
    """There are at least as many placeholders as wanted, as `[name]` within one line."""
    return sum(map(_placeholders, text.split("\n"))) >= int(arguments["num_placeholders"])


def _placeholders(line: str) -> int:
    count, end = 0, -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
        count += 1
    return count


def postscript(text: str, arguments: Arguments) -> bool:
    """The mark of a postscript occurs, in upper or lower case; spaces within `P.S.` do not count."""
    marker = arguments["postscript_marker"].lower()
    pattern = _POSTSCRIPTS.get(marker)
    return marker in text.lower() if pattern is None else pattern.search(text.lower()) is not None


def json_format(text: str, arguments: Arguments) -> bool:
    """The whole text is JSON, possibly in a code block; any JSON value counts, up to 100 levels deep."""
    del arguments
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    text = text.removesuffix("```").strip()
    if text.count("[") + text.count("{") > _MAX_JSON_DEPTH and _depth(text) > _MAX_JSON_DEPTH:
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _depth(text: str) -> int:
    """Return how deeply brackets are nested, without those in strings."""
    steps = (1 if bracket in "[{" else -1 for bracket in _BRACKET.findall(_STRING.sub("", text)))
    return max(accumulate(steps), default=0)


def constrained_response(text: str, arguments: Arguments) -> bool:
    """Exactly one of the options occurs. The original accepts a response with all of them."""
    options = arguments.get("options", _ANSWERS)
    found = [option for option in options if option in text]
    return len(found) - sum(any(option != other and option in other for other in found) for option in found) == 1


def two_responses(text: str, arguments: Arguments) -> bool:
    """There are exactly two different responses between dividers of six asterisks."""
    del arguments
    parts = [part.strip() for part in text.split(_RESPONSE_DIVIDER)]
    given = list(filter(None, parts))
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


def repeat_prompt(text: str, arguments: Arguments) -> bool:
    """The response starts with the prompt, in upper or lower case."""
    return text.strip().lower().startswith(arguments["prompt_to_repeat"].lower())


def end_checker(text: str, arguments: Arguments) -> bool:
    """The response ends with the phrase, in upper or lower case; double quotes after it do not count."""
    return text.strip().strip('"').lower().endswith(arguments["end_phrase"].lower())


def quotation(text: str, arguments: Arguments) -> bool:
    """The response starts and ends with a double quote."""
    del arguments
    text = text.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def no_comma(text: str, arguments: Arguments) -> bool:
    """There is no comma."""
    del arguments
    return "," not in text
