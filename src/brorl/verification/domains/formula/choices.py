r"""Letters of choices: a reference such as `\textbf{(B)}\ 12`, and the list `A, C, D` that is also written `ACD`."""

from __future__ import annotations

import re

from brorl.verification.domains.formula.expressions import Symbol
from brorl.verification.domains.formula.forms import Form, Listing

_LABELED = re.compile(
    r"\\(?:text(?:bf|rm|sf|it)?|mathrm|mathbf|mbox) ?\{ ?\(([A-J])\)(?:\\?[ ~])*\}(?:\\[ ,;:]|\\q?quad\b|[ ~:])*"
    r"([^ ].*)",
    re.DOTALL,
)


def labeled(text: str) -> tuple[str, str] | None:
    """Return the letter of a choice and the value that follows it; None if there are none."""
    match = _LABELED.fullmatch(text)
    return (match[1], match[2]) if match else None


def are_letters(form: Form, words: str) -> bool:
    """Whether a list of letters is written in one word, in any order."""
    if not isinstance(form, Listing):
        return False
    letters = [item.name for item in form.items if isinstance(item, Symbol) and re.fullmatch("[A-J]", item.name)]
    return len(letters) == len(form.items) and sorted(letters) == sorted(words)
