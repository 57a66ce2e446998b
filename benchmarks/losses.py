"""The cost of losses, corrections and penalties: seconds of a training step, as a ratio to plain PPO in the same run.

    python benchmarks/losses.py [--repeats N]

The shipped model, 16 prompts of random tokens x 512 rollouts, 4 mini-batches, one thread; the variants take turns.
"""

import argparse
from copy import deepcopy
from functools import partial

import numpy as np
import torch
from harness import table, timed

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings, ImportanceCorrection, KLPenalty, PolicyLossSettings
from brorl.config.settings import TrainConfig
from brorl.model.load import load_model, load_tokenizer
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.training.learner import TreeLearner
from brorl.training.settings import OptimizerSettings, ReferenceSettings

NUM_PROMPTS, NUM_ROLLOUTS, PROMPT_TOKENS = 16, 512, 8


def settings(old_logprobs: str = "engine", **sections: object) -> TrainConfig:
    return TrainConfig(optimizer=OptimizerSettings(learning_rate=1e-9, old_logprobs=old_logprobs), **sections)


VARIANTS = {
    "ppo": settings(),
    "cispo": settings(loss=PolicyLossSettings(kind="cispo")),
    "gspo": settings(loss=PolicyLossSettings(kind="gspo", clip_low=3e-4, clip_high=4e-4)),
    "ppo, old log-probs recomputed, masked": settings(
        old_logprobs="recompute", importance=ImportanceCorrection(correction="mask")
    ),
    "ppo, KL in the loss": settings(kl=KLPenalty(coefficient=1e-4)),
    "ppo, KL in the loss, reference offloaded": settings(
        kl=KLPenalty(coefficient=1e-4), reference=ReferenceSettings(offload=True)
    ),
    "the recipe: recomputed, truncated, KL": settings(
        old_logprobs="recompute",
        importance=ImportanceCorrection(correction="truncate"),
        kl=KLPenalty(coefficient=1e-4),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    model = load_model("quickstart", torch.device("cpu"), torch.float32)
    end = load_tokenizer("quickstart").eos_token_id
    rng = np.random.default_rng(0)
    prompts = rng.integers(4, 16, (NUM_PROMPTS, PROMPT_TOKENS)).tolist()
    trees = NativeEngine(model, end).sample(SampleTask(prompts, NUM_ROLLOUTS, SamplingParams(max_new_tokens=12), 0))
    groups = []
    for tree in trees:
        correct_L = rng.random(tree.num_responses) < 0.3
        groups.append(Group(Prompt("p", "?", tree.prompt_ids, "a", "d"), tree, correct_L, correct_L.astype(float)))
    advantages = advantage_estimator(AdvantageSettings())(groups)
    learners = {name: TreeLearner(deepcopy(model), s) for name, s in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(1 + repeats):  # the first warms up
        for name, learner in learners.items():
            seconds[name].append(timed(partial(learner.learn, groups, lambda _: advantages, seed=0)).seconds)
    median = {name: float(np.median(times[1:])) for name, times in seconds.items()}
    rows = ((name, f"{value:.3f}", f"{value / median['ppo']:.2f}") for name, value in median.items())
    print(table(("", "seconds", "times PPO"), rows))


if __name__ == "__main__":
    main()
