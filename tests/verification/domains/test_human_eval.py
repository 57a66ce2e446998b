"""Rows of HumanEval whose prompt defines another function first, in real sandboxed processes.

The rows have the shape of HumanEval/32, /38 and /50: the answer is the last function of the prompt, and the test code
calls the other one.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brorl.prompts.code_tests import CodeTests
from brorl.prompts.prompt import Prompt
from brorl.prompts.public_data import LAYOUTS
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.verifier import try_verifier

pytestmark = pytest.mark.linux

POLY, CYCLIC, SHIFT = map(json.loads, Path(__file__).with_name("human_eval.jsonl").read_text("utf-8").splitlines())
ROWS = {row["entry_point"]: row for row in (POLY, CYCLIC, SHIFT)}


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    with ProgramPool(2) as pool:
        yield CodeVerifier(pool, timeout_s=10.0)


def read(row: dict[str, Any]) -> Prompt:
    fields = LAYOUTS["humaneval"].question(row, 0)
    return Prompt(row["task_id"], fields.text, (1,), fields.reference, "code")


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_answer_and_the_test_code_find_the_other_function(verifier: CodeVerifier, row: dict[str, Any]) -> None:
    prompt = read(row)
    assert verifier.check_references([prompt.reference]) == {}
    trial = try_verifier(verifier, [prompt])
    assert trial.certain
    assert trial.right_verdict.correct
    assert not trial.wrong_verdict.correct
    signature = row["prompt"][row["prompt"].index(f"def {row['entry_point']}(") :]
    alone = f"```python\n{signature}{row['canonical_solution']}```"  # an answer without the function of the prompt
    wrong = f"```python\n{signature}    return s if 's' in locals() else 0.0\n```"
    right, bad = verifier.verify_all([(prompt, alone), (prompt, wrong)])
    assert right.reason == "correct"
    assert bad.reason == "wrong answer"


@pytest.mark.slow
def test_a_prompt_with_imports_alone_leaves_the_test_code_as_it_is() -> None:
    prompt = "from typing import List\nimport math\n\n\ndef add(x: List[int]) -> int:\n    pass\n"
    row = {**SHIFT, "prompt": prompt, "entry_point": "add"}
    tests = CodeTests.from_text(read(row).reference)
    assert tests.prelude == "from typing import List\nimport math"
    assert tests.tests.code == f"{row['test']}\n\ncheck(candidate)\n"  # type: ignore[union-attr]
