"""What programs can use without an import, and which values count as a list: in real sandboxed processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from code_answers import fenced, question_of

from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from brorl.prompts.layouts.code import PRELUDE
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.domains.code_judges import imports, module
from brorl.verification.sandbox.pool import ProgramPool

pytestmark = pytest.mark.linux


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    with ProgramPool(2) as pool:
        yield CodeVerifier(pool, timeout_s=10.0)


def reasons(verifier: CodeVerifier, pairs: list[tuple[CodeTests, str]]) -> list[str]:
    items = [(question_of(tests), fenced(code)) for tests, code in pairs]
    return [verdict.reason for verdict in verifier.verify_all(items)]


def test_programs_can_use_what_the_usual_judges_import(verifier: CodeVerifier) -> None:
    call = CodeTests(CallCases("f", (([4, 9],),), (2,)))
    program = CodeTests(StdinCases(("4 9\n",), ("2\n",)))
    codes = [
        "def f(x: List[int]) -> Optional[int]:\n    return int(math.sqrt(x[0]))",
        "def f(x):\n    return isqrt(x[0])",
        "def f(x):\n    heap = list(x)\n    heapq.heapify(heap)\n    return Counter(x)[heappop(heap)] + 1",
        "def f(x):\n    return int(statistics.median([1, 2, 3]))",
        "@lru_cache(None)\ndef g(n):\n    return 0 if n == 0 else 1 + g(n - 1)\ndef f(x):\n    return g(20000) - 19998",
        "from __future__ import annotations\ndef f(x: Unknown) -> List[int]:\n    return len(x)",
        "def f(x):\n    return pow(x[0], 3, 31)",  # the built-in one, not that of math
        "class Solution:\n    def f(self, x: List[int]) -> int:\n        return bisect_left(x, 9) + 1",
    ]
    pairs = [(call, code) for code in codes]
    pairs += [(program, "print(sqrt(int(stdin.readline().split()[0])).__trunc__())")]
    pairs += [(program, "values = [int(x) for x in sys.stdin.read().split()]\nprint(len(values))")]
    assert reasons(verifier, pairs) == ["correct"] * len(pairs)


@pytest.mark.parametrize("prelude", ["", PRELUDE])
@pytest.mark.parametrize("name", ["add", "gcd", "sum", "sorted", "reduce"])
def test_an_imported_function_is_not_the_answer(verifier: CodeVerifier, name: str, prelude: str) -> None:
    """`operator.add` would pass these tests without an answer."""
    arguments, expected = {"add": ([1, 2], 3), "gcd": ([4, 6], 2), "sum": ([[1, 2]], 3), "sorted": ([[2, 1]], [1, 2]),
                           "reduce": ([1, 2], 3)}[name]  # fmt: skip
    tests = CodeTests(CallCases(name, (tuple(arguments),), (expected,)), prelude=prelude)
    empty, own = f"x = {name!r}  # {name}", f"def {name}(*arguments):\n    return {expected!r}"
    assert reasons(verifier, [(tests, empty), (tests, own)]) == ["raised NameError", "correct"]


def test_test_code_gets_no_imports(verifier: CodeVerifier) -> None:
    """As in EvalPlus."""
    tests = CodeTests(TestCode("f", "assert f(4) == 2"))
    assert reasons(verifier, [(tests, "def f(x):\n    return math.isqrt(x)")]) == ["raised NameError"]
    assert module(tests, "x = 1") == "x = 1"


def test_imports_are_those_that_the_names_have_in_a_module_with_all_of_them() -> None:
    """Independently of the table: the same names after `from ... import *` of every module, in order."""
    names = [name for name in imports() if name not in ("string", "re")]
    modules = ["string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
               "itertools", "functools", "operator", "io", "sys", "json"]  # fmt: skip
    stars = "\n".join(f"from {name} import *" for name in [*modules, "builtins", "typing"])
    everything: dict[str, object] = {}
    exec(f"{stars}\nimport {', '.join(modules)}", everything)
    for name in names:
        alone: dict[str, object] = {}
        exec(imports()[name], alone)
        assert alone[name] is everything[name], name


def test_long_integers_can_be_printed(verifier: CodeVerifier) -> None:
    digits = "7" * 20_000
    tests = CodeTests(StdinCases((f"{digits}\n",), (f"{digits}\n",)))
    assert reasons(verifier, [(tests, "print(int(input()))")]) == ["correct"]


ONE_TO_THREE = CodeTests(CallCases("f", ((),), ([1, 2, 3],)))
VALUES = [
    "dict(a=1, b=2, c=3).values()", "{1: 0, 2: 0, 3: 0}.keys()", "{1: 0, 2: 0, 3: 0}", "map(int, '123')", "range(1, 4)",
    "filter(None, [1, 0, 2, 3])", "(x for x in (1, 2, 3))", "reversed([3, 2, 1])", "deque([1, 2, 3])",
    "itertools.chain([1], [2, 3])", "__import__('array').array('i', [1, 2, 3])", "iter([1, 2, 3])", "{1, 2, 3}",
    "'123'", "range(3)", "itertools.count(1)",
]  # fmt: skip


def test_the_elements_of_iterables_are_lists_where_values_are_json(verifier: CodeVerifier) -> None:
    value_reasons = reasons(verifier, [(ONE_TO_THREE, f"def f():\n    return {value}") for value in VALUES])
    right = {value for value, reason in zip(VALUES, value_reasons, strict=True) if reason == "correct"}
    assert right == {*VALUES} - {"{1: 0, 2: 0, 3: 0}", "{1, 2, 3}", "'123'", "range(3)", "itertools.count(1)"}
    pairs = CodeTests(CallCases("f", ((),), ([["a", 1], [2, 3]],)))
    nested = "def f():\n    return [*dict(a=1).items(), map(int, '23')]"
    assert reasons(verifier, [(pairs, nested)]) == ["correct"]


@pytest.mark.slow
def test_they_are_no_lists_where_python_compares(verifier: CodeVerifier) -> None:
    tests = CodeTests(TestCode("f", "assert f() == [1, 2, 3]"))
    assert reasons(verifier, [(tests, "def f():\n    return range(1, 4)")]) == ["wrong answer"]
