"""The peer `ours`: the native engine, and a whole training step as `brorl train` makes it."""

from __future__ import annotations

import time
from typing import Any

import torch
from measurement import Job, Run, Workload
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import Turns

from brorl.prompts import Prompt
from brorl.rollout.native import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree


def measure(job: Job, workload: Workload, turns: Turns) -> None:
    """Sample, or sample and train on, one prompt per turn."""
    model = AutoModelForCausalLM.from_pretrained(workload.model_dir, dtype=torch.float32)
    turns.ready()
    engine = NativeEngine(model, workload.eos_token_id)
    sampling = SamplingParams(max_new_tokens=workload.max_new_tokens)
    for turn in range(job.num_turns):
        prompt = _prompt(workload, turn)
        turns.wait()
        if job.quantity == "generation":
            start = time.perf_counter()
            trees = engine.sample([prompt.token_ids], job.num_rollouts, sampling, seed=turn)
            turns.reply(_run(time.perf_counter() - start, trees[0]))
        else:
            raise NotImplementedError("the learner is not there yet")


def _prompt(workload: Workload, turn: int) -> Prompt:
    entry: dict[str, Any] = workload.prompts[turn]
    return Prompt(**{**entry, "token_ids": tuple(entry["token_ids"]), "domain": workload.domain})


def _run(
    seconds: float,
    tree: RolloutTree,
    parts: dict[str, float] | None = None,
    facts: dict[str, float] | None = None,
) -> Run:
    position_M = tree.depth + 1 + len(tree.prompt_ids)
    return Run(
        seconds=seconds,
        sampled_tokens=tree.num_sampled_tokens,
        sampled_context=int((position_M * tree.count).sum()),
        unique_tokens=tree.num_unique_tokens,
        unique_context=int(position_M.sum()),
        parts=parts or {},
        facts=facts or {},
    )
