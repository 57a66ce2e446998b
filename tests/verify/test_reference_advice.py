"""The error on reference answers that no response can match: its number, and fixes that fit the domain."""

from collections.abc import Sequence

import numpy as np
import pytest

from brorl.errors import UserError
from brorl.prompts.prompt import Question
from brorl.verification.trial import check_references


class Unreadable:
    """A verifier that can read no reference."""

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(references, "has malformed tests")


def message(domain: str, number: int, before: str = "") -> str:
    questions = [Question(f"rows:{place}", "?", f"{before}{place}", domain) for place in range(number)]
    with pytest.raises(UserError) as error:
        check_references({domain: Unreadable()}, questions)  # type: ignore[dict-item]
    return str(error.value)


@pytest.mark.parametrize("domain", ["code", "gym", "ifeval"])
def test_json_text_is_never_the_last_part_of_an_answer(domain: str) -> None:
    found = message(domain, 2)
    assert "has malformed tests" in found
    assert "answer_after" not in found
    assert "data.sources[].layout" in found
    assert "verification.functions" in found


@pytest.mark.parametrize("domain", ["science", "mine"])
def test_a_json_object_of_any_domain_is_never_the_last_part_of_an_answer(domain: str) -> None:
    assert "answer_after" not in message(domain, 2, before='{"answer": ')
    assert "answer_after" in message(domain, 2, before="The answer is ")


def test_a_set_of_math_is_no_json(rng: np.random.Generator) -> None:
    assert "answer_after" in message("math", 2, before=f"{{{rng.integers(9)}, ")


@pytest.mark.parametrize("domain", ["math", "science", "mine"])
def test_other_answers_can_be_the_last_part(domain: str) -> None:
    assert "set data.sources[].answer_after to the text before the answer" in message(domain, 2)


def test_one_answer_is_not_plural() -> None:
    assert "(1 such answer)" in message("math", 1)
    assert "(3 such answers)" in message("math", 3)
