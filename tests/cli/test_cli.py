"""The command line: help, overrides, and one line with exit code 2 for whatever cannot work, before any work."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import brorl
from brorl.api.arguments import make_run_directory
from brorl.cli import COMMANDS, _overrides_of, make_parser
from brorl.config.reading import parse_yaml, setting_fields
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.runs.run_directory import RunDirectory
from case_tables import table
from each_row import each_row
from run_support import SMALL, Outcome, command, refused, save_tiny_model

HEAVY = ("torch", "transformers", "tokenizers", "pyarrow", "scipy", "matplotlib")


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def contents() -> list[Path]:
    """List the current folder without the folder that collects run directories."""
    return sorted(path for path in Path().rglob("*") if path != Path("runs"))


def trained(*arguments: str | Path) -> Outcome:
    """Train a step on the shipped model."""
    outcome = command("train", *SMALL, "--steps=1", "--evaluation.num_prompts=0", *arguments)
    assert outcome.code == 0, outcome
    return outcome


def test_help_and_import_are_light() -> None:
    """No command loads torch or a library like it; one process runs all of them in this order."""
    program = f"""
import sys
def heavy(): return sorted(set({HEAVY!r}) & set(sys.modules))
import brorl
found = {{"import brorl": heavy()}}
from brorl.cli import main
commands = [[name, "--help"] for name in {[*COMMANDS]}]
for arguments in (["--help"], ["--version"], *commands):
    try: main(arguments)
    except SystemExit as leaving: assert not leaving.code
    found["brorl " + " ".join(arguments)] = heavy()
import json
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3 + len(COMMANDS)
    assert not any(found.values()), found
    assert done.stderr == ""


def test_help_of_train_documents_every_setting() -> None:
    outcome = command("train", "--help")
    assert outcome.code == 0
    for name, info in setting_fields(TrainConfig):
        assert f"--{name} " in outcome.said
        assert " ".join(info.description.split()) in outcome.said, name
        shown = re.search(rf"--{re.escape(name)} .*?\(default: (.*?)\)(?= --|$)", outcome.said)
        assert shown, name
        if isinstance(info.default, dict | str):
            assert shown[1] == str(info.default), name
        else:  # it is the value in YAML
            read = parse_yaml(shown[1], name)
            expected = (
                [getattr(v, "label", v) for v in info.default] if isinstance(info.default, tuple) else info.default
            )
            assert read == expected, name


def test_every_option_of_every_command_has_help() -> None:
    """The help of an option is in the docstring of its function."""
    (commands,) = (a for a in make_parser(COMMANDS)._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        for action in parser._actions:
            assert action.help, (name, action)


@each_row(
    ("name", "texts", "value"),
    [
        ("evaluation.ks", ("1,8", "[1,8]", "[1, 8]", "1, 8"), (1, 8)),
        ("evaluation.ks", ("1", "[1]"), (1,)),
        ("optimizer.betas", ("0.9,0.99", "[0.9, 0.99]"), (0.9, 0.99)),
        ("budget.eval_points", ("10,20.5", "[10, 20.5]", " [10,20.5]"), (10, 20.5)),
        ("evaluation.sources", ("a,b c", "[a, b c]"), ("a", "b c")),
        ("phases", ("[]",), ()),
    ],
)
def test_a_list_may_be_given_with_or_without_brackets(name: str, texts: tuple[str, ...], value: Any) -> None:
    for text in texts:
        overrides = _overrides_of({f"setting:{name}": text})
        assert tuple(overrides[name]) == value


def test_help_of_the_program_names_the_commands() -> None:
    for outcome in (command(), command("--help")):
        assert outcome.code == 0
        assert "train" in outcome.said
        assert "resume" in outcome.said
    assert command("--version").out.strip() == f"brorl {brorl.__version__}"


@pytest.mark.parametrize(*table(__file__, "what_cannot_work_is_refused"))
def test_what_cannot_work_is_refused(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_broken_recipe_names_file_and_line() -> None:
    recipe = Path("mine.yaml")
    recipe.write_text("steps: 3\nloss: {clip_high: 0.2\n")
    assert "mine.yaml line 3" in refused("train", recipe)
    recipe.write_text("steps: 3\nloss: {clip_hihg: 0.2}\n")
    assert "did you mean loss.clip_high? (in mine.yaml)" in refused("train", recipe)


def test_models_that_cannot_work(tmp_path: Path) -> None:
    endless = save_tiny_model(tmp_path / "endless", end_token=False)
    assert "no end-of-sequence token" in refused("train", f"--model={endless}")
    wordless = save_tiny_model(tmp_path / "wordless", characters="0123456789+-*/() ")
    assert "cannot encode the prompt" in refused("train", f"--model={wordless}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device() -> None:
    assert "set device: cpu" in refused("train", "--device", "cuda")


def test_output_dir_that_is_in_use_is_left_alone() -> None:
    used = Path("used")
    used.mkdir()
    (used / "thesis.txt").write_text("precious")
    for name, advice in (("used", "brorl resume used"), ("used/thesis.txt", "choose a different")):
        message = refused("train", f"--output_dir={name}")
        assert "exists and is not empty" in message
        assert advice in message
    assert "could not make output_dir" in refused("train", "--output_dir=used/thesis.txt/run")
    assert (used / "thesis.txt").read_text() == "precious"


@pytest.mark.slow
def test_output_dir_that_another_process_holds_is_left_alone() -> None:
    """The other process has made it, and has written nothing yet."""
    Path("run").mkdir()
    with RunDirectory(Path("run")).locked():
        assert "another process is working on run; wait for it" in refused("train", "--output_dir=run")
        assert Path("run").is_dir()
    trained("--output_dir=run")


def test_output_dir_that_cannot_be_made() -> None:
    """/proc takes no folders, not even from root."""
    if not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    assert "set output_dir to a writable folder" in refused("train", "--output_dir=/proc/run")


@pytest.mark.slow
def test_refused_run_can_be_given_again_with_the_same_output_dir() -> None:
    refused("train", "--output_dir=run", "--model=./none")
    Path("run").mkdir()  # an empty one is used
    trained("--output_dir=run")
    assert Path("run/checkpoints/step-000001/COMMIT").exists()


@pytest.mark.slow
def test_options_may_have_equals_signs_spaces_and_dashes() -> None:
    recipe = Path("mine.yaml")
    recipe.write_text(
        "steps: 9\nseed: 4\noptimizer: {learning_rate: 1e-5, max_grad_norm: 0.25}\nsampling: {max_new_tokens: 9}\n"
    )
    arguments = [
        "--output-dir", "a", "--loss.clip-high=0.5", "--loss.clip_low", "0.125", "--optimizer.learning-rate", "1e-6",
    ]  # fmt: skip
    settings = [s for s in SMALL if not s.startswith("--optimizer.learning_rate") and "max_new" not in s]
    outcome = command("train", recipe, *settings, "--steps=1", *arguments)
    assert outcome.code == 0, outcome.err
    written = parse_yaml(Path("a/config.yaml").read_text(), "a")
    assert written["steps"] == 1  # the command line beats the file
    assert written["seed"] == 4  # the file beats the default
    assert written["optimizer"]["learning_rate"] == 1e-6
    assert written["optimizer"]["max_grad_norm"] == 0.25
    assert (written["loss"]["clip_high"], written["loss"]["clip_low"]) == (0.5, 0.125)
    assert written["sampling"]["max_new_tokens"] == 9
    assert written["dtype"] == "float32"  # the default is written too
    assert {name for name, _ in setting_fields(TrainConfig) if "." not in name} <= set(written)


def test_runs_without_output_dir_get_folders_of_their_own() -> None:
    folders = {make_run_directory(None, "quickstart").path for _ in range(3)}
    assert {*Path("runs").iterdir()} == folders
    assert len(folders) == 3
    assert all(folder.name.startswith("quickstart-") for folder in folders)


def test_environment_is_recorded(short_run: Path) -> None:
    environment = json.loads((short_run / "env.json").read_text())
    assert environment["packages"]["brorl"] == brorl.__version__
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["threads"] == 1


@pytest.mark.slow
def test_run_that_finds_no_mixed_group_ends_well_and_says_why(tiny: Path) -> None:
    """A random model solves nothing."""
    arguments = [
        "--rollouts_per_prompt=4", "--data.sources={task: countdown, max_number: 5}", "--sampling.max_new_tokens=4",
        "--output_dir=run", "--evaluation.num_prompts=2", "--evaluation.rollouts_per_prompt=4", "--evaluation.ks=[1]",
        f"--model={tiny}",
    ]  # fmt: skip
    outcome = command("train", *arguments, "--dynamic_sampling.max_tries=2")
    assert outcome.code == 1, outcome.err  # not one step was made
    assert (
        "no group was mixed (correct and incorrect rollouts) in 2 rounds in a row (no rollout was correct)"
        in outcome.said
    )
    assert "were truncated at sampling.max_new_tokens; raise it" in outcome.said
    assert Path("run/checkpoints/step-000000/COMMIT").exists()
    start, end = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert (start["step"], end["step"]) == (0, 1)
    assert "no group was mixed" in end["end_reason"]
    assert (end["sampling"]["rounds"], end["sampling"]["samples"]) == (2, 2 * 32 * 4)  # looking has its cost
    assert end["seconds"]["total"] > 0
    assert end["evaluation"]["prompts"] == start["evaluation"]["prompts"]  # the run is evaluated where it ends


@pytest.mark.slow
def test_a_run_that_solves_nothing_shows_what_the_model_answered(tmp_path: Path) -> None:
    """Answers and references are read back from the data, which this test made up."""
    model = save_tiny_model(tmp_path / "model", characters="0123456789+-*/() >:[red")
    rows = [{"prompt": f"[red {i} -> {i}:", "answer": f"{i} 9 -> 77"} for i in range(1, 9)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [
        "train", f"--model={model}", "--rollouts_per_prompt=4", "--prompts_per_step=4",
        "--data.sources={path: rows.jsonl, domain: countdown}", "--evaluation.num_prompts=0",
        "--store_rollouts_every=7", "--sampling.max_new_tokens=5", "--dynamic_sampling.max_tries=2",
    ]  # fmt: skip
    outcome = command(*arguments, "--output_dir=run")
    assert outcome.code == 1, outcome.err
    stored = pq.read_table("run/rollouts/step-000001.parquet").to_pylist()
    assert sum(row["count"] for row in stored) == 2 * 4 * 4  # of both rounds
    answers = {row["prompt"]: row["answer"] for row in rows}
    first_two = list(dict.fromkeys(row["prompt"] for row in stored))[:2]
    assert len(first_two) == 2
    for place, prompt in enumerate(first_two, 1):
        of_prompt = [row for row in stored if row["prompt"] == prompt]
        most = max(row["count"] for row in of_prompt)
        example = outcome.out.partition(f"\nexample {place}, prompt: {prompt}\n")[2].splitlines()
        assert any(
            example[0] == f"response ({most} of 4 rollouts): {row['response'].strip()}"
            for row in of_prompt
            if row["count"] == most
        )
        assert f"reference answer: {answers[prompt]};" in example[1]
    assert "brorl samples run --step 1" in outcome.out
    shown = command("samples", "run", "--step=1")
    assert shown.code == 0
    assert any(f"reference {answer}" in shown.out for answer in answers.values())
    outcome = command(*arguments, "--output_dir=other", "--store_rollouts_every=0")
    assert "store_rollouts_every: 1 stores the rollouts" in outcome.said
    assert not Path("other/rollouts").exists()


@pytest.mark.slow
@each_row(
    ("bad", "domain", "said"),
    [
        ({"prompt": "1 20 -> 21:", "answer": "4"}, "countdown", ("question rows:9", "which is not a countdown puzzle")),
        ({"prompt": "9 -> 9:", "answer": "   \\\\"}, "math",
         ("rows.jsonl line 9) has the reference answer", "verification.functions")),
    ],
)  # fmt: skip
def test_a_reference_answer_that_nothing_can_equal_is_named_before_the_model_is_loaded(
    bad: dict[str, str], domain: str, said: tuple[str, ...]
) -> None:
    solved = [f"1 {i} -> {i + 1}" for i in range(2, 10)]
    rows = [{"prompt": f"{answer}:", "answer": "7" if domain == "math" else answer} for answer in solved]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, bad])))
    message = refused("train", f"--data.sources={{path: rows.jsonl, domain: {domain}}}", "--data.held_out_fraction=0.5")
    assert all(part in message for part in said)


@pytest.mark.slow
def test_other_held_out_questions_are_refused_on_resume() -> None:
    rows = [f'{{"prompt": "1 {i} -> {1 + i}:", "answer": "1 {i} -> {1 + i}"}}' for i in range(2, 9)]
    Path("test.jsonl").write_text("\n".join(rows))
    only = "--evaluation.sources={path: test.jsonl, domain: countdown}"
    short_run_with = [*SMALL, "--steps=1", only, "--output_dir=run"]
    assert command("train", *short_run_with).code == 0
    Path("test.jsonl").write_text("\n".join(rows[1:]))
    outcome = command("resume", "run", "--steps=2")
    assert outcome.code == 2
    assert "the held-out questions have changed since the run began" in outcome.err


def test_resume_needs_a_run_and_leaves_alone_what_another_process_works_on(short_run: Path) -> None:
    outcome = command("resume")
    assert (outcome.code, outcome.out) == (2, "")
    assert "the following arguments are required: RUN (see brorl resume --help)" in outcome.err
    shutil.copytree(short_run, "runs/only")
    with RunDirectory(Path("runs/only")).locked():
        outcome = command("resume", "runs/only", "--steps=2")
    assert outcome.code == 2
    assert "another process is working on runs/only" in outcome.err


def test_a_run_that_a_tracker_refused_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        Path("run/tensorboard").mkdir(parents=True)
        Path("run/trackers.json").write_text("{}")
        raise UserError("wandb did not start")

    monkeypatch.setattr("brorl.api.training_session.open_trackers", refuse)
    outcome = command("train", *SMALL, "--steps=1", "--output_dir=run")
    assert outcome.code == 2
    assert not Path("run").exists()


def test_a_path_without_permission_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an ordinary user; root reads every file."""

    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("brorl.api.data.resolve_config", lambda path, _: denied(path))
    outcome = command("data", "mine.yaml")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert "mine.yaml: permission denied" in line
