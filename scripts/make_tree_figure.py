"""Draw docs/figures/tree.png: rollouts of one puzzle as a tree, sampled from the shipped model or a checkpoint.

In: a model. Out: the figure. A box is a node; its height is its count, its color the fraction of correct rollouts
below.

    python scripts/make_tree_figure.py [--model RUN/checkpoints/step-000150]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from transformers import PreTrainedTokenizerBase

from brorl import RolloutTree, SamplingParams
from brorl.model.load import end_tokens, load_model, load_tokenizer
from brorl.prompts.countdown import CountdownPuzzle
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.verification.domains.countdown import CountdownVerifier

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "tree.png"
PUZZLE = CountdownPuzzle((3, 5, 7), 22)
NUM_ROLLOUTS = 512
COLORS = LinearSegmentedColormap.from_list("correct", ["#f0cdc6", "#fbeec1", "#4caf7a"])
MIN_LABEL = 9  # rollouts: lower boxes have no room for text


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="quickstart")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, torch.device("cpu"), torch.float32)
    token_ids = tuple(tokenizer(PUZZLE.text)["input_ids"])
    prompt = Prompt("puzzle", PUZZLE.text, token_ids, PUZZLE.reference, "countdown")
    engine = NativeEngine(model, end_tokens(model, tokenizer))
    sampling = SamplingParams(max_new_tokens=16)
    (tree,) = engine.sample(SampleTask([token_ids], num_rollouts=NUM_ROLLOUTS, sampling=sampling, seed=0))
    draw(tree, prompt, tokenizer)
    print(f"{tree.num_sampled_tokens} sampled tokens, {tree.num_unique_tokens} computed, {tree.leaf.size} responses")


def draw(tree: RolloutTree, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
    """Draw a tree, one column per token."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in tree.responses()]
    verdicts = CountdownVerifier().verify_all([(prompt, text) for text in texts])
    correct = np.zeros(tree.token.size)
    for leaf, count, verdict in zip(tree.leaf, tree.leaf_count, verdicts, strict=True):
        node = int(leaf)
        while node >= 0:
            correct[node] += count * verdict.correct
            node = int(tree.parent[node])
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.add_patch(Rectangle((-1.9, 0), 1.9, tree.num_rollouts, facecolor="#dddddd", edgecolor="white", linewidth=0.6))
    label = f"{prompt.text}\n\n{tree.num_rollouts} rollouts"
    axes.text(-0.95, tree.num_rollouts / 2, label, ha="center", va="center")
    used: dict[int, float] = {-1: 0.0}  # the lower edge of the next child
    depth = {-1: -1}
    for node, (parent, count) in enumerate(zip(tree.parent.tolist(), tree.count.tolist(), strict=True)):
        low, column = used[parent], depth[parent] + 1
        used[parent], used[node], depth[node] = low + count, low, column
        fraction = correct[node] / count
        box = Rectangle((column, low), 1, count, facecolor=COLORS(fraction), edgecolor="white", linewidth=0.6)
        axes.add_patch(box)
        if count >= MIN_LABEL:
            text = tokenizer.decode([int(tree.token[node])]).strip()
            text = "end" if int(tree.token[node]) in tokenizer.all_special_ids else text
            axes.text(column + 0.5, low + count / 2, text, ha="center", va="center", fontsize=min(10, 6 + count / 12))
    axes.set(xlim=(-1.9, max(depth.values()) + 1), ylim=(tree.num_rollouts, 0))
    axes.axis("off")
    axes.set_title(
        f"{tree.num_rollouts} rollouts: {tree.num_sampled_tokens:,} sampled tokens, {tree.num_unique_tokens} computed; "
        f"{tree.leaf.size} distinct responses.\n"
        "Height: rollouts through a node. Color: fraction of correct rollouts below it.",
        fontsize=9, loc="left",
    )  # fmt: skip
    figure.savefig(FIGURE, dpi=130)


if __name__ == "__main__":
    main()
