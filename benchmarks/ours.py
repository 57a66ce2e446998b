"""The peer `ours`: the native engine, and a whole training step from the package's own parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from measurement import Job, Run, Work, Workload
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import Turns

from brorl.algorithms.advantages import grpo
from brorl.algorithms.groups import Group
from brorl.config.settings import TrainConfig
from brorl.model.forward import choose_forward
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.training.learner import TreeLearner
from brorl.training.settings import OptimizerSettings
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.grade import grade, seen_text
from brorl.verification.verifier import Verifier

# As for TRL: the model stays practically the same in all steps.
RECIPE = TrainConfig(optimizer=OptimizerSettings(learning_rate=1e-7, mini_batches=1))


class ParityVerifier:
    """Calls a response of the random models correct if its token ids sum to an even number.

    Their tokenizer writes token 17 as `t17`, so the text has the ids.
    """

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses one by one."""
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:  # noqa: ARG002
        """Verify one response; it cannot fail because of its format."""
        correct = sum(int(word[1:]) for word in response.split()) % 2 == 0
        return Verdict(correct, float(correct), None, "parity", 0.0)


@dataclass(frozen=True)
class Step:
    """The parts of a training step, made once and used in every step."""

    engine: NativeEngine
    sampling: SamplingParams
    verifier: Verifier
    decode: Callable[[tuple[int, ...]], str]
    accept_truncated: bool
    learner: TreeLearner


def measure(job: Job, workload: Workload, turns: Turns) -> None:
    """Sample, or sample and train on, the prompts of each turn."""
    model = AutoModelForCausalLM.from_pretrained(workload.model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(workload.model_dir)
    forward = choose_forward(model)
    turns.ready()
    step = Step(
        engine=NativeEngine(model, workload.eos_token_id, forward=forward),
        sampling=SamplingParams(max_new_tokens=workload.max_new_tokens),
        verifier=ParityVerifier() if workload.domain == "parity" else CountdownVerifier(),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        accept_truncated=workload.domain == "parity",  # its responses never end
        learner=TreeLearner(model, RECIPE, forward=forward),
    )
    measured = our_generation if job.quantity == "generation" else our_step
    for turn in range(job.num_turns):
        prompts = [
            Prompt(**(entry | {"token_ids": tuple(entry["token_ids"]), "domain": workload.domain}))
            for entry in workload.prompts_of(turn, job.prompts_per_step)
        ]
        turns.wait()
        turns.reply(measured(step, prompts, job.num_rollouts, turn))


def our_generation(step: Step, prompts: list[Prompt], num_rollouts: int, seed: int) -> Run:
    """Sample one tree per prompt."""
    start, cpu_start = time.perf_counter(), time.process_time()
    trees = step.engine.sample(SampleTask([p.token_ids for p in prompts], num_rollouts, step.sampling, seed))
    parts = {"generation": time.perf_counter() - start}
    return tree_run(parts, time.process_time() - cpu_start, trees, {})


def our_step(step: Step, prompts: list[Prompt], num_rollouts: int, seed: int) -> Run:
    """Sample, verify and learn from the trees.

    As in TRL, advantages are normalized within the group, and groups that are not mixed stay in the update; dynamic
    sampling would drop them.
    """
    cpu_start = time.process_time()
    times = [time.perf_counter()]
    trees = step.engine.sample(SampleTask([p.token_ids for p in prompts], num_rollouts, step.sampling, seed))
    times.append(time.perf_counter())
    verifiers = {prompts[0].domain: step.verifier}
    graded = grade(prompts, trees, verifiers, partial(seen_text, decode=step.decode), step.accept_truncated)
    times.append(time.perf_counter())
    groups = [
        Group(prompt, tree, np.array([v.correct for v in vs]), np.array([v.score for v in vs]))
        for prompt, tree, vs in zip(prompts, trees, graded, strict=True)
    ]
    update = step.learner.learn(groups, grpo, seed)
    step.engine.load_weights(step.learner.weights(), version=0)
    times.append(time.perf_counter())
    cpu_seconds = time.process_time() - cpu_start
    names = ("generation", "verification", "training")
    parts = dict(zip(names, np.diff(times).tolist(), strict=True))
    facts = {
        "mixed_groups": sum(g.is_mixed for g in groups) / len(groups),
        "mean_reward": sum(g.num_correct for g in groups) / (num_rollouts * len(groups)),
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "entropy_nats": update.entropy,
    }
    return tree_run(parts, cpu_seconds, trees, facts)


def tree_work(tree: RolloutTree) -> Work:
    """Count the work of sampling a tree, and of one forward pass of learning from it.

    The prompt and every distinct prefix go through the model once. A node without children is the last token of its
    responses and is not fed.
    """
    num_prompt = len(tree.prompt_ids)
    inner_F = np.unique(tree.parent[tree.parent >= 0])
    attended = int((num_prompt + tree.depth[inner_F] + 1).sum())
    positions = int(tree.depth[inner_F].max(initial=-1)) + 1
    return Work(
        fed_tokens=num_prompt + inner_F.size,
        attended=num_prompt * (num_prompt + 1) // 2 + attended,
        predictions=1 + inner_F.size,
        positions=1 + positions,
        cached=num_prompt * positions + int((tree.depth[inner_F] + 1).sum()),
    )


def tree_run(
    parts: dict[str, float],
    cpu_seconds: float,
    trees: list[RolloutTree],
    facts: dict[str, float],
) -> Run:
    """Return the run of a peer that sampled trees."""
    sampled = sum(tree.num_sampled_tokens for tree in trees)
    nats = -sum(float((tree.count * tree.logprob).sum()) for tree in trees) / sampled
    return Run(
        seconds=sum(parts.values()),
        cpu_seconds=cpu_seconds,
        sampled_tokens=sampled,
        unique_tokens=sum(tree.num_unique_tokens for tree in trees),
        work=Work.total(tree_work(tree) for tree in trees),
        parts=parts,
        facts=facts | {"nats_per_token": nats},
    )
