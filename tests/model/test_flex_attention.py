"""FlexAttention: its mask against plain loops, and its log-probs and gradients against tiles and the flattened batch.

PyTorch has no backward pass of FlexAttention on a CPU. Its uncompiled version has one, behind a check that these tests
remove.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from brorl.errors import UserError
from brorl.model import flex_attention, kernels, tree_batch
from brorl.model.flex_attention import FlexAttention, KeySpans, check_flex_device
from brorl.model.forward import choose_forward
from brorl.model.gradient_checkpointing import enable_gradient_checkpointing
from brorl.model.hook_check import check_flex
from brorl.model.logits import NextToken
from brorl.model.logprobs import ModelPass, chunk_logprobs, tree_logprobs
from brorl.model.lora import add_adapter
from brorl.model.memory_plan import MemorySettings, Workload, plan_memory
from brorl.model.settings import LoraSettings
from brorl.model.tree_batch import AttentionChoice, ChunkInputs, TreeSlice
from brorl.tree import RolloutTree
from small_models import (
    assert_same_gradients,
    flattened_logprobs,
    gradients,
    mostly_slow,
    random_tree,
    rollouts,
    small_model,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # PyTorch hides it
]
FLEX = ModelPass("flex")
BLOCK = 128


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def long_response(rng: np.random.Generator, prompt: int, length: int) -> RolloutTree:
    return RolloutTree.from_responses(
        rng.integers(1, 17, prompt).tolist(), [rng.integers(1, 17, length).tolist()], finished=[False]
    )


def some_trees(rng: np.random.Generator) -> list[RolloutTree]:
    """Bushy trees, first tokens only, a single input node, and chains of several blocks; ragged prompts."""
    return [
        random_tree(rng, num_rollouts=60, max_length=9),
        RolloutTree.from_responses([3], [(0,), (4,), (9,)], finished=[True, False, False]),
        RolloutTree.from_responses([5, 6], [(4, 0)]),
        long_response(rng, int(rng.integers(1, 40)), int(rng.integers(200, 300))),
        random_tree(rng, num_rollouts=30, branching=2, max_length=20, prompt_length=int(rng.integers(100, 200))),
    ]


def inputs_of(trees: list[RolloutTree]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the lengths of the prompts, and the prompt, depth and parent of the input nodes of whole trees."""
    prompts, depths, parents = [], [], []
    for number, tree in enumerate(trees):
        inputs = ChunkInputs.of(tree, TreeSlice(number, 0, tree.num_responses))
        before = sum(map(len, depths))
        prompts.append(np.full(inputs.node_F.size, number))
        depths.append(tree.depth[inputs.node_F])
        parents.append(np.where(inputs.parent_F >= 0, inputs.parent_F + before, -1))
    lengths = np.array([len(tree.prompt_ids) for tree in trees])
    return lengths, np.concatenate(prompts), np.concatenate(depths), np.concatenate(parents)


def dense_definition(lengths: np.ndarray, prompt_F: np.ndarray, parent_F: np.ndarray) -> np.ndarray:
    """Whether each node sees each token of the prompts, and each node: its prompt, and its path by parents."""
    owner_S = np.repeat(np.arange(lengths.size), lengths)
    sees = np.zeros((parent_F.size, owner_S.size + parent_F.size), bool)
    for node in range(parent_F.size):
        sees[node, : owner_S.size] = owner_S == prompt_F[node]
        above = node
        while above >= 0:
            sees[node, owner_S.size + above] = True
            above = int(parent_F[above])
    return sees


def expanded(count: Tensor, index: Tensor) -> np.ndarray:
    """Return lists of blocks as a matrix."""
    listed = np.zeros(index.shape[2:], bool)
    for row, (number, blocks) in enumerate(zip(count[0, 0].tolist(), index[0, 0].tolist(), strict=True)):
        assert len(set(blocks)) == len(blocks)
        listed[row, blocks[:number]] = True
    return listed


def by_element(mask: BlockMask) -> np.ndarray:
    """Return the mask as the kernel reads it: whole blocks are not masked, unlisted ones are skipped."""
    masked, whole = (
        expanded(mask.kv_num_blocks, mask.kv_indices),
        expanded(mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    np.testing.assert_array_equal(expanded(mask.q_num_blocks, mask.q_indices), masked.T)
    np.testing.assert_array_equal(expanded(mask.full_q_num_blocks, mask.full_q_indices), whole.T)
    num_queries, num_keys = mask.seq_lengths
    zero, query, key = torch.tensor(0), torch.arange(num_queries)[:, None], torch.arange(num_keys)
    sees = mask.mask_mod(zero, zero, query, key).numpy()
    of_blocks = sees.reshape(num_queries // BLOCK, BLOCK, num_keys // BLOCK, BLOCK)
    np.testing.assert_array_equal(whole, of_blocks.all((1, 3)))
    np.testing.assert_array_equal(masked, of_blocks.any((1, 3)) & ~whole)
    return sees


@pytest.mark.parametrize("scale", [1, 5])
def test_the_block_mask_is_the_dense_definition(scale: int, rng: np.random.Generator) -> None:
    """Blocks are whole, masked or skipped exactly where the definition has all, some or no pairs."""
    trees = [tree for _ in range(scale) for tree in some_trees(rng)]
    rng.shuffle(trees)
    lengths, prompt_F, depth_F, parent_F = inputs_of(trees)
    expected = dense_definition(lengths, prompt_F, parent_F)
    spans = KeySpans.of(lengths, prompt_F, depth_F)
    got = by_element(spans.mask(torch.device("cpu")))
    nodes, keys = expected.shape
    np.testing.assert_array_equal(got[:nodes, :keys], expected)
    assert got.any(1).all()  # also padding sees something
    assert not got[nodes:, :keys].any()
    assert not got[:nodes, keys:].any()
    assert all(size % BLOCK == 0 for size in got.shape)
    assert 2 * BLOCK <= got.shape[0] < got.shape[1]


@pytest.mark.parametrize(
    "sizes",
    [
        *([pair] for pair in ((1, 2), (128, 129), (127, 129), (128, 257), (256, 385), (255, 258))),
        [(127, 140), (1, 5)],  # a block of keys of which one is not visible
        [(5, 9), (300, 1), (3, 4)],  # a prompt of several blocks that no input node sees
    ],
)
def test_lengths_at_the_edges_of_blocks(sizes: list[tuple[int, int]], rng: np.random.Generator) -> None:
    """Sizes are pairs of the lengths of a prompt and its response."""
    lengths, prompt_F, depth_F, parent_F = inputs_of([long_response(rng, *pair) for pair in sizes])
    expected = dense_definition(lengths, prompt_F, parent_F)
    got = by_element(KeySpans.of(lengths, prompt_F, depth_F).mask(torch.device("cpu")))
    np.testing.assert_array_equal(got[: expected.shape[0], : expected.shape[1]], expected)
    assert got.any(1).all()


def learned(
    model: PreTrainedModel, trees: list[RolloutTree], weight_K: Tensor, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return all log-probs, and the gradient of their weighted sum, chunk by chunk."""
    model.zero_grad()
    found = torch.full_like(weight_K, torch.nan)
    for chunk in chunk_logprobs(model, trees, next_token=NextToken(0.8), **options):
        found[chunk.index] = chunk.logprob.detach()
        (chunk.logprob * weight_K[chunk.index]).sum().backward()
    assert torch.isfinite(found).all()
    return found, gradients(model)


def flattened(model: PreTrainedModel, trees: list[RolloutTree], weight_K: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same from rows of prompt and response, one per rollout, through the model's own attention."""
    model.zero_grad()
    found, total, offset = torch.empty_like(weight_K), torch.zeros((), dtype=torch.float64), 0
    for tree, rows in zip(trees, flattened_logprobs(model, trees, 0.8), strict=True):
        for (_, path), row in zip(rollouts(tree), rows, strict=True):
            found[offset + path] = row.detach()
            total = total + (row * weight_K[offset + path] / torch.from_numpy(tree.count[path])).sum()
        offset += tree.num_unique_tokens
    total.backward()
    return found, gradients(model)


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_log_probs_and_gradients_equal_tiles_and_the_flattened_batch(
    architecture: str, rng: np.random.Generator
) -> None:
    model = small_model(architecture, seed=int(rng.integers(1 << 30)), max_position_embeddings=512)
    trees = some_trees(rng)
    weight_K = torch.from_numpy(rng.normal(size=sum(t.num_unique_tokens for t in trees)))
    expected, expected_gradients = flattened(model, trees, weight_K)
    for attention, max_nodes in (("tiled", None), ("flex", None), ("flex", 150)):
        got, got_gradients = learned(model, trees, weight_K, max_nodes=max_nodes, model_pass=ModelPass(attention))
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        assert_same_gradients(got_gradients, expected_gradients, 1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
def test_gradient_checkpointing_computes_it_again(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), max_position_embeddings=512).train()
    trees = some_trees(rng)
    weight_K = torch.from_numpy(rng.normal(size=sum(t.num_unique_tokens for t in trees)))
    expected, expected_gradients = learned(model, trees, weight_K)
    enable_gradient_checkpointing(model)
    got, got_gradients = learned(model, trees, weight_K, model_pass=FLEX)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert_same_gradients(got_gradients, expected_gradients, 1e-10)
    model.zero_grad()
    whole = torch.cat(tree_logprobs(model, trees, next_token=NextToken(0.8), model_pass=FLEX))
    (whole * weight_K).sum().backward()
    assert_same_gradients(gradients(model), expected_gradients, 1e-10)


@pytest.fixture
def compiled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Compile as on CUDA, up to the code that PyTorch generates for the graph, and count the compilations."""
    counter, compiled = CompileCounterWithBackend("aot_eager"), torch.compile
    torch.compiler.reset()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: compiled(function, backend=counter, **options))
        kernel = flex_attention._kernel.__wrapped__("cuda")
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_kernel", lambda _device: kernel)
    return counter


@pytest.mark.parametrize("lengths", mostly_slow([(2, 140), (2, 140, 300, 390, 520)]))
def test_one_compiled_kernel_serves_all_lengths(
    lengths: tuple[int, ...], rng: np.random.Generator, compiled_on_cpu: CompileCounterWithBackend
) -> None:
    counter = compiled_on_cpu
    model = small_model(seed=int(rng.integers(1 << 30)), max_position_embeddings=1024)
    compilations = []
    for length in lengths:
        trees = [long_response(rng, int(rng.integers(1, 300)), length), random_tree(rng, num_rollouts=20)]
        weight_K = torch.from_numpy(rng.normal(size=sum(t.num_unique_tokens for t in trees)))
        got, got_gradients = learned(model, trees, weight_K, model_pass=FLEX)
        expected, expected_gradients = learned(model, trees, weight_K)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        assert_same_gradients(got_gradients, expected_gradients, 1e-10)
        compilations.append(counter.frame_count)
    assert compilations[0] > 0
    assert compilations[-1] <= compilations[0] + 2  # sizes that were equal by chance to other sizes of the first chunk


@pytest.mark.slow
def test_a_process_can_have_more_kernels_than_compile_permits_by_default(
    rng: np.random.Generator, compiled_on_cpu: CompileCounterWithBackend
) -> None:
    """Models with different heads, in two dtypes, with and without a gradient."""
    for heads in (4, 8, 16):
        model = small_model(seed=int(rng.integers(1 << 30)), num_attention_heads=heads, dtype=torch.float32)
        trees = [random_tree(rng, num_rollouts=20)]
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                torch.cat(tree_logprobs(model, trees, model_pass=FLEX)).sum().backward()
                with torch.no_grad():
                    tree_logprobs(model, trees, model_pass=FLEX)
    assert compiled_on_cpu.frame_count > torch._dynamo.config.cache_size_limit


def test_it_computes_in_the_dtype_of_autocast(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), dtype=torch.float32)
    trees = [random_tree(rng), random_tree(rng)]
    with torch.no_grad():
        exact = torch.cat(tree_logprobs(model, trees))
        with torch.autocast("cpu", torch.bfloat16):
            chains, flex = (torch.cat(tree_logprobs(model, trees, model_pass=p)) for p in (ModelPass(), FLEX))
    assert 1e-3 < float((flex - exact).abs().max()) < 10 * float((chains - exact).abs().max())


def test_the_choice_decides_the_attention(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("ChainAttention", "TiledAttention", "FlexAttention"):
        kind = getattr(tree_batch, name)
        monkeypatch.setattr(tree_batch, name, lambda *args, kind=kind, name=name: (made.append(name), kind(*args))[1])
    model, trees = small_model(), [random_tree(rng)]

    def attended(choice: AttentionChoice) -> set[str]:
        made.clear()
        forward = choose_forward(model, attention=choice)
        with torch.no_grad():
            made.clear()
            list(forward.chunk_logprobs(model, trees, next_token=NextToken(), max_nodes=None))
        return set(made)

    assert attended("auto") == {"ChainAttention"}
    assert attended("tiled") == {"TiledAttention"}
    assert attended("flex") == {"FlexAttention"}


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", "float32", r"engine\.attention: flex needs a CUDA device, and the device is cpu.*attention: auto"),
        ("cuda", "float64", r"dtype is float64; set engine\.attention: auto, or dtype: float32"),
    ],
)
def test_devices_and_dtypes_without_a_kernel_are_errors(device: str, dtype: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_flex_device(torch.device(device), dtype)
    check_flex_device(torch.device("cuda"), "bfloat16")


def doubled(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: 2 * attend(*args)


class _DoubledGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def doubled_gradient(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: _DoubledGradient.apply(attend(*args))


def failing(_attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(*_: Any) -> Tensor:
        raise RuntimeError("no valid configuration")

    return attend


@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            doubled,
            r"the log-probs of LlamaForCausalLM change with FlexAttention .*set engine\.attention: auto",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            doubled_gradient,
            r"the gradients of LlamaForCausalLM change with FlexAttention",
            marks=pytest.mark.slow,
        ),
        (failing, r"FlexAttention fails with LlamaForCausalLM .*RuntimeError: no valid configuration; set engine\."),
    ],
)
def test_a_kernel_that_fails_or_differs_is_an_error(
    change: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(dtype=torch.float32).train()
    check_flex(model)
    check_flex(model, autocast=True)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    monkeypatch.setattr(FlexAttention, "attend", change(FlexAttention.attend))
    with pytest.raises(UserError, match=message):
        check_flex(model)
    assert model.training


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
def test_a_wrong_gradient_of_new_adapters_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first weight of an adapter has no gradient at first, since the second one is 0."""
    model = small_model(dtype=torch.float32)
    add_adapter(model, LoraSettings(rank=2))
    check_flex(model)
    monkeypatch.setattr(FlexAttention, "attend", doubled_gradient(FlexAttention.attend))
    with pytest.raises(UserError, match="the gradients of LlamaForCausalLM change with FlexAttention"):
        check_flex(model)


@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("num_rollouts", mostly_slow([4, 16]))
def test_the_memory_plan_is_near_what_autograd_keeps(
    num_rollouts: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(num_hidden_layers=6, hidden_size=64, intermediate_size=192, dtype=torch.float32)
    responses = rng.integers(0, 17, (num_rollouts, 64)).tolist()
    tree = RolloutTree.from_responses(rng.integers(0, 17, 64).tolist(), responses, finished=[False] * num_rollouts)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    most = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for chunk in chunk_logprobs(model, [tree], max_nodes=4096, model_pass=FLEX):
            most = max(most, sum(kept.values()))
            del chunk
    settings = MemorySettings("float32", 1 << 30, nodes_per_pass=4096, attention="flex")
    workload = Workload(64, 64, num_rows=num_rollouts, num_prompts=1)
    planned = plan_memory(model.config, settings, workload).learning.num_bytes
    assert 1 < planned / most < 3  # temporary tensors come on top
    monkeypatch.setattr(kernels, "_choice", "off")  # they keep no scores either
    whole = plan_memory(model.config, replace(settings, attention="auto"), workload).learning.num_bytes
    assert planned < whole
