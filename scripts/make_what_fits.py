"""Write docs/how-to/what_fits.md: which runs fit on a GPU, by the package's own predictions of memory.

In: the shapes of three models, which are typed below from their published config.json, and the memory plan of one
process. Out: the page. Nothing is measured, and no model is loaded.

    python scripts/make_what_fits.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from brorl.model.memory_plan import MemoryPlan, MemorySettings, Workload, plan_memory
from brorl.model.model_shape import ModelShape
from brorl.model.settings import LoraSettings
from brorl.table import Table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "what_fits.md"
_VOCABULARY = {"vocab_size": 151_936, "tie_word_embeddings": True}
MODELS = {
    "0.5B": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        **_VOCABULARY,
    ),
    "1.5B": Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        **_VOCABULARY,
    ),
    "7B": Qwen2Config(
        hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152_064, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""The shapes of Qwen2.5-0.5B, 1.5B and 7B."""
PROMPTS, MINI_BATCHES, ROLLOUTS, PROMPT, RESPONSE = 32, 4, 512, 512, 2048
WORKLOAD = Workload(PROMPT, RESPONSE, num_rows=PROMPTS * ROLLOUTS, num_prompts=PROMPTS // MINI_BATCHES)
CARDS_GB = (24, 80)
"""Memory of the GPUs: an L4 or an RTX 4090, and an A100 or an H100."""
USABLE = 0.9
"""Fraction of a GPU's memory: the CUDA context, its libraries and fragments take the rest."""
_NODES = (16384, 8192, 4096, 2048)  # a response is never split
_RANKS = (2, 4, 8)
_SHARDED_BYTES = 4 + 4 + 8 + 4  # per weight: itself, its gradient, AdamW's moments, and the reference
_LOGIT_NODES = 1024  # nodes whose logits exist at once in a sharded learner
_ADAPTERS = LoraSettings(rank=16)
_QUANTIZED = LoraSettings(rank=16, quantization="nf4")


class Fit(NamedTuple):
    """A way to fit a run on one GPU."""

    settings: dict[str, Any]  # by dotted name, beside those that the page names for all
    plan: MemoryPlan
    rows: int  # responses of full length that are decoded together


def ways(trains: str) -> Iterator[tuple[LoraSettings | None, bool]]:
    """Yield adapters and gradient checkpointing in the order of the speed that they cost."""
    for lora in (None,) if trains == "all weights" else (_ADAPTERS, _QUANTIZED):
        yield from ((lora, False), (lora, True))


def fit(config: Qwen2Config, gpu_bytes: float, trains: str) -> Fit | None:
    """Return the first way in which a run fits on a GPU with this memory; None if it does not."""
    usable = int(USABLE * gpu_bytes)
    for lora, checkpointing in ways(trains):
        for nodes in _NODES:
            smallest = _plan(config, lora, checkpointing, nodes, 1)
            if smallest.total_bytes > usable:
                continue
            gib = (usable - smallest.kept_bytes) >> 30
            while gib > 1 and _plan(config, lora, checkpointing, nodes, gib).total_bytes > usable:
                gib -= 1
            settings = {
                **({"lora.rank": lora.rank} if lora else {}),
                **({"lora.quantization": lora.quantization} if lora and lora.quantization != "none" else {}),
                **({"engine.gradient_checkpointing": True} if checkpointing else {}),
                "engine.nodes_per_pass": nodes,
                "engine.memory_gib": gib,
            }
            return Fit(settings, _plan(config, lora, checkpointing, nodes, gib), (gib << 30) // _row_bytes(config))
    return None


def _plan(config: Qwen2Config, lora: LoraSettings | None, checkpointing: bool, nodes: int, gib: int) -> MemoryPlan:
    settings = MemorySettings(
        dtype="bfloat16", engine_bytes=gib << 30, lora=lora, nodes_per_pass=nodes, gradient_checkpointing=checkpointing,
        device="cuda",
    )  # fmt: skip
    return plan_memory(config, settings, WORKLOAD)


def _row_bytes(config: Qwen2Config) -> int:
    """Return the bytes of a row of the decoding batch: keys and values of a response in bfloat16, and logits."""
    head_size = config.hidden_size // config.num_attention_heads
    kept: int = RESPONSE * config.num_hidden_layers * 2 * config.num_key_value_heads * head_size * 2
    return kept + 3 * 4 * config.vocab_size


def ranks_that_fit(config: Qwen2Config, gpu_bytes: float) -> tuple[int, float] | None:
    """Return the fewest ranks that train all weights, up to 8, and the bytes of each; None if none of them fit.

    Weights, gradients, moments and reference are float32 and sharded. Each layer is gathered in bfloat16 for a pass,
    with gradient checkpointing and as many nodes as fit, but at least the longest response.
    """
    with torch.device("meta"):
        shape = ModelShape.of_model(AutoModelForCausalLM.from_config(config))
    gathered = 2 * (2 * shape.parameters / shape.layers + 2 * shape.vocabulary * shape.hidden)
    for ranks in _RANKS:
        for nodes in (*_NODES[:2], PROMPT + RESPONSE):
            activations = shape.pass_bytes(nodes, nodes * shape.activation_bytes(), checkpointing=True)
            logits = 3 * _LOGIT_NODES * shape.vocabulary * 4
            needed = _SHARDED_BYTES * shape.parameters / ranks + activations + logits + gathered
            if needed <= USABLE * gpu_bytes:
                return ranks, needed
    return None


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for name, config in MODELS.items():
        for size in CARDS_GB:
            for trains in ("all weights", "adapters"):
                found, start = fit(config, size * 1e9, trains), (name, trains, f"{size} GB")
                if found is None:
                    yield (*start, _on_several(config, size * 1e9), *["-"] * 5)
                    continue
                settings = ", ".join(f"`{key}: {str(value).lower()}`" for key, value in found.settings.items())
                sizes = (found.plan.kept_bytes, found.plan.learning.num_bytes, found.plan.sampling.num_bytes)
                total = found.plan.total_bytes
                yield (*start, settings, *(f"{x / 1e9:.1f}" for x in (*sizes, total)), f"{found.rows:,}")


def _on_several(config: Qwen2Config, gpu_bytes: float) -> str:
    found = ranks_that_fit(config, gpu_bytes)
    if found is None:
        return "not on one GPU, and not sharded over 8"
    ranks, needed = found
    return (
        f"not on one GPU; `cluster.learner_ranks: {ranks}` with `engine.gradient_checkpointing: true` needs "
        f"{needed / 1e9:.1f} GB on each GPU of the learner"
    )


INTRODUCTION = f"""\
# What fits on a GPU

!!! warning "Predictions"
    The figures of this page are predictions and have not been measured. On one H200, a run of SmolLM2-135M peaked at
    14.9 GB where 16.7 GB were predicted. `brorl check mine.yaml` predicts the memory of your own run on your GPU.

The table has the first way in which a run fits. These are tried in order: `engine.nodes_per_pass` from 16,384 down to
2,048, the same with `engine.gradient_checkpointing`, and both with a base in 4 bits. All runs have `dtype: bfloat16`,
the native engine on the same GPU, AdamW, and no KL penalty. They sample N = {ROLLOUTS} rollouts of {PROMPTS} prompts of
up to {PROMPT} tokens, with responses of up to {RESPONSE:,} tokens, and make {MINI_BATCHES} mini-batches. {USABLE:.0%}
of the GPU's memory count as usable: the CUDA context, libraries and fragments take the rest. 24 GB is an L4 or an RTX
4090, and 80 GB an A100 or an H100. The models have the shapes of Qwen2.5-0.5B, 1.5B and 7B.
"""
COLUMNS = (
    "model", "trains", "GPU", "settings", "kept (GB)", "learning (GB)", "sampling (GB)", "peak (GB)", "rows",
)  # fmt: skip
END = """\

- **Kept**: weights, gradients, AdamW's two moments, and the copy in bfloat16 that samples. Training all weights takes
  16 bytes per weight, 2 for the copy, and 2 for the weights of the maps that the engine joins. With adapters the
  base takes 2 bytes per weight, or about half a byte in 4 bits.
- **Learning** and **sampling** take turns. The peak is the kept memory and the larger of the two.
- **Rows**: responses of full length that are decoded together. Others wait, so a run with few rows fits and is slow.
  Shorter responses, and rollouts that share prefixes, take less.
- `engine.memory_gib` is the largest whole number that fits. Sampling adds the temporaries of a step to it.

A run that does not fit on one GPU can shard the learner ([Train on several processes and machines](cluster.md)). Its
ranks need gradient checkpointing here, and the rollout workers take other GPUs with `cluster.placement: apart`.

vLLM has its own weights and cache, and the prediction counts a file of the weights too. `engine.vllm.placement: apart`
gives it a GPU of its own ([Sample with vLLM](vllm.md)).

Longer responses need more memory for learning: a response is never split, so `engine.nodes_per_pass` cannot be below
the longest. [Fit a run into memory](memory.md) has the formula, and the settings in the order to try them.

`scripts/make_what_fits.py` writes this page.
"""


def page() -> str:
    """Return the page."""
    table = Table("", COLUMNS, tuple(rows()), words=frozenset({0, 1, 2, 3}))
    return f"{INTRODUCTION}\n{table.markdown()}\n{END}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
