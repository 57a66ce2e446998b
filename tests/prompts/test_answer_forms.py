"""The form of the answer that a question asks for, on sentences of common prompts and on text that asks for none."""

from brorl.prompts.answer_forms import answer_forms, asked_form
from each_row import each_row

ASKED = {
    "in \\boxed{}": ["Please put your final answer within \\boxed{}.", "Give \\boxed{answer}."],
    "after ####": [
        'Let\'s think step by step and output the final answer after "####".',
        "Reason. Then write #### followed by the number.",
        "End with\n#### <answer>"[:-8] + "your answer",
        "Finish with a line:\n#### [number]",
    ],
    "in <answer> tags": [
        "Respond in <think>...</think> <answer>...</answer>.",
        "Put it between <ANSWER> and </ANSWER>.",
    ],
    "after Answer:": [
        'Remember to put your answer on its own line after "Answer:".',
        "The last line of your response should be of the form Answer: $Answer (without quotes).",
        "Question: 1 + 1?\nAnswer:",
        "Q: 1 + 1?\nA:",
        "End with **Final Answer:** and the number.",
    ],
}


@each_row(("name", "text"), [(name, text) for name, texts in ASKED.items() for text in texts])
def test_forms_that_are_asked_for(name: str, text: str) -> None:
    (form,) = answer_forms(text)
    assert form.name == name
    assert "42" in form.write("42")


@each_row(
    "text",
    [
        "#### Problem 3\nFind the answer to 1 + 1.",
        "What is 1 + 1?",
        "Ann's answer is 4. What is Bob's?",
        "##### a heading with a result",
        "How many answers: two or three?",
        "A: is a point. B: is another. How far?",
    ],
)
def test_text_that_asks_for_none(text: str) -> None:
    assert answer_forms(text) == []


def test_nearly_all_questions_decide() -> None:
    box, plain = "Use \\boxed{}.", "1 + 1?"
    assert asked_form([box] * 9 + [plain]) == answer_forms(box)[0]
    assert asked_form([box] * 8 + [plain] * 2) is None
    assert asked_form([plain]) is None
