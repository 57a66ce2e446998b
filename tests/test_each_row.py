"""`each_row`, which many tests of tables rely on."""

import pytest

from each_row import each_row


def test_every_row_that_fails_is_listed() -> None:
    @each_row("number, square", [(1, 1), (2, 5), (3, 9), (4, 15)])
    def check(number: int, square: int, power: int) -> None:
        assert number**power == square

    with pytest.raises(AssertionError, match="2 of 4 rows fail") as caught:
        check(power=2)
    assert [f"({n}, " in str(caught.value) for n in (1, 2, 3, 4)] == [False, True, False, True]


def test_an_error_that_is_missing_is_a_failure() -> None:
    @each_row("text", ["1", "x"])
    def check(text: str) -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            int(text)

    with pytest.raises(AssertionError, match="1 of 2 rows fail"):
        check()
