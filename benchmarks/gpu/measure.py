"""Checks the engine and the learner on an accelerator, and measures them against transformers `generate`.

One call prints JSON: exactness (float64 and float32 on small models of four architectures), then
rollouts per second against `generate`, the time of a training step and peak memory on a larger random Llama, in
float32 and bfloat16.

    python benchmarks/gpu/measure.py --device cuda --output gpu.json
    python benchmarks/gpu/measure.py --device cpu --small          # the same code without a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from brorl.algorithms.advantages import reinforce_pp_baseline
from brorl.algorithms.groups import Group
from brorl.model.logprobs import chunk_logprobs
from brorl.prompts.prompt import Prompt
from brorl.rollout.native.engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.training.learner import LearnerSettings
from brorl.training.tree_learner import TreeLearner
from brorl.tree import RolloutTree

NO_END_TOKEN = 10**9


def random_model(kind: str, device: str, dtype: torch.dtype, **shape: int) -> PreTrainedModel:
    """Make a randomly initialised model; its logits are sharpened so that rollouts share prefixes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, max_position_embeddings=4096, **shape)
    model = AutoModelForCausalLM.from_config(config).to(device=device, dtype=dtype)
    return model.eval()


@contextmanager
def plain_rms_norm(model: PreTrainedModel) -> Iterator[None]:
    """Let RMSNorm compute in the model's own precision (transformers computes it in float32)."""
    norms = {type(m) for m in model.modules() if type(m).__name__.endswith("RMSNorm")}
    originals = {norm: norm.forward for norm in norms}

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for norm in norms:
        norm.forward = forward
    try:
        yield
    finally:
        for norm, original in originals.items():
            norm.forward = original


def flat_gradient(model: PreTrainedModel, trees: list[RolloutTree], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradient of the weighted log-probs, one response at a time, with the model's own attention."""
    model.zero_grad()
    for tree, weight_M in zip(trees, weights, strict=True):
        seen: set[int] = set()
        for leaf in tree.leaf.tolist():
            path = tree.path(leaf)
            ids = torch.tensor([[*tree.prompt_ids, *tree.token[path].tolist()]], device=model.device)
            logprob = model(ids).logits[0].log_softmax(-1)
            new = [i for i, node in enumerate(path.tolist()) if node not in seen]
            seen.update(path.tolist())
            rows = torch.tensor(new, device=model.device) + len(tree.prompt_ids) - 1
            nodes = torch.from_numpy(path[new]).to(model.device)
            tokens = torch.from_numpy(tree.token[path[new]]).to(model.device)
            (weight_M[nodes] * logprob[rows, tokens]).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def check_exactness(kind: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Compare tree decoding with flat decoding, and the tree's log-probs and gradient with the plain model's."""
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 61,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "head_dim": 16,
    }
    model = random_model(kind, device, dtype, **shape)
    model.lm_head.weight.data *= 20
    prompts = [[1, 2, 3, 4, 5], [6, 7], list(range(8, 30))]
    sampling = SamplingParams(max_new_tokens=20)
    with plain_rms_norm(model):
        tree = NativeEngine(model, 0).sample(prompts, 128, sampling, 7)
        flat = NativeEngine(model, 0, share_prefixes=False).sample(prompts, 128, sampling, 7)
        weights = [torch.randn(t.num_unique_tokens, dtype=dtype, device=device) for t in tree]
        expected = flat_gradient(model, tree, weights)
        model.zero_grad()
        weight = torch.cat(weights)
        worst_logprob = 0.0
        sampled = torch.from_numpy(np.concatenate([t.logprob for t in tree])).to(device)
        for chunk in chunk_logprobs(model, tree, max_nodes=64):
            worst_logprob = max(worst_logprob, float((chunk.logprob.detach() - sampled[chunk.index]).abs().max()))
            (weight[chunk.index] * chunk.logprob).sum().backward()
        actual = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "same_tokens_tree_and_flat": [a.responses() == b.responses() for a, b in zip(tree, flat, strict=True)],
        "learner_minus_engine_logprob": worst_logprob,
        "gradient_relative_error": max(
            float((a - e).abs().max() / e.abs().max()) for a, e in zip(actual, expected, strict=True)
        ),
    }


def timed(call: Callable[[], Any], device: str, runs: int) -> float:
    """Median seconds of a call after one warm-up."""
    seconds = []
    for _ in range(runs + 1):
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def synchronise(device: str) -> None:
    """Wait for the accelerator."""
    if device != "cpu":
        torch.cuda.synchronize()


def parity_groups(trees: list[RolloutTree]) -> list[Group]:
    """Call a response correct if its token ids sum to an even number."""
    groups = []
    for tree in trees:
        correct_L = np.array([sum(tokens) % 2 == 0 for tokens, _ in tree.responses()])
        prompt = Prompt("parity", "parity", tree.prompt_ids, "even", "parity")
        groups.append(Group(prompt, tree, correct_L, correct_L.astype(np.float64)))
    return groups


def measure_speed(arguments: argparse.Namespace, dtype: torch.dtype, sharpness: float) -> dict[str, float]:
    """Measure rollouts per second against `generate`, and a training step, at one entropy."""
    small = arguments.small
    shape = {
        "hidden_size": 128 if small else 1024,
        "num_hidden_layers": 4 if small else 12,
        "vocab_size": 256 if small else 8192,
        "num_attention_heads": 4 if small else 16,
        "num_key_value_heads": 2 if small else 4,
        "intermediate_size": 344 if small else 2816,
    }
    prompt_length, response_length, num_rollouts = (16, 16, 64) if small else (256, 512, 512)
    device = arguments.device
    model = random_model("llama", device, torch.float32, **shape)
    model.lm_head.weight.data *= sharpness
    sampler = random_model("llama", device, dtype, **shape)
    sampler.load_state_dict(model.state_dict())
    prompt = torch.randint(1, shape["vocab_size"], (prompt_length,)).tolist()
    engine = NativeEngine(sampler, NO_END_TOKEN, memory_bytes=arguments.memory_gib << 30)
    sampling = SamplingParams(max_new_tokens=response_length)
    learner = TreeLearner(
        model,
        LearnerSettings(
            1e-7,
            autocast=dtype == torch.bfloat16,
            recompute_old_logprobs=dtype == torch.bfloat16,
            max_nodes=arguments.nodes,
        ),
    )

    def generate() -> torch.Tensor:
        ids = torch.tensor([prompt], device=device)
        output: torch.Tensor = sampler.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=num_rollouts,
            max_new_tokens=response_length,
            min_new_tokens=response_length,
            pad_token_id=0,
            eos_token_id=None,
        )
        return output

    result: dict[str, float] = {"parameters": sum(p.numel() for p in model.parameters())}
    reset_memory(device)
    trees = engine.sample([prompt], num_rollouts, sampling, 0)
    tree = trees[0]
    result["entropy_nats"] = float(-(tree.count * tree.logprob).sum() / tree.num_sampled_tokens)
    result["unique_over_sampled"] = tree.num_unique_tokens / tree.num_sampled_tokens
    ours = timed(lambda: engine.sample([prompt], num_rollouts, sampling, 0), device, arguments.runs)
    result |= {"ours_rollouts_per_s": num_rollouts / ours, "ours_generation_gib": peak_memory_gib(device)}
    reset_memory(device)
    theirs = timed(generate, device, arguments.runs)
    result |= {"generate_rollouts_per_s": num_rollouts / theirs, "generate_gib": peak_memory_gib(device)}
    groups = parity_groups(trees)
    advantages = reinforce_pp_baseline(groups)
    reset_memory(device)
    step = timed(lambda: learner.step(groups, advantages, 0), device, arguments.runs)
    return result | {"learner_step_s": step, "learner_gib": peak_memory_gib(device), "generation_ratio": theirs / ours}


def reset_memory(device: str) -> None:
    """Begin to record peak memory."""
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib(device: str) -> float:
    """Peak memory of the accelerator since the reset, in GiB."""
    return torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else float("nan")


def main() -> None:
    """Run all checks and measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that the script runs")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--memory-gib", type=int, default=32, help="the engine's memory limit")
    parser.add_argument("--nodes", type=int, default=8192, help="tree nodes per forward pass of the learner")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device != "cpu" else "cpu"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    for kind in ("llama", "qwen2", "qwen3", "mistral"):
        for dtype in (torch.float64, torch.float32):
            result[f"exactness {kind} {dtype}"] = check_exactness(kind, arguments.device, dtype)
            print(kind, dtype, result[f"exactness {kind} {dtype}"], flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        for sharpness in (1.0, 100.0):
            key = f"speed {dtype} head x{sharpness:.0f}"
            result[key] = measure_speed(arguments, dtype, sharpness)
            print(key, json.dumps(result[key]), flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
