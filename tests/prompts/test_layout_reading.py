"""Sources in the layout of a public dataset: questions, dropped rows with their reasons, and errors."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl.errors import UserError
from brorl.prompts.file_questions import CONTRADICTION, check_first_row, read_source
from brorl.prompts.public_data import BENCHMARKS, LAYOUTS, Layout, layouts_of
from brorl.prompts.row import DroppedRow, row_question
from brorl.prompts.settings import FileSource
from brorl.prompts.source_questions import SourceQuestions
from data_files import write_rows
from each_row import each_row
from error_names import check_names

# Rows in the shape of the public datasets. Each has a question and its reference, or the reason why it is dropped.
BOX = "Present the answer in LaTex format: \\boxed{Your answer}"
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nIf $a = 2$,\n\nfind $a^5$.\n\nRemember to "
    'put your answer on its own line after "Answer:".'
)


def verl(question: str, answer: str, ability: str = "math") -> dict[str, Any]:
    turns = [{"role": "system", "content": "\nWhen tackling ..."}, {"role": "user", "content": question}]
    truth = {"ground_truth": answer, "style": "rule"}
    return {"data_source": "x", "prompt": turns, "ability": ability, "reward_model": truth, "extra_info": {"index": 0}}


CODE = verl("Sum.", '{"inputs": ["1\\n"], "outputs": ["1\\n"]}', "code")
PRIMES = "How many primes are below 10?"
AOPS = {"problem_source": "aops_c4_high_school_math", "inference_mode": "cot"}
ROWS: dict[str, list[tuple[dict[str, Any], tuple[str, str] | str]]] = {
    "deepscaler": [
        ({"problem": "Find $x$.", "answer": "\\frac{1}{2}", "solution": "\\boxed{7}."}, ("Find $x$.", "\\frac{1}{2}")),
        ({"problem": "Find $y$.", "answer": "", "solution": ""}, "no answer"),
        ({"problem": "Find $z$.", "answer": None, "solution": ""}, "no answer"),
        ({"problem": " ", "answer": "3", "solution": ""}, "no question"),
    ],
    "dapo": [
        (verl(DAPO, "32", "MATH"), ("If $a = 2$,\n\nfind $a^5$.", "32")), (verl("Add 1 and 1.", ""), "no answer"),
    ],
    "eurus2_math": [
        (verl(f"Find $x$ if $x + 1 = 3$.\n\n{BOX}", "2"), ("Find $x$ if $x + 1 = 3$.", "2")),
        (CODE, "the ability is code, not math"),
    ],
    "skywork_math": [
        (verl(PRIMES, '["4"]'), (PRIMES, "4")), (verl(PRIMES, '["4", "four"]'), "several accepted"),
        (verl(PRIMES, "[]"), "no answer"), (CODE, "the ability is code"),
    ],
    "open_math_reasoning": [
        ({"problem": "1 + 1?", "problem_type": "has_answer_extracted", "expected_answer": "2", **AOPS},
         ("1 + 1?", "2")),
        ({"problem": "Prove it.", "problem_type": "converted_proof", "expected_answer": "5", **AOPS},
         "the problem_type is converted_proof, not has_answer_extracted"),
    ],
    "gsm8k": [
        ({"question": "Eggs?", "answer": "She has 3 * 400 = <<3*400=1200>>1200.\n#### 1,200"}, ("Eggs?", "1200")),
        ({"question": "Cows?", "answer": "18"}, "no ####"),
    ],
    "math": [
        ({"problem": "How?", "level": "5", "type": "Algebra", "solution": "As \\boxed{1}, $\\boxed{\\frac{1}{2}}$."},
         ("How?", "\\frac{1}{2}")),
        ({"problem": "Why?", "level": "1", "type": "Algebra", "solution": "It is 3."}, "no \\boxed{}"),
    ],
}  # fmt: skip


def read(path: str, layout: str, seed: int = 0, **settings: Any) -> SourceQuestions:
    return read_source(FileSource(path=path, name="mine", layout=layout, **settings), seed)


def refusal(path: str, layout: str) -> str:
    with pytest.raises(UserError) as caught:
        read(path, layout)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("layout", ROWS)
def test_every_row_becomes_a_question_or_is_dropped(layout: str, suffix: str, tmp_path: Path) -> None:
    cases = ROWS[layout]
    reading = read(write_rows(tmp_path / f"rows{suffix}", [row for row, _ in cases]), layout)
    expected = [
        (f"mine:{number}", *found, "math") for number, (_, found) in enumerate(cases, 1) if isinstance(found, tuple)
    ]
    assert [(q.id, q.text, q.reference, q.domain) for q in reading.questions] == expected
    assert {q.source for q in reading.questions} == {"mine"}
    given = [found for _, found in cases if isinstance(found, str)]
    for reason, count in reading.dropped.items():
        assert count == sum(reason.startswith(start) for start in given), reason
    assert sum(reading.dropped.values()) == len(given)
    assert (reading.num_rows, reading.num_repeated) == (len(cases), 0)


def test_the_table_holds_every_layout_by_its_name() -> None:
    for name, layout in LAYOUTS.items():
        assert name == layout.name
        assert name.isidentifier()
        assert layout.columns or layout.is_whole
        for dataset in layout.datasets:
            assert name in layouts_of(dataset)


def test_the_documentation_lists_every_layout_and_every_benchmark() -> None:
    docs = Path(__file__).parents[2] / "docs"
    listed = (docs / "how-to" / "data.md").read_text("utf-8")
    for layout in LAYOUTS.values():
        datasets = ", ".join(f"`{dataset}`" for dataset in layout.datasets)
        assert f"| `{layout.name}` | {datasets} |" in listed
    evaluations = (docs / "how-to" / "evaluation.md").read_text("utf-8")
    for name, (hub, *_) in BENCHMARKS.items():
        row = rf"\| `{name}` \| {re.escape(hub.id)} \({hub.split}(, {hub.subset})?\) \|"
        found = re.search(row + ".*", evaluations)
        assert found, name
        assert (f", {hub.subset}" in found[0]) == (hub.subset is not None)
        assert (f"`{hub.layout}`" in found[0]) == (hub.layout != "benchmark")


@pytest.mark.parametrize("check", [read_source, check_first_row])
def test_an_unknown_layout_is_refused_before_the_data_is_read(check: Callable[[FileSource], Any]) -> None:
    for name, advice in (("deepscalar", "did you mean deepscaler?"), ("zzz", "the layouts are deepscaler, ")):
        with pytest.raises(UserError, match=re.escape(f"'{name}'` is not a layout; {advice}")):
            check(FileSource(path="owner/none", layout=name))


def test_repetitions_and_contradictions_against_plain_counting(rng: np.random.Generator, tmp_path: Path) -> None:
    """Rows of a few questions with one or two answers, in any order, against counts of the answers of each."""
    pairs = [(int(q), int(a)) for q, a in zip(rng.integers(0, 30, 100), rng.integers(0, 2, 100), strict=True)]
    pairs = [(q, a if q % 3 == 0 else 0) for q, a in pairs]
    rows = [{"problem": f"{q}?", "answer": str(a)} for q, a in pairs]
    rows += [{"problem": "none?", "answer": ""}] * 3
    answers = {question: {a for q, a in pairs if q == question} for question, _ in pairs}
    order = list(dict.fromkeys(q for q, _ in pairs if len(answers[q]) == 1))
    contradicting = sum(len(answers[q]) > 1 for q, _ in pairs)
    reading = read(write_rows(tmp_path / "rows.jsonl", rows), "deepscaler")
    assert [q.text for q in reading.questions] == [f"{q}?" for q in order]
    expected = Counter({CONTRADICTION: contradicting, "no answer": 3})
    assert +Counter(reading.dropped) == +expected
    assert reading.num_repeated == len(pairs) - contradicting - len(order)
    assert reading.num_rows == len(reading.questions) + reading.num_repeated + sum(reading.dropped.values())


def test_a_seed_and_the_row_reach_the_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layout = Layout("seeded", ("a",), lambda row, seed: row_question(f"{row['a']} {seed}", "1", "math"))
    monkeypatch.setitem(LAYOUTS, "seeded", layout)  # type: ignore[arg-type]
    path = write_rows(tmp_path / "rows.jsonl", [{"a": "x"}, {"a": "y"}])
    assert [q.text for q in read(path, "seeded", seed=5).questions] == ["x 5", "y 5"]
    assert [q.id for q in read(path, "seeded", id_column="a").questions] == ["mine:x", "mine:y"]
    assert read(path, "seeded", limit=1).num_rows == 1


@each_row(
    ("text", "reference", "reason"),
    [(" ", "1", "no question"), ("x", "", "no answer"), ("\ud800", "1", "an unpaired surrogate")],
)
def test_unusable_rows_are_dropped(text: str, reference: str, reason: str) -> None:
    with pytest.raises(DroppedRow, match=f"^{reason}$"):
        row_question(text, reference, "math")


def test_a_wrong_layout_names_the_row_the_problem_and_the_layout_that_fits(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"problem": "x", "solution": "\\boxed{1}"}])
    said = refusal(path, "gsm8k")
    check_names(said, f"{path} line 1", "the layout gsm8k", "'question'", "columns: problem, solution", "columns: math")
    path = write_rows(tmp_path / "other.parquet", [{"u": "x", "v": 1}])
    said = refusal(path, "math")
    check_names(said, f"{path} row 1", "the layout math", "'problem'", "columns: u, v", "`prompt_column`")
    path = write_rows(tmp_path / "broken.jsonl", [{"question": 3, "answer": "#### 4"}])
    check_names(refusal(path, "gsm8k"), "the layout gsm8k", "a string, got int", "columns: question, answer")


def test_data_of_which_no_row_is_left_lists_the_reasons(tmp_path: Path) -> None:
    rows = [row for row, found in ROWS["deepscaler"] if isinstance(found, str)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    said = refusal(path, "deepscaler")
    check_names(said, "the layout deepscaler", f"3 rows of {path} (2 no answer, 1 no question)", "`layout`")


def test_columns_of_a_known_data_set_suggest_its_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "agentica-org" / "DeepScaleR-Preview-Dataset"
    folder.mkdir(parents=True)
    write_rows(folder / "deepscaler.json", [{"problem": "x", "answer": "1", "solution": ""}])
    with pytest.raises(UserError, match=r"no column 'prompt' .*; set `layout: deepscaler`, which reads"):
        read_source(
            FileSource(path="x", name="s").model_copy(update={"path": "agentica-org/DeepScaleR-Preview-Dataset"})
        )
