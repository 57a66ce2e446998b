"""Scientific answers: numbers with units against exact fractions, and chemistry by hand."""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from brorl.prompts.prompt import Prompt
from brorl.prompts.science import Choices, MeasuredAnswer
from brorl.verdict import Verdict
from brorl.verification.domains.science import ScienceVerifier, same_chemistry
from brorl.verification.sandbox.pool import WorkerPool
from case_tables import table
from each_row import each_row

CHOICES = Choices(("helium", "neon", "argon", "krypton"), 1)
GRAVITY = MeasuredAnswer("9.81 m/s^2", 0.05).to_text()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, 8.0) as pool:
        yield pool


def verify(pool: WorkerPool, *pairs: tuple[str, str]) -> list[Verdict]:
    items = [(Prompt(str(at), "?", (1,), reference, "science"), answer) for at, (reference, answer) in enumerate(pairs)]
    return ScienceVerifier(pool).verify_all(items)


def test_empty_and_long_answers_are_wrong(pool: WorkerPool) -> None:
    verdicts = verify(pool, *(("5", response) for response in ("", r"\boxed{}", r"\boxed{" + "5" * 2001 + "}")))
    assert [verdict.reason for verdict in verdicts] == ["no answer", "no answer", "answer too long"]


def test_aliases_are_right_too(pool: WorkerPool) -> None:
    city = MeasuredAnswer.of_aliases("New York City", ["NYC", "The Big Apple", "new york", 7, "New York City"])
    assert MeasuredAnswer.of_aliases("a", None).to_text() == MeasuredAnswer("a").to_text()
    answers = ["New York City", "NYC", "the big apple", "New York", "Boston", "7"]
    verdicts = verify(pool, *((city.to_text(), f"\\boxed{{{answer}}}") for answer in answers))
    assert [verdict.correct for verdict in verdicts] == [True] * 4 + [False] * 2


def test_tolerance_against_fractions(pool: WorkerPool, rng: np.random.Generator) -> None:
    pairs, expected = [], []
    for _ in range(300):
        right = Fraction(int(rng.integers(-(10**6), 10**6)), 10 ** int(rng.integers(0, 9)))
        given = right * (1 + Fraction(int(rng.integers(-100, 100)), 1000))
        tolerance = float(rng.choice([0.01, 0.02, 0.05]))
        prefix, factor = [("", 1), ("k", 1000), ("m", Fraction(1, 1000)), ("c", Fraction(1, 100))][int(rng.integers(4))]
        digits, scaled = f"{float(right):.12e}", given / factor
        pairs.append((MeasuredAnswer(f"{digits} m", tolerance).to_text(), f"\\boxed{{{float(scaled):.15e} {prefix}m}}"))
        shown = Fraction(f"{float(scaled):.15e}") * factor
        expected.append(abs(shown - Fraction(digits)) <= Fraction(tolerance) * abs(Fraction(digits)))
    assert [verdict.correct for verdict in verify(pool, *pairs)] == expected
    assert len(set(expected)) == 2


@pytest.mark.usefixtures("no_own_time")
def test_equal_calls_are_made_once_and_kept_in_order(pool: WorkerPool) -> None:
    pairs = [("x+1", r"\boxed{1+x}"), (CHOICES.to_text(), "B"), ("x+1", r"\boxed{x+2}"), ("x+1", r"\boxed{1+x}")]
    verifier = ScienceVerifier(pool)
    items = [(Prompt("q", "?", (1,), reference, "science"), answer) for reference, answer in (*pairs, ("5 m", ""))]
    first, again = verifier.verify_all(items), verifier.verify_all(items)
    assert [v.correct for v in first] == [v.correct for v in again] == [True, True, False, True, False]
    assert first[0].seconds > 0
    assert [v.seconds for v in (first[3], *again)] == [0.0] * 6


def test_bad_references_are_found_before_training(pool: WorkerPool) -> None:
    bad = {
        '{"options": ["a"], "answer": "A"}': "has 1 options",
        '{"options": ["a", "b"], "answer": "C"}': "not the letter of an option",
        '{"a": 1}': "has no options",
        '{"value": "5 m", "tolerance": 2}': "not between 0 and 0.5",
        r"\frac{1}{": "cannot be read",
    }
    good = [CHOICES.to_text(), GRAVITY, "5 m", "x^2", r"\sqrt{2}\ \text{m}", "7"]
    problems = ScienceVerifier(pool).check_references([*good, *bad])
    assert list(problems) == list(bad)
    assert all(problem in problems[reference] for reference, problem in bad.items())


@pytest.mark.parametrize("reference", [CHOICES.to_text(), GRAVITY, "5 m", "x^2"])
def test_trial_responses(pool: WorkerPool, reference: str) -> None:
    made = ScienceVerifier(pool).trial_responses(reference, ["7 kg", "x^3"])
    right, *wrong = verify(pool, (reference, made.right), *((reference, response) for response in made.wrong))
    assert made.certain
    assert right.correct
    assert wrong
    assert not any(verdict.correct for verdict in wrong)


@each_row(*table(__file__, "the_same_in_other_notation"))
def test_the_same_in_other_notation(reference: str, answer: str) -> None:
    assert same_chemistry(reference, answer) is True


@each_row(*table(__file__, "others"))
def test_others(reference: str, answer: str) -> None:
    assert same_chemistry(reference, answer) is False


@pytest.mark.slow
@each_row(*table(__file__, "letters_of_physics_are_no_chemistry"))
def test_letters_of_physics_are_no_chemistry(reference: str) -> None:
    assert same_chemistry(reference, reference) is None
