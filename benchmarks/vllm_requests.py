"""One request of n responses against split requests, and one engine against two, with vLLM on the CPU.

Run in the environment of `vllm_environment.sh`, with brorl in it: python benchmarks/vllm_requests.py. A random Llama
samples N responses of a fixed length for each prompt. With prefix affinity each of two engines samples half of the
prompts; without, each samples half of the responses of every prompt. All arms take turns. Prints Markdown: medians of
the turns, and the range of the ratio to the first arm over the turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from harness import table, timed
from transformers import LlamaConfig, LlamaForCausalLM

from brorl.rollout.vllm_engine import split_request
from brorl.rollout.vllm_process import Request, VllmProcess, VllmSetup
from brorl.sampling import SamplingParams

VOCABULARY = 8192
NO_STOP = VOCABULARY - 1  # never drawn: min_new_tokens forbids it


def main() -> None:
    options = _options()
    rollouts, rng = options.rollouts, np.random.default_rng(0)
    prompts = [rng.integers(1, NO_STOP, options.prompt_tokens).tolist() for _ in range(options.prompts)]
    sampling = SamplingParams(max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens - 1)

    def requests(chosen: list[list[int]], number: int, largest: int, seed: int) -> list[Request]:
        seeds = range(seed << 32, 1 << 62, 1 << 20)
        return [r for p, s in zip(chosen, seeds, strict=False) for r in split_request(p, number, s, largest)]

    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder), options.hidden, options.layers)
        settings = VllmSetup(
            folder, "float32", options.prompt_tokens + options.new_tokens, options.cache_gib << 30,
            threads=options.threads, max_rows=rollouts,
        )  # fmt: skip
        engines = [VllmProcess(settings) for _ in range(1 + options.two)]

        def both(*halves: list[Request]) -> None:
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(lambda engine, half: engine.complete(half, sampling, [NO_STOP]), engines, halves))

        def one(size: int) -> Callable[[int], object]:
            return lambda turn: engines[0].complete(requests(prompts, rollouts, size, turn), sampling, [NO_STOP])

        arms = {("1", size): one(size) for size in dict.fromkeys([rollouts, *options.split])}
        if options.two:
            half = options.prompts // 2
            arms["2, by prompt", rollouts] = lambda turn: both(
                *(requests(part, rollouts, rollouts, turn) for part in (prompts[:half], prompts[half:]))
            )
            arms["2, by response", rollouts // 2] = lambda turn: both(
                *(requests(prompts, rollouts // 2, rollouts, 2 * turn + i) for i in range(2))
            )
        seconds = [[timed(partial(arm, turn)).seconds for arm in arms.values()] for turn in range(options.turns + 1)][
            1:
        ]
        for engine in engines:
            engine.close()
    print(f"{options.prompts} prompts of {options.prompt_tokens} tokens, N = {rollouts}, {options.new_tokens} new, "
          f"{options.threads} threads an engine, {options.turns} turns\n")  # fmt: skip
    rows = []
    for i, (name, size) in enumerate(arms):
        rate = options.prompts * rollouts / median(turn[i] for turn in seconds)
        ratios = [turn[0] / turn[i] for turn in seconds]
        rows.append((name, size, f"{rate:,.0f}", f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"))
    print(table(("engines", "responses of a request", "samples/s", "times the first row"), rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("rollouts", 512), ("prompts", 2), ("prompt-tokens", 200), ("new-tokens", 64), ("hidden", 512), ("layers", 8),
        ("threads", 1), ("turns", 5), ("cache-gib", 4),
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


if __name__ == "__main__":
    main()
