"""The points of held-out prompts: the fractions before and after, and labels that tell the prompts apart."""

from pathlib import Path

from brorl.reporting.page.charts import held_out_points
from brorl.runs.run_record import RunRecord

CHAT = (
    "<|im_start|>user\nWhat is {question}?\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    "<|im_end|>\n<|im_start|>assistant\n"
)


def points_of(held_out: tuple[str, ...], before: list[int], after: list[int]) -> dict:
    records = tuple(
        {"step": step, "evaluation": {"num_samples": 4, "prompts": {"num_correct": correct}}}
        for step, correct in ((0, before), (9, after))
    )
    (trace,) = held_out_points([RunRecord(Path(), "a", {}, {}, records, held_out)])
    return dict(trace)


def test_labels_are_questions_without_the_template() -> None:
    questions = ("10 + 38", "2 + 45")
    trace = points_of(tuple(CHAT.format(question=q) for q in questions), [0, 1], [2, 4])
    assert (trace["x"], trace["y"]) == ([0, 0.25], [0.5, 1])
    assert [text.endswith(f">{q}") for text, q in zip(trace["text"], questions, strict=True)] == [True, True]


def test_one_prompt_keeps_its_end() -> None:
    (label,) = points_of(("first line\nlast line",), [0], [4])["text"]
    assert label.endswith("last line")
