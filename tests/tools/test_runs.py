"""Whole runs with tools: a kill between two turns, stored rollouts, and games that begin with the same prompt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from run_support import SMALL, assert_same_run, command, metrics_without_times

pytestmark = pytest.mark.usefixtures("same_import_path")

_FORM = """
import os
import signal
from pathlib import Path

COUNT, LAST = (Path(__file__).with_name(name) for name in ("count", "last"))


def parse(text):
    return [{"name": "value", "arguments": {"expression": text}}] if "*" in text and ":" not in text else []


def render(results):
    count = int(COUNT.read_text()) + 1
    COUNT.write_text(str(count))
    if LAST.exists() and count == int(LAST.read_text()):
        LAST.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return ":" + " ".join(content for _, content in results) + ">"
"""
_TOOLS = '''
def value(expression: str) -> str:
    """Say the value of an expression.

    Args:
        expression: The expression.
    """
    return str(int(eval(expression)))[:6]
'''
_GAME = '''
class Game:
    def reset(self, secret, **columns):
        self.secret, self.found = secret, 0.0

    def guess(self, number: int) -> str:
        """Compare a number with the secret one.

        Args:
            number: The number.
        """
        self.found = float(number == self.secret)
        return "=" if self.found else "-" if number < self.secret else "+"

    def get_reward(self):
        return self.found
'''
_GAME_FORM = """
def parse(text):
    return [{"name": "guess", "arguments": {"number": int(text[0])}}] if text[:1].isdigit() else []


def render(results):
    return ":" + results[0][1] + ">"
"""
_LIMITS = ("--tools.max_turns=2", "--tools.max_result_tokens=8", "--sampling.max_new_tokens=8")


@pytest.fixture
def with_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.chdir(tmp_path)
    Path("form.py").write_text(_FORM)
    Path("count").write_text("0")
    Path("tools.py").write_text(_TOOLS)
    tools = ("--tools.functions={value: tools.py:value}", "--tools.format=form.py")
    return (*SMALL, *tools, *_LIMITS, "--steps=3", "--checkpoint_every=1")


@pytest.mark.slow
def test_a_run_that_is_killed_between_two_turns_resumes_bitwise(with_a_tool: tuple[str, ...]) -> None:
    outcome = command("train", *with_a_tool, "--output_dir", "whole")
    assert outcome.code == 0, outcome.err
    called = [record["tools"] for record in metrics_without_times(Path("whole")) if record["step"]]
    assert all(1 < tools["turns"] < 2 and tools["calls"] >= tools["distinct_calls"] > 8 for tools in called)

    Path("last").write_text(str(int(int(Path("count").read_text()) * 0.75)))
    Path("count").write_text("0")
    arguments = ("train", *with_a_tool, "--output_dir", "killed")
    killed = subprocess.run([sys.executable, "-m", "brorl", *arguments], env=dict(os.environ), capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert 1 < len(metrics_without_times(Path("killed"))) < 4
    assert command("resume", "killed").code == 0
    assert_same_run(Path("killed"), Path("whole"))


def test_stored_rollouts_say_who_wrote_each_token(with_a_tool: tuple[str, ...]) -> None:
    assert command("train", *with_a_tool, "--steps=1", "--output_dir", "run").code == 0
    rows = pq.read_table("run/rollouts/step-000001.parquet").to_pylist()
    by_hand = [row for row in rows if any(row["given"])]
    assert len(by_hand) > 8
    for row in rows:
        given = [n for n, flag in enumerate(row["given"]) if flag]
        assert given == list(range(given[0], given[-1] + 1)) if given else True  # at most one reply in two turns
        assert not row["given"][-1]
        assert all((logprob == 0) <= flag for logprob, flag in zip(row["logprobs"], row["given"], strict=True))
    (record,) = [record for record in metrics_without_times(Path("run")) if record["step"] == 1]
    assert record["tools"]["turns"] == pytest.approx(
        1 + sum(row["count"] for row in by_hand) / sum(row["count"] for row in rows)
    )
    assert record["sampling"]["sampled_tokens"] == sum(row["count"] * row["given"].count(False) for row in rows)


def test_an_environment_plays_rows_with_equal_prompts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward is that of a game with the row's own secret, played by hand from the stored tokens."""
    monkeypatch.chdir(tmp_path)
    Path("game.py").write_text(_GAME)
    Path("form.py").write_text(_GAME_FORM)
    secrets = [1, 3, 5, 7, 9]
    Path("rows.jsonl").write_text("".join(json.dumps({"question": "1 2 3 -> 6:", "secret": s}) + "\n" for s in secrets))
    arguments = (
        *SMALL, *_LIMITS, "--tools.environment=game.py:Game", "--tools.format=form.py", "--steps=1",
        "--data.sources={path: rows.jsonl, prompt_column: question, domain: environment}", "--data.held_out_fraction=0",
        "--evaluation.num_prompts=0", "--evaluation.every=0", "--dynamic_sampling.enabled=false",
        "--rollouts_per_prompt=64", "--prompts_per_step=5", "--prompt.template={prompt}",
    )  # fmt: skip
    outcome = command("train", *arguments, "--output_dir", "run")
    assert outcome.code == 0, outcome.err
    rows = pq.read_table("run/rollouts/step-000001.parquet").to_pylist()
    assert {json.loads(row["reference"])["secret"] for row in rows} == {*secrets}
    right = 0
    for row in rows:
        secret, calls = json.loads(row["reference"])["secret"], json.loads(row["response"])
        guesses = [json.loads(arguments)["number"] for _, arguments in calls]
        assert row["correct"] == bool(row["finished"] and guesses and guesses[-1] == secret)
        right += row["correct"]
    assert right > 0


def test_programs_of_responses_are_named_with_the_sandbox(with_a_tool: tuple[str, ...]) -> None:
    outcome = command("train", *with_a_tool, "--tools.python=true", "--steps=1", "--output_dir", "run")
    assert "sandbox for untrusted code (tools.python): " in outcome.said, outcome


@pytest.mark.slow
def test_an_evaluation_with_a_changed_tool_starts_anew(with_a_tool: tuple[str, ...]) -> None:
    assert command("train", *with_a_tool, "--steps=1", "--output_dir", "run").code == 0
    evaluate = ("eval", "run", "--samples=2", "--temperature=1", "--top-p=1")
    assert command(*evaluate).code == 0
    written = {path.name for path in Path("runs/evaluations").iterdir()}
    Path("tools.py").write_text(_TOOLS.replace("[:6]", "[:2]"))
    outcome = command(*evaluate)
    assert outcome.code == 0, outcome.said
    assert {path.name for path in Path("runs/evaluations").iterdir()} > written
