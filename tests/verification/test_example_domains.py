"""The hand-made responses of `examples/domains`: every good one is correct, and every bad one is not."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from brorl.algorithms.settings import RewardShaping
from brorl.config.reading import make_config, read_recipe
from brorl.evaluation.questions import build_questions
from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.instructions import KINDS, Instructions
from brorl.prompts.prompt import Prompt, Question
from brorl.verification.domains.table import make_verifiers
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "domains"
DOMAINS = ("math", "code", "science", "ifeval")


def stored(domain: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (FOLDER / "responses" / f"{domain}.jsonl").read_text("utf-8").splitlines()]


def questions_of(recipe: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Question]:
    """Return the questions of a recipe by id."""
    monkeypatch.chdir(ROOT)
    path = str(FOLDER / recipe)
    sources = build_questions(make_config(read_recipe(path), {}, path))
    return {question.id: question for source in sources for question in (*source.train, *source.held_out)}


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Question]:
    return questions_of("recipe.yaml", monkeypatch)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


def check(domain: str, questions: dict[str, Question], workers: Workers) -> None:
    """Verify the stored responses and compare the verdicts."""
    rows = stored(domain)
    prompts = [Prompt(q.id, q.text, (1,), q.reference, q.domain) for q in (questions[str(row["id"])] for row in rows)]
    assert {prompt.domain for prompt in prompts} == {domain}
    verifier = make_verifiers([domain], VerificationSettings(), RewardShaping(), workers)[domain]
    assert verifier.check_references([prompt.reference for prompt in prompts]) == {}
    verdicts = verifier.verify_all([(p, str(row["response"])) for p, row in zip(prompts, rows, strict=True)])
    wrong = [
        f"{row['id']} {row['response']!r}: stored as {row['correct']}, verified as {verdict}"
        for row, verdict in zip(rows, verdicts, strict=True)
        if verdict.correct is not row["correct"]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("domain", [pytest.param("math", marks=pytest.mark.slow), "science"])
def test_answers_are_verified_as_stored(domain: str, questions: dict[str, Question], workers: Workers) -> None:
    check(domain, questions, workers)


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.slow
def test_programs_are_verified_as_stored(questions: dict[str, Question], workers: Workers) -> None:
    check("code", questions, workers)


def test_texts_are_verified_as_stored(questions: dict[str, Question], workers: Workers) -> None:
    pytest.importorskip("langdetect")
    check("ifeval", questions, workers)


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.slow
def test_answers_of_reasoning_gym_are_verified_as_stored(monkeypatch: pytest.MonkeyPatch, workers: Workers) -> None:
    pytest.importorskip("reasoning_gym")
    questions = questions_of("gym.yaml", monkeypatch)
    assert len(questions) == 50
    check("gym", questions, workers)


@pytest.mark.parametrize("domain", [*DOMAINS, "gym"])
def test_every_question_has_good_and_bad_responses(domain: str) -> None:
    rows = stored(domain)
    assert len({(row["id"], row["response"]) for row in rows}) == len(rows)
    good, bad = (Counter(row["id"] for row in rows if row["correct"] is correct) for correct in (True, False))
    assert len(good) == 50
    assert set(bad) == set(good)
    assert min(bad.values()) >= 3


def test_the_questions_cover_their_domains(questions: dict[str, Question]) -> None:
    by_domain = Counter(question.domain for question in questions.values())
    assert by_domain == dict.fromkeys(DOMAINS, 50)
    assert len({question.words for question in questions.values()}) == 200
    references = {domain: [q.reference for q in questions.values() if q.domain == domain] for domain in DOMAINS}
    tests = Counter(type(CodeTests.from_text(reference).tests) for reference in references["code"])
    assert set(tests) == {StdinCases, CallCases, TestCode}
    assert min(tests.values()) >= 10
    kinds = {one.kind for text in references["ifeval"] for one in Instructions.from_text(text).instructions}
    assert kinds == set(KINDS)
