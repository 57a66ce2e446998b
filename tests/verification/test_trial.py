"""A trial gives a verifier one response that is right and one that is wrong, and tells which verdicts it got."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from brorl.api.check import check_trial
from brorl.errors import UserError
from brorl.prompts.countdown import CountdownPuzzle, countdown_puzzles
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Question
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.domains.math import MathVerifier
from brorl.verification.domains.verifiers import FunctionVerifier
from brorl.verification.sandbox.pool import WorkerPool
from brorl.verification.verifier import check_references, try_verifier


def prompts(domain: str, *references: str) -> list[Prompt]:
    return [Prompt(f"{domain}:{i}", "?", (1,), reference, domain) for i, reference in enumerate(references)]


@pytest.fixture(scope="module")
def pool() -> WorkerPool:
    return WorkerPool(1, 20.0, 1 << 30)


@pytest.mark.parametrize("num_numbers", [1, 2, 3, 4])
def test_every_puzzle_is_solved_as_the_verifier_wants_it(num_numbers: int, rng: np.random.Generator) -> None:
    puzzles = countdown_puzzles(num_numbers, 8, range(1, 50))
    for i in rng.choice(len(puzzles), min(40, len(puzzles)), replace=False):
        puzzle = puzzles[int(i)]
        trial = try_verifier(CountdownVerifier(), prompts("countdown", puzzle.reference))
        assert trial.right_verdict.correct, (puzzle, trial.right)
        assert not trial.wrong_verdict.correct, (puzzle, trial.wrong)


def test_a_puzzle_without_a_solution_has_none() -> None:
    assert CountdownPuzzle((1, 1), 50).solution is None


@pytest.mark.parametrize(
    ("reference", "others"),
    [("28", ["28", "31"]), ("\\frac{1}{2}", ["0.5", "1/2", "3"]), ("B", ["C"]), ("7", []), ("\\boxed{9}", ["10"])],
)
def test_mathematical_answers(reference: str, others: list[str], pool: WorkerPool) -> None:
    trial = try_verifier(MathVerifier(pool), prompts("math", reference, *others))
    assert trial.right_verdict.correct
    assert not trial.wrong_verdict.correct  # equal answers of other prompts are passed over
    check_trial(trial)


def test_a_reference_that_nothing_equals_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(
        UserError, match=r"question math:0: a response with the reference answer, .* fix the row's answer"
    ):
        check_trial(try_verifier(MathVerifier(pool), prompts("math", "\\\\", "4")))


def test_functions_of_the_user(pool: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "checks.py"
    file.write_text(
        "def same(response, reference):\n    return response == reference\n"
        "def strict(response, reference):\n    return response == f'<{reference}>'\n"
        "def fails(response, reference):\n    return 1 / (response != 'b')\n"
    )
    asked = prompts("mine", "a", "a", "b")
    trials = {
        name: try_verifier(FunctionVerifier(pool, f"{file}:{name}", "mine"), asked)
        for name in ("same", "strict", "fails")
    }
    same, strict = trials["same"], trials["strict"]
    assert (same.right, same.right_verdict.correct) == ("a", True)
    assert (same.wrong, same.wrong_verdict.correct) == ("b", False)
    assert not strict.right_verdict.correct
    check_trial(same)
    check_trial(strict)  # it may want more than the reference answer
    with pytest.raises(
        UserError, match="failed on the response `b` to question mine:0: verifier raised ZeroDivisionError"
    ):
        check_trial(trials["fails"])


class Unreadable:
    """A verifier that can read no reference."""

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(references, "has malformed tests")


@pytest.mark.parametrize(
    ("domain", "before", "is_part"),
    [("code", "", False), ("gym", "", False), ("ifeval", "", False), ("science", '{"answer": ', False),
     ("mine", '{"a": ', False), ("science", "The answer is ", True), ("math", "{1, ", True), ("math", "", True),
     ("science", "", True), ("mine", "", True)],
)  # fmt: skip
def test_the_advice_on_references_fits_the_domain(domain: str, before: str, is_part: bool) -> None:
    """JSON text, which a set of mathematics is not, is never the last part of an answer."""
    for number, counted in ((1, "1 such answer)"), (3, "3 such answers)")):
        questions = [Question(f"rows:{place}", "?", f"{before}{place}", domain) for place in range(number)]
        with pytest.raises(UserError, match="has malformed tests") as error:
            check_references({domain: Unreadable()}, questions)  # type: ignore[dict-item]
        assert counted in str(error.value)
        assert "verification.functions" in str(error.value)
        assert ("set `answer_after` to the text before the answer" in str(error.value)) == is_part
        assert ("`layout`" in str(error.value)) == (not is_part)
