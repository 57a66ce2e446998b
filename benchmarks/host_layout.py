"""The host's time beside the learner's forward and backward passes, by part: milliseconds per mini-batch, on one core.

    OMP_NUM_THREADS=1 python benchmarks/host_layout.py [--repeats N]

Mini-batches of about 65,536 nodes, as packed passes of 65,536 and of 16,384 nodes. Medians of the process time, on one
thread. The trees are new in each run, so values that they cache count in the first part that needs them. Operations on
tensors, which a GPU would compute, count with their dispatch only. `LogprobHead.logprobs` stops at its first block.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from harness import table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from brorl.algorithms.groups import Group
from brorl.algorithms.settings import ImportanceCorrection, KLPenalty
from brorl.config.settings import TrainConfig
from brorl.model.chunks import ChunkLayout, split_into_chunks
from brorl.model.flex_attention import FlexContext, FlexLayout
from brorl.model.load import load_model
from brorl.model.logits import RowLogits
from brorl.model.logprobs import PLAIN, ChunkLogprobs, LogprobHead, by_tree, node_offsets
from brorl.model.tree_path import TreeForward
from brorl.prompts.prompt import Prompt
from brorl.training.mini_batch import chunk_loss, prepare_mini_batches
from brorl.training.policy_logprobs import PolicyLogprobs
from brorl.training.ranks import ALONE
from brorl.training.settings import OptimizerSettings
from brorl.tree import RolloutTree

CPU = torch.device("cpu")
NODES_PER_PASS = 65_536, 16_384
PROMPT_TOKENS = 128
RECIPE = TrainConfig(
    optimizer=OptimizerSettings(mini_batches=1, old_logprobs="recompute"),
    importance=ImportanceCorrection(correction="truncate"),
    kl=KLPenalty(coefficient=1e-4),
)
T = TypeVar("T")


class Case(NamedTuple):
    """The rollouts of a mini-batch: random tokens, all of one length."""

    num_prompts: int
    num_rollouts: int
    num_tokens: int
    vocabulary: int  # a small one makes rollouts share prefixes

    def groups(self, rng: np.random.Generator) -> list[Group]:
        """Return the groups of a step, with advantages and all log-probs."""
        return [self._group(rng) for _ in range(self.num_prompts)]

    def _group(self, rng: np.random.Generator) -> Group:
        responses = rng.integers(self.vocabulary, size=(self.num_rollouts, self.num_tokens)).tolist()
        logprobs = rng.normal(-1, 0.1, (self.num_rollouts, self.num_tokens)).tolist()
        tree = RolloutTree.from_responses(
            rng.integers(self.vocabulary, size=PROMPT_TOKENS).tolist(), responses, logprobs
        )
        correct_L = rng.random(tree.num_responses) < 0.5
        old_M, reference_M = tree.logprob + rng.normal(0, 0.1, (2, tree.num_nodes))
        return Group(
            Prompt("p", "p", tree.prompt_ids, "", "d"), tree, correct_L, correct_L.astype(float), old_M,
            reference_logprob_M=reference_M, advantage_L=correct_L - 0.5,
        )  # fmt: skip


CASES = {
    "16 x 64 x 64": Case(16, 64, 64, 1 << 16),
    "2 x 16 x 2,048": Case(2, 16, 2048, 1 << 16),
    "16 x 1,024 x 13, shared": Case(16, 1024, 13, 2),
}


class FirstBlockError(Exception):
    """The first block of logits would be computed now."""


class Embedding(nn.Module):
    """Stops `LogprobHead.logprobs` when its work on arrays is done."""

    def forward(self, _hidden: Tensor) -> Tensor:
        """Raise the error."""
        raise FirstBlockError


class Instant(TorchDispatchMode):
    """Computes the operations of a first run. In later runs, each returns its first result."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[object, Any]] = []
        self._next = 0

    def rewind(self) -> None:
        """Start a run."""
        self._next = 0

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._next == len(self._operations):
            self._operations.append((operation, operation(*args, **(kwargs or {}))))
        first_operation, result = self._operations[self._next]
        assert operation is first_operation
        self._next += 1
        return result.detach() if isinstance(result, Tensor) else tuple(tensor.detach() for tensor in result)


class Watch:
    """Adds up the process time of the parts of a run."""

    def __init__(self, device: Instant) -> None:
        self.milliseconds: dict[str, float] = {}
        self._device = device

    def time(self, part: str, call: Callable[[], T]) -> T:
        """Return the result of a call, and count its time for a part."""
        with self._device:
            start = time.process_time()
            try:
                return call()
            finally:
                self.milliseconds[part] = self.milliseconds.get(part, 0.0) + 1e3 * (time.process_time() - start)


def measured(
    groups: Sequence[Group], logprobs: PolicyLogprobs, nodes_per_pass: int, device: Instant
) -> dict[str, float]:
    """Return the milliseconds of each part of one mini-batch."""
    watch = Watch(device)
    device.rewind()
    groups = [replace(group, tree=replace(group.tree)) for group in groups]  # without cached values
    args = groups, [True] * len(groups), logprobs, np.random.default_rng(0)
    (batch,), _ = watch.time("prepare_mini_batches", lambda: prepare_mini_batches(*args))
    trees = batch.trees
    offsets = watch.time("split_into_chunks", lambda: node_offsets(trees))
    slices = watch.time("split_into_chunks", lambda: list(split_into_chunks(trees, nodes_per_pass)))
    head, computed = LogprobHead(PLAIN, entropy=False), []
    for part in slices:
        layout = watch.time("ChunkLayout", lambda p=part: ChunkLayout(trees, offsets, p, with_prompts=True))
        flex = watch.time("FlexLayout", lambda x=layout: FlexLayout.of(x.position_T, x.end_T, None))
        tensors = [torch.from_numpy(array) for array in flex.arrays]
        watch.time("FlexContext", lambda f=flex, t=tensors: FlexContext(f, *t))
        rows = RowLogits(torch.empty(layout.logit_rows.size, 1), Embedding(), vocabulary=1 << 16)
        targets = layout.length_R, layout.target_row, layout.target_token, layout.target_index
        with suppress(FirstBlockError):
            watch.time("LogprobHead.logprobs", lambda r=rows, t=targets: head.logprobs(r, *t))
        index = torch.from_numpy(layout.target_index)
        chunk = ChunkLogprobs(index, torch.zeros(index.numel(), requires_grad=True))
        watch.time("chunk_loss", lambda c=chunk: chunk_loss(c, batch, RECIPE, None))
        computed.append(chunk)
    watch.time("by_tree", lambda: by_tree(computed, trees))
    return watch.milliseconds | {"sum": sum(watch.milliseconds.values())}


def columns(model: PreTrainedModel, repeats: int) -> Iterator[tuple[str, dict[str, float], int]]:
    """Yield the head of each column, its medians and the number of nodes."""
    logprobs = PolicyLogprobs(model, RECIPE, TreeForward(packed=True), (), lambda _: None, ALONE)
    for name, case in CASES.items():
        groups = case.groups(np.random.default_rng(0))
        for nodes_per_pass in NODES_PER_PASS:
            device = Instant()
            runs = [measured(groups, logprobs, nodes_per_pass, device) for _ in range(1 + repeats)][1:]
            medians = {part: float(np.median([run[part] for run in runs])) for part in runs[0]}
            yield f"{name}, {nodes_per_pass:,} a pass", medians, sum(group.tree.num_nodes for group in groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    model = load_model("quickstart", CPU, torch.float32)
    heads, medians, nodes = zip(*columns(model, repeats), strict=True)
    rows = [("nodes", *(f"{number:,}" for number in nodes))]
    rows += [(part, *(f"{column[part]:.1f}" for column in medians)) for part in medians[0]]
    print(table(("milliseconds", *heads), rows))


if __name__ == "__main__":
    main()
