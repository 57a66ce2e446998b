"""Long responses: blocks of logits and tiles of attention against whole tensors and the flattened batch (float64)."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

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
from brorl.model import kernels, logits, logprobs, tree_batch
from brorl.model.flat_path import flat_chunk_logprobs
from brorl.model.forward import choose_forward
from brorl.model.logits import NextToken, embeds_last
from brorl.model.logprobs import ChunkLogprobs, by_tree, chunk_logprobs, tree_logprobs
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.model.tree_attention import PromptCache, enable_gradient_checkpointing
from brorl.model.tree_batch import ChunkInputs, TreeBatch, TreeSlice
from brorl.tree import RolloutTree
from small_models import (
    ARCHITECTURES,
    assert_same_gradients,
    gradients,
    mostly_slow,
    random_tree,
    small_model,
)

VOCABULARY = 17
HEADS = 4


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Compute a few rows of logits, and tiles of a few queries."""
    monkeypatch.setattr(logits, "MAX_LOGITS", 0)
    monkeypatch.setattr(logprobs, "LOGITS_PER_BLOCK", int(rng.integers(1, 6)) * VOCABULARY)
    monkeypatch.setattr(tree_batch, "SCORES_PER_TILE", int(rng.integers(1, 8)) * 30 * HEADS)


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
@pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES))
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
    options: dict[str, Any] = {"next_token": NextToken(temperature), "max_nodes": max_nodes}
    with torch.no_grad():
        quiet = torch.cat(tree_logprobs(model, trees, **options))
    model.zero_grad()
    found = torch.cat(tree_logprobs(model, trees, **options))
    (found * weight_KO[:, 0]).sum().backward()
    got_gradients = gradients(model)
    weight_KO[:, 1] = 0
    _, expected_gradients = flattened(model, trees, weight_KO, temperature)
    for logprob_K in (quiet, found.detach()):
        torch.testing.assert_close(logprob_K, expected[:, 0], rtol=1e-12, atol=1e-12)
    assert_same_gradients(got_gradients, expected_gradients, 1e-11)


def whole_and_blocks(
    model: PreTrainedModel,
    trees: list[RolloutTree],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    next_token: NextToken,
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return log-probs, entropies and gradients from whole logits, and from blocks; the attention is the same."""
    weight_KO = torch.from_numpy(rng.normal(size=(sum(t.num_unique_tokens for t in trees), 2)))
    found = []
    for limit in (1 << 27, 0):
        monkeypatch.setattr(logits, "MAX_LOGITS", limit)
        monkeypatch.setattr(logprobs, "LOGITS_PER_BLOCK", 3 * VOCABULARY)
        chunks = chunk_logprobs(model, trees, next_token=next_token, max_nodes=20, entropy=True)
        found.append(weighted(model, chunks, weight_KO))
    return found


def tied(model: PreTrainedModel) -> None:
    assert model.lm_head.weight is model.model.embed_tokens.weight


def frozen_embeddings(model: PreTrainedModel) -> None:
    model.lm_head.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)


def adapter_on_the_head(model: PreTrainedModel) -> None:
    add_adapter(model, LoraSettings(rank=2, target_modules=("lm_head", "q_proj")))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)


def biased_head(model: PreTrainedModel) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY, dtype=torch.float64))


def checkpointed(model: PreTrainedModel) -> None:
    enable_gradient_checkpointing(model.train())


@pytest.mark.parametrize("change", [tied, frozen_embeddings, adapter_on_the_head, biased_head, checkpointed])
def test_blocks_serve_every_kind_of_output_embedding(
    change: Callable[[PreTrainedModel], None], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at a temperature, with stop tokens that are forbidden at first."""
    model = small_model(seed=int(rng.integers(1 << 30)), tie_word_embeddings=change is tied)
    change(model)
    next_token = NextToken(0.8, min_new_tokens=2, stop_token_ids=(0,))
    responses = [[3, 4, 0], [3, 5, 6, 7, 0], [3, 5, 6, 8], [9, 10, 0], [3, 4, 1, 2]]
    trees = [
        RolloutTree.from_responses([1, 2], responses),
        RolloutTree.from_responses([5], [rng.integers(1, VOCABULARY, 30).tolist()]),
    ]
    (whole, whole_gradients), (blocks, blocks_gradients) = whole_and_blocks(model, trees, rng, monkeypatch, next_token)
    torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-12)
    assert_same_gradients(blocks_gradients, whole_gradients, 1e-12)


def test_blocks_compute_in_the_dtype_of_autocast(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounding of bfloat16 is that of whole logits: it differs from float32 far more than from whole logits."""
    model = small_model(seed=int(rng.integers(1 << 30)), dtype=torch.float32)
    trees = some_trees(rng)
    exact, _ = whole_and_blocks(model, trees, np.random.default_rng(0), monkeypatch, NextToken())[0]
    with torch.autocast("cpu", torch.bfloat16):
        (whole, whole_gradients), (blocks, blocks_gradients) = whole_and_blocks(
            model, trees, np.random.default_rng(0), monkeypatch, NextToken()
        )
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)
    assert_same_gradients(blocks_gradients, whole_gradients, 2e-2)
    assert float((whole - exact).abs().max()) > 1e-3


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def soft_capping() -> PreTrainedModel:
    config = Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=2.0)
    return Gemma2ForCausalLM(config)


def scaled() -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3))


def divided() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0))


def doubled_in_place() -> PreTrainedModel:
    model = small_model(dtype=torch.float32)
    forward = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits.mul_(2)
        return output

    model.forward = doubled
    return model


@pytest.mark.parametrize(
    ("make", "choice"),
    [*product([soft_capping, scaled, divided], ["tree", "flat"]), (doubled_in_place, "tree")],
)
def test_models_that_change_their_logits_keep_them_whole(
    make: Callable[[], PreTrainedModel], choice: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = make().eval()
    assert not embeds_last(model)
    forward = choose_forward(model, choice)
    trees = [random_tree(rng)]
    with torch.no_grad():
        expected = by_tree(list(forward.chunk_logprobs(model, trees)), trees)[0]
        monkeypatch.setattr(logits, "MAX_LOGITS", 0)
        assert torch.equal(by_tree(list(forward.chunk_logprobs(model, trees)), trees)[0], expected)
        with pytest.raises(UserError, match="changes its logits after its output embedding"):
            tree_logprobs(model, trees)
    model.config.vocab_size = 1 << 20  # whole logits need smaller chunks
    assert forward.default_max_nodes(model) == 128


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_models_compute_their_logits_last(architecture: str) -> None:
    model = small_model(architecture)
    assert embeds_last(model)
    assert "forward" not in vars(model.lm_head)
    assert not choose_forward(model, "tree").model_pass.whole_logits
    with torch.device("meta"):
        on_meta = type(model)(model.config)
    assert embeds_last(on_meta)


def random_batch(
    rng: np.random.Generator, dtype: torch.dtype
) -> tuple[list[RolloutTree], list[TreeSlice], TreeBatch, list[Tensor]]:
    """Return three trees, a chunk of their nodes, and random queries, keys (of 3 numbers) and values (of 5) for it."""
    trees = [random_tree(rng, prompt_length=n, num_rollouts=10, branching=4, max_length=12) for n in (3, 1, 6)]
    kv_heads = 2

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype).requires_grad_()

    prompts = [normal(3, kv_heads, 6, 3), normal(3, kv_heads, 6, 5)]
    offsets = np.cumsum([0] + [t.num_unique_tokens for t in trees])[:-1]
    slices = [TreeSlice(0, 2, trees[0].num_responses), TreeSlice(1, 0, trees[1].num_responses), TreeSlice(2, 0, 3)]
    batch = TreeBatch(trees, offsets, slices, torch.device("cpu"))
    nodes = batch.token_T.numel()
    return (
        trees,
        slices,
        batch,
        [normal(nodes, HEADS, 3), normal(nodes, kv_heads, 3), normal(nodes, kv_heads, 5), *prompts],
    )


def attended_by_paths(trees: list[RolloutTree], slices: list[TreeSlice], inputs: list[Tensor]) -> Tensor:
    """Return the attention of the input nodes, one by one: to the prompt, and to the path by parents."""
    query, key, value, prompt_key, prompt_value = inputs
    outputs: list[Tensor] = []
    for responses in slices:
        tree, before = trees[responses.tree], len(outputs)
        fed = ChunkInputs.of(tree, responses).node_F.tolist()
        place = {node: before + i for i, node in enumerate(fed)}
        own = [x[responses.tree, :, : len(tree.prompt_ids)].transpose(0, 1) for x in (prompt_key, prompt_value)]
        for node in fed:
            path = [place[int(n)] for n in tree.path(node)]
            keys, values = torch.cat([own[0], key[path]]), torch.cat([own[1], value[path]])
            by_head = query[place[node]].unflatten(0, (keys.shape[1], -1))
            weight = torch.einsum("kgd,tkd->kgt", by_head, keys).softmax(-1)
            outputs.append(torch.einsum("kgt,tkd->kgd", weight, values).flatten(0, 1))
    return torch.stack(outputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tiles_attend_to_prompts_and_paths(
    dtype: torch.dtype, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and the gradients of queries, keys, values and prompts, for tiles of 1 query up to all of them."""
    trees, slices, batch, inputs = random_batch(rng, dtype)
    query, key, value, prompt_key, prompt_value = inputs
    lengths = np.array([3, 1, 6])
    grad = torch.from_numpy(rng.normal(size=(query.shape[0], HEADS, 5)))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    output = attended_by_paths(trees, slices, exact)
    expected = [output.detach(), *torch.autograd.grad(output, exact, grad)]
    tolerance = 1e-12 if dtype == torch.float64 else 0.1
    for scores in (1, 200, 2000, 1 << 20):
        monkeypatch.setattr(tree_batch, "SCORES_PER_TILE", scores)
        context = batch.context(PromptCache([prompt_key], [prompt_value], lengths))
        output = context.attend(0, query, key, value)
        found = [output.detach(), *torch.autograd.grad(output, inputs, grad.to(dtype))]
        for got, reference in zip(found, expected, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), reference, rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else [output]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return output


def test_no_tensor_grows_with_the_rows_times_the_vocabulary_or_the_length_squared(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, prompt, vocabulary, limit = 1200, 100, 3000, 1 << 17
    model = small_model(vocab_size=vocabulary, dtype=torch.float32, max_position_embeddings=2048, num_hidden_layers=1)
    tree = RolloutTree.from_responses(
        rng.integers(1, vocabulary, prompt).tolist(), [rng.integers(1, vocabulary, length).tolist()], finished=[False]
    )

    def largest() -> int:
        with Largest() as recorded:
            for chunk in chunk_logprobs(model, [tree], entropy=True):
                (chunk.logprob.sum() + chunk.entropy.sum()).backward()
            with torch.no_grad():
                tree_logprobs(model, [tree])
        return recorded.numel

    bound = max(limit, length * 48, vocabulary * 32)  # or a token's activations, or the embedding's weight
    monkeypatch.setattr(kernels, "_choice", "off")
    assert largest() >= (length - 1) * vocabulary  # the mode sees the logits
    monkeypatch.setattr(logits, "MAX_LOGITS", limit)
    monkeypatch.setattr(logprobs, "LOGITS_PER_BLOCK", limit)
    monkeypatch.setattr(tree_batch, "SCORES_PER_TILE", limit)
    model.zero_grad()
    assert largest() <= bound
    monkeypatch.setattr(kernels, "_choice", "auto")
    if kernels.kernels() is not None:  # they need no tiles
        model.zero_grad()
        assert largest() <= bound
