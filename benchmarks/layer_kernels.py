"""The kernels of a packed pass: how many a compiled decoder layer starts, and how many the rest of a chunk.

    python benchmarks/layer_kernels.py [CASE ...] [--names]

No GPU is needed: PyTorch's inductor generates its kernels for a simulated one (`tests/simulated_devices`). They are
counted and compute nothing; operators outside of generated code run on the CPU. This takes a build of PyTorch without
CUDA, g++ and the package `triton`. A cell has the kernels of a forward pass + those of its backward pass, for a chunk
whose gradients are added to an earlier one's. A kernel with several purposes counts as the first kind that fits. One
operator counts as one kernel, although cuBLAS may start two for a product. `--names` lists the kernels of each part.
"""

import argparse
import ctypes
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import triton
from harness import ABSENT, table
from torch import Tensor
from torch._inductor import async_compile, config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from triton.backends.compiler import GPUTarget

from brorl.algorithms.groups import Group
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.model.tree_path import TreeForward
from brorl.prompts.prompt import Prompt
from brorl.training.learner import TreeLearner
from brorl.tree import RolloutTree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "simulated_devices"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import simulated_device

from recipes import recipe

PROMPT_TOKENS, NUM_RESPONSES, RESPONSE_TOKENS, VOCABULARY = 200, 24, 100, 1024
NUM_ROWS = 1 + NUM_RESPONSES * (RESPONSE_TOKENS - 1)  # of logits per chunk


class Case(NamedTuple):
    """A model, and how it is trained."""

    kind: str  # `model_type` in transformers
    dtype: str
    rank: int = 0  # of adapters; 0 without them


CASES = {
    "Llama, float32": Case("llama", "float32"),
    "Llama, bfloat16": Case("llama", "bfloat16"),
    "Qwen2, bfloat16": Case("qwen2", "bfloat16"),
    "Qwen3, bfloat16": Case("qwen3", "bfloat16"),
    "Llama, adapters": Case("llama", "bfloat16", 8),
}
KINDS = {  # of kernels, by parts of their names
    "attention": "flex_attention",
    "matrix products": "^(mm|bmm|addmm)$",
    "sums with earlier gradients": "^add$",
    "norms": "rsqrt|pow|mul_sum|^sum$",
    "biases": "_sum_",
    "copies of keys and values": "index|arange_eq",
    "rotation of queries and keys": "neg",
    "gate": "silu",
    "residual sums": r"view_add_\d",
    "casts": "to_copy",
    "others": "",
}


class Counts(NamedTuple):
    """Kernels by name."""

    forward: dict[str, float]
    backward: dict[str, float]

    def minus(self, other: "Counts", divisor: int = 1) -> "Counts":
        """Return the differences, divided by a number."""
        pairs = zip(self, other, strict=True)
        return Counts(*({name: (a.get(name, 0) - b.get(name, 0)) / divisor for name in a | b} for a, b in pairs))

    def cell(self, kind: str | None = None) -> str:
        """Return the number of kernels, of one kind or of all."""
        forward, backward = (sum(c[name] for name in c if kind in (None, kind_of(name))) for c in self)
        return f"{forward:g} + {backward:g}" if forward or backward else ABSENT


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


started: Counter[str] = Counter()  # generated kernels by name


class Kernel:
    """A generated kernel that computes nothing."""

    def __init__(self, name: str, *_: object, **__: object) -> None:
        self._name = name

    def run(self, *_: object, **__: object) -> None:
        """Count a start."""
        started[self._name] += 1


def simulate() -> None:
    """Simulate a GPU for which inductor generates kernels."""
    simulated_device.install(str(simulated_device.build(Path(cache_dir()))), devices=1, gib=8.0)
    sys.modules["triton"] = triton
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    properties = {"major": 9, "multi_processor_count": 132, "regs_per_multiprocessor": 1 << 16}
    properties |= {"max_threads_per_multi_processor": 2048, "gcnArchName": ""}

    def zeros(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        memory = torch.empty_strided(size, stride, dtype=dtype, device="cuda")
        ctypes.memset(memory.untyped_storage().data_ptr(), 0, memory.untyped_storage().nbytes())
        return memory

    torch.cuda._get_device_properties = lambda _: SimpleNamespace(**properties)  # type: ignore[attr-defined]
    torch.cuda._exchange_device = lambda _: 0
    torch.cuda._maybe_exchange_device = lambda _: 0  # a second function: dynamo registers both
    torch._C._dynamo.guards._empty_strided_cuda = zeros  # type: ignore[attr-defined]
    async_compile.AsyncCompile.triton = Kernel
    config.force_disable_caches = True  # nothing else may find these kernels


def kernels() -> Counter[str]:
    """Return the kernels since the last reset, by name."""
    operators = ((name.removeprefix("kernel:aten::"), n) for name, n in simulated_device.counts().items())
    return started + Counter({name: n for name, n in operators if ":" not in name})


def group_of(seed: int) -> Group:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
    responses = [[first, *rng.integers(0, VOCABULARY, RESPONSE_TOKENS - 1)] for first in range(NUM_RESPONSES)]
    tree = RolloutTree.from_responses(prompt, responses, np.full((NUM_RESPONSES, RESPONSE_TOKENS), -4.0).tolist())
    correct_L = np.arange(NUM_RESPONSES) % 2 == 0
    group = Group(Prompt("p", "p", tree.prompt_ids, "", "d"), tree, correct_L, correct_L.astype(float))
    return replace(group, old_logprob_M=tree.logprob)  # a bfloat16 run would recompute them


def model_of(case: Case, num_layers: int) -> PreTrainedModel:
    settings = AutoConfig.for_model(
        case.kind, vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(settings).to(torch.bfloat16 if case.rank else torch.float32)
    if case.rank:
        add_adapter(model, LoraSettings(rank=case.rank))
    return model.cuda()


def of_step(case: Case, num_layers: int, num_blocks: int, num_chunks: int) -> Counts:
    """Return the kernels of an update with so many chunks, each with so many blocks of logits."""
    settings = recipe(nodes_per_pass=NUM_RESPONSES * RESPONSE_TOKENS, attention="tiled", dtype=case.dtype)
    settings = settings.model_copy(update={"lora": LoraSettings(rank=case.rank)})
    learner = TreeLearner(model_of(case, num_layers), settings, forward=TreeForward(packed=True, compiled=True))
    groups = [group_of(seed) for seed in range(num_chunks)]
    advantages = [np.resize([-1.0, 1.0], NUM_RESPONSES)] * num_chunks
    logits_per_block = VOCABULARY * -(-NUM_ROWS // num_blocks)
    in_backward: Counter[str] = Counter()
    run_backward = Tensor.backward

    def counted(loss: Tensor) -> None:
        before = kernels()
        run_backward(loss)
        in_backward.update(kernels() - before)

    with (
        patch.object(Tensor, "backward", counted),
        patch("brorl.model.tree_path.COMPILED_LOGITS_PER_BLOCK", logits_per_block),
    ):
        for _ in range(2):  # the first compiles
            started.clear()
            in_backward.clear()
            simulated_device.reset()
            learner.learn(groups, lambda _: advantages, seed=0)
    return Counts(dict(kernels() - in_backward), dict(in_backward))


def of_chunk(case: Case, num_layers: int, num_blocks: int) -> Counts:
    few, many = (of_step(case, num_layers, num_blocks, num_chunks) for num_chunks in (2, 4))
    return many.minus(few, 2)


def of_parts(case: Case) -> dict[str, Counts]:
    """Return the kernels of the parts of a chunk."""
    one, three = (of_chunk(case, num_layers, 2) for num_layers in (1, 3))
    layer = three.minus(one, 2)
    block = of_chunk(case, 1, 4).minus(one, 2)
    rest = one.minus(layer).minus(block).minus(block)
    return {"a layer": layer, "a block of logits": block, "the rest of a chunk": rest}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help="; ".join(CASES))
    parser.add_argument("--names", action="store_true")
    options = parser.parse_args()
    simulate()
    cases = {name: of_parts(CASES[name]) for name in options.cases}
    rows = [[f"a layer: {kind}", *(parts["a layer"].cell(kind) for parts in cases.values())] for kind in KINDS]
    rows += [[part, *(parts[part].cell() for parts in cases.values())] for part in next(iter(cases.values()))]
    print(table(("kernels", *cases), rows))
    if not options.names:
        return
    for case, parts in cases.items():
        for part, counts in parts.items():
            for way, times in counts._asdict().items():
                print(f"\n{case}, {part}, {way}:")
                print("\n".join(f"{n:g} {name}" for name, n in sorted(times.items()) if n))


if __name__ == "__main__":
    main()
