"""The countdown verifier against Python's own evaluation with exact fractions."""

import math
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from brorl.prompts.countdown import CountdownPuzzle
from brorl.prompts.prompt import Prompt
from brorl.verification.domains.countdown import CountdownVerifier
from case_tables import table
from each_row import each_row


def prompt_of(numbers: tuple[int, ...], target: int) -> Prompt:
    puzzle = CountdownPuzzle(tuple(sorted(numbers)), target)
    return Prompt("p", puzzle.text, (1,), puzzle.reference, "countdown")


def reference_numbers_and_value(text: str) -> tuple[list[int], Fraction | None]:
    """Numbers in an expression and its value (None: division by zero), as Python evaluates it with fractions."""
    used = [int(digits) for digits in re.findall(r"\d+", text)]
    try:
        return used, Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", text.strip()), {"Fraction": Fraction}))
    except ZeroDivisionError:
        return used, None


numbers = st.integers(0, 20).map(str)
spaces = st.sampled_from(["", "", "", " ", "  "])


def compound(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    infix = st.tuples(parts, spaces, st.sampled_from("+-*/"), spaces, parts).map("".join)
    return infix | st.tuples(st.just("("), spaces, parts, spaces, st.just(")")).map("".join)


expressions = st.recursive(numbers, compound, max_leaves=6)


class TestAgainstPython:
    @given(expressions)
    def test_every_expression_gets_the_value_that_python_gives_it(self, text: str) -> None:
        used, value = reference_numbers_and_value(text)
        if min(used) < 1:
            return
        target = value if value is not None and value >= 0 and value.denominator == 1 else Fraction(77)
        verdict = CountdownVerifier().verify(prompt_of(tuple(used), int(target)), text)
        if value is None:
            expected = "division by zero"
        elif value == target:
            expected = "correct"
        else:
            expected = f"wrong value {value}"
        assert verdict.reason == expected
        assert verdict.correct == (expected == "correct")
        assert verdict.score == float(verdict.correct)
        assert verdict.extracted == text.replace(" ", "")

    @given(expressions, st.lists(st.integers(1, 20), min_size=1, max_size=6))
    def test_numbers_must_be_used_exactly_once(self, text: str, given_numbers: list[int]) -> None:
        used, _ = reference_numbers_and_value(text)
        verdict = CountdownVerifier().verify(prompt_of(tuple(given_numbers), 5), text)
        mismatch = Counter(used) != Counter(given_numbers)
        assert (verdict.reason == "numbers used do not match") == mismatch

    @given(st.text(alphabet="0123+-*/() ", max_size=12))
    def test_what_does_not_shrink_to_one_number_is_no_expression(self, text: str) -> None:
        """A number in brackets is one, and so are two with an operator between them; but for emphasis: `*3*` is 3."""
        assume(not text.strip().startswith("*"))
        left, before = re.sub(r"(?<!\d)(?:0|[1-9]\d*)(?!\d)", "n", text.strip()), ""
        while left != before:
            left, before = re.sub(r"\( *n *\)|n *[-+*/] *n", "n", left), left
        verdict = CountdownVerifier().verify(prompt_of((1, 2), 3), text)
        assert (verdict.reason != "not an expression") == (left == "n")


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
class TestReasons:
    @each_row(*table(__file__, "each_reason"))
    def test_each_reason(self, response: str, reason: str) -> None:
        verdict = CountdownVerifier().verify(prompt_of((3, 5, 7), 22), response)
        assert verdict.reason == reason
        assert verdict.correct == (reason == "correct")
        assert (verdict.extracted is None) == (reason == "not an expression")

    def test_division_by_zero(self) -> None:
        verdict = CountdownVerifier().verify(prompt_of((3, 3, 5), 0), "5/(3-3)")
        assert (verdict.reason, verdict.extracted) == ("division by zero", "5/(3-3)")

    def test_fractions_on_the_way_are_exact(self) -> None:
        assert CountdownVerifier().verify(prompt_of((3, 3, 8, 8), 24), "8/(3-8/3)").correct
        # In floating point 1/3*3 may be 1 by luck; 49*(1/49) is not.
        assert CountdownVerifier().verify(prompt_of((1, 49, 49), 1), "1/49*49").correct
        assert (1 / 49) * 49 != 1


class TestBounds:
    @pytest.mark.slow
    @given(st.text(max_size=100) | st.text("0123456789+-*/() ", min_size=200, max_size=400))
    def test_any_text_gets_a_verdict(self, text: str) -> None:
        verdict = CountdownVerifier().verify(prompt_of((3, 5), 8), text)
        assert math.isfinite(verdict.score)
        assert verdict.seconds >= 0

    @each_row(
        ("response", "reason"),
        [
            ("9" * 100_000, "too long"),
            ("(" * 100_000, "too long"),
            ("1" * 255, "numbers used do not match"),
            ("1" * 256, "numbers used do not match"),
            ("1" * 257, "too long"),
            ("(" * 33 + "1" + ")" * 33, "too deep"),
            ("(" * 32 + "1" + ")" * 32, "numbers used do not match"),
            ("(" * 200, "too deep"),
            ("*".join(["9" * 60] * 4), "numbers used do not match"),
        ],
    )
    def test_huge_and_deep_responses_are_refused(self, response: str, reason: str) -> None:
        assert CountdownVerifier().verify(prompt_of((3, 5), 8), response).reason == reason

    def test_deepest_allowed_nesting_works(self) -> None:
        assert CountdownVerifier().verify(prompt_of((8,), 8), "(" * 32 + "8" + ")" * 32).correct

    def test_a_prompt_of_another_task_is_an_error_of_the_caller(self) -> None:
        with pytest.raises(ValueError, match="countdown reference"):
            CountdownVerifier().verify(Prompt("p", "1+1", (1,), "2", "math"), "2")
