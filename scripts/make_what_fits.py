"""Write docs/how-to/what_fits.md: which runs fit on a GPU, by the package's own predictions of memory.

In: the shapes of three models, which are typed below from their published config.json, and the memory prediction of one
process. Out: the page. Nothing is measured, and no model is loaded.

    python scripts/make_what_fits.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import Qwen2Config

from brorl.model.memory_choices import Choice, MemoryChoices
from brorl.model.memory_prediction import ModelMemory
from brorl.model.memory_settings import MemorySettings, Workload
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
CARDS_GB = (24, 32, 80)
"""Memory of the GPUs: an L4 or an RTX 4090, an RTX 5090, and an A100 or an H100."""
USABLE = 0.9
"""Fraction of a GPU's memory: the CUDA context, its libraries and fragments take the rest."""
_NODES = (16384, 8192)  # of a pass of a sharded learner
_RANKS = (2, 4, 8)
_SHARDED_BYTES = 4 + 4 + 8 + 4  # per weight: itself, its gradient, AdamW's moments, and the reference
_LOGIT_NODES = 1024  # nodes whose logits exist at once in a sharded learner


def choices_on(config: Qwen2Config, gpu_bytes: float) -> MemoryChoices:
    """Return the ways to train a model on a GPU with this memory, with all of it for the engine."""
    settings = MemorySettings("bfloat16", int(gpu_bytes), device="cuda", graphs="auto")
    return MemoryChoices(config, settings, WORKLOAD, int(USABLE * gpu_bytes))


def ranks_that_fit(config: Qwen2Config, gpu_bytes: float) -> tuple[int, float] | None:
    """Return the fewest ranks that train all weights, up to 8, and the bytes of each; None if none of them fit.

    Weights, gradients, moments and reference are float32 and sharded. Each layer is gathered in bfloat16 for a pass,
    with gradient checkpointing and as many nodes as fit, but at least the longest response.
    """
    model = ModelMemory(config)
    settings = MemorySettings("bfloat16", 0, gradient_checkpointing=True, device="cuda")
    sizes = model.passes
    gathered = 2 * (2 * model.num_weights / sizes.layers + 2 * sizes.vocabulary * sizes.hidden)
    for ranks in _RANKS:
        for nodes in (*_NODES, PROMPT + RESPONSE):
            logits = 3 * _LOGIT_NODES * sizes.vocabulary * 4
            activations = sizes.pass_bytes(settings, nodes, PROMPT + RESPONSE)
            needed = _SHARDED_BYTES * model.num_weights / ranks + activations + logits + gathered
            if needed <= USABLE * gpu_bytes:
                return ranks, needed
    return None


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for name, config in MODELS.items():
        on_cards = {size: choices_on(config, size * 1e9) for size in CARDS_GB}
        for of_way in zip(*(choices.all() for choices in on_cards.values()), strict=True):
            lines = {line.name: line.num_bytes for line in of_way[0].prediction.kept if line.name != "sampling cache"}
            sizes = (f"{x / 1e9:.1f}" for x in (lines["AdamW"], sum(lines.values())))
            cells = [
                _cell(way, choices.fitted(way), config, size)
                for (size, choices), way in zip(on_cards.items(), of_way, strict=True)
            ]
            settings = ", ".join(f"`{one}`" for one in of_way[0].name.split(", "))
            yield (name, settings, *sizes, *cells)


def _cell(way: Choice, found: Choice | None, config: Qwen2Config, size: int) -> str:
    """Return how a way to train fits on a GPU: its peak, the rows that are decoded together, and further settings."""
    if found is not None:
        rows = found.settings.engine_bytes // found.prediction.row_bytes
        further = {name: value for name, value in found.changes.items() if name not in way.changes}
        settings = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in further.items())
        return f"{found.prediction.total_bytes / 1e9:.1f} GB, {rows:,} rows: {settings}"
    if way.changes or (sharded := ranks_that_fit(config, size * 1e9)) is None:
        return "no"
    ranks, needed = sharded
    return f"no; {ranks} learner ranks: {needed / 1e9:.1f} GB each"


INTRODUCTION = f"""\
# What fits on a GPU

!!! warning "Predictions"
    The numbers on this page are [predictions](memory.md#accuracy), not measurements. `brorl check mine.yaml`
    predicts the memory of your own run on your GPU.

The table shows the ways to train and how each one fits on a GPU: the predicted peak, the number of full-length
responses decoded together, and further settings that don't change what is learned. All runs have `dtype: bfloat16`,
the native engine on the same GPU, AdamW, and no KL penalty. They sample N = {ROLLOUTS} rollouts for each of {PROMPTS}
prompts. Prompts have up to {PROMPT} tokens, responses have up to {RESPONSE:,} tokens, and each step has {MINI_BATCHES}
mini-batches. {USABLE:.0%} of the GPU's memory counts as usable: the CUDA context, libraries, and fragmentation take the
rest. 24 GB is an L4 or an RTX 4090, 32 GB is an RTX 5090, and 80 GB is an A100 or an H100. The models have the shapes
of Qwen2.5-0.5B, 1.5B, and 7B.
"""
COLUMNS = ("model", "settings", "AdamW (GB)", "kept (GB)", *(f"{size} GB" for size in CARDS_GB))
END = """\

- **AdamW**: its two moments. `optimizer.states: 8bit` rounds them, and `host` doesn't change the updates
  ([Fit a run into memory](memory.md#adamws-moments)).
- **Kept**: weights, gradients, AdamW's moments, and the bfloat16 sampling copy. Training all weights takes 16 bytes per
  weight, 2 for the copy, and 2 for the weights of the maps that the engine joins. With adapters, the base takes 2 bytes
  per weight, or about half a byte in 4 bits.
- **Rows**: responses beyond these rows wait, so a run with few rows is slow. Shorter responses, and rollouts that share
  prefixes, need less memory.
- `engine.memory_gib` is the largest whole number that fits. Learning takes turns with sampling. It has as many nodes
  per pass as fit next to the engine's cache, which CUDA graphs keep.

A run that doesn't fit on one GPU can shard the learner ([Train on several processes and machines](cluster.md)). Its
ranks need gradient checkpointing here, and the rollout workers use other GPUs with `cluster.placement: apart`.

vLLM frees its weights and its cache while the learner works, so it can use more memory than the native engine with CUDA
graphs. `engine.vllm.placement: apart` gives it its own GPU ([Sample with vLLM](vllm.md)).

Longer responses need more memory for learning, because [a response is never split](memory.md#long-responses).
[Fit a run into memory](memory.md) has the formula, and the settings in the order to try them.

`scripts/make_what_fits.py` writes this page.
"""


def page() -> str:
    """Return the page."""
    table = Table("", COLUMNS, tuple(rows()), words=frozenset({0, 1, *range(4, len(COLUMNS))}))
    return f"{INTRODUCTION}\n{table.markdown()}\n{END}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
