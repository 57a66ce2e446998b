"""`brorl verify`: new verdicts against plain evaluation, agreement against counting, and its errors."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.console import Console

import brorl
from brorl.api.verify import VerifyResult, verify
from brorl.errors import UserError
from brorl.verification.sandbox.level import choose_level
from run_support import SMALL, command

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def write(name: str, rows: list[dict[str, Any]]) -> str:
    path = Path(name)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def sums(count: int) -> str:
    return write("sums.jsonl", [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(1, count + 1)])


def printed(result: VerifyResult) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(result, soft_wrap=True)
    return capture.get()


def boxed(value: int) -> str:
    return f"So it is \\boxed{{{value}}}."


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("key", ["exact id", "part of the id", "text"])
def test_verdicts_and_agreement_against_plain_counting(suffix: str, key: str, rng: np.random.Generator) -> None:
    data, rows, expected = sums(9), [], []
    for _ in range(60):
        number, given = (int(n) for n in rng.integers(1, 10, 2))
        stored = bool(rng.integers(0, 2))
        row = {"response": boxed(given * 2), "correct": stored}
        if key == "text":
            row["question"] = f"What is  {number} + {number}? "
        else:
            row["id"] = f"sums:{number}" if key == "exact id" else str(number)
        rows.append(row)
        expected.append((f"sums:{number}", given == number, stored))
    result = verify(write(f"responses{suffix}", rows), data=data, progress=False)
    assert [(r.question.id, r.verdict.correct, r.response.correct) for r in result.rescored] == expected
    pairs = [(stored, now) for _, now, stored in expected]
    counts = {pair: f"{pairs.count(pair):,}" for pair in product((True, False), repeat=2)}
    assert result.tables[-1].rows == (
        ("stored correct", counts[True, True], counts[True, False]),
        ("stored incorrect", counts[False, True], counts[False, False]),
    )
    assert result.agreement == pytest.approx(np.mean([stored == now for stored, now in pairs]))
    assert result.agrees == (result.agreement == 1)
    assert [one.response.location for one in result.disagreements] == [
        one.response.location for one, (stored, now) in zip(result.rescored, pairs, strict=True) if stored != now
    ]


def test_each_distinct_response_is_verified_once() -> None:
    Path("counting.py").write_text(
        "import pathlib\n"
        "def check(response, reference):\n"
        "    with pathlib.Path('calls').open('a') as file:\n"
        "        file.write(response + '\\n')\n"
        "    return response == reference\n"
    )
    rows = [{"id": str(1 + i % 2), "response": str(i % 3)} for i in range(24)]
    source = write("q.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    result = verify(
        write("r.jsonl", rows),
        data=f"{{path: {source}, domain: mine}}",
        progress=False,
        **{"verification.functions": {"mine": f"{Path('counting.py').absolute()}:check"}, "verification.workers": 1},
    )
    assert len(Path("calls").read_text().splitlines()) == 6
    assert [one.verdict.correct for one in result.rescored] == [i % 3 == 1 + i % 2 for i in range(24)]
    assert not result.compared
    assert not result.agrees
    assert "6 distinct responses" in printed(result)


@pytest.mark.slow
def test_rollouts_and_evaluations_of_a_run_reach_their_verdicts_again() -> None:
    options = ("--steps=2", "--output_dir=run", "--store_rollouts_every=1", "--evaluation.every=1")
    assert command("train", *SMALL, *options).code == 0
    result = verify("run", progress=False)
    assert result.path == "run/rollouts/step-000002.parquet"
    table = parquet.read_table(result.path).to_pylist()
    assert [(one.response.text, one.question.id) for one in result.rescored] == [
        (row["response"], row["prompt_id"]) for row in table
    ]
    now = [
        (one.verdict.correct, one.verdict.score, one.verdict.extracted, one.verdict.reason) for one in result.rescored
    ]
    assert now == [(row["correct"], row["score"], row["extracted"], row["reason"]) for row in table]
    compared = sum(row["reason"] != "truncated" for row in table)
    assert (result.agreement, len(result.compared)) == (1.0, compared)
    for stored in "run/rollouts", "run/evaluations/step-000001.parquet":
        again = command("verify", stored, "--data=run", "--require-agreement")
        assert (again.code, again.err) == (0, ""), again


def test_the_command_writes_verdicts_and_requires_agreement() -> None:
    rows = [
        {"id": "1", "response": boxed(2), "correct": True},
        {"id": "2", "response": boxed(5), "is_correct": 1},
        {"id": "77", "response": boxed(5), "correct": False},
        {"id": "3", "response": "\x1b[mI do not know", "correct": None},
    ]
    responses, data = write("r.jsonl", rows), sums(3)
    outcome = command("verify", responses, f"--data={data}", "--output=verdicts.jsonl")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    for said in (
        f"not verified, because no question of {data} has the same id or text: 1 response, r.jsonl line 3 (77)",
        "agreement with 2 stored verdicts: 50.00%",
        "first disagreements (1 in total)",
        "sums:2, r.jsonl line 2: stored correct, now incorrect (wrong answer)",
        "extracted: 5; reference: 4",
    ):
        assert said in outcome.out
    written = [json.loads(line) for line in Path("verdicts.jsonl").read_text().splitlines()]
    assert [(v["id"], v["correct"], v["stored_correct"], v["reason"]) for v in written] == [
        ("sums:1", True, True, "correct"),
        ("sums:2", False, True, "wrong answer"),
        ("sums:3", False, None, "no answer"),
    ]
    assert command("verify", responses, f"--data={data}", "--require-agreement").code == 1
    assert "`output=r.jsonl` exists" in command("verify", responses, f"--data={data}", "--output=r.jsonl").err


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"id": "1", "text": "x"}, {}, "line 1 has no column 'response' (columns: id, text); set `response_column`"),
        ({"id": "1", "response": 3}, {}, "line 1: response must be a string, got a number; write one response per row"),
        ({"response": "x"}, {}, "line 1 has neither the id nor the text of its question (columns: response;"),
        ({"id": "1", "response": "x", "correct": "yes"}, {}, "the stored verdict is 'yes', not true, false, 1 or 0"),
        ({"id": "1", "response": None}, {}, "line 1: response must be a string, got null; write one response per row"),
        ({"id": [1], "response": "x"}, {}, "line 1: the question id is a list; write text or a number"),
        ({"id": True, "response": "x"}, {}, "line 1: the question id is true or false; write text or a number"),
        ({"id": "1", "response": "x"}, {"id_column": "key"}, "has no column 'key' (columns: id, response); fix"),
        ({"id": "1", "response": "x"}, {"correct_column": "ok"}, "has no column 'ok' (columns: id, response); fix"),
        (
            {"id": "9", "response": "x"},
            {},
            "no response in r.jsonl belongs to a question of sums.jsonl (its ids: sums:1",
        ),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        verify(write("r.jsonl", [row]), data=sums(2), progress=False, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_whole_number_as_a_float_is_an_id(rng: np.random.Generator) -> None:
    number = int(rng.integers(1, 9))
    responses = write("r.jsonl", [{"id": float(number), "response": boxed(2 * number)}])
    (only,) = verify(responses, data=sums(9), progress=False).rescored
    assert (only.question.id, only.verdict.correct) == (f"sums:{number}", True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("hello", 'write one object per line, such as {"COLUMN": VALUE, ...}'),
        (f'{{"id": {"9" * 5000}}}', "a number has more than 4,300 digits; write it as text"),
        ("", "r.jsonl contains no responses; give a file with at least one"),
    ],
)
def test_a_file_that_holds_no_responses(content: str, said: str) -> None:
    Path("r.jsonl").write_text(content)
    with pytest.raises(UserError) as caught:
        verify("r.jsonl", data=sums(2), progress=False)
    assert said in str(caught.value)


def test_what_cannot_be_verified() -> None:
    data, responses = sums(1), write("r.jsonl", [{"id": "1", "response": boxed(2)}])
    for keywords, said in (
        ({"data": None}, "r.jsonl does not belong to a run; name its questions with `data`"),
        ({"steps": 3}, "steps is not a setting of brorl verify"),
        ({"data": " "}, "^`data` is empty"),
        ({"output": "none/verdicts.jsonl"}, "there is no folder none"),
    ):
        with pytest.raises(UserError, match=said):
            verify(responses, **{"data": data, "progress": False, **keywords})
    with pytest.raises(UserError, match="FILE is empty; name the file"):
        verify("", data=data)
    with pytest.raises(UserError, match=r"there is no file or folder missing\.jsonl"):
        verify("missing.jsonl", data=data)
    assert "contains no stored verdicts" in command("verify", responses, f"--data={data}", "--require-agreement").err
    Path("run").mkdir()
    Path("run/config.yaml").write_text("steps: 1\n")
    with pytest.raises(UserError, match="the run run stored no rollouts; train with `store_rollouts_every=1"):
        verify("run")


@pytest.mark.parametrize(
    ("domain", "good", "bad"),
    [
        ("code", '{"calls": {"function": "f", "arguments": [[1]], "expected": [1]}}', '{"tests": []}'),
        ("code", '{"stdin": {"inputs": ["1"], "outputs": ["1"]}}', "not JSON"),
        ("science", '{"options": ["He", "Ne"], "answer": "A"}', '{"options": ["He"], "answer": "A"}'),
        ("ifeval", '{"instructions": [{"kind": "punctuation:no_comma"}]}', '{"instructions": [{"kind": "no_comma"}]}'),
    ],
)
def test_a_malformed_reference_is_named_and_the_others_are_verified(domain: str, good: str, bad: str) -> None:
    write("data.jsonl", [{"prompt": "Print it.", "answer": good}, {"prompt": "Print this.", "answer": bad}])
    write("r.jsonl", [{"id": "data:1", "response": "Answer: A"}, {"id": "data:2", "response": "Answer: A"}])
    result = verify("r.jsonl", data=f"{{path: data.jsonl, domain: {domain}}}", progress=False)
    first, second = result.rescored
    assert first.verdict.reason != second.verdict.reason == "unreadable reference"
    assert not second.verdict.correct
    assert "no response can be correct for 1 question, such as data:2" in printed(result)


def verified_by(lines: str, responses: list[str]) -> VerifyResult:
    """Verify responses to one question by a function of the user."""
    Path("own.py").write_text(f"def check(response, reference):\n{lines}")
    source = write("q.jsonl", [{"prompt": "a", "answer": "1"}])
    file = write("r.jsonl", [{"id": "1", "response": response} for response in responses])
    functions = {"verification.functions": {"mine": f"{Path('own.py').absolute()}:check"}}
    return verify(file, data=f"{{path: {source}, domain: mine}}", progress=False, **functions)


def test_reasons_that_are_not_listed_are_counted(rng: np.random.Generator) -> None:
    counts = {letter: int(rng.integers(1, 6)) for letter in "abcdefghijklmnopqrst"}
    responses = [f"{letter}{i}" for letter, count in counts.items() for i in range(count)]
    (table,) = verified_by("    return {'correct': False, 'reason': 'kind ' + response[0]}\n", responses).tables
    assert table.title == "verdicts"
    listed = [(row[1], int(row[2])) for row in table.rows]
    assert [count for _, count in listed[:-1]] == sorted(counts.values(), reverse=True)[:12]
    assert listed[-1] == ("8 other reasons", sum(counts.values()) - sum(count for _, count in listed[:-1]))


def test_a_number_in_a_reason_is_explained_and_others_are_not() -> None:
    lines = (
        "    reason = f'length {len(response)}' if response[0] == 'x' else 'no'\n"
        "    return {'correct': False, 'reason': reason}\n"
    )
    for response, notes, reason in (("x" * 17, ("# stands for a number",), "length #"), ("y", (), "no")):
        (table,) = verified_by(lines, [response]).tables
        assert (table.notes, table.rows[0][1]) == (notes, reason)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope.yaml", "`data=nope.yaml`: recipe 'nope.yaml' is neither a file nor a built-in recipe"),
        ("nope.jsonl", "`data=nope.jsonl`: there is no file or folder nope.jsonl"),
        (
            "{path: q.jsonl, answer_column: reply}",
            "has no column 'reply' (columns: prompt, answer); set `answer",
        ),
        ("empty.jsonl", "`data=empty.jsonl`: "),
    ],
)
def test_an_error_of_the_questions_names_the_option(name: str, said: str) -> None:
    write("q.jsonl", [{"prompt": "a", "answer": "1"}])
    Path("empty.jsonl").touch()
    outcome = command("verify", write("r.jsonl", [{"id": "1", "response": "x"}]), f"--data={name}")
    assert outcome.code == 2
    assert said in outcome.err
    assert "brorl train" not in outcome.err
    assert "data.sources" not in outcome.err


@pytest.mark.linux
@pytest.mark.parametrize("level", ["auto", "unsafe"])
def test_the_level_of_the_sandbox_is_shown_if_code_runs(level: str) -> None:
    calls = '{"calls": {"function": "f", "arguments": [[1]], "expected": [1]}}'
    write("code.jsonl", [{"prompt": "Write f.", "answer": calls}])
    responses = write("r.jsonl", [{"id": "1", "response": "```python\ndef f(x):\n    return x\n```"}])
    data = "{path: code.jsonl, domain: code}"
    outcome = command("verify", responses, f"--data={data}", f"--verification.sandbox={level}")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    if level == "auto":
        assert f"sandbox for untrusted code (code): {choose_level('auto').name}" in outcome.out.splitlines()
    assert outcome.said.count("warning: no sandbox: verification.sandbox = unsafe runs code from responses (code)") == (
        level == "unsafe"
    )
    outcome = command("verify", write("s.jsonl", [{"id": "1", "response": "2"}]), f"--data={sums(1)}")
    assert "sandbox" not in outcome.out
    assert outcome.out.splitlines()[0] == f"brorl {brorl.__version__}: starting"
