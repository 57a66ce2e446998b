"""A whole run in this process: its metrics and rollouts against the trees that the engine really returned."""

import json
import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from brorl.prompts.countdown import countdown_puzzles, split_countdown
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.training.schedule import Evaluations
from brorl.tree import RolloutTree
from run_support import SMALL, Outcome, command, leftovers

STEPS, PER_STEP, N, EVAL_N = 5, 4, 16, 4


class Run(NamedTuple):
    path: Path
    outcome: Outcome
    records: list[dict[str, Any]]
    sampled: list[list[RolloutTree]]  # the trees of each step, in the order of sampling
    evaluated: list[list[RolloutTree]]  # the trees of each evaluation


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("loop") / "run"
    rounds: list[list[RolloutTree]] = []
    evaluated: list[list[RolloutTree]] = []
    sample = NativeEngine.sample

    def recording(self: NativeEngine, task: SampleTask) -> list[RolloutTree]:
        trees = sample(self, task)
        (rounds if task.num_rollouts == N else evaluated).append(trees)
        return trees

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeEngine, "sample", recording)
        settings = (*SMALL, f"--steps={STEPS}", "--checkpoint_every=3", "--store_rollouts_every=2")
        settings = (*settings, "--evaluation.num_prompts=12")
        outcome = command("train", *settings, "--output_dir", path)
    assert outcome.code == 0, outcome.err
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    sampled, done = [], 0
    for record in records[1:]:
        stop = done + record["sampling"]["rounds"]
        sampled.append([tree for trees in rounds[done:stop] for tree in trees])
        done = stop
    assert done == len(rounds)
    return Run(path, outcome, records, sampled, evaluated)


def rollouts_of(trees: list[RolloutTree]) -> list[tuple[RolloutTree, tuple[int, ...], bool]]:
    """List every single rollout with its tree."""
    return [
        (tree, tokens, bool(finished))
        for tree in trees
        for (tokens, count), finished in zip(tree.responses(), tree.finished, strict=True)
        for _ in range(count)
    ]


def solves(prompt: str, response: str) -> bool:
    """Judge a countdown response by Python's own arithmetic, on rational numbers."""
    numbers, target = prompt.rstrip(":").split(" -> ")
    text = response.replace(" ", "")
    if not re.fullmatch(r"[0-9+*/()-]+", text) or re.search(r"(^|[-+*/(])[-+]|\*\*|//|\b0[0-9]|\)[0-9(]|[0-9]\(", text):
        return False
    if Counter(re.findall("[0-9]+", text)) != Counter(numbers.split()):
        return False
    try:
        return bool(eval(re.sub("([0-9]+)", r"Fraction(\1)", text), {"Fraction": Fraction}) == int(target))
    except (SyntaxError, ZeroDivisionError):
        return False


def test_one_line_a_step(run: Run) -> None:
    assert [r["step"] for r in run.records] == list(range(STEPS + 1))
    assert set(run.records[0]) == {"step", "evaluation"}
    for record in run.records[1:]:
        assert {"step", "sampling", "update", "seconds", "kept"} <= set(record)


def test_evaluates_at_the_start_every_so_many_steps_and_at_the_end(run: Run) -> None:
    assert [r["step"] for r in run.records if "evaluation" in r] == [0, 2, 4, 5]


def test_sampling_numbers_are_those_of_the_rollouts(run: Run) -> None:
    for record, trees in zip(run.records[1:], run.sampled, strict=True):
        sampling, rollouts = record["sampling"], rollouts_of(trees)
        assert sampling["groups"] == len(trees)
        assert sampling["samples"] == len(rollouts) == len(trees) * N
        assert sampling["sampled_tokens"] == sum(len(tokens) for _, tokens, _ in rollouts)
        prefixes = {(id(tree), tokens[:i]) for tree, tokens, _ in rollouts for i in range(1, len(tokens) + 1)}
        assert sampling["unique_tokens"] == len(prefixes) < sampling["sampled_tokens"]
        assert sampling["distinct_responses"] == len({(id(tree), tokens) for tree, tokens, _ in rollouts})
        assert sampling["mean_length"] == pytest.approx(sampling["sampled_tokens"] / len(rollouts))
        assert sampling["truncation_rate"] == pytest.approx(np.mean([not done for *_, done in rollouts]))
        assert sampling["groups_mixed"] + sampling["groups_all_correct"] <= sampling["groups"]
        assert sampling["reward"] == pytest.approx(sampling["accuracy"])
        assert 0 < sampling["reward"] < 1


def test_no_group_is_lost_between_steps(run: Run) -> None:
    carried = 0
    for record in run.records[1:]:
        kept = record["kept"]
        assert kept["groups"] == PER_STEP
        assert kept["samples"] == PER_STEP * N
        assert kept["carried"] == carried + record["sampling"]["groups_mixed"] - PER_STEP
        carried = kept["carried"]


def test_seconds_add_up(run: Run) -> None:
    for record in run.records[1:]:
        seconds = dict(record["seconds"])
        total = seconds.pop("total")
        assert set(seconds) == {"generation", "verification", "diagnostics", "training", "storing"}
        assert min(seconds.values()) > 0
        assert sum(seconds.values()) <= total


def test_updates_are_finite_and_change_the_weights(run: Run) -> None:
    for record in run.records[1:]:
        known = [value for value in record["update"].values() if value is not None]
        assert all(np.isfinite(known))
        assert (
            len(known) == len(record["update"]) - 5
        )  # there is no reference and no entropy bonus, and old log-probs are the engine's
    rates = [record["update"]["learning_rate"] for record in run.records[1:]]  # 2 updates a step, 5 of warm-up
    assert rates == pytest.approx([3e-4 * fraction for fraction in (2 / 5, 4 / 5, 1, 1, 1)])
    weights = [load_file(run.path / f"checkpoints/step-00000{s}/model.safetensors") for s in (3, 5)]
    assert all(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_stored_rollouts_are_the_trees(run: Run) -> None:
    files = sorted((run.path / "rollouts").iterdir())
    assert [f.name for f in files] == ["step-000002.parquet", "step-000004.parquet"]
    correct_rollouts, rollouts = 0, 0
    for step, file in zip((2, 4), files, strict=True):
        rows = pq.read_table(file).to_pylist()
        trees = run.sampled[step - 1]
        expected = [
            (tree, tokens, count, bool(finished))
            for tree in trees
            for (tokens, count), finished in zip(tree.responses(), tree.finished, strict=True)
        ]
        assert len(rows) == len(expected)
        for row, (tree, tokens, count, finished) in zip(rows, expected, strict=True):
            assert row["step"] == step
            assert tuple(row["token_ids"]) == tokens
            assert row["logprobs"] == [np.float32(x) for x in logprobs_along(tree, tokens)]
            assert (row["count"], row["num_rollouts"], row["finished"]) == (count, N, finished)
            assert row["correct"] == (finished and solves(row["prompt"], row["response"])), row
            assert row["score"] == row["reward"] == float(row["correct"])
            assert (row["reason"] == "truncated") == (not finished)
            assert (row["reason"] == "correct") == row["correct"]
        per_prompt = Counter()
        for row in rows:
            per_prompt[row["prompt_id"]] += row["count"]
        assert set(per_prompt.values()) == {N}
        assert len(per_prompt) == len(trees)
        correct_rollouts += sum(r["count"] for r in rows if r["correct"])
        rollouts += sum(r["count"] for r in rows)
        reward = sum(r["count"] * r["reward"] for r in rows) / sum(r["count"] for r in rows)
        assert run.records[step]["sampling"]["reward"] == pytest.approx(reward)
    assert 0 < correct_rollouts < rollouts


def test_stored_evaluations_are_the_trees_of_a_few_held_out_prompts(run: Run) -> None:
    steps = [r["step"] for r in run.records if "evaluation" in r]
    files = sorted((run.path / "evaluations").iterdir())
    assert [f.name for f in files] == [f"step-{step:06d}.parquet" for step in steps]
    held_out = json.loads((run.path / "held_out.json").read_text())
    for step, file, trees in zip(steps, files, run.evaluated, strict=True):
        rows = pq.read_table(file).to_pylist()
        ids = list(dict.fromkeys(row["prompt_id"] for row in rows))
        places = [[prompt["id"] for prompt in held_out].index(name) for name in ids]
        assert len(places) == 8 < len(trees)
        assert (places[0], places[-1]) == (0, len(trees) - 1)
        assert max(np.diff(places)) - min(np.diff(places)) <= 1
        num_correct = run.records[step]["evaluation"]["prompts"]["num_correct"]
        for name, place in zip(ids, places, strict=True):
            mine = [row for row in rows if row["prompt_id"] == name]
            tree = trees[place]
            expected = [(tokens, count) for tokens, count in tree.responses()]
            assert [(tuple(row["token_ids"]), row["count"]) for row in mine] == expected
            assert [row["finished"] for row in mine] == tree.finished.tolist()
            assert [row["logprobs"] for row in mine] == [
                [np.float32(x) for x in logprobs_along(tree, tokens)] for tokens, _ in expected
            ]
            assert [row["correct"] for row in mine] == [
                row["finished"] and solves(row["prompt"], row["response"]) for row in mine
            ]
            assert sum(row["count"] for row in mine if row["correct"]) == num_correct[place]
            assert {(row["step"], row["num_rollouts"], row["prompt"]) for row in mine} == {
                (step, EVAL_N, held_out[place]["text"])
            }


@pytest.mark.slow
def test_a_run_that_stores_no_rollouts_stores_no_evaluations(tmp_path: Path) -> None:
    settings = (*SMALL, "--steps=1", "--store_rollouts_every=0", "--output_dir", tmp_path / "run")
    assert command("train", *settings).code == 0
    assert not {"rollouts", "evaluations"} & {p.name for p in (tmp_path / "run").iterdir()}


def logprobs_along(tree: RolloutTree, tokens: tuple[int, ...]) -> list[float]:
    """Walk down from the prompt, one token after the other."""
    values, parent = [], -1
    for token in tokens:
        (parent,) = (i for i in range(len(tree.token)) if tree.parent[i] == parent and tree.token[i] == token)
        values.append(float(tree.logprob[parent]))
    return values


def test_held_out_numbers_are_never_trained_on(run: Run) -> None:
    puzzles = countdown_puzzles(3, 7, range(1, 100))
    held_out = {p.numbers for p in split_countdown(puzzles, 0.2, 0)[1]}
    trained = {
        tuple(int(n) for n in row["prompt"].split(" -> ")[0].split())
        for file in (run.path / "rollouts").iterdir()
        for row in pq.read_table(file, columns=["prompt"]).to_pylist()
    }
    assert held_out
    assert trained
    assert not held_out & trained
    prompts = [tuple(t.prompt_ids) for trees in run.evaluated for t in trees]
    assert not set(prompts) & {tuple(t.prompt_ids) for trees in run.sampled for t in trees}


def test_evaluations_ask_the_same_prompts_each_time(run: Run) -> None:
    assert len(run.evaluated) == 4
    for before, after in pairwise(run.evaluated):
        assert [t.prompt_ids for t in before] == [t.prompt_ids for t in after]
    for record, trees in zip([r for r in run.records if "evaluation" in r], run.evaluated, strict=True):
        evaluation = record["evaluation"]
        assert evaluation["num_samples"] == EVAL_N == trees[0].num_rollouts
        assert evaluation["num_prompts"] == len(trees)
        assert evaluation["sampled_tokens"] == sum(len(tokens) for _, tokens, _ in rollouts_of(trees))
        assert evaluation["unique_tokens"] == sum(len(t.token) for t in trees)
        assert evaluation["solved"] / len(trees) == evaluation["pass_at"]["4"]["value"]  # all 4 samples


def test_checkpoints_are_those_asked_for_and_nothing_is_left_over(run: Run) -> None:
    assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == ["step-000003", "step-000005"]
    assert not leftovers(run.path)
    names = {p.name for p in run.path.iterdir()}
    files = {"begun.json", "config.yaml", "env.json", "held_out.json", "metrics.jsonl", "run.log"}
    assert names == files | {"rollouts", "evaluations", "checkpoints"}


def test_same_seed_same_run_other_seed_other_run(short_run: Path, tmp_path: Path) -> None:
    weights = [(short_run / "checkpoints/step-000001/model.safetensors").read_bytes()]
    for seed in (5, 6):
        settings = (*SMALL, "--steps=1", "--evaluation.num_prompts=0", f"--seed={seed}")
        assert command("train", *settings, "--output_dir", tmp_path / str(seed)).code == 0
        weights.append((tmp_path / str(seed) / "checkpoints/step-000001/model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_console_and_log_tell_every_step(run: Run) -> None:
    log = (run.path / "run.log").read_text()
    for text in (run.outcome.out, log):
        lines = [re.match(r" *([0-9]+) +([0-9.]+) ", line) for line in text.splitlines()]
        told = {int(m[1]): float(m[2]) for m in lines if m}
        assert told == {r["step"]: round(r["sampling"]["reward"], 3) for r in run.records[1:]}
        assert "held-out prompts before training: pass@1" in text
        assert str(run.path) in text.replace("\n", "")
    assert "\x1b" not in log


@pytest.mark.slow
def test_checkpoints_of_new_best_evaluations_do_not_replace_regular_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is a new best; steps 2 and 4 and the end are the regular checkpoints."""
    monkeypatch.setattr(Evaluations, "score", lambda _, record: record.step if record.evaluation else None)
    few = ("--steps=5", "--checkpoint_every=2", "--keep_checkpoints=3", "--evaluation.every=1")
    outcome = command("train", *SMALL, *few, "--evaluation.keep_best=true", "--output_dir", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    folders = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert folders == ["step-000002", "step-000004", "step-000005"]
    assert (tmp_path / "run/checkpoints/best").resolve().name == "step-000005"
