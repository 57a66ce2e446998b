"""Each guard rejects the wrong answers that its scorer accepts, and no right one; Reasoning Gym is not needed."""

from typing import Any

from brorl.verification.gym.answers import EVALUATED, GUARDS
from each_row import each_row

EXPLOIT = "__import__('os').system('true')"


def entry(answer: str | None, **metadata: Any) -> dict[str, Any]:
    return {"answer": answer, "metadata": metadata}


INTEGRAL = entry("x**3/3 + C", variable="x", integrand="x**2")
MATRIX = entry("0 1\n1 2")
PUZZLE = entry("4*(9 - 3) + 0", numbers=[4, 9, 3, 0], target=24)
HALF = "2*x**2 + 1"

# By dataset: an entry, answers that pass, and answers that are rejected or cannot be correct.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "binary_matrix": (MATRIX, ["0 1\n1 2", "[[0, 1], [1, 2]]"], [EXPLOIT, "(0).bit_count()", "[[x]]"]),
    "countdown": (
        PUZZLE,
        ["4*(9 - 3) + 0", "(0 + 4) * (9 - 3)"],
        ["24", "4*6", "4*(9-3)", "4*(9 - 3)**0 + 24", "max(4,9)", EXPLOIT, "True", "9" * 5000, "(" * 999],
    ),
    "cryptarithm": (
        entry("A=1,B=2"),
        ["A=1,B=2", "B = 2, A = 1"],
        ["A=3,B=2,A=1", "A=1,B=2, A=1", "A=1,B=2,C=3", "A=1"],
    ),
    "intermediate_integration": (
        INTEGRAL,
        ["x**3/3 + C", "(x**3 + 1.5)/3", "exp(x)*sin(2*x) - log(x)/pi"],
        ["Integral(x**2, x)", "integrate(x**2, x)", EXPLOIT, "x.diff()", "1 .real", "x.__class__", "lambda: x", "y"],
    ),
    "jugs": (
        entry('["fill A"]'),
        ['["fill A", "pour A->B"]', "[]"],
        ['["fill A or B"]', '["fill A", "pour A->B and stop"]', "fill A", '"fill A"', "[1]", "["],
    ),
    "kakurasu": (entry("1 0\n0 1"), ["1 0\n0 1", "[1, 0]\n[0, 1]"], ["1 0\n0 1 or", "2 1 0\n0 1", "x"]),
    "n_queens": (entry("Q _\n_ Q"), ["Q _\n_ Q", "[['Q', '_'], ['_', 'Q']]"], [EXPLOIT, "print(Q)", "Q.x"]),
    "polynomial_multiplication": (
        entry(HALF),
        [HALF, "1 + x**2*2"],
        ["expand((x + 1)*(2*x - 1))", EXPLOIT, "x.y", "2*y**2 + 1", "sympify('1')"],
    ),
    "puzzle24": (PUZZLE, ["4*(9 - 3) + 0"], ["6*4*1*1", "4*6+0*9", "24", "4*(9-3)", EXPLOIT]),
    "quantum_lock": (
        entry("A → C → B"),
        ["A → C → B", "ACB", "a, c, b", "A -> C -> B"],
        ["A → C → B or nothing", "0: A → C → B", "the lock: A"],
    ),
    "rubiks_cube": (entry(None), ["R U' F2 Rw", "R"], ["R U, 1", "R 2U2", "R (U)", "3, R", "R' 17"]),
    "rush_hour": (entry(None), ["F+1 K-2", "F+1, K-2"], ["F+1 or K-2", "F+1K-2", "G-1 not F+1"]),
    "sokoban": (entry("RDL"), ["RDL", " RDLU\n"], ["RDL or UU", "RDL\nUU", "RDL, UU", "RzDL", "rdl UU"]),
    "simple_integration": (INTEGRAL, ["x**3/3 + C"], ["Integral(x**2, x)", EXPLOIT, "E.x", "Derivative(x, x)"]),
    "spell_backward": (entry("olleh"), ["olleh", "OLLEH"], ["olleh world"]),
    "spiral_matrix": (entry("1 2 4 3"), ["1 2 4 3", "[1, 2, 4, 3]"], [EXPLOIT, "range(4)"]),
    "string_insertion": (entry("ABCDA"), ["ABCDA", "['A', 'B']"], [EXPLOIT, "A.B", "A()"]),
    "tower_of_hanoi": (
        entry("Move disk 1 from Peg 1 to Peg 3"),
        ["Move disk 1 from Peg 1 to Peg 3", "1. Move disk 1 from Peg 1 to Peg 2.\n2. Move disk 1 from Peg 2 to Peg 3"],
        [
            "Move disk 1 from Peg 1 to Peg 3 or Move disk 1 from Peg 1 to Peg 2",
            "0/Move disk 1 from Peg 1 to Peg 3",
            "Move disk 1 from Peg 1 to Peg 3 (not 2)",
        ],
    ),
}


def passes(name: str, answer: str, of: dict[str, Any]) -> bool:
    return GUARDS[name].admits(answer, of)


def test_every_guard_is_tested() -> None:
    elsewhere = {"propositional_logic"}  # with Reasoning Gym in test_gym
    assert set(GUARDS) == {*CASES, *elsewhere}
    assert set(CASES) >= EVALUATED


@each_row("name", CASES)
def test_right_answers_pass_and_wrong_ones_do_not(name: str) -> None:
    of, right, wrong = CASES[name]
    assert [answer for answer in right if not passes(name, answer, of)] == []
    assert [answer for answer in wrong if passes(name, answer, of)] == []


@each_row("name", sorted(EVALUATED))
def test_no_answer_that_can_call_or_access_reaches_an_evaluating_scorer(name: str) -> None:
    of = CASES[name][0]
    for answer in (
        EXPLOIT,
        "().__class__",
        "[].sort()",
        "f(1)",
        "x if x else x",
        "lambda: 0",
        "`1`",
        "a:=1",
        "x;x",
        "@",
    ):
        assert not GUARDS[name].admits(answer, of), answer


@each_row("name", CASES)
def test_long_answers_take_linear_time(name: str) -> None:
    """A pattern that backtracks would take hours, and a parser without a bound would raise."""
    of = CASES[name][0]
    for text in (
        "1" * 50_000 + "!",
        "x" * 50_000,
        "1." * 20_000,
        "(" * 50_000,
        "-" * 50_000,
        "[" * 50_000,
        "1e9" * 9999,
    ):
        assert passes(name, text, of) in (True, False)
