"""The compiled kernels: seconds of sampling and of learning without them over those with them, in turns in one process.

    python benchmarks/compiled_kernels.py [--repeats N]

One prompt of 64 random tokens, one thread. The models are random Llamas in float32 (`build_workload.py`), at full
entropy, and the responses have a fixed length. The last column samples with `engine.dtype: bfloat16`.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from build_workload import PROMPT_TOKENS, _random_llama
from harness import table, timed

from brorl.algorithms.advantages import grpo
from brorl.algorithms.groups import Group
from brorl.config.settings import TrainConfig
from brorl.model.forward import choose_forward
from brorl.model.kernels import use_kernels
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.training.learner import TreeLearner
from brorl.training.settings import OptimizerSettings
from brorl.tree import RolloutTree

CELLS = ((False, 64, 16), (False, 64, 512), (False, 512, 16))  # big, tokens, N


def rows(repeats: int) -> Iterator[tuple[object, ...]]:
    """Yield the row of each cell."""
    for big, tokens, num_rollouts in CELLS:
        model = _random_llama(big, PROMPT_TOKENS + tokens)
        forward, end, sampling = choose_forward(model), model.config.vocab_size, SamplingParams(max_new_tokens=tokens)
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, end, PROMPT_TOKENS).tolist()
        engine = NativeEngine(model, end, forward=forward)
        rounded = NativeEngine(model, end, forward=forward, dtype=torch.bfloat16)
        learner = TreeLearner(
            model, TrainConfig(optimizer=OptimizerSettings(learning_rate=1e-7, mini_batches=1)), forward=forward
        )
        tree = engine.sample(SampleTask([prompt], num_rollouts, sampling, 0))[0]
        correct_L = rng.random(tree.num_responses) < 0.3
        group = Group(Prompt("p", "?", tuple(prompt), "a", "d"), tree, correct_L, correct_L.astype(float))

        def sample(by: NativeEngine = engine, seed: int = 1) -> list[RolloutTree]:
            return by.sample(SampleTask([prompt], num_rollouts, sampling, seed))  # noqa: B023

        calls = {
            ("off", "sampling"): sample,
            ("on", "sampling"): sample,
            ("on", "bfloat16"): lambda: sample(rounded),  # noqa: B023
            ("off", "learning"): lambda: learner.learn([group], grpo, 0),  # noqa: B023
            ("on", "learning"): lambda: learner.learn([group], grpo, 0),  # noqa: B023
        }
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(1 + repeats):  # the first warms up
            for (choice, what), call in calls.items():
                use_kernels(choice)
                seconds[choice, what].append(timed(call).seconds)
        median = {key: float(np.median(times[1:])) for key, times in seconds.items()}
        ratios = (median["off", what] / median["on", what] for what in ("sampling", "learning"))
        weights = sum(p.numel() for p in model.parameters()) / 1e6
        yield (
            f"{weights:.2g}M",
            tokens,
            num_rollouts,
            f"{median['on', 'sampling']:.3g}",
            f"{median['on', 'learning']:.3g}",
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{median['on', 'sampling'] / median['on', 'bfloat16']:.2f}",
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = ("weights", "tokens", "N", "sampling, s", "learning, s")
    ratios = ("sampling: without / with", "learning: without / with", "sampling: float32 / bfloat16")
    print(table((*heads, *ratios), rows(repeats)))


if __name__ == "__main__":
    main()
