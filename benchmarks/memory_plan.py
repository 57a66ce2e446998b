"""Compares the memory that `predict_memory` predicts with the peak of real training steps, each in a fresh process.

    python benchmarks/memory_plan.py [--models 5M,20M,60M] [--variants full,checkpointing,lora,bfloat16] [--out FILE]
    python benchmarks/memory_plan.py --models long --variants full,checkpointing

A random Llama samples N = 32 responses of exactly 64 tokens for 2 prompts of 64 tokens, at full entropy, makes one
update, and samples again. The model `long` has a vocabulary of 150,000 tokens and samples 2 responses of 4,096 tokens
for one prompt. Peaks are those of the resident set above its size before the model was made; sampling and learning are
measured separately. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from brorl.rollout.engine import SampleTask

MODELS = {
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 1024},
    "20M": {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8, "vocab_size": 8192},
    "60M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32768},
    "long": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 150_000},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {"lora": True},
    "bfloat16": {"dtype": "bfloat16"},
    "lora bfloat16": {"lora": True, "dtype": "bfloat16"},
}
PROMPT_TOKENS = 64
SHORT, LONG = (2, 32, 64), (1, 2, 4096)  # prompts, rollouts of each, tokens of each
ENGINE_BYTES = 4 << 30


def measure(name: str, variant: str) -> dict[str, object]:
    """Sample, learn and sample again in this process; return predicted and measured bytes."""
    import numpy as np
    import torch
    from gpu.device import bytes_in_use, peak_bytes, reset_peak
    from transformers import LlamaConfig, LlamaForCausalLM

    from brorl.algorithms.groups import Group
    from brorl.config.settings import TrainConfig
    from brorl.model.lora import add_adapter
    from brorl.model.memory_prediction import predict_memory
    from brorl.model.memory_settings import MemorySettings, Workload
    from brorl.model.settings import LoraSettings
    from brorl.model.tree_attention import enable_gradient_checkpointing
    from brorl.prompts.prompt import Prompt
    from brorl.rollout.native_engine import NativeEngine
    from brorl.sampling import SamplingParams
    from brorl.training.learner import TreeLearner
    from brorl.training.settings import OptimizerSettings

    device = torch.device("cpu")
    num_prompts, num_rollouts, new_tokens = LONG if name == "long" else SHORT
    options = VARIANTS[variant]
    dtype, adapters = options.get("dtype", "float32"), bool(options.get("lora"))
    lora = LoraSettings(rank=16) if adapters else None
    config = LlamaConfig(**MODELS[name], num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
                         bos_token_id=None, eos_token_id=None, max_position_embeddings=8192)  # fmt: skip
    work({**MODELS["5M"], "num_hidden_layers": 1, "vocab_size": 64})  # libraries keep what they load at first use
    checkpointing = bool(options.get("gradient_checkpointing"))
    plan = predict_memory(
        config,
        MemorySettings(dtype, ENGINE_BYTES, lora, gradient_checkpointing=checkpointing),
        Workload(PROMPT_TOKENS, new_tokens, num_rows=num_prompts * num_rollouts, num_prompts=num_prompts),
    )
    torch.manual_seed(0)
    before = bytes_in_use(device)
    model = LlamaForCausalLM(config)
    sampler = model
    if dtype == "bfloat16":
        sampler = LlamaForCausalLM(config).to(torch.bfloat16)
        if lora:
            model = sampler
    if lora:
        add_adapter(model, lora)
    if checkpointing:
        enable_gradient_checkpointing(model)
    engine = NativeEngine(sampler, config.vocab_size, ENGINE_BYTES)
    recipe = TrainConfig(dtype=dtype, lora=lora or LoraSettings(), optimizer=OptimizerSettings(mini_batches=1))
    learner = TreeLearner(model, recipe)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, config.vocab_size, PROMPT_TOKENS).tolist()) for _ in range(num_prompts)]
    sampled = learned = 0
    for step in range(2):
        bytes_in_use(device)
        reset_peak(device)
        trees = engine.sample(SampleTask(prompts, num_rollouts, SamplingParams(max_new_tokens=new_tokens), seed=step))
        sampled = max(sampled, peak_bytes(device) - before)
        if step:
            break
        groups, advantages = [], []
        for prompt, tree in zip(prompts, trees, strict=True):
            correct = rng.random(tree.num_responses) < 0.5
            groups.append(Group(Prompt("id", "text", prompt, "", "domain"), tree, correct, correct.astype(float)))
            advantages.append(rng.normal(size=tree.num_responses))
        bytes_in_use(device)
        reset_peak(device)
        learner.learn(groups, lambda _, given=advantages: given, seed=step)
        learned = max(learned, peak_bytes(device) - before)
        engine.load_weights(learner.weights(), version=0)
    bytes_in_use(device)
    return {
        "model": name, "variant": variant, "parameters": sum(p.numel() for p in model.parameters()),
        "predicted_kept": plan.kept_bytes, "measured_kept": bytes_in_use(device) - before,
        "predicted_sampling": plan.certain_bytes, "measured_sampling": sampled,
        "predicted_learning": plan.kept_bytes + plan.learning.num_bytes, "measured_learning": learned,
    }  # fmt: skip


def work(sizes: dict[str, int]) -> None:
    """Make one forward and backward pass of a small model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8))
    logits = model(input_ids=model.lm_head.weight.new_zeros((1, 4)).long()).logits
    logits.sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="5M,20M,60M")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path, help="also write the numbers there, as JSON lines")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    print("| model | variant | weights (M) | kept, MiB (predicted / measured) | sampling | learning |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name in arguments.models.split(","):
        for variant in arguments.variants.split(","):
            command = [sys.executable, __file__, "--one", name, variant]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode:
                sys.exit(done.stderr)
            row = json.loads(done.stdout.splitlines()[-1])
            cells = []
            for part in ("kept", "sampling", "learning"):
                predicted, measured = row[f"predicted_{part}"], row[f"measured_{part}"]
                cells.append(f"{predicted / 2**20:.0f} / {measured / 2**20:.0f} = {predicted / measured:.2f}")
            print(f"| {name} | {variant} | {row['parameters'] / 1e6:.1f} | {' | '.join(cells)} |", flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
