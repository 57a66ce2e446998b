"""Mathematical answers: against math-verify called here, and against inputs made to hang a verifier."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from math_verify import parse, verify
from nasty_answers import RESPONSES, boxed

from brorl import verdict as reasons
from brorl.prompts.prompt import Prompt
from brorl.verification.domains.math import SEVERAL_ANSWERS, MathVerifier, verify_by_form
from brorl.verification.sandbox.pool import VerifierCall, WorkerPool
from brorl.verification.sandbox.request import Reply
from each_row import each_row


class CountingPool(WorkerPool):
    """Remembers what it was asked."""

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        super().__init__(num_workers, timeout_s)
        self.asked: list[object] = []

    def map(self, function: str, items: Sequence[object], *rest: object, at_once: int = 32) -> list[Reply]:
        self.asked += items
        return super().map(function, items, *rest, at_once=at_once)


@pytest.fixture(scope="module")
def pool() -> Iterator[CountingPool]:
    with CountingPool(2, 4.0) as pool:
        yield pool


def question(reference: str) -> Prompt:
    return Prompt(reference, "?", (1,), reference, "math")


def agrees(reference: str, answer: str) -> bool:
    """What math-verify says by itself."""
    gold, given = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return bool(verify(gold, given, timeout_seconds=None))


class TestForm:
    """What is decided here without math-verify must be what math-verify decides."""

    def pairs(self, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
        written = ["{}", "-{}", "0{}", "+{}", "{}.0", "{},000", "{}%", r"{}\%", r"{}^\circ", r"\frac{{{}}}{{1}}",
                   "{} cm", r"{}\text{{ apples}}", "({})", "{}/1", "{}.", r"\${}", "{}e0", "--{}", "{}_10",
                   "{},{}"]  # fmt: skip
        symbols = ["x", "x+1", r"\pi", "(1,2)", r"\{1,2\}", "[0,1)", r"\frac{1}{2}", "0.5", r"\text{yes}", "no",
                   "1:2", r"\sqrt{2}", "x=3", r"\infty", r"\emptyset", r"\frac{1}{0}", "i", "e", "", " ", "-",
                   "."]  # fmt: skip
        choices = ["A", "B", "C", "D", "E", "J", "a", "e", "j", "(A)", "(E)", "(b)", r"\text{A}", r"\text{(C)}",
                   r"\textbf{(B)}", r"\mathrm{D}", r"\text{E}", "K", "AB", "A+B", "2", "x"]  # fmt: skip
        digits = [str(rng.integers(0, 10 ** int(rng.integers(1, 19)))) for _ in range(4)] + ["0", "7", "10", "-3"]
        for _ in range(180):
            one, other = rng.choice(digits, size=2)
            other = one if rng.random() < 0.4 else other
            yield str(rng.choice(written[:2])).format(one, one), str(rng.choice(written)).format(other, other)
        for _ in range(100):
            yield str(rng.choice(choices[:10])), str(rng.choice(choices))
        for _ in range(80):
            reference = str(rng.choice(symbols))
            yield reference, reference if rng.random() < 0.5 else str(rng.choice(symbols + digits))
        letters = [*"abcdeghijklmopqrstuxyzABCDEFGHIJNOPQXZ"]
        for word in ("pi", "lne", "oo", "nan", "ten", "Ii", "exp", "xII", *(
            "".join(rng.choice(letters, int(rng.integers(1, 6)))) for _ in range(20)
        )):  # fmt: skip
            yield str(rng.choice(["0", "1", "-1", "14"])), word

    @pytest.mark.slow
    def test_it_agrees_with_math_verify(self, rng: np.random.Generator) -> None:
        decided = {True: 0, False: 0}
        for reference, answer in self.pairs(rng):
            verdict = verify_by_form(reference, answer)
            if verdict is None:
                continue
            decided[verdict.correct] += 1
            assert verdict.correct == agrees(reference, answer), (reference, answer)
            assert verdict.reason == ("correct" if verdict.correct else "wrong answer")
            assert (verdict.extracted, verdict.score) == (answer, float(verdict.correct))
        assert decided[True] > 30
        assert decided[False] > 30

    @each_row(
        ("reference", "answer"),
        [("3", "3.0"), ("1000", "1,000"), ("7", "07"), ("0", "-0"), ("3", "\u0663"), ("50", "50%"), ("x", "y"),
         ("3", "3 cm"), ("1/2", "0.5"), ("C", "AC"), ("C", "the C"), ("c", "C"), ("10" * 10, "11" * 10), (".", "."),
         ("A", r"A = \pi r^2"), ("A", "A triangle"), ("F", "F(x)"), ("-1", "II"), ("1", "i"), ("3", "x y")],
    )  # fmt: skip
    def test_what_it_leaves_to_a_worker(self, reference: str, answer: str) -> None:
        assert verify_by_form(reference, answer) is None

    @each_row(
        ("answer", "correct"),
        [("C", True), ("(C)", True), ("(C) 12", True), ("C. twelve", True), ("C: 12", True), ("c)", True),
         (r"\text{C}", True), (r"\text{C. twelve}", True), (r"\textbf{(C) }12", True), (r"\mathbf{C}", True),
         ("D", False), ("(A) C", False), (r"\text{(E)}", False)],
    )  # fmt: skip
    def test_a_choice_may_be_followed_by_its_text(self, answer: str, correct: bool) -> None:
        verdict = verify_by_form("C", answer)
        assert verdict is not None
        assert verdict.correct is correct


def test_workers_find_the_values_that_math_verify_finds(pool: CountingPool, rng: np.random.Generator) -> None:
    """Random fractions, roots and products in several spellings, half of them equal to their reference.

    Roots and products equal to a fraction are the exception: math-verify accepts them.
    """
    items, expected = [], []
    for _ in range(20):
        a, b, k = (int(n) for n in rng.integers(2, 9, size=3))
        c = b if rng.random() < 0.5 else b + 1
        spellings = [rf"\frac{{{a * k}}}{{{c * k}}}", f"{a}/{c}", rf"\sqrt{{\frac{{{a * a}}}{{{c * c}}}}}",
                     rf"{a} \cdot {c}^{{-1}}"]  # fmt: skip
        spelling = int(rng.integers(len(spellings)))
        items.append((question(rf"\frac{{{a}}}{{{b}}}"), boxed(spellings[spelling])))
        is_evaluated = spelling < 2 or a % b == 0  # a reference such as 6/3 has an operation itself
        expected.append("wrong answer" if c != b else "correct" if is_evaluated else "not evaluated")
        assert agrees(items[-1][0].reference, spellings[spelling]) is (c == b)
    verdicts = MathVerifier(pool).verify_all(items)
    assert [verdict.reason for verdict in verdicts] == expected


def test_three_digits_of_a_small_number_are_enough(pool: CountingPool, rng: np.random.Generator) -> None:
    """Python's rounding to three digits is right in both directions; two units of the third digit more are wrong."""
    items, expected = [], []
    pairs = [(r"\frac{1}{7776}", "0.000129"), (r"\frac{1}{9000}", "0.000111"), ("0.00012345", "0.000123"),
             (r"\frac{1}{80129}", "0.0000125")]  # fmt: skip
    wrong = [(r"1.6 \times 10^{-19}", r"1.7 \times 10^{-19}"), ("0.000900", "0.000904"), ("0.0005", "-0.0005")]
    for divisor in [1_001, 10_015, *rng.integers(1_001, 10_000_000, 30).tolist()]:
        mantissa, power = f"{1 / divisor:.2e}".split("e")
        pairs.append((rf"\frac{{1}}{{{divisor}}}", rf"{mantissa} \times 10^{{{int(power)}}}"))
        digits = int(mantissa.replace(".", "")) + int(rng.choice([-1, 1]) * rng.integers(2, 50))
        wrong.append((pairs[-1][0], rf"{digits / 100:.2f} \times 10^{{{int(power)}}}"))
    for reference, answer in pairs:
        items += [(question(reference), boxed(answer)), (question(answer), boxed(reference))]
        expected += [True, True]
    items += [(question(reference), boxed(answer)) for reference, answer in wrong]
    expected += [False] * len(wrong)
    verdicts = MathVerifier(pool).verify_all(items)
    assert [verdict.correct for verdict in verdicts] == expected


def test_what_a_busy_machine_did_is_not_remembered(pool: CountingPool) -> None:
    """A worker that was killed from outside says nothing about the answer: it is asked again, also for references."""

    class BusyOnce(WorkerPool):
        def __init__(self) -> None:
            super().__init__(1, pool.timeout_s)
            self.runs = 0

        def run(self, calls: list[VerifierCall]) -> list[Reply]:  # type: ignore[override]
            self.runs += 1
            return [Reply(None, reasons.TIMEOUT, 1.0) for _ in calls] if self.runs == 1 else pool.run(calls)

    verifier = MathVerifier(BusyOnce())
    verdicts = [verifier.verify_all([(question("1/2"), boxed("0.50"))])[0] for _ in range(2)]
    assert [(v.correct, v.reason) for v in verdicts] == [(False, reasons.TIMEOUT), (True, reasons.CORRECT)]
    assert MathVerifier(BusyOnce()).check_references([r"\frac{1}{7}"]) == {}


@pytest.mark.usefixtures("no_own_time")
def test_each_pair_of_reference_and_answer_is_compared_once(pool: CountingPool) -> None:
    """However the responses around the answer differ; a remembered verdict took no time."""
    verifier = MathVerifier(pool, cache_size=3)
    first_questions = [question("1/2"), question("1/2"), question("1/3")]
    asked = len(pool.asked)
    verdicts = verifier.verify_all(
        [(q, f"{text}{boxed('0.5')}") for q, text in zip(first_questions, ["a ", "b ", ""], strict=True)]
    )
    assert [verdict.correct for verdict in verdicts] == [True, True, False]
    assert [verdict.seconds > 0 for verdict in verdicts] == [True, False, True]
    assert len(pool.asked) == asked + 2
    again = verifier.verify_all([(question("1/2"), "the answer is 0.5")])
    assert [(v.correct, v.seconds) for v in again] == [(True, 0.0)]
    assert len(pool.asked) == asked + 2
    # Two new pairs push out the pair that was used longest ago, which is 1/3 with 0.5.
    verifier.verify_all([(question("1/2"), boxed("0.25")), (question("1/2"), boxed("0.125"))])
    verifier.verify_all([(question("1/2"), boxed("0.5"))])
    assert len(pool.asked) == asked + 4
    verifier.verify_all([(question("1/3"), boxed("0.5"))])
    assert len(pool.asked) == asked + 5


def test_what_needs_no_worker_asks_none(pool: CountingPool) -> None:
    asked = len(pool.asked)
    items = [("3", boxed("3")), ("3", boxed("4")), ("x", boxed("x")), ("3", "nothing"), ("3", boxed("7" * 2_001))]
    verdicts = MathVerifier(pool).verify_all([(question(reference), text) for reference, text in items])
    assert [verdict.reason for verdict in verdicts] == [
        "correct",
        "wrong answer",
        "correct",
        "no answer",
        reasons.TOO_LONG,
    ]
    assert [verdict.extracted is None for verdict in verdicts] == [False, False, False, True, True]
    assert len(pool.asked) == asked
    assert MathVerifier(pool).verify_all([]) == []


def test_references_that_compare_with_nothing_are_found(pool: CountingPool) -> None:
    good = ["3", "-17", "C", "1/2", r"\frac{1}{2}", r"\boxed{5}", "$x+1$", r"\text{Tuesday}", "(1, 2)", r"\{1\}",
            "[0,1)", "12 cm", r"50\%", "3:4", "x = 1 or x = 2", r"\int_0^1 f(x)\,dx"]  # fmt: skip
    bad = [r"\frac{1}{", "", " ", "((", r"\frac{1}{0}", r"\begin{pmatrix}1&2", "?", "1" * 3_000, r"\\", r"\frac{0}{0}",
           "9^{9^{9^{9}}}"]  # fmt: skip
    problems = MathVerifier(pool).check_references([*good, *bad, *good, *bad[:2]])
    assert list(problems) == bad
    assert set(problems.values()) == {"cannot be read as a mathematical expression"}


def test_references_that_contain_an_answer_are_found(pool: CountingPool) -> None:
    """A response with the answer alone would not be equal to them."""
    good = [r"\boxed{5}", r"x \boxed{5}", r"$x = \boxed{5}$", r"\text{red}", r"[1, 2]", "x or y"]
    bad = [r"We add. It is \boxed{5}.", "<think> 2 + 3 </think> 5", '["5"]', " ['5', '6']", r"so the sum is \fbox{5}"]
    problems = MathVerifier(pool).check_references([*good, *bad])
    assert problems == dict.fromkeys(bad, "contains an answer but is not one itself")
    (verdict,) = MathVerifier(pool).verify_all([(question(bad[0]), boxed("5"))])
    assert not verdict.correct


def test_a_broken_reference_has_its_reason(pool: CountingPool) -> None:
    (verdict,) = MathVerifier(pool).verify_all([(question(""), boxed("1/2"))])
    assert verdict.reason == "reference not parsed"


@pytest.mark.slow
@pytest.mark.usefixtures("no_own_time")
def test_nothing_hangs_crashes_or_goes_without_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, each among answers that are right, which must not be lost."""
    monkeypatch.chdir(tmp_path)
    assert len(RESPONSES) >= 36
    sane = [(question(f"{n}/7"), boxed(rf"\frac{{{2 * n}}}{{14}}")) for n in range(1, 7)]
    nasty = [(question("2/7"), response) for response in RESPONSES.values()]
    with WorkerPool(2, memory_bytes=1 << 28) as pool:
        verifier = MathVerifier(pool, limit_s=0.15)
        verdicts = verifier.verify_all([*sane[:3], *nasty, *sane[3:]])
        again = verifier.verify_all(nasty)
    outcomes = dict(zip(RESPONSES, verdicts[3:-3], strict=True))
    allowed = {reasons.WRONG, reasons.NO_ANSWER, reasons.TOO_LONG, "not parsed", SEVERAL_ANSWERS, reasons.TIMEOUT,
               reasons.OUT_OF_MEMORY, reasons.CRASHED}  # fmt: skip
    for name, verdict in outcomes.items():
        assert not verdict.correct, (name, verdict)
        assert verdict.reason in allowed, (name, verdict)
    assert outcomes["sums of sums"].reason == "timeout"
    assert outcomes["million digits"].reason == reasons.TOO_LONG
    assert all(verdict.correct for verdict in verdicts[:3] + verdicts[-3:])
    # A timeout is remembered: asking again costs nothing and changes nothing.
    assert [(v.reason, v.seconds) for v in again] == [(v.reason, 0.0) for v in outcomes.values()]
    assert list(tmp_path.iterdir()) == []  # no answer was run as code


@pytest.mark.slow
def test_there_must_be_time(pool: CountingPool) -> None:
    with pytest.raises(ValueError, match="limit_s must be above 0, got 0"):
        MathVerifier(pool, limit_s=0)
