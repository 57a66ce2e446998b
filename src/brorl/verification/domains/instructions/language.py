"""Instructions about the language of a response, with langdetect.

langdetect draws random numbers. Here every detection starts from the same seed, and its profiles are loaded in the
order of their names, so a text has one language on every machine. It reads the first 10,000 characters. It ignores
words in capitals, so a text in capitals is detected in lower case. A text whose language cannot be detected, such as
`123`, follows no instruction about languages. The original accepts it for every language.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from brorl.errors import UserError

LANGUAGE_KINDS = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)
_READ_CHARACTERS = 10_000


def require_langdetect() -> None:
    """Check that langdetect is installed, without importing it.

    Raises:
        UserError: If it is not.
    """
    if find_spec("langdetect") is None:
        raise UserError(
            "the data has instructions about languages, which need the package langdetect; run: pip install "
            "'brorl[ifeval]'"
        )


def detect(text: str) -> str | None:
    """Return the code of the language, None if the text has no letters of a known language.

    Args:
        text: Any string; the first 10,000 characters are read.
    """
    text = text[:_READ_CHARACTERS]
    return _detect(text.lower() if text.isupper() else text)


@lru_cache(maxsize=64)  # several instructions about one text
def _detect(text: str) -> str | None:
    from langdetect.lang_detect_exception import LangDetectException

    detector = _factory().create()
    detector.append(text)
    try:
        language = str(detector.detect())
    except LangDetectException:
        return None
    return None if language == detector.UNKNOWN_LANG else language


@lru_cache(maxsize=1)
def _factory() -> Any:
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.set_seed(0)
    profiles = sorted(Path(PROFILES_DIRECTORY).iterdir())
    factory.load_json_profile([path.read_text("utf-8") for path in profiles if not path.name.startswith((".", "_"))])
    return factory
