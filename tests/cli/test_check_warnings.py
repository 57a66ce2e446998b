"""Warnings of `brorl check`: prompts that cannot lead to their references, and answers in a form that is not read."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brorl.api.data_warnings import other_spellings, unreachable_references, unread_forms, unused_options
from brorl.prompts.answer_forms import last_box
from brorl.prompts.file_questions import read_source
from brorl.prompts.prompt import Prompt
from brorl.prompts.settings import FileSource, PromptFormat
from brorl.verdict import Verdict
from brorl.verification.verifier import TrialResponses
from choice_rows import SCHEMAS
from data_files import write_rows
from run_support import command, save_tiny_model

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
BOX = "{prompt} Put your answer within \\boxed{}."
OPTIONS = "which can only be options of multiple-choice questions"
BLIND = "name an option that the prompt does not contain"
UNREAD = "which the verifier cannot read"
SECOND = "but the text around them for one in \\boxed{}"


class Boxes:
    """Accepts a box with the reference, or an integer at the end."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        right = [
            last_box(text) == prompt.reference or (prompt.reference.isdigit() and text.endswith(prompt.reference))
            for prompt, text in items
        ]
        return [Verdict(bool(one), float(one), None, "", 0.0) for one in right]

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        raise AssertionError(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        return TrialResponses(f"\\boxed{{{reference}}}", others)


def warnings(rows: list[dict[str, Any]], template: str = "{prompt}", **columns: Any) -> str:
    """Return the warnings about rows with the columns `question` and `answer`."""
    write_rows("rows.jsonl", rows)
    source = FileSource(path="rows.jsonl", prompt_column="question", **columns)
    style = PromptFormat(template=template)
    prompts = [
        Prompt(q.id, style.fill(q.text, q.domain), (1,), q.reference, q.domain, q.source, q.last_turn)
        for q in read_source(source).questions
    ]
    found = [*unused_options(source), *unreachable_references(prompts), *unread_forms(Boxes(), prompts, is_own=False)]
    return "\n".join(found)


def test_a_system_message_that_wants_the_answer_alone() -> None:
    """The template asks for a box all the same; then the question of `init` has none."""
    text = "<system>Reply with the number only.</system>1 + 1? Please put your final answer within \\boxed{}."
    prompts = [Prompt(f"p{n}", text, (1,), "2", "math", "rows", "1 + 1?") for n in range(9)]
    (said,) = unread_forms(Boxes(), prompts, is_own=False)
    assert "the questions ask for the answer alone, but the text around them for one in \\boxed{}" in said
    plain = [replace(one, text="<system>Be kind.</system>1 + 1? Use \\boxed{}.") for one in prompts]
    assert not [*unread_forms(Boxes(), plain, is_own=False)]


def test_references_in_other_spellings_are_tried() -> None:
    """On a verifier that compares texts; digits and commas of ASCII are no other spelling."""
    references = ["32,5", "\N{ARABIC-INDIC DIGIT SIX}\N{ARABIC-INDIC DIGIT ONE}", "61", "1, 2"]
    prompts = [Prompt(f"p{n}", "?", (1,), reference, "math") for n, reference in enumerate(references)]
    (said,) = other_spellings(Boxes(), prompts)
    assert "`32,5` of question p0 rejects `\\boxed{32.5}`" in said
    assert "2 such answers" in said
    assert not [*other_spellings(Boxes(), prompts[2:])]


@pytest.mark.slow
def test_a_check_says_the_warnings(tmp_path: Path) -> None:
    every = "".join(map(chr, range(32, 127))) + "\n"
    model = save_tiny_model(tmp_path / "tiny", characters=every, max_positions=800)
    rows = [{**row, "question": f"{row['question']} {AFTER}"} for row in SCHEMAS["mmlu_csv"].rows]
    write_rows("rows.jsonl", rows)
    source = "--data.sources={path: rows.jsonl, prompt_column: question}"
    rest = ("--no-timing", f"--model={model}", "--data.held_out_fraction=0", "--evaluation.num_prompts=0")
    outcome = command("check", source, *rest, "--prompt.template={prompt} Use \\boxed{}.")
    assert outcome.code == 0, outcome
    for said in (OPTIONS, BLIND, SECOND, UNREAD):
        assert said in outcome.out


def test_options_that_the_prompt_leaves_out() -> None:
    said = warnings(SCHEMAS["mmlu_csv"].rows, BOX)
    assert f"the prompts do not contain A to D, {OPTIONS}; set data.sources[].options_column: [A, B, C, D]" in said
    assert f"the reference answers of 5 prompts {BLIND}, such as rows:1 with 'B'" in said
    assert "do not contain choices, which can only" in warnings(SCHEMAS["mmlu"].rows, BOX)
    columns = {"options_column": ["A", "B", "C", "D"], "domain": "science"}
    assert warnings(SCHEMAS["mmlu_csv"].rows, BOX, **columns) == ""


@pytest.mark.parametrize("form", ["{q}\nA. {A}\nB. {B}\nC. {C}\nD. {D}", "{q} (A) {A} (B) {B} (C) {C} (D) {D}"])
def test_options_that_stand_in_the_question(form: str) -> None:
    rows = [{**row, "question": form.format(q=row["question"], **row)} for row in SCHEMAS["mmlu_csv"].rows]
    assert warnings(rows, BOX) == ""
    assert warnings([{n: row[n] for n in ("question", "answer")} for row in rows], BOX) == ""


def test_choices_whose_options_the_question_does_not_show() -> None:
    rows = [
        {
            "question": row["question"],
            "answer": json.dumps({"options": row["choices"], "answer": "ABCD"[row["answer"]]}),
        }
        for row in SCHEMAS["mmlu"].rows
    ]
    assert f"of 5 prompts {BLIND}" in warnings(rows, BOX, domain="science")


def test_a_letter_may_be_an_answer_of_mathematics() -> None:
    rows = [{"question": f"Which is larger, A = {i} or B = 5?", "answer": "AB"[i < 5]} for i in range(8)]
    assert warnings(rows, BOX) == ""


def sums(asked: str, form: str = "{}") -> list[dict[str, Any]]:
    return [{"question": f"{i} + x + 1? {asked}", "answer": form.format(i + 1)} for i in range(12)]


AFTER = "Give the final answer after ####."
TAGS = "Write the answer between <answer> and </answer>."


@pytest.mark.parametrize(
    ("asked", "form", "template", "said"),
    [
        (AFTER, "{}", "{prompt}", ()),  # the last number of a response
        (AFTER, "x+{}", "{prompt}", ("ask for the answer after ####", UNREAD, "it rejects '#### x+1' (8 of 8")),
        (TAGS, "x+{}", "{prompt}", (UNREAD, "it rejects '<answer>x+1</answer>'")),
        ("Write it into \\boxed{}.", "x+{}", "{prompt}", ()),
        (AFTER, "{}", "{prompt} Use \\boxed{}.", ("the questions ask for the answer after ####", SECOND)),
        ("Use \\boxed{}.", "{}", "{prompt} Use \\boxed{}.", ()),
        ("", "{}", "{prompt} Use \\boxed{}.", ()),
    ],
)
def test_forms_of_the_answer(asked: str, form: str, template: str, said: tuple[str, ...]) -> None:
    found = warnings(sums(asked, form), template)
    assert all(part in found for part in said)
    assert bool(found) == bool(said)
