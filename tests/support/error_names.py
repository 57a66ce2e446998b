"""A test of an error: it names the place, the value and the fix, in whatever words."""


def check_names(message: object, *parts: str) -> None:
    """Check that an error names everything that it should."""
    text = str(message)
    assert [part for part in parts if part not in text] == [], text
