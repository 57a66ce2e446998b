"""Where an answer stands: against responses written by hand, and boxes against a counter of braces."""

import numpy as np

from brorl.prompts.answer_forms import last_box
from brorl.verification.domains.math_answer import extract_answer, tidy
from case_tables import table
from each_row import each_row


@each_row(
    ("response", "answer"),
    [
        (r"First \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}} and more", r"\frac{1}{2}"),
        (r"\boxed {x^{2^{3}}}", "x^{2^{3}}"),
        (r"\fbox{7} after \boxed{6}? no: \fbox{8}", "8"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[0, \infty)}", r"[0, \infty)"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{ 12" + "\n" + " }", "12"),
        (r"\boxed{$7$}", "7"),
        (r"\boxed{}", None),
        (r"the answer is 4, no, \boxed{}", None),
        (r"The answer is 3. But \boxed{4} is boxed. The answer is 5.", "4 or 5"),
        (r"\boxed{4} is boxed. The answer is $4$.", "4"),
        (r"\boxed{4}. Scratch that.", "4 or Scratch that"),
        (r"\boxed{4, \boxed{5}}", r"4, \boxed{5}"),
        (r"$x = -\boxed{4}$", "-4"),
        (r"- \boxed{4}", "4"),
        (r"$\boxed{4}\%$ of it", r"4\%"),
        (r"\boxed{4} km/h.", "4 km/h"),
        (r"\boxed{4} in the end", "4"),
        ("\\boxed{4}\nUser: And 2+3?\nAssistant: \\boxed{5}", "4"),
        (r"\boxed{4}<|im_end|> \boxed{5}", "4"),
        ("Question: 2+2? The answer is 4", "4"),
        ("The value is 4. See page 7.", "4"),
        ("The answer is 42.", "42"),
        ("The answer is: 42", "42"),
        ("Answer: 3.5", "3.5"),
        ("**Answer:** 1/2", "1/2"),
        ("**Answer**: (B)", "(B)"),
        ("Final Answer: The final answer is $x+1$. I hope it is correct.", "x+1"),
        (r"The answer is \(\frac{3}{4}\), as was to be shown", r"\frac{3}{4}"),
        ("the answer is\n$$\n17\n$$", "17"),
        ("The answer is 1. No, the answer is 2. See page 9", "2"),
        ("The answer is 42 apples", "42"),
        ("The answer is 42 because 6 * 7 is 42", "42"),
        ("The answer is 2 pi", "2 pi"),
        ("The answer is 3 or 4", "3 or 4"),
        ("The answer is x = 5 or so\n$6$", "x = 5 or so"),
        ("the answer = 12", "12"),
        ("answers are 12 and 13", "13"),
        ("we get $x = 1$ and $y = 2$ of 9 values", "y = 2"),
        (r"so \[ z^2 \] and nothing else", "z^2"),
        (r"it costs \$5", "5"),
        ("it costs $5 in all", "5"),
        ("from 1,234 to 5,678 in steps", "5,678"),
        ("about -3.25 or so", "-3.25"),
        ("a half is 1/2 of it", "1/2"),
        ("down by 50%", "50%"),
        ("no digits here", None),
        ("", None),
        ("the answer is ", None),
        ("\u0663 and \uff13", None),
    ],
)
def test_each_rule(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


def box_by_hand(text: str) -> str | None:
    """The last `\boxed{` that closes and is in no other one, by counting character by character from every start."""
    boxes = []
    for start in (i for i in range(len(text)) if text.startswith(r"\boxed{", i)):
        depth, i = 0, start + 6
        while i < len(text):
            if text[i] == "\\":
                i += 2
                continue
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                boxes.append((start + 7, i))
                break
            i += 1
    alone = [(start, end) for start, end in boxes if not any(a < start and end < b for a, b in boxes)]
    return text[slice(*alone[-1])] if alone else None


def test_the_last_box_that_closes_is_taken(rng: np.random.Generator) -> None:
    pieces = [r"\boxed{", "{", "}", "}", r"\{", r"\}", "a", "1", r"\frac", " b "]
    num_found = 0
    for _ in range(400):
        text = "".join(rng.choice(pieces, size=rng.integers(1, 25)))
        if text.count(r"\boxed{") > 4:
            continue
        box = box_by_hand(text)
        if box is not None:
            num_found += 1
            assert last_box(text) == box, text
    assert num_found > 50


def test_only_the_end_of_a_response_without_a_box_is_looked_at() -> None:
    assert extract_answer("The answer is 3. " + "blah " * 1_000) is None
    assert extract_answer(r"\boxed{3} " + "blah " * 1_000) == "3"


@each_row(*table(__file__, "what_surrounds_an_answer_is_dropped"))
def test_what_surrounds_an_answer_is_dropped(answer: str, tidied: str) -> None:
    assert tidy(answer) == tidied
