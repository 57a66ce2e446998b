"""Values keep their exact types on the wire, and no text makes the decoder slow or lets it raise another error."""

import itertools
import json
import math
import subprocess
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum, IntEnum
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.verification.sandbox.values import MAX_DEPTH, Elements, NotPlainError, decode, encode

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=8,
)
plain = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner, inner)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
    ),
    max_leaves=20,
)


def shape(value: object) -> object:
    """Return a comparable form of a value with all types, and of numbers the exact bits."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        return kind, [shape(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(shape(item)) for item in value)
    if isinstance(value, dict):
        return kind, [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, float):
        return kind, "nan" if math.isnan(value) else value.hex()
    if isinstance(value, complex):
        return kind, shape(value.real), shape(value.imag)
    return kind, value


@given(plain)
def test_a_value_comes_back_with_its_types(value: object) -> None:
    text = encode(value)
    assert text.isascii()
    assert shape(decode(text)) == shape(value)


@pytest.mark.parametrize("digits", [18, 19, 20, 4300, 4301, 50_000])
def test_integers_of_any_size(digits: int, rng: np.random.Generator) -> None:
    value = int.from_bytes(rng.bytes(math.ceil(digits * math.log(10, 256))))
    for number in (value, -value):
        assert decode(encode(number)) == number


def test_values_of_subclasses_become_plain() -> None:
    class Level(IntEnum):
        LOW = 3

    class Liar(str):
        def __str__(self) -> str:
            return "forged"

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    class Endless(list):
        def __iter__(self):  # type: ignore[no-untyped-def]
            while True:
                yield 1

    counts: defaultdict[str, int] = defaultdict(int, a=2)
    point = namedtuple("point", "x y")(1, 2.0)
    values = [point, counts, Counter("aab"), OrderedDict(b=1), deque([1, 2]), Level.LOW, Liar("true"), Endless([5])]
    decoded = decode(encode(values))
    assert shape(decoded) == shape([(1, 2.0), {"a": 2}, {"a": 2, "b": 1}, {"b": 1}, [1, 2], 3, "true", [5]])
    assert math.copysign(1.0, decode(encode(np.float64(-0.0)))) == -1.0


@pytest.mark.slow
def test_values_with_elements_become_lists_of_them() -> None:
    values = [range(3), iter("ab"), {1: 2}.items(), (x for x in ()), array("d", [0.5])]
    decoded = decode(encode(values))
    assert decoded == [[0, 1, 2], ["a", "b"], [(1, 2)], [], [0.5]]
    assert [type(value) for value in decoded] == [Elements] * 5
    assert decode(encode(decoded)) == decoded
    assert len(decode(encode(itertools.count()))) == 1_000_000  # what no program can send


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value", [object(), print, Fraction(1, 2), Colour.RED, np.int64(3), bytearray(b"a"), {1: {2: int}}]
)
def test_other_types_are_rejected(value: object) -> None:
    with pytest.raises(NotPlainError, match="of type"):
        encode([value])


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {"a": [v]}])
def test_what_is_encoded_can_be_decoded_at_any_depth(wrap: Callable[[object], object]) -> None:
    value: object = 1
    for _ in range(MAX_DEPTH // 2):
        value = wrap(value)
        assert decode(encode(value)) == value


def test_nesting_is_bounded() -> None:
    value: object = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(NotPlainError, match="nested too deeply"):
        encode([value])
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(f"[{encode(value)}]")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(NotPlainError, match="nested too deeply"):
        encode(loop)


def dict_text(*keys: str) -> str:
    return json.dumps({"d": [[json.loads(key), 0] for key in keys]})


HOSTILE = {
    "empty": "",
    "not JSON": "{",
    "two values": "1 2",
    "deep lists": "[" * 100_000,
    "deep objects": '{"t":[' * 100_000,
    "closed deep lists": "[" * 5_000 + "]" * 5_000,
    "decimal integer": "1" * 100_000,
    "decimal fraction": "0." + "1" * 100_000,
    "two keys": '{"t":[],"s":[]}',
    "no key": "{}",
    "unknown kind": '{"q":1}',
    "class": '{"__class__":"os.system"}',
    "tuple of no list": '{"t":5}',
    "unhashable member": '{"s":[[1]]}',
    "unhashable key": '{"d":[[[1],2]]}',
    "pair of three": '{"d":[[1,2,3]]}',
    "pairs of tuples": '{"d":[{"t":[1,2]}]}',
    "odd hexadecimal": '{"b":"abc"}',
    "number as bytes": '{"b":1}',
    "integer with a word": '{"i":"12z"}',
    "integer as number": '{"i":5}',
    "complex of text": '{"c":["1","2"]}',
    "complex of one": '{"c":[1.0]}',
    "complex of a tuple": '{"c":{"t":[1.0,2.0]}}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the kind of error is what matters)
        decode(text)


@pytest.mark.parametrize("kind", ["s", "z", "d"])
def test_elements_of_one_hash_are_rejected(kind: str) -> None:
    """Multiples of 2**61 - 1 all have the hash 0; a set of 40,000 of them takes half a minute to build."""
    numbers = [{"i": format(k * sys.hash_info.modulus, "x")} for k in range(40_000)]
    content = [[number, 0] for number in numbers] if kind == "d" else numbers
    with pytest.raises(ValueError, match="share a hash"):
        decode(json.dumps({kind: content}))


@given(st.text(alphabet='[]{}",:0123456789.eE+-tszdbci \\u nulrafsNIity', max_size=60))
def test_any_text_is_a_value_or_a_value_error(text: str) -> None:
    try:
        value = decode(text)
    except ValueError:
        return
    assert shape(decode(encode(value))) == shape(value)


def test_the_standard_library_is_enough() -> None:
    """Sandboxed processes import this module without any package."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from brorl.verification.sandbox.inside import fork_server; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    root = str(__import__("pathlib").Path(__import__("brorl").__file__).parents[1])
    done = subprocess.run([sys.executable, "-S", "-c", code, root], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['__main__', 'brorl']", done.stdout
