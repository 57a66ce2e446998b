"""One request of n responses against split requests, and one engine against two, with vLLM on the CPU.

Run in the environment of `vllm_environment.sh`, with brorl in it: python benchmarks/vllm_requests.py. A random Llama
samples N responses of a fixed length for each prompt. Two engines share the cores: with prefix affinity each samples
half of the prompts; without, each samples half of the responses of every prompt. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brorl.rollout.vllm import VllmEngine
from brorl.rollout.vllm_process import VllmSettings
from brorl.sampling import SamplingParams

VOCABULARY = 8192
NO_STOP = VOCABULARY - 1  # never drawn: min_new_tokens forbids it


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder), options.hidden, options.layers)
        settings = VllmSettings(
            folder, "float32", options.prompt_tokens + options.new_tokens, options.cache_gib << 30,
            threads=options.threads, max_rows=options.rollouts,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        prompts = [rng.integers(1, NO_STOP, options.prompt_tokens).tolist() for _ in range(options.prompts)]
        sampling = SamplingParams(max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens - 1)
        print(f"{options.prompts} prompts of {options.prompt_tokens} tokens, N = {options.rollouts}, "
              f"{options.new_tokens} new tokens, {options.threads} threads an engine\n")  # fmt: skip
        print("| engines | responses of a request | seconds (best of turns) | samples/s |\n| --- | --- | --- | --- |")
        total = options.prompts * options.rollouts

        def row(engines: str, requests: str, sample: Callable[[int], object]) -> None:
            seconds = min(_seconds(sample, turn) for turn in range(options.turns))
            print(f"| {engines} | {requests} | {seconds:.2f} | {total / seconds:,.0f} |", flush=True)

        for size in dict.fromkeys([options.rollouts, *options.split]):
            engine = VllmEngine(replace(settings, responses_per_request=size), (NO_STOP,))
            row("1", str(size), lambda turn, engine=engine: engine.sample(prompts, options.rollouts, sampling, turn))
            engine.close()
        if options.two:
            pair = [VllmEngine(settings, (NO_STOP,)) for _ in range(2)]
            half = options.prompts // 2
            row("2, by prompt", str(options.rollouts), lambda turn: _both(
                pair, [prompts[:half], prompts[half:]], options.rollouts, sampling, turn))  # fmt: skip
            row("2, by response", str(options.rollouts // 2), lambda turn: _both(
                pair, [prompts, prompts], options.rollouts // 2, sampling, turn))  # fmt: skip
            for engine in pair:
                engine.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("rollouts", 512), ("prompts", 2), ("prompt-tokens", 200), ("new-tokens", 64), ("hidden", 512), ("layers", 8),
        ("threads", 1), ("turns", 3), ("cache-gib", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--split", type=int, nargs="*", default=[128, 32, 8], help="responses of a request")
    parser.add_argument("--two", action="store_true", help="measure two engines too")
    return parser.parse_args()


def _save_model(folder: Path, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), head_dim=64, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def _seconds(sample: Callable[[int], object], turn: int) -> float:
    start = time.perf_counter()
    sample(turn)
    return time.perf_counter() - start


def _both(
    engines: Sequence[VllmEngine],
    prompts: Sequence[Sequence[Sequence[int]]],
    num_rollouts: int,
    sampling: SamplingParams,
    turn: int,
) -> None:
    """Sample with both engines in parallel."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(
            lambda i: engines[i].sample(prompts[i], num_rollouts, sampling, 2 * turn + i), range(2)
        ))  # fmt: skip


if __name__ == "__main__":
    main()
