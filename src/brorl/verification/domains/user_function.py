"""Verifier that calls a user's function in killable workers.

The function is called as `function(response, reference)`, or `function(response, reference, prompt)` if it takes three
arguments, and returns a bool, a number from 0 to 1, or a dict. A reward function with TRL's signature,
`reward(completions, **columns) -> list[float]`, works as it is. An exception, a wrong return value or a timeout becomes
a verdict; a function that cannot be loaded is an error before training.
"""

import re
from collections.abc import Sequence

from brorl.errors import UserError
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, RETURNED, WRONG, Verdict, is_unverified, verdict_of
from brorl.verification.sandbox.inside.functions import REWARD
from brorl.verification.sandbox.pool import LoadError, VerifierCall, WorkerPool
from brorl.verification.sandbox.replies import Reply
from brorl.verification.verifier import TrialResponses

_KEYS = ("correct", "score", "extracted", "reason")


class FunctionVerifier:
    """Verifies responses with a user's function; a UserError says why it cannot be loaded or called.

    Args:
        pool: The workers that call it.
        function: `package.module:function`, also looked for in the current directory, or `path/to/file.py:function`.
        domain: The domain that it verifies, for error messages.
        as_messages: Whether a reward function with TRL's signature gets completions as lists of messages.
        section: The settings that name it, for error messages.
    """

    def __init__(
        self,
        pool: WorkerPool,
        function: str,
        domain: str,
        as_messages: bool = False,
        section: str = "verification.functions",
    ) -> None:
        self._pool = pool
        self._function = function
        setting = f"{section}.{domain}"
        try:
            (result,) = pool.run([VerifierCall(function, None)])
            if result.failure:
                raise LoadError(f"cannot read the arguments of {function!r}: {result.failure}")
        except LoadError as error:
            raise UserError(f"{setting}: {error}; {_load_advice(function, str(error))}") from None
        self._more = (as_messages,) if result.value == REWARD else ()
        minimum, maximum = (3, 3) if result.value == REWARD else result.value
        if minimum > 3 or (maximum is not None and maximum < 2):
            upper = "any number" if maximum is None else maximum
            arguments = f"{minimum}" if minimum == maximum else f"{minimum} to {upper}"
            raise UserError(
                f"{setting}: {function!r} takes {arguments} arguments; "
                "it must take two (response, reference) or three (response, reference, prompt), or have the signature "
                "of TRL's reward functions (completions, **columns)"
            )
        self._takes_prompt = maximum is None or maximum >= 3

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses.

        The reason is the function's, or `correct` or `wrong answer`, or after a failure `verifier raised ...`,
        `verifier returned ...`, `timeout`, `out of memory`, `verifier crashed` or `unverified: ...`. A function that
        cannot decide returns `False` with such a reason itself.
        """
        return [_verdict(result) for result in self.replies(items)]

    def replies(self, items: Sequence[tuple[Prompt, str]]) -> list[Reply]:
        """Call the function on responses, and return what it returned on each, or its failure."""
        calls = []
        for prompt, response in items:
            asked = (prompt.question or prompt.text,) if self._takes_prompt else ()
            calls.append(VerifierCall(self._function, (response, prompt.reference, *asked, *self._more)))
        return self._pool.run(calls)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Accept every reference: only the function can read them."""
        del references
        return {}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the references without change; the function may expect another form of response."""
        return TrialResponses(reference, others, certain=False)


def _load_advice(function: str, problem: str) -> str:
    """Return the fix of a function that cannot be loaded: install what it imports, or name it in another way."""
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", problem)
    if missing and missing[1] != re.split(r"[.:]", function)[0]:
        return f"install the package that it imports (pip install {missing[1]}, unless the package has another name)"
    return "give package.module:function, importable from the current directory, or path/to/file.py:function"


def _verdict(reply: Reply) -> Verdict:
    if reply.failure:
        return verdict_of(reply.failure, seconds=reply.seconds)
    try:
        correct, score, extracted, reason = _read(
            reply.value if isinstance(reply.value, dict) else {"score": reply.value}
        )
    except ValueError as error:
        return verdict_of(f"{RETURNED} {error}", seconds=reply.seconds)
    return Verdict(correct, score, extracted, reason or (CORRECT if correct else WRONG), reply.seconds)


def _read(value: dict[str, object]) -> tuple[bool, float, str | None, str | None]:
    """Return correct, score, extracted and reason; a ValueError names the problem of the returned value."""
    unknown = [key for key in value if key not in _KEYS]
    if unknown or not ("correct" in value or "score" in value):
        raise ValueError(f"a dict with the keys {', '.join(value)[:200] or 'none'} (allowed: {', '.join(_KEYS)})")
    outcome = value["score"] if "score" in value else value["correct"]
    if not isinstance(outcome, bool | int | float):
        raise ValueError(f"{type(outcome).__name__}, not a bool, a number from 0 to 1 or a dict")
    if not 0 <= outcome <= 1:  # nor NaN
        raise ValueError(f"{str(outcome)[:40]}, not a number from 0 to 1")
    correct = value.get("correct", outcome >= 1)
    if not isinstance(correct, bool):
        raise ValueError(f"correct of type {type(correct).__name__}, not bool")
    extracted, reason = (_text(value, key) for key in ("extracted", "reason"))
    if reason is not None and is_unverified(reason) and (correct or outcome):
        raise ValueError(f"the reason {reason!r}, which needs the outcome 0 and not correct")
    return correct, float(outcome), extracted, reason


def _text(value: dict[str, object], key: str) -> str | None:
    text = value.get(key)
    if not isinstance(text, str | None):
        raise ValueError(f"{key} of type {type(text).__name__}, not str")
    return text
