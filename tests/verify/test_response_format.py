"""The format of responses against Python's own `re`, and on what would run for ever."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.verification.response_format import ResponseFormat

THINK = r"<think>.+</think>\s*\\boxed\{[^}]*\}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>a</think>\\boxed{3}", True),
        ("  <think>a\nb</think>\n\n\\boxed{3}\n", True),
        ("so <think>a</think>\\boxed{3}", False),
        ("<think>a</think>\\boxed{3} indeed", False),
        ("<think></think>\\boxed{3}", False),
        ("", False),
    ],
)
def test_the_whole_text_counts(text: str, wanted: bool) -> None:
    assert ResponseFormat(THINK).matches(text) is wanted


@given(st.text(alphabet="ab \n", max_size=12))
def test_it_agrees_with_the_standard_library(text: str) -> None:
    pattern = r"a.*b+"
    assert ResponseFormat(pattern).matches(text) == bool(re.fullmatch(pattern, text.strip(), re.DOTALL))


def test_a_pattern_that_never_comes_to_an_end_does_not_match() -> None:
    assert not ResponseFormat(r"(a|aa)+(a|aa)+(a|aa)+(a|aa)+c").matches("a" * 5_000 + "b")
    assert ResponseFormat(r"(a|aa)+").matches("aaa")


def test_what_is_no_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\(a' is not a regular expression: missing \)"):
        ResponseFormat("(a")
