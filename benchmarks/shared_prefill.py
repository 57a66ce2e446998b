"""The prefill of transcripts that share their prompt, against one by one: processor seconds, in turns in one process.

    python benchmarks/shared_prefill.py MODEL [--repeats N]

MODEL is a folder or a name. Tokens are random, in float32, on one thread; `own` has the tokens of each transcript after
the prompt. Medians after a first turn. The last row is close to the fraction of distinct tokens above which the engine
computes prompts one by one.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np
import torch
from harness import table, timed
from transformers import PreTrainedModel

from brorl.model.llama_pass import LlamaPass
from brorl.model.load import load_model
from brorl.model.shared_prefill import shared_prefill
from brorl.model.tree_attention import prefill, tree_attention

CELLS = ((400, 16, 50), (400, 16, 150), (400, 4, 50), (1500, 8, 60), (150, 16, 250))  # prompt, transcripts, own tokens


def rows(model: PreTrainedModel, repeats: int) -> Iterator[tuple[object, ...]]:
    """Yield the row of each cell."""
    rng = np.random.default_rng(0)
    model_pass = LlamaPass(model, model.dtype)
    for prompt_tokens, num_transcripts, own_tokens in CELLS:
        token = partial(rng.integers, model.config.vocab_size)
        prompt = token(size=prompt_tokens).tolist()
        transcripts = [(*prompt, *token(size=own_tokens).tolist()) for _ in range(num_transcripts)]
        calls = [partial(compute, model_pass, transcripts) for compute in (prefill, shared_prefill)]
        turns = [[timed(call).cpu_seconds for call in calls] for _ in range(1 + repeats)]
        plain, shared = (median(seconds) for seconds in zip(*turns[1:], strict=True))
        distinct = (prompt_tokens + num_transcripts * own_tokens) / sum(map(len, transcripts))
        numbers = f"{distinct:.2f}", f"{plain:.2f}", f"{shared:.2f}", f"{plain / shared:.2f}"
        yield prompt_tokens, num_transcripts, own_tokens, *numbers


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.model, torch.device("cpu"), torch.float32).eval()
    columns = ("prompt", "transcripts", "own", "distinct / all", "plain, s", "shared, s", "plain / shared")
    with torch.no_grad(), tree_attention(model):
        print(table(columns, rows(model, options.repeats)))


if __name__ == "__main__":
    main()
