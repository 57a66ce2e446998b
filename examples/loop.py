"""The whole algorithm on one page: sample the tree, verify the tree, learn from the tree.

    python examples/loop.py

The quickstart model trains on countdown puzzles (3 7 8 -> 29: `3*7+8`) for about a minute on one core.
`brorl train` adds what a long run needs: files, resuming, intervals, other models, GPUs, clusters.

Dimensions: N rollouts per prompt, L distinct responses, M tree nodes, K nodes of all trees in a mini-batch.
"""

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brorl import RolloutTree, SamplingParams
from brorl.algorithms.advantages import maxrl_weight, outcome_weighted
from brorl.algorithms.groups import Group
from brorl.algorithms.losses import clipped_policy_loss, loss_denominator, node_weights
from brorl.arrays import FloatArray
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.model.load import load_model, load_tokenizer
from brorl.model.tree_path import tree_logprobs
from brorl.prompts.countdown import countdown_puzzles, countdown_questions, split_countdown
from brorl.prompts.prompt import Prompt
from brorl.prompts.rendering import render
from brorl.prompts.settings import PromptFormat
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.verification.domains.countdown import CountdownVerifier

PROMPTS_PER_STEP, MINI_BATCHES, LEARNING_RATE, CLIP_LOW, CLIP_HIGH = 32, 4, 1e-3, 0.2, 0.4
SAMPLING = SamplingParams(max_new_tokens=12)


def verify(prompt: Prompt, tree: RolloutTree, tokenizer: PreTrainedTokenizerBase) -> Group:
    """Verify each distinct response once, regardless of its count. Truncated responses are incorrect."""
    texts = tokenizer.batch_decode([tokens for tokens, _ in tree.responses()], skip_special_tokens=True)
    correct_L = tree.finished & [CountdownVerifier().verify(prompt, text).correct for text in texts]
    return Group(prompt, tree, correct_L, reward_L=correct_L.astype(float))


def policy_loss(model: PreTrainedModel, groups: Sequence[Group], advantages: Sequence[FloatArray]) -> Tensor:
    """Return PPO's clipped loss over all rollouts, from one pass over their distinct tokens.

    A node needs two numbers: the sums of the positive and of the negative advantages of the rollouts below it.
    """
    trees = [group.tree for group in groups]
    logprob_K = torch.cat(tree_logprobs(model, trees))
    # tuples: old log-probs, positive, negative
    per_tree = [(tree.logprob, *node_weights(tree, a_L)) for tree, a_L in zip(trees, advantages, strict=True)]
    old_logprob_K, positive_K, negative_K = (
        torch.as_tensor(np.concatenate(arrays)).to(logprob_K) for arrays in zip(*per_tree, strict=True)
    )
    denominator = loss_denominator(trees, "token_mean", SAMPLING.max_new_tokens)
    bounds = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "denominator": denominator}
    return clipped_policy_loss(logprob_K, old_logprob_K, positive_K, negative_K, **bounds).loss


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
    """Update once with MaxRL's advantages, w(N, c) (r - mean), whose weight w grows as successes become rarer."""
    optimizer.zero_grad()
    policy_loss(model, groups, outcome_weighted(groups, maxrl_weight)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main(num_rollouts: int = 512, steps: int = 60) -> None:
    """Train, and print what each step sampled and computed, and the fraction that was correct."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer("quickstart")
    model = load_model("quickstart", torch.device("cpu"), torch.float32)
    engine = NativeEngine(model, tokenizer.eos_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    puzzles = split_countdown(countdown_puzzles(3, 12, range(1, 100)), held_out_fraction=0.2, seed=0)
    train, held_out = (render(countdown_questions(p), PromptFormat(), tokenizer) for p in puzzles)
    generator = np.random.default_rng(0)

    def sample(prompts: Sequence[Prompt], seed: int) -> list[Group]:
        trees = engine.sample(SampleTask([p.token_ids for p in prompts], num_rollouts, SAMPLING, seed))
        return [verify(prompt, tree, tokenizer) for prompt, tree in zip(prompts, trees, strict=True)]

    def evaluate() -> str:
        correct_P = [group.num_correct for group in sample(held_out[:64], seed=0)]
        return ", ".join(
            f"pass@{k} {pass_at_k(correct_P, num_rollouts, k).mean():.3f}" for k in (1, min(16, num_rollouts))
        )

    print(f"held-out {evaluate()}")
    for step in range(1, steps + 1):
        groups = sample([train[i] for i in generator.integers(len(train), size=PROMPTS_PER_STEP)], seed=step)
        mixed = [
            group for group in groups if group.is_mixed
        ]  # groups that are all correct or all incorrect have no gradient
        for part in np.array_split(generator.permutation(len(mixed)), MINI_BATCHES):
            if part.size:
                update(model, optimizer, [mixed[i] for i in part])
        correct = sum(group.num_correct for group in groups) / (num_rollouts * PROMPTS_PER_STEP)
        sampled = sum(group.tree.num_sampled_tokens for group in groups)
        distinct = sum(group.tree.num_unique_tokens for group in groups)
        print(f"step {step:2}  correct {correct:.3f}  {sampled:,} sampled tokens, {distinct:,} computed")
    print(f"held-out {evaluate()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
