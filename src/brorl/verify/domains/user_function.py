"""Verifier that calls a user's function in killable workers.

In: prompts, responses, and a function by its import path. Out: verdicts. The function is called as
`function(response, reference)`, or `function(response, reference, prompt)` if it takes three arguments, and returns a
bool, a number from 0 to 1, or a dict. What it raises, prints or takes too long for ends in a verdict; a function that
cannot be loaded is an error before training.
"""

from collections.abc import Sequence

from brorl.errors import UserError
from brorl.prompts.prompt import Prompt
from brorl.verify.sandbox.pool import Job, LoadError, Result, WorkerPool
from brorl.verify.verifier import CORRECT, RETURNED, WRONG, Verdict

_KEYS = ("correct", "score", "extracted", "reason")


class FunctionVerifier:
    """Judges responses with a user's function.

    Args:
        pool: Where it runs.
        function: `package.module:function`, also looked for in the current directory, or `path/to/file.py:function`.
        domain: The domain that it judges; only named in errors.
    """

    def __init__(self, pool: WorkerPool, function: str, domain: str) -> None:
        self._pool = pool
        self._function = function
        self._domain = domain
        self._takes_prompt: bool | None = None

    def check(self) -> None:
        """Load the function in a worker, without calling it.

        Raises:
            UserError: If it cannot be loaded, or takes neither two nor three arguments.
        """
        setting = f"verification.functions.{self._domain}"
        try:
            least, most = self._pool.load(self._function)
        except LoadError as error:
            raise UserError(
                f"{setting}: {error}; give package.module:function, importable from the current directory, "
                "or path/to/file.py:function"
            ) from None
        if least > 3 or (most is not None and most < 2):
            arguments = f"{least}" if least == most else f"{least} to {'any number' if most is None else most}"
            raise UserError(
                f"{setting}: {self._function!r} takes {arguments} arguments; "
                "it must take two (response, reference) or three (response, reference, prompt)"
            )
        self._takes_prompt = most is None or most >= 3

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Judge responses.

        Args:
            items: Pairs of a prompt and a response.

        Returns:
            One verdict per pair, in the same order. The reason is the function's own, or `correct` or `wrong answer`;
            `verifier raised ...`, `verifier returned ...`, `timeout`, `out of memory` or `verifier crashed` where it
            failed.

        Raises:
            UserError: If the function cannot be loaded.
        """
        if self._takes_prompt is None:
            self.check()
        jobs = [
            Job(self._function, (response, prompt.reference, *([prompt.text] if self._takes_prompt else [])))
            for prompt, response in items
        ]
        return [_verdict(result) for result in self._pool.run(jobs)]


def _verdict(result: Result) -> Verdict:
    if result.failure:
        return Verdict(False, 0.0, None, result.failure, result.seconds)
    try:
        correct, score, extracted, reason = _read(result.value)
    except ValueError as error:
        return Verdict(False, 0.0, None, f"{RETURNED} {error}", result.seconds)
    return Verdict(correct, score, extracted, reason or (CORRECT if correct else WRONG), result.seconds)


def _read(value: object) -> tuple[bool, float, str | None, str | None]:
    """Return correct, score, extracted and reason; a ValueError says what was wrong with what was returned."""
    if not isinstance(value, dict):
        correct, score = _outcome(value)
        return correct, score, None, None
    unknown = [key for key in value if key not in _KEYS]
    if unknown or not ("correct" in value or "score" in value):
        raise ValueError(f"a dict with the keys {', '.join(value)[:200] or 'none'} (allowed: {', '.join(_KEYS)})")
    correct, score = _outcome(value["score"] if "score" in value else value["correct"])
    if "correct" in value:
        if not isinstance(value["correct"], bool):
            raise ValueError(f"correct of type {type(value['correct']).__name__}, not bool")
        correct = value["correct"]
    extracted, reason = value.get("extracted"), value.get("reason")
    if not (isinstance(extracted, str | None) and isinstance(reason, str | None)):
        raise ValueError("an extracted answer or a reason that is no string")
    return correct, score, extracted, reason


def _outcome(value: object) -> tuple[bool, float]:
    if not isinstance(value, bool | int | float):
        raise ValueError(f"{type(value).__name__}, not a bool, a number from 0 to 1 or a dict")
    if not 0 <= value <= 1:  # nor NaN
        raise ValueError(f"{str(value)[:40]}, not a number from 0 to 1")
    return value >= 1, float(value)
