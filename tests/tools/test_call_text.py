"""The calls that are read from text, against the calls that were written into it."""

import json
import re
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.tools.call_text import FORMS, hermes_calls, llama3_calls, mistral_calls
from brorl.tools.calls import Call
from each_row import each_row

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_.-]{0,12}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(), JSON, max_size=4)), min_size=1, max_size=3)
PROSE = st.text(st.characters(exclude_characters="<[{")).filter(lambda text: "<" not in text)


def written(value: object, draw: Callable[[], bool]) -> str:
    """Return JSON in one of its spellings."""
    return json.dumps(value, ensure_ascii=draw(), indent=2 if draw() else None, sort_keys=draw())


def hermes(calls: list[str]) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


WRITERS: dict[str, Callable[[list[str]], str]] = {
    "hermes": hermes, "llama3": "; ".join, "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(calls)}]"
}  # fmt: skip


@given(st.sampled_from(sorted(FORMS)), CALLS, st.randoms(use_true_random=False), st.sampled_from(["arguments", "text"]))
def test_calls_are_read_as_they_were_written(form: str, calls: list[Any], random: Random, kind: str) -> None:
    """In every spelling of JSON, also with arguments that are JSON text, as OpenAI writes them."""
    draw, key = (lambda: random.random() < 0.5), "parameters" if form == "llama3" else "arguments"
    texts = [
        written({"name": name, key: written(given, draw) if kind == "text" else given}, draw) for name, given in calls
    ]
    expected = [
        Call(name, json.dumps(g, sort_keys=True, separators=(",", ":"), ensure_ascii=False)) for name, g in calls
    ]
    if any(re.search("[\ud800-\udfff]", call.name + call.arguments) for call in expected):
        return
    assert list(FORMS[form](WRITERS[form](texts))) == expected


@given(PROSE, PROSE, CALLS)
def test_prose_may_stand_around_calls(before: str, after: str, calls: list[Any]) -> None:
    texts = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    for form, marker in (("hermes", ""), ("mistral", ""), ("llama3", "<|python_tag|>")):
        alone = FORMS[form](marker + WRITERS[form](texts))
        assert len(alone) == len(calls)
        assert FORMS[form](f"{before}{marker}{WRITERS[form](texts)}\n.{after}") == alone


ADD = Call("add", '{"a":1}')
OBJECT, OTHER = '{"name": "add", "arguments": {"a": 1}}', '{"name": "stop", "arguments": {}}'


@each_row(
    "text, expected",
    [
        ("The answer is 4.", ()),
        ("", ()),
        (f"<tool_call>{OBJECT}</tool_call>", (ADD,)),
        (f"<tool_call>\n{OBJECT}\n", (ADD,)),  # the end token came first
        (f"<tool_call>{OBJECT}<tool_call>{OTHER}</tool_call>", (ADD, Call("stop", "{}"))),
        (f"```json\n<tool_call>\n{OBJECT}\n</tool_call>\n```", (ADD,)),
        ('<tool_call>{"name": "add"}</tool_call>', (Call("add", "{}"),)),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', (Call("add", "{}"),)),
        ('<tool_call>{"arguments": {"b": [1.50, "\\u00e9"], "a": 1e3}, "name": "x"}</tool_call>',
         (Call("x", '{"a":1000.0,"b":[1.5,"é"]}'),)),
        ('<tool_call>{"name": "x", "arguments": {"code": "a\nb", "tag": "</tool_call>"}}</tool_call>',
         (Call("x", '{"code":"a\\nb","tag":"</tool_call>"}'),)),
        (f"<think>I could <tool_call>{OBJECT}</tool_call>.</think>No.", ()),
        (f"<think>I could <tool_call>{OBJECT}</tool_call>.", ()),
        (f"<think>Hm.</think>\n<tool_call>{OBJECT}</tool_call>", (ADD,)),
        ('<tool_call>{"name": "x", "arguments": {"q": "<think>"}}</tool_call>', (Call("x", '{"q":"<think>"}'),)),
    ],
)  # fmt: skip
def test_hermes(text: str, expected: tuple[Call, ...]) -> None:
    assert hermes_calls(text) == expected


@each_row(
    "text, expected",
    [
        (OBJECT, (ADD,)),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', (ADD,)),
        (f"<|python_tag|>{OBJECT}", (ADD,)),
        (f"I use the tool. <|python_tag|>{OBJECT};<|python_tag|>{OTHER}", (ADD, Call("stop", "{}"))),
        (f"{OBJECT}\n{OTHER}\nDone.", (ADD, Call("stop", "{}"))),
        (f"<think>{OBJECT}</think>\n\n{OBJECT}", (ADD,)),
        (f"<think>{OBJECT}", ()),
        (f"I would call {OBJECT}", ()),
        ('{"name": "Ann", "age": 3}', ()),  # an answer
        ("{1, 2, 3}", ()),
        (f'{OBJECT}; {{"name": "Ann"}}', (ADD,)),
        ("[1]", ()),
    ],
)
def test_llama3(text: str, expected: tuple[Call, ...]) -> None:
    assert llama3_calls(text) == expected


@each_row(
    "text, expected",
    [
        (f"[TOOL_CALLS][{OBJECT}, {OTHER}]", (ADD, Call("stop", "{}"))),
        (f"[TOOL_CALLS] [{OBJECT}] ", (ADD,)),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]stop[ARGS]{}', (ADD, Call("stop", "{}"))),
        ('[TOOL_CALLS]add{"a": 1}', (ADD,)),
        ('[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}', (ADD,)),
        ("[TOOL_CALLS][]", ()),
        ("[1, 2]", ()),
    ],
)
def test_mistral(text: str, expected: tuple[Call, ...]) -> None:
    assert mistral_calls(text) == expected


@each_row(
    "body, problem",
    [
        ('{"name": "add", "arguments": {"a": 1}', "not valid JSON"),
        ('{"name": "add", "arguments": {"a": 1}}}', "more than one"),
        (f"{OBJECT}\n{OTHER}", "more than one"),
        (f"[{OBJECT}]", "not a list"),
        ("add(1)", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"arguments": {}}', "no name"),
        ('{"name": 3, "arguments": {}}', "no name"),
        ('{"name": "add", "arguments": [1]}', "an object, not a list"),
        ('{"name": "add", "arguments": "1"}', "an object, not a number"),
        ('{"name": "add", "arguments": "{"}', "not valid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "not finite"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "not finite"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "too many digits"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 50_000 + "]" * 50_000 + "}}", "nested too deeply"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogate"),
    ],
)
def test_what_cannot_be_read_says_why(body: str, problem: str) -> None:
    """Calls before it count."""
    for text in (f"<tool_call>{body}</tool_call>", f"Well. <tool_call>\n{body}"):
        (call,) = hermes_calls(text)
        assert (call.name, call.arguments) == ("", "{}")
        assert problem in call.problem
        assert len(call.problem) < 100
    first, last = hermes_calls(f"<tool_call>{OBJECT}</tool_call><tool_call>{body}</tool_call>")
    assert first == ADD
    assert problem in last.problem


@each_row(
    "form, text",
    [
        ("llama3", '{"name": "add", "parameters": {"a": 1}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", f'{OBJECT}; {{"name": "add", "parameters": {{"a": }}}}'),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": Infinity}}'),
        ("mistral", f"[TOOL_CALLS][{OBJECT}"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", f"[TOOL_CALLS]{OBJECT}"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1'),
        ("mistral", "[TOOL_CALLS]add[ARGS][1]"),
        ("mistral", f"[TOOL_CALLS][{OBJECT}, 3]"),
    ],
)
def test_damaged_calls_of_the_other_forms(form: str, text: str) -> None:
    *before, last = FORMS[form](text)
    assert last.problem
    assert before in ([], [ADD])


PIECES = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '"', "\\", "{",
    "}", "[", "]", ":", ",", ";", " ", "\n", "1", "-", "NaN", "null", '"name"', '"arguments"', OBJECT, "é", "\ud800",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_no_text_raises_or_takes_superlinear_time(form: str, rng: np.random.Generator) -> None:
    """Random pieces, repeated: a second is much for 200,000 characters in linear time, and little in quadratic time."""
    for _ in range(60):
        few = "".join(rng.choice(PIECES, size=rng.integers(1, 7)))
        start = "".join(rng.choice(PIECES, size=rng.integers(0, 4)))
        text = start + few * (200_000 // len(few))
        before = time.process_time()
        calls = FORMS[form](text)
        assert time.process_time() - before < 1
        for call in calls:
            json.loads(call.arguments)
            call.name.encode()
