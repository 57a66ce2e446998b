"""Answers to programming questions, for the tests of the verifier of programs."""

from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.prompt import Prompt
from brorl.verification.domains.code import CODE_DOMAIN, CodeVerifier
from brorl.verification.verifier import Verdict

Tests = StdinCases | CallCases | TestCode


def question_of(tests: Tests | CodeTests, **options: object) -> Prompt:
    """A question with these tests."""
    whole = tests if isinstance(tests, CodeTests) else CodeTests(tests, **options)  # type: ignore[arg-type]
    return Prompt("q", "?", (1,), whole.to_text(), CODE_DOMAIN)


def fenced(code: str) -> str:
    return f"This works:\n```python\n{code}\n```\n"


def verify(verifier: CodeVerifier, question: Prompt | Tests, code: str) -> Verdict:
    """Return the verdict on a program."""
    asked = question if isinstance(question, Prompt) else question_of(question)
    (verdict,) = verifier.verify_all([(asked, fenced(code))])
    return verdict
