"""Long responses: blocks of logits and tiles of attention against whole tensors and the flattened batch (float64)."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from brorl.errors import UserError
from brorl.model import logprobs, row_logits, tiled_attention, tree_batch
from brorl.model.flat_logprobs import flat_chunk_logprobs
from brorl.model.forward import choose_forward
from brorl.model.gradient_checkpointing import enable_gradient_checkpointing
from brorl.model.logprobs import ChunkLogprobs, chunk_logprobs, default_max_nodes, tree_logprobs
from brorl.model.lora import LoraSettings, add_adapter
from brorl.model.next_token import NextToken
from brorl.model.row_logits import embeds_last
from brorl.tree import RolloutTree
from small_models import (
    ARCHITECTURES,
    assert_same_gradients,
    flattened_logprobs,
    gradients,
    random_tree,
    rollouts,
    small_model,
)

VOCABULARY = 17
HEADS = 4


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Compute a few rows of logits, and tiles of a few queries."""
    monkeypatch.setattr(row_logits, "MAX_LOGITS", 0)
    monkeypatch.setattr(logprobs, "LOGITS_PER_BLOCK", int(rng.integers(1, 6)) * VOCABULARY)
    monkeypatch.setattr(tree_batch, "MAX_CHAIN_SCORES", 0)
    monkeypatch.setattr(tiled_attention, "SCORES_PER_TILE", int(rng.integers(1, 8)) * 30 * HEADS)


def some_trees(rng: np.random.Generator) -> list[RolloutTree]:
    """Bushy trees, one long response, a tree of first tokens only, ragged prompts."""
    return [
        random_tree(rng, num_rollouts=20),
        RolloutTree.from_responses([3, 4, 5], [rng.integers(1, VOCABULARY, 40).tolist()], finished=[False]),
        RolloutTree.from_responses([3], [(0,), (4,), (4,), (9,)], finished=[True, False, False, False]),
        random_tree(rng, branching=2, max_length=15),
    ]


def weighted(
    model: PreTrainedModel, chunks: Iterator[ChunkLogprobs], weight_KO: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs and entropies, shape [K, 2], and the gradient of their weighted sum."""
    model.zero_grad()
    found = torch.full(weight_KO.shape, torch.nan, dtype=torch.float64)
    for chunk in chunks:
        assert chunk.entropy is not None
        outputs = torch.stack([chunk.logprob, chunk.entropy], 1)
        found[chunk.index] = outputs.detach().double()
        (outputs * weight_KO[chunk.index]).sum().backward()
    assert torch.isfinite(found).all()
    return found, gradients(model)


def flattened(
    model: PreTrainedModel, trees: list[RolloutTree], weight_KO: Tensor, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same from rows of prompt and response through the model's own attention, entropies written out."""
    model.zero_grad()
    found, offset, total = torch.empty_like(weight_KO), 0, torch.zeros((), dtype=torch.float64)
    for tree in trees:
        seen: set[int] = set()
        for leaf in tree.leaf.tolist():
            path = tree.path(leaf)
            row = torch.tensor([[*tree.prompt_ids, *tree.token[path].tolist()]])
            logprob_TV = (model(input_ids=row).logits[0] / temperature).log_softmax(-1)
            for place, node in enumerate(path.tolist()):
                if node not in seen:
                    seen.add(node)
                    of_node = logprob_TV[len(tree.prompt_ids) - 1 + place]
                    outputs = torch.stack([of_node[tree.token[node]], -(of_node.exp() * of_node).sum()])
                    found[offset + node] = outputs.detach()
                    total = total + (outputs * weight_KO[offset + node]).sum()
        offset += tree.num_unique_tokens
    total.backward()
    return found, gradients(model)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("max_nodes", [6, None])
def test_blocks_and_tiles_equal_the_flattened_batch(
    architecture: str, max_nodes: int | None, rng: np.random.Generator
) -> None:
    model = small_model(architecture, seed=int(rng.integers(1 << 30)))
    trees, temperature = some_trees(rng), float(rng.choice([1.0, 0.7]))
    weight_KO = torch.from_numpy(rng.normal(size=(sum(t.num_unique_tokens for t in trees), 2)))
    expected, expected_gradients = flattened(model, trees, weight_KO, temperature)
    for function in (chunk_logprobs, flat_chunk_logprobs):
        chunks = function(model, trees, next_token=NextToken(temperature), max_nodes=max_nodes, entropy=True)
        got, got_gradients = weighted(model, chunks, weight_KO)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert_same_gradients(got_gradients, expected_gradients, 1e-11)
    with torch.no_grad():
        quiet = torch.cat(tree_logprobs(model, trees, next_token=NextToken(temperature), max_nodes=max_nodes))
    torch.testing.assert_close(quiet, expected[:, 0], rtol=1e-12, atol=1e-12)
