"""An evaluation in batches: a continued one equals an uninterrupted one, and other folders are rejected."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from brorl.activity import Echo
from brorl.algorithms.settings import RewardShaping
from brorl.errors import StorageError, UserError
from brorl.evaluation.evaluator import BatchCounts, Evaluator, PromptBatch, split_into_batches
from brorl.evaluation.responses import ResponseStore, evaluate_batches
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from brorl.verification.grade import Grader

N = 12
SAMPLING = SamplingParams(temperature=0.6, top_p=0.95, max_new_tokens=3)
SETTINGS = {"checkpoint": "here", "samples": N, "data": {"one": {"prompts": 5}, "empty": {}}, "ks": [1, 2]}


class RandomEngine:
    """Its trees depend on the prompts and the seed alone."""

    def __init__(self) -> None:
        self.calls = 0

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        assert (task.num_rollouts, task.sampling) == (N, SAMPLING)
        self.calls += 1
        rng = np.random.default_rng(task.seed)
        trees = []
        for prompt in task.prompts:
            rollouts = [rng.integers(2, 5, rng.integers(1, 4)).tolist() for _ in range(N)]
            logprobs = [[-float(t) - 0.1 for t in r] for r in rollouts]
            finished = [len(r) < 3 for r in rollouts]
            trees.append(RolloutTree.from_responses(prompt, rollouts, logprobs, finished))
        return trees


class SumVerifier:
    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        reasons = ["correct" if sum(map(int, text.split())) % 3 == int(p.reference) else "timeout" for p, text in items]
        return [Verdict(r == "correct", float(r == "correct"), None, r, 0.0) for r in reasons]


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def evaluate(engine: RandomEngine, store: ResponseStore, echo: Echo = lambda _: None) -> list[BatchCounts]:
    evaluator = Evaluator(Grader({"sum": SumVerifier()}, decode, RewardShaping()), SAMPLING, N)
    return evaluate_batches(batches(), evaluator, engine, store, echo)


def prompts(name: str, number: int) -> list[Prompt]:
    return [Prompt(f"{name}:{i}", f"{name} {i}", (7, i), str(i % 3), "sum", name) for i in range(number)]


def batches() -> list[PromptBatch]:
    return split_into_batches({"one": prompts("one", 5), "two": prompts("two", 3)}, 2, 11)


def content(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("responses/*.parquet")) for row in parquet.read_table(file).to_pylist()]


def test_batches_depend_on_the_seed_the_data_set_and_the_place_in_it_alone() -> None:
    every = batches()
    assert [(p.source, len(p.prompts)) for p in every] == [
        ("one", 2), ("one", 2), ("one", 1), ("two", 2), ("two", 1),
    ]  # fmt: skip
    assert [p for batch in every for p in batch.prompts] == [*prompts("one", 5), *prompts("two", 3)]
    assert len({batch.seed for batch in every}) == 5
    alone = split_into_batches({"two": prompts("two", 9)}, 2, 11)
    assert (alone[0].seed, alone[0].prompts) == (every[3].seed, every[3].prompts)
    assert alone[1].seed == every[4].seed
    assert split_into_batches({"two": prompts("two", 3)}, 2, 12)[0].seed != every[3].seed


def test_results_are_those_of_plain_loops_over_what_is_stored(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    store.begin(SETTINGS)
    lines: list[str] = []
    stored = evaluate(RandomEngine(), store, lines.append)
    results = [r for batch in stored for r in batch.prompts]
    rows = content(tmp_path)
    assert list(rows[0]) == [
        "source", "prompt_id", "domain", "prompt", "question", "reference", "response", "token_ids", "logprobs",
        "given", "count", "num_rollouts", "finished", "correct", "score", "extracted", "reason",
    ]  # fmt: skip
    for result in results:  # the numbers of a summary follow from these, see test_summary.py
        own = [row for row in rows if row["prompt_id"] == result.prompt_id]
        rollouts = [row for row in own for _ in range(row["count"])]
        assert result.num_samples == len(rollouts) == N
        assert result.num_correct == sum(row["correct"] for row in rollouts)
        assert result.num_truncated == sum(not row["finished"] for row in rollouts)
        assert result.sampled_tokens == sum(len(row["token_ids"]) for row in rollouts)
        assert result.unique_tokens == len(
            {tuple(r["token_ids"][:i]) for r in own for i in range(1, 1 + len(r["token_ids"]))}
        )
        assert result.num_distinct == len(own)
        assert result.verifier_timeouts == sum(row["reason"] == "timeout" for row in own)
        assert {row["source"] for row in own} == {result.source}
    for row in rows:
        assert row["response"] == decode(row["token_ids"])
        assert row["logprobs"] == pytest.approx([-t - 0.1 for t in row["token_ids"]], rel=1e-6)
        assert row["correct"] == (row["finished"] and sum(row["token_ids"]) % 3 == int(row["reference"]))
        assert row["num_rollouts"] == N
        assert row["prompt"] == row["prompt_id"].replace(":", " ")
    starts = ("one  2/5 prompts", "one  4/5 prompts", "one  5/5 prompts", "two  2/3 prompts", "two  3/3 prompts")
    assert [line.partition("  pass@1")[0] for line in lines] == [*starts]
    correct = sum(result.num_correct for result in results if result.source == "one")
    assert f"  pass@1 so far {correct / (5 * N):.3f}  " in lines[2]
    assert re.search(r"  [\d,]+ tokens/s  ETA 0s$", lines[-1])


def begin_and_evaluate(folder: Path) -> list[BatchCounts]:
    ResponseStore(folder).begin(SETTINGS)
    return evaluate(RandomEngine(), ResponseStore(folder))


class Killed(BaseException):
    """Nothing in the code can catch it, as nothing can run after a kill."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[Any]]:
    folder = tmp_path_factory.mktemp("whole")
    stored = begin_and_evaluate(folder)
    return content(folder), [batch.prompts for batch in stored]


def kill_at(event: str, nth: int, patch: pytest.MonkeyPatch) -> None:
    """Kill the nth time that a file is half written, wholly written, or renamed: the settings, then five batches."""
    seen = 0
    force, rename = os.fsync, Path.replace

    def now() -> bool:
        nonlocal seen
        seen += 1
        return seen == nth + 1

    def fsync(descriptor: int) -> None:
        if now():
            if event == "half written":
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            raise Killed
        force(descriptor)

    def replace(self: Path, target: Path) -> Path:
        if now():
            raise Killed
        return rename(self, target)

    if event == "renamed":
        patch.setattr(Path, "replace", replace)
    else:
        patch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("event", ["half written", "written", "renamed"])
def test_killed_at_any_instant_it_continues_to_the_same_responses(
    event: str,
    nth: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: tuple[list[dict[str, Any]], list[Any]],
) -> None:
    with monkeypatch.context() as patch:
        kill_at(event, nth, patch)
        with pytest.raises(Killed):
            begin_and_evaluate(tmp_path)
    store = ResponseStore(tmp_path)
    store.begin(SETTINGS)
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".tmp")]
    done = len(list(store.responses.iterdir()))
    assert done == max(0, nth - 1)
    engine = RandomEngine()
    stored = evaluate(engine, store)
    assert engine.calls == 5 - done  # what is done is not done again
    assert (content(tmp_path), [batch.prompts for batch in stored]) == uninterrupted
    again = RandomEngine()
    assert evaluate(again, store) == stored  # seconds included
    assert again.calls == 0
    assert json.loads(store.settings_file.read_text()) == SETTINGS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 16}, "samples is 12 there and 16 here"),
        ({"data": {"one": {"prompts": 6}, "empty": {}}}, "data.one.prompts is 5 there and 6 here"),
        ({"data": {"one": {"prompts": 5}, "empty": {}, "two": {"x": 1}}}, "data.two.x is not set there and 1 here"),
        ({"ks": [1, 4]}, r"ks is \[1, 2\] there and \[1, 4\] here"),
        ({"data": {"one": {"prompts": 5}}}, "data.empty is {} there and not set here"),
        ({"weights": "ab"}, "weights is not set there and 'ab' here"),
    ],
)
def test_another_evaluation_is_refused_by_its_first_difference(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    store = ResponseStore(tmp_path)
    store.begin(SETTINGS)
    store.begin(SETTINGS)
    store.check({"samples": N})  # some of them, before the weights are known
    before = store.settings_file.read_bytes()
    with pytest.raises(UserError, match=f"contains a different evaluation: {said}"):
        store.begin({**SETTINGS, **change})
    assert store.settings_file.read_bytes() == before


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"is not empty \(metrics.jsonl, ...\) and contains no evaluation"):
        ResponseStore(tmp_path).begin(SETTINGS)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(UserError, match=r"settings.json is damaged"):
        ResponseStore(tmp_path).begin(SETTINGS)


def test_a_damaged_batch_and_one_of_other_prompts_are_rejected(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    store.begin(SETTINGS)
    every = batches()
    evaluate(RandomEngine(), store)
    assert isinstance(store.read(0, every[0]), BatchCounts)
    store.file_of(1).write_bytes(store.file_of(0).read_bytes())
    with pytest.raises(UserError, match=r"part-00001.parquet does not contain the prompts of batch 1; delete it"):
        store.read(1, every[1])
    for content_of_file in (b"", store.file_of(0).read_bytes()[:-20]):
        store.file_of(0).write_bytes(content_of_file)
        with pytest.raises(UserError, match=r"part-00000.parquet is damaged \(.+\); delete it and rerun the command"):
            store.read(0, every[0])


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(tmp_path)
    store.begin(SETTINGS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"part-00000.parquet: No space left .* then rerun the command"):
        evaluate(RandomEngine(), store)
    assert list(store.responses.iterdir()) == []
