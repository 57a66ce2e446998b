"""The format of responses against Python's own `re`, and on what would run for ever."""

import re

from hypothesis import given
from hypothesis import strategies as st

from brorl.verification.grade import has_format
from each_row import each_row

THINK = r"<think>.+</think>\s*\\boxed\{[^}]*\}"


@each_row(
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
    assert has_format(text, THINK) is wanted


@given(st.text(alphabet="ab \n", max_size=12))
def test_it_agrees_with_the_standard_library(text: str) -> None:
    pattern = r"a.*b+"
    assert has_format(text, pattern) == bool(re.fullmatch(pattern, text.strip(), re.DOTALL))


def test_a_pattern_that_never_comes_to_an_end_does_not_match() -> None:
    assert not has_format("a" * 5_000 + "b", r"(a|aa)+(a|aa)+(a|aa)+(a|aa)+c")
    assert has_format("aaa", r"(a|aa)+")
