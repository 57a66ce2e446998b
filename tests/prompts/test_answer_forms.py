"""The form of the answer that a question asks for, on sentences of common prompts and on text that asks for none."""

from brorl.prompts.answer_forms import answer_forms, asked_form
from brorl.prompts.rendering import TEMPLATES
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
    "alone": [
        "Reply with the number only.",
        "What is 1 + 1? Answer with just the letter.",
        "Return nothing but the result.",
        "Only output the final answer.",
        "Respond with a single word.",
        "Give the answer without explanation.",
        "Do not explain your answer.",
        "1 + 1? Just the number.",
        "Antworte nur mit der Zahl.",
        "Responde únicamente con el número.",
        "Réponds uniquement par le nombre.",
        "只输出答案。",
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
        "Answer only in English.",
        "You are a helpful assistant. Please reason step by step.",
        "Only two of the ten boxes hold a ball. How many do not?",
    ],
)
def test_text_that_asks_for_none(text: str) -> None:
    assert answer_forms(text) == []


def test_a_form_that_is_named_is_not_the_answer_alone() -> None:
    for text in ("Write only the final answer within \\boxed{}.", 'End with "Answer:" and nothing else.'):
        assert "alone" not in [form.name for form in answer_forms(text)]
    assert not any(form.name == "alone" for text in TEMPLATES.values() for form in answer_forms(text))


def test_nearly_all_questions_decide() -> None:
    box, plain = "Use \\boxed{}.", "1 + 1?"
    assert asked_form([box] * 9 + [plain]) == answer_forms(box)[0]
    assert asked_form([box] * 8 + [plain] * 2) is None
    assert asked_form([plain]) is None
