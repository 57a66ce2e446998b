"""Decimal commas, lists and thousands: texts alone, and the texts of a column."""

from brorl.prompts.decimal_commas import column_reading, has_decimal_comma, with_points
from each_row import each_row


@each_row(
    ("text", "read", "is_sure"),
    [
        ("32,5", "32.5", True),
        ("2,5", "2.5", False),
        ("3,05", "3.05", True),
        ("-12,5 cm", "-12.5 cm", False),
        ("x = 7,5", "x = 7.5", True),
        ("2{,}5", "2.5", True),
        ("1.234,5", "1234.5", True),
        ("1.234.567", "1234567", False),
        ("(2,5; 3,5)", "(2.5; 3.5)", False),
        ("1,234", None, False),
        ("1,2,3", None, False),
        ("32, 5", None, False),
        ("(2,5)", None, False),
        (r"\{2,5\}", None, False),
        ("x_{1,2}", None, False),
        ("1," * 1_000, None, False),
    ],
)
def test_texts(text: str, read: str | None, is_sure: bool) -> None:
    assert with_points(text) == read
    assert has_decimal_comma(text) == is_sure


@each_row(
    ("texts", "reading", "written"),
    [
        (["32,5", "7", "1,234"], "decimal", ["32.5", "7", "1.234"]),
        (["1,2", "3,4,5"], "list", ["1, 2", "3,4,5"]),
        (["1,2", "0.5"], "list", ["1, 2", "0.5"]),
        (["1,2", "3,4"], None, ["1,2", "3,4"]),
        (["32,5", "0.5"], None, ["32,5", "0.5"]),
    ],
)
def test_columns(texts: list[str], reading: str | None, written: list[str]) -> None:
    column = column_reading(texts)
    assert column is not None
    assert column.reading == reading
    assert [column.write(text) for text in texts] == written


def test_columns_without_such_commas() -> None:
    assert column_reading(["3", "1,234", "(2,5)"]) is None
