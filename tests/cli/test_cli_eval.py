"""`brorl eval` from the command line: whole evaluations, continued ones, and one line for each error."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from brorl.config.reading import read_recipe
from brorl.errors import UserError
from brorl.evaluation.evaluator import Evaluator
from brorl.runs.checkpoint import mark_best
from brorl.verification.sandbox.level import choose_level
from case_tables import table
from run_support import SMALL, command, refused, save_tiny_model

QUICK = ("quickstart", "--samples=16", "--evaluation.num_prompts=5", "--engine.threads=1")
EVERY_CHARACTER = "".join(map(chr, range(32, 127))) + "\n"


refusal = partial(refused, "eval")


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(autouse=True)
def several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.evaluation.preparation._MIN_PROMPTS", 2)
    monkeypatch.setattr("brorl.evaluation.preparation._MAX_PROMPTS", 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, with a checkpoint, which asks in its own words."""
    path = tmp_path_factory.mktemp("runs") / "short"
    outcome = command(
        "train", *SMALL, "--steps=1", "--evaluation.num_prompts=0", f"--output_dir={path}", "--data.split_seed=3"
    )
    assert outcome.code == 0, outcome
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that can spell every question."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", characters=EVERY_CHARACTER, max_positions=256)


def record(folder: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "evaluation.json").read_text())
    return found


def rows(folder: str | Path) -> list[dict[str, Any]]:
    files = sorted(Path(folder, "responses").iterdir())
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def timeless(value: Any) -> Any:
    """Return a record without times and the command."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "sessions")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def test_an_evaluation_from_end_to_end() -> None:
    outcome = command("eval", *QUICK, "--output-dir=out/mine")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    found, stored = record("out/mine"), rows("out/mine")
    assert sorted(p.name for p in Path("out/mine").iterdir()) == [
        "env.json", "evaluation.json", "responses", "sessions.json", "settings.json"
    ]  # fmt: skip
    assert len(list(Path("out/mine/responses").iterdir())) == 3  # of 2, 2 and 1 prompts
    rollouts = [row for row in stored for _ in range(row["count"])]
    assert len(rollouts) == 5 * 16
    correct = {p: sum(r["correct"] for r in rollouts if r["prompt_id"] == p) for p in {r["prompt_id"] for r in stored}}
    overall = found["overall"]
    assert list(overall["pass_at"]) == ["1", "2", "4", "8"]
    assert overall["pass_at"]["1"]["value"] == pytest.approx(np.mean([row["correct"] for row in rollouts]))
    assert {p["prompt_id"]: p["num_correct"] for p in found["prompts"]} == correct
    settings = found["settings"]
    assert (settings["temperature"], settings["top_p"], settings["max_new_tokens"]) == (0.6, 0.95, 12)
    (session,) = found["sessions"]
    assert session["packages"]["brorl"]
    assert session["parts_before"] == 0
    value = overall["pass_at"]["1"]["value"]
    written = "written: out/mine/evaluation.json"
    for text in ("countdown 5/5 prompts", f"{value:.3f} [", written, "16 responses per prompt"):
        assert text in outcome.said


@pytest.mark.slow
def test_an_interrupted_evaluation_continues_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("eval", *QUICK, "--output-dir=whole").code == 0
    evaluate, calls = Evaluator.evaluate, 0

    def interrupted(self: Evaluator, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return evaluate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", interrupted)
        patch.setattr("brorl.runs.run_directory.processor_name", lambda: "another processor")
        outcome = command("eval", *QUICK)
    assert outcome.code == 130
    (folder,) = Path("runs/evaluations").iterdir()
    said = f"stopped: 1 of 3 batches are stored; rerun the command to continue (it finds {folder})"
    assert said in outcome.said
    first = next(folder.glob("responses/*")).stat().st_mtime_ns
    outcome = command("eval", *QUICK)
    assert "continuing: 1 of 3 batches are already stored" in outcome.said
    assert "countdown 2/5 prompts" not in outcome.said
    assert "the 2 sessions differ in processor:" in outcome.said
    assert outcome.code == 0
    assert sorted(folder.glob("responses/*"))[0].stat().st_mtime_ns == first
    assert rows(folder) == rows("whole")
    assert timeless(record(folder)) == timeless(record("whole"))

    before = record(folder)
    outcome = command("eval", *QUICK, "--ks=1,16")  # other k need no other responses
    assert outcome.code == 0
    assert list(record(folder)["overall"]["pass_at"]) == ["1", "16"]
    assert record(folder)["overall"]["seconds"] == before["overall"]["seconds"]
    sessions = record(folder)["sessions"]  # of the two that sampled
    assert sessions == before["sessions"] == json.loads((folder / "sessions.json").read_text())
    assert [session["parts_before"] for session in sessions] == [0, 1]
    first_processor, second_processor = (session["processor"] for session in sessions)
    assert first_processor == "another processor" != second_processor


def test_other_weights_in_the_same_place_are_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    model = save_tiny_model(tmp_path / "model")
    arguments = (model, "--data=countdown", "--samples=4", "--evaluation.num_prompts=1", "--max-new-tokens=3")
    assert command("eval", *arguments).code == 0
    weights = load_file(model / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = torch.nextafter(weights[name], torch.tensor(9.0))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    outcome = command("eval", *arguments)
    assert outcome.code == 2
    assert "contains a different evaluation: weights is '" in outcome.err


@pytest.mark.slow
def test_a_run_gives_its_held_out_questions_and_its_last_checkpoint(run: Path) -> None:
    mark_best(run / "checkpoints", 1)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    common = ("--samples=4", "--evaluation.num_prompts=3")
    assert command("eval", run, *common, "--output-dir=a").code == 0
    assert command("eval", run / "checkpoints" / "step-000001", *common, "--output-dir=b").code == 0
    assert command("eval", run / "checkpoints" / "best", *common, "--output-dir=c").code == 0
    assert timeless(record("a")) == timeless(record("b")) == timeless(record("c"))
    assert record("a")["settings"]["checkpoint"] == str((run / "checkpoints" / "step-000001").resolve())
    assert record("a")["settings"]["max_new_tokens"] == 16  # the run's
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before  # nothing of the run has changed

    from brorl.config.reading import make_config, read_recipe
    from brorl.evaluation.questions import build_questions

    config = make_config(read_recipe(str(run / "config.yaml")), {"evaluation.num_prompts": 3}, "the run")
    (source,) = build_questions(config)
    assert [p["prompt_id"] for p in record("a")["prompts"]] == [q.id for q in source.held_out]
    trained = {q.id for q in source.train}
    assert not trained & {p["prompt_id"] for p in record("a")["prompts"]}


@pytest.mark.slow
def test_an_evaluation_of_a_run_says_how_it_differs_from_the_runs_own(tmp_path: Path) -> None:
    path = tmp_path / "evaluated"
    assert command("train", *SMALL, "--steps=1", f"--output_dir={path}").code == 0
    outcome = command("eval", path, "--samples=8", "--evaluation.num_prompts=3", "--top-p=1", "--output-dir=other")
    assert outcome.code == 0, outcome
    differing = "temperature 0.6 (in training 1), responses per prompt 8 (in training 4), prompts 3 (in training 2)"
    said = f"the run's own evaluations used other settings, so their pass@k is not comparable: {differing}"
    assert outcome.said.count(said) == 2  # before the work, and beside the numbers
    same = ("--samples=4", "--ks=1,4", "--temperature=1", "--top-p=1", "--evaluation.num_prompts=2")
    outcome = command("eval", path, *same, "--output-dir=same")
    assert outcome.code == 0, outcome
    assert "own evaluations" not in outcome.said
    settings, config = record("same")["settings"], read_recipe(str(path / "config.yaml"))
    wanted = config["evaluation"]
    assert (
        (settings["temperature"], settings["top_p"]) == (wanted["temperature"], config["sampling"]["top_p"]) == (1, 1)
    )
    assert settings["max_new_tokens"] == config["sampling"]["max_new_tokens"]
    held_out = {prompt["id"] for prompt in json.loads((path / "held_out.json").read_text())}
    assert {prompt["prompt_id"] for prompt in record("same")["prompts"]} == held_out
    assert list(record("same")["overall"]["pass_at"]) == [str(k) for k in wanted["ks"]]
    assert "own evaluations" not in command("eval", path, "--data=countdown", "--samples=2", *QUICK[2:]).said

    later = tmp_path / "later"
    assert command("train", *SMALL, "--steps=1", "--evaluation.skip_prompts=2", f"--output_dir={later}").code == 0
    outcome = command("eval", later, *same, "--output-dir=all")
    assert "not comparable: skipped prompts 0 (in training 2)" in outcome.said


@pytest.mark.slow
def test_benchmarks_of_one_model(tiny: Path, tmp_path: Path) -> None:
    aime = tmp_path / "aime.jsonl"
    aime.write_text("".join(json.dumps({"problem": f"What is {i}?", "answer": str(i)}) + "\n" for i in range(3)))
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    sets = (f"--data=aime24={aime}", f"--data={{path: {own}, name: mine}}")
    small = ("--samples=8", "--max-new-tokens=1")
    outcome = command("eval", tiny, *sets, *small, "--output-dir=out")
    assert outcome.code == 0, outcome
    asked = "Please reason step by step, and put your final answer within \\boxed{}."
    assert "added to each question of aime24" in outcome.said
    prompts = {row["prompt_id"]: row["prompt"] for row in rows("out")}
    assert prompts == {**{f"aime24:{i + 1}": f"What is {i}?\n\n{asked}" for i in range(3)}, "mine:1": "1+1?"}
    found = record("out")
    assert (list(found["by_source"]), list(found["by_domain"])) == (["aime24", "mine"], ["math"])
    assert found["overall"]["num_prompts"] == 4
    assert found["settings"]["data"]["aime24"]["source"]["path"] == str(aime)
    assert "all prompts" in outcome.said

    outcome = command("eval", tiny, *sets, *small, "--prompt.template=Q: {prompt}", "--output-dir=other")
    assert "asked after" not in outcome.said
    assert {row["prompt"] for row in rows("other")} == {*(f"Q: What is {i}?" for i in range(3)), "Q: 1+1?"}

    outcome = command("eval", tiny, *sets, "--samples=1", "--output-dir=long")
    longest = len(f"What is 0?\n\n{asked}")
    assert record("long")["settings"]["max_new_tokens"] == 256 - longest  # as many as the model's positions leave


@pytest.mark.linux
def test_a_missing_sandbox_is_a_warning(tiny: Path, tmp_path: Path) -> None:
    calls = '{"calls": {"function": "f", "arguments": [[1]], "expected": [1]}}'
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "Write f.", "answer": calls}))
    options = (f"--data={{path: {tmp_path / 'code.jsonl'}, domain: code}}", "--samples=2", "--max-new-tokens=1")
    outcome = command("eval", tiny, *options, "--verification.sandbox=unsafe", "--output-dir=unsafe")
    assert "warning: no sandbox: verification.sandbox = unsafe runs code from responses (code)" in outcome.said
    outcome = command("eval", tiny, *options, "--output-dir=confined")
    assert f"sandbox for untrusted code (code): {choose_level('auto').name}" in outcome.said
    assert "warning: no sandbox" not in outcome.said


@pytest.mark.slow
def test_a_benchmark_with_an_unreadable_answer_is_evaluated_and_a_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "minerva.jsonl"
    data.write_text(
        "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in (("a?", "7"), ("b?", "\\frac{1}{")))
    )
    outcome = command("eval", tiny, f"--data=minerva={data}", "--samples=2", "--max-new-tokens=1", "--output-dir=out")
    assert outcome.code == 0, outcome
    said = outcome.said
    assert "warning: minerva: the verifier cannot read 1 reference answer, such as " in said
    assert record("out")["unreadable_references"] == {"minerva": ["minerva:2"]}
    said = refusal(tiny, f"--data={{path: {data}, prompt_column: question}}", "--samples=2", "--max-new-tokens=1")
    assert f"question minerva:2 ({data} line 2) has the reference answer " + repr("\\frac{1}{") in said


@pytest.mark.parametrize(*table(__file__, "what_cannot_work_is_said_before_any_work"))
def test_what_cannot_work_is_said_before_any_work(arguments: list[str], said: str) -> None:
    if "--device=cuda:0" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
    assert said in refusal(*arguments)


def test_a_model_of_no_run_needs_data(tiny: Path, run: Path, tmp_path: Path) -> None:
    assert "is not from a run with held-out questions; choose the data to evaluate on: `data` aime24 |" in refusal(tiny)
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "x", "right": "1"}\n')
    said = refusal(tiny, f"--data=aime24={wrong}")
    assert "line 1 has no question (columns: text, right; expected one of problem, question" in said
    said = refusal(tiny, f"--data={wrong}")
    assert (
        "no column is clearly the reference answer (columns: text, right); name it with `answer_column`, as in `data="
        in said
    )
    assert "cannot encode the prompt" in refusal(run, f"--data=aime24={aime_file(tmp_path)}")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    assert "is not empty (notes.txt, ...)" in refusal("quickstart", f"--output-dir={taken}")


@pytest.mark.slow
def test_a_failure_removes_only_a_folder_that_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise UserError("it does not work")

    monkeypatch.setattr("brorl.assemble.build_evaluation", fails)
    Path("mine").mkdir()
    assert "it does not work" in outcome_of_failure("mine")
    assert "it does not work" in outcome_of_failure("new")
    assert sorted(path.name for path in Path().iterdir()) == ["mine"]
    assert list(Path("mine").iterdir()) == []


def outcome_of_failure(folder: str) -> str:
    outcome = command("eval", *QUICK, f"--output-dir={folder}")
    assert outcome.code == 2, outcome
    return outcome.err


@pytest.mark.slow
def test_greedy_decoding_gives_one_response() -> None:
    outcome = command("eval", *QUICK, "--samples=1", "--temperature=0", "--output-dir=greedy")
    assert outcome.code == 0, outcome
    found = record("greedy")
    assert list(found["overall"]["pass_at"]) == ["1"]
    assert [row["count"] for row in rows("greedy")] == [1] * 5


def aime_file(folder: Path) -> Path:
    (folder / "aime.jsonl").write_text('{"problem": "What?", "answer": "1"}\n')
    return folder / "aime.jsonl"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mine.jsonl", "name it with `prompt_column`, as in `data={path: "),
        ("aime", "did you mean the benchmark aime2"),
        ("GSM8k", "did you mean the benchmark gsm8k?"),
    ],
)
def test_what_was_probably_meant_by_data_is_said(text: str, said: str) -> None:
    Path("mine.jsonl").write_text('{"ask": "1 + 1", "answer": "2"}\n')
    outcome = command("eval", "quickstart", "--data", text)
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert said in outcome.err
