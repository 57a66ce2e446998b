"""Made-up run directories: random trees, verdicts and metrics, with texts that no page or terminal should trust."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from brorl.algorithms.groups import Group
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.prompts.prompt import Prompt
from brorl.runs.run_directory import RunDirectory, StoredRun
from brorl.runs.step_record import StepRecord, from_json, to_json
from brorl.training.batch import Batch
from brorl.training.diagnostics import coverage_record
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from small_models import with_given

HOSTILE = (
    "</script><script>document.title='taken'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "&lt;b&gt; &amp; 'quoted' \"twice\" `ticks` ${0}",
    "\x00\x07\x1b[31mred\x1b[0m\x9b2J\r\n\ttab",
    "\u202egnitsrever\u202c \u200b\ufeff \u2028\u2029",
    "\U0001f600 \u0939\u093f \u4e2d\u6587 e\u0301",
    "{{DATA}} {{STYLE}} \\u003c/script\\u003e \\",
    "[bold red]markup[/bold red] [/]",
)
REASONS = ("correct", "wrong value 7", "truncated", "timeout", "<i>verifier raised</i> \x1b[1m")


def random_tree(rng: np.random.Generator, num_rollouts: int, unknown: bool, vocabulary: int = 5) -> RolloutTree:
    """Short responses over few tokens, so that prefixes and whole responses repeat; some cut; log-probs if known."""
    responses = [rng.integers(1, vocabulary, rng.integers(1, 6)).tolist() for _ in range(num_rollouts)]
    logprob_of: dict[tuple[int, ...], float] = {}
    logprobs = []
    for response in responses:
        prefixes = [tuple(response[: i + 1]) for i in range(len(response))]
        logprobs.append([logprob_of.setdefault(p, -float(rng.exponential())) for p in prefixes])
        if unknown:
            logprobs[-1] = [float("nan")] * len(response)
    return RolloutTree.from_responses((3, 4), responses, logprobs, rng.random(num_rollouts) < 0.8)


def tools_record(rng: np.random.Generator, trees: Sequence[RolloutTree]) -> dict[str, Any]:
    """A section of the metrics on tools, for trees with given nodes: one call before each of their replies."""
    calls = sum(int(tree.count[tree.first_given].sum()) for tree in trees)
    kinds = rng.choice(["raised", "timeout", "wrong arguments"], 2, replace=False).tolist()
    return {
        "turns": 1 + calls / sum(tree.num_rollouts for tree in trees), "calls": calls,
        "distinct_calls": int(rng.integers(1, calls + 1)), "given_tokens": sum(t.num_given_tokens for t in trees),
        "failures": {kind: int(rng.integers(1, calls + 1)) for kind in kinds},
    }  # fmt: skip


def random_step(rng: np.random.Generator, num_groups: int, num_rollouts: int, long: int = 0) -> list[Group]:
    """Groups with random verdicts and hostile texts; of 3 two are of one prompt, of 4 one has no log-probs."""
    groups: list[Group] = []
    for g in range(num_groups):
        name = HOSTILE[g % len(HOSTILE)]
        if num_groups > 2 and g == 2:
            name = groups[1].prompt.id[:-2]
        place = 1 if num_groups > 2 and g == 2 else g
        question = f"{name}{place}\n{'x' * long}"
        text = f"You are told this before every question.\n\n{question}"
        prompt = Prompt(f"{name} {place}", text, (3, 4), "ref", f"domain {place % 2}", question=question)
        tree = random_tree(rng, num_rollouts, unknown=g == 3)
        correct_L = rng.random(tree.num_responses) < rng.random()
        made = [
            Verdict(
                bool(correct), float(rng.random()), None if rng.random() < 0.2 else HOSTILE[i % len(HOSTILE)],
                "correct" if correct else REASONS[1 + i % (len(REASONS) - 1)], 0.25,
            )
            for i, correct in enumerate(correct_L)
        ]  # fmt: skip
        reward_L = rng.normal(size=tree.num_responses)
        texts = [f"{HOSTILE[(g + i) % len(HOSTILE)]}{i}" for i in range(tree.num_responses)]
        groups.append(Group(prompt, tree, correct_L, reward_L, verdicts=made, texts=texts))
    return groups


def step_record(rng: np.random.Generator, step: int, stored: Sequence[Group]) -> dict[str, Any]:
    """A metrics record, made by the code that makes real ones where there is any."""
    groups = [g for g in stored if np.isfinite(g.tree.logprob).all()]
    batch = Batch(sampled=list(stored), rounds=1)
    names = (
        "loss", "grad_norm", "clip_fraction", "old_policy_kl", "entropy", "learning_rate", "clip_low_fraction",
        "clip_high_fraction", "reference_kl", "masked_fraction",
    )  # fmt: skip
    phases = ("generation", "verification", "training", "diagnostics", "storing")
    seconds = {phase: float(rng.random()) for phase in phases}
    made = to_json(StepRecord(step=step, sampling=batch.summary(), coverage=coverage_record(groups)))
    record = {
        "step": step,
        "sampling": made["sampling"] | dropped_record(stored),
        "kept": {"groups": batch.num_kept, "carried": 0, "samples": 7},
        "update": {name: float(rng.random()) for name in names} | {"out_of_memory_retries": 0, "nodes_per_pass": 9},
        "coverage": made["coverage"],
        "seconds": {**seconds, "total": sum(seconds.values()) + 0.01},
    }
    return json.loads(json.dumps(record))


def dropped_record(groups: Sequence[Group]) -> dict[str, int]:
    """What dynamic sampling dropped of a step: the groups with one outcome."""
    trees = [g.tree for g in groups if g.num_correct in (0, g.tree.num_rollouts)]
    return {
        "samples_dropped": sum(t.num_rollouts for t in trees),
        "sampled_tokens_dropped": sum(t.num_sampled_tokens for t in trees),
        "unique_tokens_dropped": sum(t.num_unique_tokens for t in trees),
    }


def fruitless_record(rng: np.random.Generator, step: int) -> dict[str, Any]:
    """The last line of a run that found no correct rollout: sampled, verified, and no update."""
    wrong = Verdict(False, 0.0, None, "no answer", 0.0)
    groups = [Group.from_verdicts(g.prompt, g.tree, [wrong] * g.tree.num_responses) for g in random_step(rng, 4, 12)]
    record = step_record(rng, step, groups)
    for section in ("update", "coverage"):
        del record[section]
    return record | {"end_reason": "no group had both", "kept": {"groups": 0, "carried": 0, "samples": 0}}


def held_out_answers(rng: np.random.Generator, prompts: Sequence[Prompt], num_rollouts: int) -> list[Group]:
    """Responses to held-out prompts, the same prompts each time."""
    made = random_step(rng, len(prompts), num_rollouts)
    return [replace(group, prompt=prompt) for group, prompt in zip(made, prompts, strict=True)]


def evaluation(rng: np.random.Generator, num_samples: int = 8, ks: Sequence[int] = (1, 4, 8)) -> dict[str, Any]:
    """An evaluation; its intervals are made up."""
    num_correct = rng.integers(0, num_samples + 1, 12)
    pass_at = {}
    for k in ks:
        value = float(pass_at_k(num_correct, num_samples, k).mean())
        pass_at[str(k)] = {"value": value, "low": value * 0.9, "high": value + (1 - value) * 0.1}
    return {
        "pass_at": pass_at, "num_prompts": 12, "num_samples": num_samples, "solved": int((num_correct > 0).sum()),
        "truncation_rate": 0.0, "verifier_timeouts": 0, "verifier_failures": 0, "unique_tokens": 50,
        "sampled_tokens": 100, "seconds": 1.0, "by_source": {},
        "prompts": {"num_correct": num_correct.tolist(), "sampled_tokens": [9] * 12},
    }  # fmt: skip


def typed(records: Iterable[dict[str, Any]]) -> tuple[StepRecord, ...]:
    """The records of some lines of the metrics."""
    return tuple(map(from_json, records))


def run_of(records: Sequence[dict[str, Any]], **settings: str) -> StoredRun:
    return StoredRun(Path("run"), "run", settings, {}, typed(records))


def complete_steps(rng: np.random.Generator, number: int) -> list[dict[str, Any]]:
    return [step_record(rng, step, random_step(rng, 3, 20)) for step in range(1, number + 1)]


def make_run(
    path: Path,
    rng: np.random.Generator,
    *,
    steps: int = 5,
    num_groups: int = 4,
    num_rollouts: int = 12,
    store_every: int = 2,
    store_evaluations: bool = True,
    tools: bool = False,
    settings: str = "steps: 5\nrollouts_per_prompt: 12\nprompts_per_step: 4\nloss: {kind: ppo, clip_high: 0.27}\n",
) -> tuple[list[dict[str, Any]], dict[int, list[Group]]]:
    """Write a run directory; return the lines of its metrics, and what was stored at which step.

    With `tools`, some tokens of every group are results, and the metrics count calls.
    """
    path.mkdir(parents=True)
    directory = RunDirectory(path)
    (path / "config.yaml").write_text(settings)
    (path / "env.json").write_text(json.dumps({"python": "3.x", "processor": HOSTILE[0], "packages": {"brorl": "1"}}))
    held_out = [{"id": str(i), "text": HOSTILE[i % len(HOSTILE)]} for i in range(12)]
    (path / "held_out.json").write_text(json.dumps(held_out))
    records: list[dict[str, Any]] = [{"step": 0, "evaluation": evaluation(rng)}]
    kept = {}
    for step in range(1, steps + 1):
        stored = random_step(rng, num_groups, num_rollouts)
        if tools:
            stored = [replace(g, tree=with_given(g.tree, rng)) for g in stored]
        records.append(step_record(rng, step, stored))
        if tools:
            records[-1]["tools"] = tools_record(rng, [group.tree for group in stored])
        if step % store_every == 0:
            directory.write_responses("rollouts", step, stored)
            kept[step] = stored
    records[2]["reference_reset"] = "2 steps since the last reset"
    records[3]["held_out_check"] = {
        "change": 0.01, "change_low": -0.01, "change_high": 0.03, "fraction_improved": 0.7, "fraction_improved_low":
        0.6, "fraction_improved_high": 0.8, "worst_drop": -0.1, "num_correct": 5,
    }  # fmt: skip
    records[-1] |= {
        "evaluation": evaluation(rng),
        "collapse": f"step {steps}: the model may be collapsing: {HOSTILE[0]}",
    }
    for record in records:
        directory.append_metrics(from_json(record))
    if store_evaluations:
        prompts = [Prompt(f"held out {i}", f"{HOSTILE[i]}\n{i}", (3, 4), "ref", "held out") for i in range(3)]
        for step in (0, steps):
            answers = held_out_answers(rng, prompts, num_rollouts)
            directory.write_responses("evaluations", step, answers)
    return records, kept
