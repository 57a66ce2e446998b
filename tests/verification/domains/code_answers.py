"""Answers to programming questions, for the tests of the verifier of programs."""

from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import CODE_DOMAIN
from brorl.verdict import Verdict
from brorl.verification.domains.code import CodeVerifier

Tests = StdinCases | CallCases | TestCode
SUMS = StdinCases(("1 2\n", "3 4\n", "-1 1\n"), ("3\n", "7\n", "0\n"))
CALLS = CallCases("add", ((1, 2), (3, 4), (-1, 1)), (3, 7, 0))
PARSED = TestCode("add", "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7\n"
                         "    assert candidate(-1, 1) == 0\n\ncheck(candidate)\n")  # fmt: skip
# Not parsed: the expected values are computed, in a process without the answer.
OUTSIDE = TestCode("add", "for a, b in [(1, 2), (3, 4), (-1, 1)]:\n    assert add(a, b) == a + b, 'no'\n")
FUNCTIONS = {"calls": CALLS, "parsed": PARSED, "outside": OUTSIDE}
KINDS = {"stdin": SUMS, **FUNCTIONS}


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
