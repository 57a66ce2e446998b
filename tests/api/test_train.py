"""`brorl.train` is the command: the same run, the same files; and its result is what the files hold."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import brorl
from brorl.api.in_memory import resolve_in_memory
from brorl.api.training_session import TrainingResult
from brorl.config.reading import parse_yaml
from brorl.console.progress import TrainingProgress
from brorl.errors import EngineLostError, LearnerLostError, UserError
from brorl.runs.step_record import StepRecord, to_json
from brorl.training.loop import Ending, Recorder
from run_support import SMALL, assert_same_run, command, metrics_without_times

SETTINGS = {
    name: parse_yaml(value, name) for name, value in (option.removeprefix("--").split("=", 1) for option in SMALL)
}
STEPS = 4


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    assert command("train", *SMALL, f"--steps={STEPS}", "--output_dir", run).code == 0
    return run


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, times: int = 1) -> None:
    """Send SIGINT to this process when a step is shown, as a notebook's interrupt does."""
    show = TrainingProgress.show

    def showing(self: TrainingProgress, record: StepRecord) -> None:
        show(self, record)
        if record.step == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainingProgress, "show", showing)


@pytest.mark.slow
def test_a_learner_that_is_lost_before_the_first_line_leaves_a_run_that_resumes(
    reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of such a run says to resume it. The directory of any other run without metrics is removed."""
    begin, errors = Recorder.begin, [UserError("no memory"), LearnerLostError("a learner process died")]

    def lose(recorder: Recorder) -> None:
        if errors:
            raise errors.pop(0)
        begin(recorder)

    monkeypatch.setattr(Recorder, "begin", lose)
    train = partial(brorl.train, "quickstart", steps=STEPS, output_dir="run", progress=False, **SETTINGS)
    with pytest.raises(UserError, match="no memory"):
        train()
    assert not Path("run").exists()
    with pytest.raises(LearnerLostError, match="died"):
        train()
    brorl.train("run", resume=True, progress=False)
    assert_same_run(Path("run"), reference)


def test_a_lost_engine_ends_the_run_with_the_command_that_continues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> None:
        raise EngineLostError("the vLLM process died")

    monkeypatch.setattr(Recorder, "begin", lose)
    with pytest.raises(EngineLostError, match=r"vLLM process died\. Continue from the start with: .*run"):
        brorl.train("quickstart", steps=STEPS, output_dir="run", progress=False, **SETTINGS)
    assert Path("run").exists()


@pytest.mark.slow
def test_the_function_makes_the_run_of_the_command(reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = brorl.train("quickstart", steps=STEPS, output_dir=Path("run"), **SETTINGS)
    assert_same_run(result.path, reference)
    printed = capsys.readouterr().out
    assert f"finished {STEPS} steps; run directory: run" in printed
    assert "compare with few rollouts" not in printed  # 16 are few
    assert result.ending is Ending.FINISHED


def test_the_result_holds_and_shows_the_numbers_of_the_files(capfd: pytest.CaptureFixture[str]) -> None:
    settings = {**SETTINGS, "report": True, "evaluation.keep_best": True}
    result = brorl.train(steps=STEPS, progress=False, output_dir="run", **settings)
    assert capfd.readouterr() == ("", "")
    assert f"finished {STEPS} steps" in Path("run/run.log").read_text()
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert json.loads(json.dumps(list(map(to_json, result.metrics)))) == records
    samples = sum(record["sampling"]["samples"] for record in records[1:])
    seconds = sum(record["seconds"]["total"] for record in records[1:])
    assert (result.cost.steps, result.cost.samples) == (STEPS, samples)
    assert result.cost.seconds == pytest.approx(seconds)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(result)
    shown = (captured.get(), result._repr_html_())
    for found, record in ((result.first_evaluation, records[0]), (result.last_evaluation, records[-1])):
        stored = record["evaluation"]["pass_at"]
        assert {str(k): [e.value, e.low, e.high] for k, e in found.items()} == {
            k: [e["value"], e["low"], e["high"]] for k, e in stored.items()
        }
        assert all(f"{estimate.value:.3f}" in text for estimate in found.values() for text in shown)
    assert all(f"finished {STEPS} steps; run directory: run" in text for text in (*shown, repr(result)))
    assert result.report == Path("run/report.html")
    assert [path.name for path in result.checkpoints][-1] == f"step-{STEPS:06d}"
    assert all((path / "COMMIT").is_file() for path in result.checkpoints)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.resolve().name in {path.name for path in result.checkpoints}


@pytest.mark.slow
def test_a_run_is_resumed_with_more_steps(reference: Path) -> None:
    brorl.train("quickstart", steps=2, progress=False, output_dir="runs/mine", **SETTINGS)
    result = brorl.train("runs/mine", resume=True, progress=False, steps=STEPS)
    assert result.path == Path("runs/mine")
    assert_same_run(result.path, reference)
    with pytest.raises(UserError, match="none is not a run directory"):
        brorl.train("none", resume=True)
    for other in (None, {}):
        with pytest.raises(UserError, match="needs a run directory as the first argument"):
            brorl.train(other, resume=True)
    with pytest.raises(UserError, match="a resumed run keeps its reward; omit reward"):
        brorl.train("runs/mine", resume=True, reward=lambda completions: [0.0] * len(completions))


@pytest.mark.slow
def test_an_interrupt_saves_and_returns(monkeypatch: pytest.MonkeyPatch, reference: Path) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, step=1)
        result = brorl.train("quickstart", steps=STEPS, progress=False, output_dir="run", **SETTINGS)
    assert result.ending is Ending.INTERRUPTED
    assert [path.name for path in result.checkpoints] == ["step-000001"]
    assert metrics_without_times(result.path) == metrics_without_times(reference)[:2]
    assert brorl.train("run", resume=True, progress=False).ending is Ending.FINISHED
    assert_same_run(result.path, reference)


@pytest.mark.slow
def test_a_second_interrupt_discards_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(monkeypatch, step=1, times=2)
    with pytest.raises(KeyboardInterrupt):
        brorl.train("quickstart", steps=STEPS, output_dir="run", **SETTINGS)
    assert "stopped immediately; unsaved work is lost" in capsys.readouterr().out


@pytest.mark.slow
def test_other_threads_train_without_signal_handlers(monkeypatch: pytest.MonkeyPatch, reference: Path) -> None:
    handlers: list[Any] = []
    show = TrainingProgress.show

    def showing(self: TrainingProgress, record: StepRecord) -> None:
        handlers.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
        show(self, record)

    monkeypatch.setattr(TrainingProgress, "show", showing)
    results: list[TrainingResult] = []
    thread = threading.Thread(
        target=lambda: results.append(
            brorl.train("quickstart", steps=STEPS, progress=False, output_dir="run", **SETTINGS)
        )
    )
    before = {signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    thread.start()
    thread.join()
    assert {*handlers} == before
    assert_same_run(results[0].path, reference)


def test_a_refused_run_leaves_nothing_behind() -> None:
    with pytest.raises(UserError, match="none does not exist"):
        brorl.train("quickstart", model="./none", output_dir="run", progress=False)
    with pytest.raises(UserError, match=r"did you mean steps\?"):
        brorl.train("quickstart", stpes=4)
    assert not list(Path().iterdir())


REWARDS = """
def reward(completions, answer, **columns):
    found = []
    for completion, puzzle in zip(completions, answer, strict=True):
        assert " -> " in puzzle
        found.append(float(completion.strip().endswith("1")))
    return found

class Inside:
    @staticmethod
    def nested(completions):
        return [0.0]
"""


@pytest.mark.slow
def test_a_reward_function_with_the_signature_of_trl_trains_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    from rewards import Inside, reward  # type: ignore[import-not-found]

    result = brorl.train(**SETTINGS, reward=reward, steps=2, store_rollouts_every=1, progress=False, output_dir="run")
    config = parse_yaml((result.path / "config.yaml").read_text(), "config.yaml")
    assert config["verification"]["functions"] == {"countdown": f"{tmp_path / 'rewards.py'}:reward"}
    others = {"verification.functions": {"math": "own.py:check", "countdown": "old.py:f"}}
    functions = resolve_in_memory("quickstart", others, reward, tmp_path).config.verification.functions
    assert functions == {"math": "own.py:check", "countdown": f"{tmp_path / 'rewards.py'}:reward"}
    group = brorl.samples(result.path).group
    assert group is not None
    assert group.correct_L.tolist() == [text.strip().endswith("1") for text in group.texts]
    again = brorl.train(**SETTINGS, reward=Inside.nested, steps=1, progress=False)
    assert again.ending is Ending.NO_MIXED_GROUPS
    layout = {"data.sources": [{"path": "some/data", "layout": "taco"}]}
    with pytest.raises(UserError, match="the rows of data name their own domains; name a function for each"):
        brorl.train(**{**SETTINGS, **layout}, reward=reward, progress=False)


@pytest.mark.slow
def test_the_file_of_a_reward_function_must_not_start_brorl(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{REWARDS}\nimport brorl\nbrorl.train(steps=1)\n", "utf-8")
    with pytest.raises(UserError, match=rf"^verification\.functions\.countdown: .*{script.name}.* if __name__ =="):
        brorl.train(
            **SETTINGS, progress=False, steps=1, **{"verification.functions": {"countdown": f"{script}:reward"}}
        )


def test_no_command_that_verifies_starts_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRORL_VERIFIER_WORKER", "1")
    calls: list[Callable[[], object]] = [
        brorl.train, brorl.check, brorl.compare, brorl.plan, brorl.tune, lambda: brorl.evaluate("quickstart"),
        lambda: brorl.sample("quickstart", "make 22 from 3 5 7"), lambda: brorl.verify("responses.jsonl"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UserError, match="move everything except imports and functions under"):
            call()


def test_a_script_that_fails_as_a_module_is_told_of_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{REWARDS}\nsteps = sys.argv['steps']\n", "utf-8")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    with pytest.raises(
        UserError, match=r"TypeError: .*; workers import this script to call its function; move everything except"
    ):
        brorl.train(
            **SETTINGS, progress=False, steps=1, **{"verification.functions": {"countdown": f"{script}:reward"}}
        )
