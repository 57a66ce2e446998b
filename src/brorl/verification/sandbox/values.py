"""Plain Python values as JSON text, for passing them between this process and a sandboxed program.

Types stay exact, and the text can never name a class or a function. Numbers, strings, lists, booleans and None are
plain JSON. Any other value is an object with one key:

    (1, 2)  <->  {"t": [1, 2]}        {"a": 1}  <->  {"d": [["a", 1]]}
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from itertools import islice
from typing import Any, NamedTuple

MAX_DEPTH = 64  # nested containers
REQUEST_DEPTH = MAX_DEPTH + 2  # for a message to a program: a value inside arguments inside a call
_SMALL = 1 << 63
_MAX_DIGITS = 40
_MAX_EQUAL_HASHES = 64  # building a hostile set of thousands of values with equal hashes takes quadratic time
_INERT = frozenset({str, float, bool, type(None)})
_MAX_ELEMENTS = 1_000_000  # more than in any accepted value; an iterator can be infinite
_NESTED: dict[type, str] = {tuple: "t", set: "s", frozenset: "z"}


class Size(NamedTuple):
    """The size of an encoded value. Decoding time is proportional to both numbers."""

    num_bytes: int  # the text's length in UTF-8
    num_parts: int  # commas and opening square brackets in the text: `[1,2]` has 2


def size_of(text: bytes) -> Size:
    """Return the size of an encoded value, much faster than decoding it."""
    return Size(len(text), text.count(b",") + text.count(b"["))


class Elements(list[Any]):
    """The elements of an iterator, range, view or array, which have no plain type."""


class NotPlainError(ValueError):
    """The value's type is not plain, or the value is nested too deeply."""


def encode(value: object, depth: int = MAX_DEPTH) -> str:
    """Encode a plain value as text; NotPlainError if a part is not plain, or is nested deeper than `depth`.

    Subclass instances are encoded as the plain type: a `namedtuple` as a tuple, a `defaultdict` as a dict, an `IntEnum`
    as an int. A `deque` becomes a list. Iterators, ranges, dict views and arrays become `Elements`, at most a million.

    Examples:
        >>> encode((1, 2))
        '{"t":[1,2]}'
    """
    return json.dumps(_encoded(value, depth), separators=(",", ":"), check_circular=False)


def decode(text: str, depth: int = MAX_DEPTH) -> Any:
    """Decode text that may be hostile, in time proportional to its length.

    Raises a ValueError if the text is not a plain value, is nested too deeply, or has a set or dict in which many
    elements share a hash.
    """
    try:
        parsed = json.loads(text, parse_int=lambda digits: int(_short(digits)), parse_float=lambda d: float(_short(d)))
        return _decoded(parsed, depth)
    except (RecursionError, TypeError, OverflowError) as error:
        raise ValueError(f"not the text of a plain value: {error}") from None


def _encoded(value: Any, depth: int) -> object:
    kind = type(value)
    if kind in _INERT:
        return value
    if kind is int:
        return value if -_SMALL <= value < _SMALL else {"i": format(value, "x")}
    if depth == 0:
        raise NotPlainError("nested too deeply")
    if kind is list:
        return [_encoded(item, depth - 1) for item in value]
    if kind in _NESTED:
        return {_NESTED[kind]: [_encoded(item, depth - 1) for item in value]}
    if kind is dict:
        pairs = value.items()
        return {"d": [[_encoded(key, depth - 1), _encoded(item, depth - 1)] for key, item in pairs]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if isinstance(value, _ELEMENTS):
        return {"e": [_encoded(item, depth - 1) for item in islice(value, _MAX_ELEMENTS)]}
    return _encoded(_plain(value), depth)


def _plain(value: object) -> object:
    """Return the plain value of a subclass instance without calling the subclass's methods."""
    for base, copy in _COPIES:
        if isinstance(value, base):
            return copy(value)
    raise NotPlainError(f"of type {type(value).__name__}")


_ELEMENTS = (Elements, range, Iterator, KeysView, ValuesView, ItemsView, array)
_COPIES: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (complex, complex.__complex__),
    (str, str.__str__),
    (bytes, bytes.__bytes__),
    (list, lambda value: [*list.__iter__(value)]),
    (tuple, lambda value: (*tuple.__iter__(value),)),
    (set, lambda value: {*set.__iter__(value)}),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (dict, lambda value: dict(dict.items(value))),
    (deque, lambda value: [*deque.__iter__(value)]),
)


def _short(digits: str) -> str:
    """Reject long decimal numbers: `encode` never writes them, and parsing them takes quadratic time."""
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a decimal number of {len(digits)} characters")
    return digits


def _decoded(item: object, depth: int) -> object:
    if type(item) is list:
        if depth == 0:
            raise ValueError("nested too deeply")
        return [_decoded(element, depth - 1) for element in item]
    if type(item) is not dict:
        return item
    if depth == 0:
        raise ValueError("nested too deeply")
    if len(item) != 1:
        raise ValueError("an object without exactly one key")
    ((kind, content),) = item.items()
    if kind not in _DECODERS:
        raise ValueError(f"an unknown kind of value: {kind[:20]!r}")
    return _DECODERS[kind](content, depth - 1)


def _items(content: object, depth: int) -> list[Any]:
    if type(content) is not list:
        raise ValueError(f"a {type(content).__name__}, not a list of values")
    return [_decoded(element, depth) for element in content]


def _text(content: object) -> str:
    if type(content) is not str:
        raise ValueError(f"a {type(content).__name__}, not text")
    return content


def _hashable(values: Iterable[Hashable]) -> list[Any]:
    """Return the values; ValueError if so many share a hash that building a set would take quadratic time."""
    values = list(values)
    most_common = Counter(map(hash, values)).most_common(1)
    if most_common and most_common[0][1] > _MAX_EQUAL_HASHES:
        raise ValueError(f"{most_common[0][1]} elements share a hash")
    return values


def _dict(content: object, depth: int) -> dict[Any, Any]:
    if type(content) is not list or any(type(pair) is not list or len(pair) != 2 for pair in content):
        raise ValueError("a dict whose items are not pairs")
    keys = _hashable(_decoded(key, depth) for key, _ in content)
    return dict(zip(keys, (_decoded(value, depth) for _, value in content), strict=True))


def _complex(content: object, depth: int) -> complex:
    parts = _items(content, depth)
    if len(parts) != 2 or any(type(part) is not float for part in parts):
        raise ValueError("a complex number whose parts are not two floats")
    return complex(*parts)


_DECODERS: dict[str, Callable[[object, int], object]] = {
    "t": lambda content, depth: tuple(_items(content, depth)),
    "s": lambda content, depth: set(_hashable(_items(content, depth))),
    "z": lambda content, depth: frozenset(_hashable(_items(content, depth))),
    "d": _dict,
    "e": lambda content, depth: Elements(_items(content, depth)),
    "b": lambda content, _depth: bytes.fromhex(_text(content)),
    "c": _complex,
    "i": lambda content, _depth: int(_text(content), 16),
}
