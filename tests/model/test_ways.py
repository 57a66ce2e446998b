"""Every way of trees through a model against rows, one per rollout (float64); chunks, blocks of logits, and tiles.

PyTorch has no backward pass of FlexAttention on a CPU. Its uncompiled version has one, behind a check that these tests
remove.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)

from brorl.errors import UserError
from brorl.model import chunks, kernels, logits, logprobs
from brorl.model.chunks import ChunkLayout, TreeSlice, default_max_nodes, input_nodes
from brorl.model.flat_path import flat_chunk_logprobs
from brorl.model.forward import choose_forward
from brorl.model.logits import embeds_last
from brorl.model.logprobs import ChunkLogprobs, NextToken, by_tree
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.model.tree_attention import PromptCache, enable_gradient_checkpointing, tree_attention
from brorl.model.tree_path import TreeForward, chunk_logprobs, tree_logprobs
from brorl.tree import RolloutTree
from path_checks import HEADS, PADDING, VOCABULARY, Chunks, gemma, learned, some_trees, weights_of
from small_models import (
    ARCHITECTURES,
    Largest,
    assert_same_gradients,
    gradients,
    kept_bytes,
    mostly_slow,
    random_tree,
    rollouts,
    small_model,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # PyTorch hides it
]


def flattened(
    model: PreTrainedModel, trees: list[RolloutTree], weight_KO: Tensor, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same from rows, one per rollout, right-padded, through the model's own attention."""
    model.zero_grad()
    results, offset, total = torch.empty_like(weight_KO), 0, torch.zeros((), dtype=torch.float64)
    for tree in trees:
        paths, prompt = [path for _, path in rollouts(tree)], len(tree.prompt_ids)
        ids = torch.zeros(len(paths), prompt + max(p.size for p in paths), dtype=torch.long)
        for row, path in enumerate(paths):
            ids[row, : prompt + path.size] = torch.tensor([*tree.prompt_ids, *tree.token[path]])
        logprob_NTV = (model(input_ids=ids, use_cache=False).logits / temperature).log_softmax(-1)
        for logprob_TV, path in zip(logprob_NTV, paths, strict=True):
            of_row = logprob_TV[prompt - 1 : prompt - 1 + path.size]
            token = of_row.gather(1, torch.from_numpy(tree.token[path])[:, None])[:, 0]
            is_sampled = torch.from_numpy(~tree.given[path])[:, None]
            outputs = torch.stack([token, -(of_row.exp() * of_row).sum(1)], 1) * is_sampled
            results[offset + path] = outputs.detach()
            total = total + (outputs * (weight_KO[offset + path] / torch.from_numpy(tree.count[path])[:, None])).sum()
        offset += tree.num_nodes
    total.backward()
    return results, gradients(model)


def frozen(model: PreTrainedModel) -> None:
    for parameter in [*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()]:
        parameter.requires_grad_(False)


def adapted(model: PreTrainedModel, *targets: str) -> None:
    add_adapter(model, LoraSettings(rank=2, target_modules=targets or ("all-linear",)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)


def biased_head(model: PreTrainedModel) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY, dtype=torch.float64))


CHANGES: dict[str, Callable[[PreTrainedModel], None]] = {
    "frozen": frozen,
    "adapters": adapted,
    "adapters of the head": lambda model: adapted(model, "lm_head", "q_proj"),
    "biased head": biased_head,
}
OPTIONS = {"tied": {}, "padded": {"pad_token_id": PADDING}, "frozen": {}}  # of the models with tied embeddings


def model_of(kind: str, rng: np.random.Generator) -> PreTrainedModel:
    torch.manual_seed(int(rng.integers(1 << 30)))
    if kind.startswith("gemma"):
        return gemma(int(kind[-1]))
    architecture = kind if kind in ARCHITECTURES else "llama"
    options = {"tie_word_embeddings": kind in OPTIONS, **OPTIONS.get(kind, {})}
    model = small_model(architecture, seed=int(rng.integers(1 << 30)), **options)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind in OPTIONS)
    CHANGES.get(kind, lambda _: None)(model)
    return model


def differentiable(model: PreTrainedModel, trees: list[RolloutTree], **options: Any) -> Iterator[ChunkLogprobs]:
    """Return what `tree_logprobs` gives as one chunk."""
    logprob_K = torch.cat(tree_logprobs(model, trees, **{k: v for k, v in options.items() if k != "entropy"}))
    return iter([ChunkLogprobs(torch.arange(logprob_K.numel()), logprob_K)])


PACKED = TreeForward(packed=True)
WAYS: dict[str, Chunks] = {
    "tree": chunk_logprobs,
    "blocks": chunk_logprobs,  # of few rows of logits, and tiles of few queries
    "llama": partial(chunk_logprobs, forward=TreeForward(llama_chunks=True)),
    "differentiable": differentiable,
    "flat": flat_chunk_logprobs,
    "packed": partial(chunk_logprobs, forward=PACKED),
}
CASES = [
    *product(ARCHITECTURES, WAYS),
    *product(["gemma 3", "gemma 2"], ["flat", "packed"]),
    *product(["tied", "padded", "frozen"], ["tree", "llama", "blocks"]),
    *product(["adapters", "adapters of the head", "checkpointed"], ["tree", "blocks", "packed", "differentiable"]),
    *product(["biased head"], ["blocks", "llama"]),
]
CASES.remove(("hooked", "llama"))
QUICK = [
    *product(["llama"], {*WAYS} - {"packed", "blocks"}), ("hooked", "tree"), ("padded", "llama"), ("frozen", "tree"),
]  # fmt: skip


def with_small_blocks(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(logits, "MAX_LOGITS", 0)
    monkeypatch.setattr(logprobs, "LOGITS_PER_BLOCK", int(rng.integers(1, 6)) * VOCABULARY)
    monkeypatch.setattr(chunks, "SCORES_PER_TILE", int(rng.integers(1, 8)) * 350 * HEADS)


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("case", mostly_slow(CASES, *QUICK), ids=" by ".join)
def test_log_probs_entropies_and_gradients_equal_the_flattened_batch(
    case: tuple[str, str], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, way = case
    model, trees, temperature = model_of(kind, rng), some_trees(rng), float(rng.choice([1.0, 0.7]))
    weight_KO = weights_of(rng, trees)
    if way == "differentiable":  # it has no entropies
        weight_KO[:, 1] = 0
    with monkeypatch.context() as patch:  # Gemma 2 rounds to float32 else
        patch.setattr("torch.nn.functional.softmax", lambda score, dim, dtype=None: score.softmax(dim))  # noqa: ARG005
        expected, expected_gradients = flattened(model, trees, weight_KO, temperature)
        if way == "blocks":
            with_small_blocks(monkeypatch, rng)
        if kind == "checkpointed":
            enable_gradient_checkpointing(model.train())
        chunks = partial(WAYS[way], next_token=NextToken(temperature))
        if kind == "gemma 2":
            whole = replace(PACKED, whole_logits=True)
            chunks = partial(chunks, **({"whole_logits": True} if way == "flat" else {"forward": whole}))
        for max_nodes in (int(rng.choice([60, 90] if way == "packed" else [1, 4, 30])), None):
            got, got_gradients = learned(model, trees, weight_KO, chunks, max_nodes=max_nodes, entropy=True)
            torch.testing.assert_close(got[:, 0], expected[:, 0], rtol=1e-10, atol=1e-10)
            assert_same_gradients(got_gradients, expected_gradients, 1e-10)
            if way != "differentiable":
                torch.testing.assert_close(got[:, 1], expected[:, 1], rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            quiet = torch.cat(by_tree(list(chunks(model, trees, max_nodes=20)), trees))
        assert not quiet.requires_grad
        torch.testing.assert_close(quiet, expected[:, 0], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("way", mostly_slow(WAYS, "tree", "flat"))
def test_there_may_be_no_trees_and_no_backward_pass(way: str, rng: np.random.Generator) -> None:
    model = small_model(seed=1)
    if way != "differentiable":
        assert list(WAYS[way](model, [])) == []
    assert tree_logprobs(model, []) == []
    for _ in WAYS[way](model, some_trees(rng), max_nodes=7):
        pass
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_blocks_compute_in_the_dtype_of_autocast(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks round as whole logits do in bfloat16: they differ from float32 far more than from whole logits."""
    model = small_model(seed=int(rng.integers(1 << 30)), dtype=torch.float32)
    trees = some_trees(rng)
    weight_KO = weights_of(rng, trees)
    way = partial(learned, model, trees, weight_KO, chunk_logprobs, max_nodes=20, entropy=True)
    exact, _ = way()
    with torch.autocast("cpu", torch.bfloat16):
        whole, whole_gradients = way()
        monkeypatch.setattr(logits, "MAX_LOGITS", 0)
        monkeypatch.setattr(logprobs, "LOGITS_PER_BLOCK", 3 * VOCABULARY)
        blocks, blocks_gradients = way()
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)
    assert_same_gradients(blocks_gradients, whole_gradients, 2e-2)
    assert float((whole - exact).abs().max()) > 1e-3


# -- chunks ------------------------------------------------------------------------------------------------------------


def fed_tokens(model: PreTrainedModel, trees: list[RolloutTree], **options: int) -> list[int]:
    """Tokens that go through the embedding in each forward pass over all parts; each is back-propagated."""
    fed: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, args, _out: fed.append(args[0].numel()))
    for chunk in chunk_logprobs(model, trees, **options):
        chunk.logprob.sum().backward()
    hook.remove()
    return fed


def test_work_does_not_grow_with_the_number_of_rollouts(rng: np.random.Generator) -> None:
    """Prompts once, nodes that have children once, last tokens never: for 1 or 1000 rollouts of each response alike."""
    model, trees = small_model(seed=1), some_trees(rng)
    many = []
    for tree in trees:
        responses, finished = [r for r, _ in tree.responses()], tree.finished.tolist()
        many.append(RolloutTree.from_responses(tree.prompt_ids, responses * 1000, finished=finished * 1000))
        assert many[-1].num_rollouts == 1000 * tree.num_responses
    inner = sum(np.unique(t.parent[t.parent >= 0]).size for t in trees)
    expected = sum(len(t.prompt_ids) for t in trees) + inner
    assert sum(fed_tokens(model, trees, max_nodes=10_000)) == expected
    assert sum(fed_tokens(model, many, max_nodes=10_000)) == expected


def test_default_chunk_shrinks_with_the_vocabulary_where_logits_are_whole() -> None:
    """Whole logits of a chunk stay near 2^27 numbers; between 128 and 1024 nodes, on CUDA 16384."""
    model, sizes = small_model(), {}
    for v in (17, 150_000, 4_000_000):
        model.config.vocab_size = v
        sizes[v] = default_max_nodes(model, whole_logits=True)
        assert default_max_nodes(model) == 1024
        assert default_max_nodes(model, device="cuda") == 16384
    assert sizes[17] == 1024
    assert 0.9 < sizes[150_000] * 150_000 / 2**27 <= 1
    assert sizes[4_000_000] == 128


# -- whole logits ------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def doubled_in_place() -> PreTrainedModel:
    model = small_model(dtype=torch.float32)
    forward = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits.mul_(2)
        return output

    model.forward = doubled
    return model


CHANGED_LOGITS: dict[str, Callable[[], PreTrainedModel]] = {
    "capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=2.0)
    ),
    "scaled": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)),
    "doubled": doubled_in_place,
}


@pytest.mark.parametrize(
    ("kind", "choice"), [*product(["capped", "scaled", "divided"], ["tree", "flat"]), ("doubled", "tree")]
)
def test_models_that_change_their_logits_keep_them_whole(
    kind: str, choice: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = CHANGED_LOGITS[kind]().eval()
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
    assert not choose_forward(model, "tree").whole_logits
    with torch.device("meta"):
        on_meta = type(model)(model.config)
    assert embeds_last(on_meta)


# -- tiles -------------------------------------------------------------------------------------------------------------


def attended_by_paths(trees: list[RolloutTree], slices: list[TreeSlice], inputs: list[Tensor]) -> Tensor:
    """Return the attention of the input nodes, one by one: to the prompt, and to the path by parents."""
    query, key, value, prompt_key, prompt_value = inputs
    outputs: list[Tensor] = []
    for responses in slices:
        tree, before = trees[responses.tree], len(outputs)
        fed = input_nodes(tree, responses)[0].tolist()
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
    """Outputs and all gradients, for tiles of 1 query up to all of them; keys of 3 numbers and values of 5."""
    lengths, kv_heads = np.array([3, 1, 6]), 2
    trees = [random_tree(rng, prompt_length=n, num_rollouts=10, branching=4, max_length=12) for n in lengths]
    slices = [TreeSlice(0, 2, trees[0].num_responses), TreeSlice(1, 0, trees[1].num_responses), TreeSlice(2, 0, 3)]
    batch = ChunkLayout(trees, np.zeros(3, np.int64), slices)
    nodes = batch.token_T.size
    shapes = [(nodes, HEADS, 3), (nodes, kv_heads, 3), (nodes, kv_heads, 5), (3, kv_heads, 6, 3), (3, kv_heads, 6, 5)]
    inputs = [torch.from_numpy(rng.normal(size=shape)).to(dtype).requires_grad_() for shape in shapes]
    query, key, value, prompt_key, prompt_value = inputs
    grad = torch.from_numpy(rng.normal(size=(nodes, HEADS, 5)))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    output = attended_by_paths(trees, slices, exact)
    expected = [output.detach(), *torch.autograd.grad(output, exact, grad)]
    tolerance = 1e-12 if dtype == torch.float64 else 0.1
    for queries in (1, 3, 17, 256):
        monkeypatch.setattr(chunks, "SCORES_PER_TILE", queries * 280 * HEADS)
        context = batch.tree_context(PromptCache([prompt_key], [prompt_value], lengths))
        output = context.attend(0, query, key, value)
        results = [output.detach(), *torch.autograd.grad(output, inputs, grad.to(dtype))]
        for got, reference in zip(results, expected, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
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
    monkeypatch.setattr(chunks, "SCORES_PER_TILE", limit)
    model.zero_grad()
    assert largest() <= bound
    monkeypatch.setattr(kernels, "_choice", "auto")
    if kernels.kernels() is not None:  # they need no tiles
        model.zero_grad()
        assert largest() <= bound


# -- gradient checkpointing --------------------------------------------------------------------------------------------


def test_the_models_own_attention_is_recomputed_as_itself(rng: np.random.Generator) -> None:
    """A plain forward pass outside tree attention keeps its own attention, even if the backward pass runs inside."""
    model = small_model(seed=1).train()
    tokens = torch.from_numpy(rng.integers(0, 17, (2, 9)))
    model(input_ids=tokens).logits.logsumexp(-1).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    enable_gradient_checkpointing(model)
    loss = model(input_ids=tokens).logits.logsumexp(-1).sum()
    with tree_attention(model):
        loss.backward()
    assert_same_gradients(gradients(model), expected, 1e-12)


@pytest.mark.slow
def test_what_is_kept_grows_with_the_layers_inputs_only(rng: np.random.Generator) -> None:
    """Two layers' inputs more, not two layers' activations, and far less in all than without checkpointing."""
    trees = [random_tree(rng, num_rollouts=40, branching=6, max_length=9)]
    kept = {}
    for num_layers in (4, 12):
        model = small_model(seed=1, num_hidden_layers=num_layers, intermediate_size=128).train()
        without = kept_bytes(model, chunk_logprobs(model, trees, max_nodes=200))
        enable_gradient_checkpointing(model)
        kept[num_layers] = without, kept_bytes(model, chunk_logprobs(model, trees, max_nodes=200))
    growth_without, growth = (b - a for a, b in zip(*kept.values(), strict=True))
    assert growth < growth_without / 5
    assert kept[12][1] < kept[12][0] / 3


def test_an_architecture_without_such_layers_is_refused() -> None:
    model = MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=17))
    for module in model.modules():
        if type(module).__name__ == "MptBlock":
            module.__class__ = type("PlainBlock", (torch.nn.Module,), {"forward": module.forward})
    with pytest.raises(UserError, match=r"MptForCausalLM .* set engine.gradient_checkpointing: false"):
        enable_gradient_checkpointing(model)
