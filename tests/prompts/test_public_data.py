"""Benchmarks in the layouts in which they are published, from small files, and what is said of other files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl.errors import UserError
from brorl.prompts.answer_forms import last_box
from brorl.prompts.file_questions import read_source
from brorl.prompts.layouts.text import reference_answer
from brorl.prompts.public_data import BENCHMARKS, LAYOUTS, benchmark_source
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import PromptFormat
from data_files import write_rows
from each_row import each_row

ROWS: Mapping[str, tuple[str, dict[str, Any], str, str]] = {  # case: benchmark, row, question, reference
    "HuggingFaceH4/aime_2024": (
        "aime24", {"id": 60, "problem": "Find x.", "solution": r"So \boxed{999}.", "answer": "204", "url": "u"},
        "Find x.", "204"),
    "math-ai/aime24": ("aime24", {"id": 1, "problem": "y?", "solution": r"\boxed{033}", "url": "u"}, "y?", "033"),
    "Maxwell-Jia/AIME_2024": (
        "aime24", {"ID": "2024-I-1", "Problem": "z?", "Solution": "Long.", "Answer": 73}, "z?", "73"),
    "math-ai/aime25": ("aime25", {"problem": "Sum?", "answer": "70", "id": "0"}, "Sum?", "70"),
    "opencompass/AIME2025": ("aime25", {"question": "Sum of b?", "answer": "588"}, "Sum of b?", "588"),
    "AI-MO/aimo-validation-amc": ("amc", {"id": 0, "problem": "Cost?", "answer": 142.0, "url": "u"}, "Cost?", "142"),
    "math-ai/amc23": ("amc", {"id": 0, "question": "Speed?", "answer": "27.0", "url": "u"}, "Speed?", "27.0"),
    "HuggingFaceH4/MATH-500": (
        "math", {"problem": "Convert.", "solution": r"$\boxed{\left(9, 9\right)}$", "answer": r"\left( 3, \pi \right)",
                 "subject": "Precalculus", "level": 2}, "Convert.", r"\left( 3, \pi \right)"),
    "hendrycks MATH": (
        "math", {"problem": "How?", "level": "Level 5", "solution": r"As \boxed{1}, \boxed{\frac{1}{2}}."},
        "How?", r"\frac{1}{2}"),
    "math-ai/minervamath": ("minerva", {"question": "Mass?", "answer": "4e33"}, "Mass?", "4e33"),
    "OCW courses": (
        "minerva", {"problem": "Energy?", "solution": r"It is $\boxed{-7.5e-3}$ J.", "idx": 3}, "Energy?", "-7.5e-3"),
    "math-ai/olympiadbench": (
        "olympiadbench", {"id": 1606, "question": "Find all $n$.", "solution": ["Long."], "final_answer": ["2", "-3"],
                          "context": None}, "Find all $n$.", "2, -3"),
    "Hothan/OlympiadBench": (
        "olympiadbench", {"question": "$k$?", "context": "Let $k > 0$.", "final_answer": [r"$\frac{1}{2}$"]},
        "Let $k > 0$.\n\n$k$?", r"$\frac{1}{2}$"),
    "a list as text": ("olympiadbench", {"question": "Both?", "final_answer": "['$1$', '$2$']"}, "Both?", "$1$, $2$"),
    "openai/gsm8k": ("gsm8k", {"question": "Eggs?", "answer": "3 * 400 = <<3*400=1200>>1200.\n#### 1,200"},
                     "Eggs?", "1200"),
    "the answer alone": ("gsm8k", {"question": "Cows?", "answer": "18"}, "Cows?", "18"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("case", ROWS)
def test_every_layout_gives_question_and_answer(case: str, suffix: str, tmp_path: Path) -> None:
    benchmark, row, question, reference = ROWS[case]
    path = write_rows(tmp_path / f"rows{suffix}", [row, row])
    found = read_source(benchmark_source(benchmark, str(path))).questions
    assert [(q.text, q.reference, q.domain, q.source) for q in found] == [(question, reference, "math", benchmark)] * 2
    assert [q.id for q in found] == [f"{benchmark}:1", f"{benchmark}:2"]  # a repeated row is a prompt of its own


def test_where_a_benchmark_is_read_from() -> None:
    contests = {"aime24", "aime25", "hmmt25", "brumo25", "cmimc25", "amc"}
    mathematical = {*contests, "math", "minerva", "olympiadbench", "gsm8k"}
    code = {"humaneval_plus", "mbpp_plus", "livecodebench", "apps", "codecontests", "codeforces", "taco"}
    others = {*code, "gpqa_diamond", "mmlu_pro", "ifeval"}
    assert set(BENCHMARKS) == mathematical | others
    for name, hubs in BENCHMARKS.items():
        assert {hub.layout == "benchmark" for hub in hubs} == {name in mathematical}
        if name not in mathematical:
            assert all(hub.id in LAYOUTS[hub.layout].datasets for hub in hubs)
    for given, path, split, subset in (
        (("gsm8k",), "openai/gsm8k", "test", "main"),
        (("gsm8k", "openai/gsm8k@v1.2"), "openai/gsm8k@v1.2", "test", "main"),
        (("olympiadbench", "Hothan/OlympiadBench"), "Hothan/OlympiadBench", "train", "OE_TO_maths_en_COMP"),
        (("aime24", "some/mirror"), "some/mirror", "train", None),
        (("aime24", "some/mirror", "mine", "aime24", "all"), "some/mirror", "aime24", "all"),
    ):
        source = benchmark_source(*given)
        assert (source.path, source.split, source.subset) == (path, split, subset)
        assert source.label == (given[2] if len(given) > 2 else given[0])
    with pytest.raises(ValueError, match="there is no benchmark 'aime23'"):
        benchmark_source("aime23")
    with pytest.raises(ValueError, match="must not contain a colon"):
        benchmark_source("aime24", name="a:b")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x", "answer": "1"}, "has no question (columns: text, answer; expected one of prob"),
        ({"problem": "x", "reply": "1"}, "has no answer (columns: problem, reply; expected one of prob"),
        ({"problem": " ", "answer": "1"}, "has no question"), ({"problem": "x", "gt": ["1", None]}, "has no answer"),
        ({"problem": "x", "answer": None, "solution": "no box"}, "has no answer"),
        ({"problem": "x", "answer": []}, "has no answer"), ({"problem": "x", "answer": True}, "has no answer"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_question_is_refused_in_one_line(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    for suffix, place in ((".jsonl", "line"), (".parquet", "row")):
        path = write_rows(tmp_path / f"rows{suffix}", [row])
        with pytest.raises(UserError, match=re.escape(f"{place} 1 {said}")) as refused:
            read_source(benchmark_source("aime24", str(path)))
        assert "\n" not in str(refused.value)
        assert str(refused.value).endswith("name the columns with `prompt_column` and answer_column")


@each_row(
    ("value", "text"),
    [
        (142.0, "142"), (0.5, "0.5"), (-3, "-3"), (float("nan"), None), (float("inf"), None), (" 7 ", "7"), ("", None),
        ("[0, 1]", "[0, 1]"), ("['0', '1']", "0, 1"), ("[a]", "[a]"), (["1", 2.0], "1, 2"), ({"a": 1}, None),
        ("[]", "[]"),
    ],
)  # fmt: skip
def test_answers_as_text(value: Any, text: str | None) -> None:
    assert reference_answer(value) == text


def test_the_last_box_is_found_whatever_is_nested_in_it(rng: np.random.Generator) -> None:
    def nested(depth: int) -> str:
        parts = [rng.choice(["a", r"\}", r"\{", " 1", r"\frac"]) for _ in range(3)]
        return "".join(parts) + (f"{{{nested(depth - 1)}}}" if depth else "") + str(rng.choice(["", "z"]))

    for _ in range(50):
        wanted = nested(int(rng.integers(0, 5)))
        opening = rng.choice([r"\boxed{", r"\boxed {", r"\fbox{"])
        text = rf"\boxed{{{nested(2)}}} then {opening}{wanted}}} end" + rng.choice(["", r" \boxed{open"])
        assert last_box(text) == wanted
    assert last_box("no box") is None
    assert last_box(r"\boxed{never closed") is None


def test_the_template_asks_for_what_the_verifier_looks_for() -> None:
    asked = PromptFormat(template=TEMPLATES["math"]).fill("What is 1 + 1?", "math")
    assert asked == "What is 1 + 1?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
