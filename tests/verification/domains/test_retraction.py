"""Which later sentences take an answer back, and in which order: against texts judged by hand."""

from brorl.verification.domains.retraction import retraction
from each_row import each_row


@each_row(
    ("after", "taken_back"),
    [
        (", which is even.", None),
        (". The answer is 36.", "36"),
        (". The answer is $x = 34$.", None),
        (". The answer is 36. I mean, the answer is 34.", None),
        (". That is wrong. Let me see: 2 * 17 = 34.", "That is wrong"),
        (". That is wrong. No, 34 is right.", None),
        (". Try 36: that is wrong.", None),
        (". Is that right? No.", "No"),
        (" Wait, no. ", "34 Wait , no"),
        (". Is there a different one? No.", None),
        (". If 34 is wrong, tell me.", None),
        (" ist falsch.", "34 ist falsch"),
        (". Summa on 36.", "36"),
        (". Palloja on 36.", None),
        (". " + "So it goes on. " * 500 + "The answer is 36.", "36"),
    ],
)
def test_later_sentences(after: str, taken_back: str | None) -> None:
    assert retraction("Siis summa on ", "34", after) == taken_back


@each_row(
    ("answer", "after", "taken_back"),
    [
        ("B", ". A is wrong, and C is heavy.", None),
        ("B", ". No: C", "C"),
        ("B", ". The answer is 3.", None),
        ("False", ". It is false, since 2 is even.", None),
        ("False", ". Actually, the answer is true.", "true"),
        ("(1, 2)", ". So the answer is (1,2).", None),
        ("(1, 2)", ". So the answer is (2, 1).", "(2, 1)"),
        ("1, 2", ". The answers are 1 and 2.", None),
        (r"\frac{3}{4}", r". Hence $\frac{1}{4}$ is the answer.", r"$\frac{1}{4}$"),
    ],
)
def test_answers_that_are_not_numbers(answer: str, after: str, taken_back: str | None) -> None:
    assert retraction("", answer, after) == taken_back
