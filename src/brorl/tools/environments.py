"""The verifier for the domain `environment`: the calls in a response go in, the environment's reward comes out.

The reference answer is the question's row as JSON. The verified text is the result of `calls_text`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from brorl.prompts.prompt import Prompt
from brorl.tools.calls import Call
from brorl.tools.functions import ToolRunner
from brorl.verdict import NO_ANSWER, Verdict, verdict_of
from brorl.verification.domains.verifiers import verdict_of_reply
from brorl.verification.verifier import TrialResponses, malformed


def calls_text(calls: Sequence[Call]) -> str:
    """Return all calls in a response as JSON, `[["name", "{arguments}"], ...]`."""
    return json.dumps([[call.name, call.arguments] for call in calls])


class EnvironmentVerifier:
    """Replays the calls in a response on a new environment and returns its reward, from 0 to 1; 1 is correct."""

    def __init__(self, tools: ToolRunner) -> None:
        self._tools = tools

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify the calls in responses. Anything but a list of calls gets the reason `no answer`.

        The other reasons are those of user functions (`FunctionVerifier.verify_all`).
        """
        calls = [_read_calls(text) for _, text in items]
        played = [(prompt.reference, made) for (prompt, _), made in zip(items, calls, strict=True) if made is not None]
        replies = iter(self._tools.rewards(played))
        return [verdict_of(NO_ANSWER) if made is None else verdict_of_reply(next(replies)) for made in calls]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that are not rows."""
        return malformed(references, _require_row)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return a response without calls, since only a player knows the right ones."""
        del reference, others
        return TrialResponses(calls_text(()), (), certain=False)


def _read_calls(text: str) -> list[Call] | None:
    """Parse a string from `calls_text`; None for any other string."""
    try:
        return [Call(str(name), str(arguments)) for name, arguments in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return None


def _require_row(reference: str) -> None:
    try:
        row = json.loads(reference)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError("is not a row as JSON, which an environment needs for its reset")
