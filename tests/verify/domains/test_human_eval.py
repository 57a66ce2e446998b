"""Rows of HumanEval whose prompt defines another function first, in real sandboxed processes.

The rows have the shape of HumanEval/32, /38 and /50: the answer is the last function of the prompt, and the test code
calls the other one.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from brorl.prompts.code_tests import CodeTests
from brorl.prompts.layouts.table import LAYOUTS
from brorl.prompts.prompt import Prompt
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.trial import try_verifier

pytestmark = pytest.mark.linux

POLY = {
    "task_id": "HumanEval/32",
    "prompt": '''import math


def poly(xs: list, x: float):
    """
    Evaluates the polynomial with coefficients xs at the point x.
    """
    return sum([c * math.pow(x, i) for i, c in enumerate(xs)])


def find_zero(xs: list):
    """ Finds one zero of the polynomial with coefficients xs.
    >>> round(find_zero([1, 2]), 2) # f(x) = 1 + 2x
    -0.5
    """
''',
    "entry_point": "find_zero",
    "canonical_solution": """    begin, end = -1., 1.
    while poly(xs, begin) * poly(xs, end) > 0:
        begin *= 2.0
        end *= 2.0
    while end - begin > 1e-10:
        center = (begin + end) / 2.0
        if poly(xs, center) * poly(xs, begin) > 0:
            begin = center
        else:
            end = center
    return begin
""",
    "test": """

METADATA = {}


def check(candidate):
    import math
    import random
    rng = random.Random(7)
    import copy
    for _ in range(20):
        coeffs = []
        for _ in range(2 * rng.randint(1, 3)):
            coeffs.append(rng.randint(-9, 9) or 1)
        solution = candidate(copy.deepcopy(coeffs))
        assert math.fabs(poly(coeffs, solution)) < 1e-4

""",
}
CYCLIC = {
    "task_id": "HumanEval/38",
    "prompt": '''

def encode_cyclic(s: str):
    """
    returns s with each group of three characters cycled.
    """
    groups = [s[(3 * i):min((3 * i + 3), len(s))] for i in range((len(s) + 2) // 3)]
    groups = [(group[1:] + group[0]) if len(group) == 3 else group for group in groups]
    return "".join(groups)


def decode_cyclic(s: str):
    """
    takes as input a string of encode_cyclic. Returns the decoded string.
    """
''',
    "entry_point": "decode_cyclic",
    "canonical_solution": "    return encode_cyclic(encode_cyclic(s))\n",
    "test": """

METADATA = {}


def check(candidate):
    from random import randint, choice
    import string

    letters = string.ascii_lowercase
    for _ in range(20):
        str = ''.join(choice(letters) for i in range(randint(10, 20)))
        encoded_str = encode_cyclic(str)
        assert candidate(encoded_str) == str

""",
}
SHIFT = {
    "task_id": "HumanEval/50",
    "prompt": '''

def encode_shift(s: str):
    """
    returns s with every character shifted by 5 in the alphabet.
    """
    return "".join([chr(((ord(ch) + 5 - ord("a")) % 26) + ord("a")) for ch in s])


def decode_shift(s: str):
    """
    takes as input a string of encode_shift. Returns the decoded string.
    """
''',
    "entry_point": "decode_shift",
    "canonical_solution": '    return "".join([chr(((ord(ch) - 5 - ord("a")) % 26) + ord("a")) for ch in s])\n',
    "test": """

METADATA = {}


def check(candidate):
    from random import randint, choice
    import copy
    import string

    letters = string.ascii_lowercase
    for _ in range(20):
        str = ''.join(choice(letters) for i in range(randint(10, 20)))
        encoded_str = encode_shift(str)
        assert candidate(copy.deepcopy(encoded_str)) == str

""",
}
ROWS = {row["entry_point"]: row for row in (POLY, CYCLIC, SHIFT)}


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    with ProgramPool(2) as pool:
        yield CodeVerifier(pool, timeout_s=10.0)


def read(row: dict[str, Any]) -> Prompt:
    fields = LAYOUTS["humaneval"].read(row, 0)
    return Prompt(row["task_id"], fields.text, (1,), fields.reference, "code")


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_answer_and_the_test_code_find_the_other_function(verifier: CodeVerifier, row: dict[str, Any]) -> None:
    prompt = read(row)
    assert verifier.check_references([prompt.reference]) == {}
    trial = try_verifier(verifier, [prompt])
    assert trial.certain
    assert trial.right.verdict.correct
    assert not trial.wrong.verdict.correct
    signature = row["prompt"][row["prompt"].index(f"def {row['entry_point']}(") :]
    alone = f"```python\n{signature}{row['canonical_solution']}```"  # an answer without the function of the prompt
    wrong = f"```python\n{signature}    return s if 's' in locals() else 0.0\n```"
    right, bad = verifier.verify_all([(prompt, alone), (prompt, wrong)])
    assert right.reason == "correct"
    assert bad.reason == "wrong answer"


def test_a_prompt_with_imports_alone_leaves_the_test_code_as_it_is() -> None:
    prompt = "from typing import List\nimport math\n\n\ndef add(x: List[int]) -> int:\n    pass\n"
    row = {**SHIFT, "prompt": prompt, "entry_point": "add"}
    tests = CodeTests.from_text(read(row).reference)
    assert tests.prelude == "from typing import List\nimport math"
    assert tests.tests.code == f"{row['test']}\n\ncheck(candidate)\n"  # type: ignore[union-attr]
