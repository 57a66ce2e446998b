"""Removes what stands around an answer, and writes tokens as words."""

from __future__ import annotations

import re

from brorl.verification.domains.formula.tokens import END, Token, written
from brorl.verification.domains.formula.words import ORDINAL_ENDINGS

_LABEL = re.compile(
    r"(?:(?:the|my|so|thus|hence|therefore),? +)?(?:(?:final|correct|right) +)?(?:answer|ans|result|solution)\b *"
    r"(?:is *:?|:|=) *",
    re.IGNORECASE,
)
_CHOICE = re.compile(
    r"\\(?:text(?:bf|rm|sf|it)?|mathrm|mathbf|mbox) ?\{ ?\(([A-J])\)(?:\\?[ ~])*\}(?:\\[ ,;:]|\\q?quad\b|[ ~:])*"
    r"([^ ].*)",
    re.DOTALL,
)
_ARROWS = frozenset({"\\therefore", "\\Rightarrow", "\\to"})
_DONE = frozenset({"\\blacksquare", "\\square", "\\qed", "\\Box", "\\checkmark"})
_DOMAINS = frozenset({"\\mathbb", "Z", "N", "Q", "R"})
_HYPHEN = re.compile(r"(?<=\w)-(?=\w)")
_END_MARKS = frozenset({".", ",", ";", ":"})


def labeled(text: str) -> tuple[str, str] | None:
    r"""Return the letter of a choice and the value after it, as in `\textbf{(B)}\ 12`; None if there are none."""
    match = _CHOICE.fullmatch(text)
    return (match[1], match[2]) if match else None


def without_frame(tokens: list[Token]) -> list[Token]:
    """Remove braces around an answer, `Answer:` before it, and marks after it."""
    infix = {"\\over", "\\choose"}
    while len(tokens) > 2 and _closing(tokens) == len(tokens) - 1 and not any(one.text in infix for one in tokens):
        tokens = tokens[1:-1]
    while tokens and tokens[-1].kind == "mark" and tokens[-1].text in _END_MARKS:
        tokens = tokens[:-1]
    while tokens and tokens[-1].text in _DONE:
        tokens = tokens[:-1]
    tokens = tokens[1:] if tokens and tokens[0].text in _ARROWS else tokens
    tokens = _with_condition(tokens)
    for length in range(min(len(tokens), 6), 0, -1):
        if _LABEL.fullmatch(written(tokens[:length]).strip() + " ") and len(tokens) > length:
            return tokens[length:]
    return tokens


def _with_condition(tokens: list[Token]) -> list[Token]:
    r"""Return tokens with a comma before a condition in brackets at their end, as in `2k\pi (k \in \mathbb{Z})`."""
    start = max((at for at, token in enumerate(tokens) if token.text == "("), default=0)
    is_condition = [token.text for token in tokens[start + 2 : start + 3]] == ["\\in"]
    is_condition = is_condition and any(token.text in _DOMAINS for token in tokens[start + 3 : start + 4])
    if not (start and is_condition and tokens[start + 1].kind == "name" and tokens[-1].text == ")"):
        return tokens
    return [*tokens[:start], Token("mark", ","), *tokens[start + 1 : -1]]


def _closing(tokens: list[Token]) -> int | None:
    """Return the place of the brace that closes the first token; None if that is no brace."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token.text == "{") - (token.text == "}")
        if depth == 0:
            return at if at else None
    return None


def words_of(tokens: list[Token]) -> str:
    """Return tokens as words with one space between them; formulas have no space."""
    kept = [token for token in tokens if token.text not in ("{", "}", '"')]
    pairs = zip([END, *kept], kept, strict=False)
    kept = [one for before, one in pairs if before.kind != "number" or one.text not in ORDINAL_ENDINGS]
    if all(token.kind in ("name", "number") or token.text in "-'.,!?():" for token in kept):
        text = _HYPHEN.sub(" ", written(kept)).replace("(", " ").replace(")", " ")
        text = " ".join(text.split()).strip(" .,!?")
        return text[1:-1] if text[:1] == text[-1:] == "'" else text
    return "".join(token.text + (" " if token.kind == "command" else "") for token in tokens)
