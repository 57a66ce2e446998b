"""The hand-made responses of `examples/domains`: every good one is correct, and every bad one is not."""

from collections import Counter
from collections.abc import Iterator

import pytest
from fuzz import ROOT, questions_of, stored_responses

from brorl.algorithms.settings import RewardShaping
from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.instructions import KINDS, Instructions
from brorl.prompts.prompt import Prompt
from brorl.verification.domains.verifiers import make_verifiers
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings

DOMAINS = ("math", "code", "science", "ifeval")
SLOW = ("code", "gym", "math")
NEEDS = {"ifeval": "langdetect", "gym": "reasoning_gym"}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


@pytest.mark.linux
@pytest.mark.parametrize(
    "domain", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in (*DOMAINS, "gym")]
)
def test_responses_are_verified_as_stored(domain: str, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    if domain in NEEDS:
        pytest.importorskip(NEEDS[domain])
    monkeypatch.chdir(ROOT)
    questions, rows = questions_of(domain), stored_responses(domain)
    prompts = [Prompt(q.id, q.text, (1,), q.reference, q.domain) for q in (questions[row["id"]] for row in rows)]
    assert {prompt.domain for prompt in prompts} == {domain}
    verifier = make_verifiers([domain], VerificationSettings(), RewardShaping(), workers)[domain]
    assert verifier.check_references([prompt.reference for prompt in prompts]) == {}
    verdicts = verifier.verify_all([(p, row["response"]) for p, row in zip(prompts, rows, strict=True)])
    wrong = [
        f"{row['id']} {row['response']!r}: stored as {row['correct']}, verified as {verdict}"
        for row, verdict in zip(rows, verdicts, strict=True)
        if verdict.correct is not row["correct"]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("domain", [*DOMAINS, "gym"])
def test_every_question_has_good_and_bad_responses(domain: str) -> None:
    rows = stored_responses(domain)
    assert len({(row["id"], row["response"]) for row in rows}) == len(rows)
    good, bad = (Counter(row["id"] for row in rows if row["correct"] is correct) for correct in (True, False))
    assert len(good) == 50
    assert set(bad) == set(good)
    assert min(bad.values()) >= 3


@pytest.mark.slow
def test_the_questions_cover_their_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    questions = questions_of("math")
    by_domain = Counter(question.domain for question in questions.values())
    assert by_domain == dict.fromkeys(DOMAINS, 50)
    assert len({question.words for question in questions.values()}) == 200
    references = {domain: [q.reference for q in questions.values() if q.domain == domain] for domain in DOMAINS}
    tests = Counter(type(CodeTests.from_text(reference).tests) for reference in references["code"])
    assert set(tests) == {StdinCases, CallCases, TestCode}
    assert min(tests.values()) >= 10
    kinds = {
        instruction.kind for text in references["ifeval"] for instruction in Instructions.from_text(text).instructions
    }
    assert kinds == set(KINDS)
