"""Packed passes: their mask against plain loops, compiled layers, and the checks before they are taken.

PyTorch has no backward pass of FlexAttention on a CPU. Its uncompiled version has one, behind a check that these tests
remove.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from inspect import unwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from brorl.arrays import IntArray
from brorl.model import compilation
from brorl.model.chunks import ChunkLayout, TreeSlice, input_nodes, split_into_chunks
from brorl.model.flat_path import FlatForward, flat_chunk_logprobs
from brorl.model.flex_attention import (
    BLOCK,
    MAX_COPIES,
    QUERIES_PER_COPY,
    FlexContext,
    FlexLayout,
    copied_tokens,
)
from brorl.model.forward import check_packed, with_packed_passes
from brorl.model.logprobs import node_offsets
from brorl.model.lora import add_adapter
from brorl.model.memory_prediction import ModelMemory
from brorl.model.memory_settings import MemorySettings
from brorl.model.settings import LoraSettings
from brorl.model.tree_attention import HooksError, enable_gradient_checkpointing
from brorl.model.tree_path import TreeForward, chunk_logprobs, tree_logprobs
from brorl.tree import RolloutTree
from path_checks import gemma, learned, long_response, weights_of
from path_checks import some_trees as some_of_each
from small_models import kept_bytes, mostly_slow, random_tree, small_model, with_given

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # PyTorch hides it
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # the compiler does it
]
PACKED = TreeForward(packed=True)


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def some_trees(rng: np.random.Generator) -> list[RolloutTree]:
    """Bushy trees, first tokens only, a single input node, and chains of several blocks; ragged prompts."""
    return [
        random_tree(rng, num_rollouts=60, max_length=9),
        RolloutTree.from_responses([3], [(0,), (4,), (9,)], finished=[True, False, False]),
        RolloutTree.from_responses([5, 6], [(4, 0)]),
        long_response(rng, int(rng.integers(1, 40)), int(rng.integers(200, 300))),
        random_tree(rng, num_rollouts=30, branching=2, max_length=20, prompt_length=int(rng.integers(100, 200))),
    ]


def whole(trees: list[RolloutTree]) -> list[TreeSlice]:
    return [TreeSlice(number, 0, tree.num_responses) for number, tree in enumerate(trees)]


def batch_of(trees: list[RolloutTree]) -> ChunkLayout:
    return ChunkLayout(trees, np.zeros(len(trees), np.int64), whole(trees), with_prompts=True)


def dense_definition(trees: list[RolloutTree], window: int | None) -> tuple[IntArray, np.ndarray]:
    """Return the input tokens of whole trees, and whether each sees each other one: its prompt and its path, in order.

    A window counts the tokens of the sequence from the one that is seen to the one that sees.
    """
    tokens: list[int] = []
    paths: list[list[int]] = []  # of each token, from the prompt's first token on
    for tree in trees:
        of_node: dict[int, list[int]] = {}
        path: list[int] = []
        for token in tree.prompt_ids:
            path = [*path, len(tokens)]
            tokens.append(token)
            paths.append(path)
        for node in range(tree.num_nodes):
            if node in tree.parent:
                above = of_node[int(tree.parent[node])] if tree.parent[node] >= 0 else path
                of_node[node] = [*above, len(tokens)]
                tokens.append(int(tree.token[node]))
                paths.append(of_node[node])
    sees = np.zeros((len(tokens), len(tokens)), bool)
    for query, path in enumerate(paths):
        sees[query, path if window is None else path[-window:]] = True
    return np.array(tokens), sees


def expanded(count_B: Tensor, order_BB: Tensor) -> np.ndarray:
    """Return lists of blocks as a matrix."""
    listed = np.zeros(order_BB.shape, bool)
    for row, (number, blocks) in enumerate(zip(count_B.tolist(), order_BB.tolist(), strict=True)):
        listed[row, blocks[:number]] = True
        assert blocks == [*np.flatnonzero(listed[row]), *np.flatnonzero(~listed[row])]
    return listed


def context_of(batch: ChunkLayout, window: int | None) -> FlexContext:
    layout = FlexLayout.of(batch.position_T, batch.end_T, window)
    return FlexContext(layout, *(torch.from_numpy(array) for array in layout.arrays))


def mask_of(batch: ChunkLayout, window: int | None) -> tuple[BlockMask, IntArray]:
    """Return the mask of a batch, and the token that each key of the kernel is, copies included."""
    forest, length = context_of(batch, window), batch.token_T.size
    token = forest._with_copies(torch.arange(float(length))[None, None, :, None])[0, 0, :, 0].numpy().astype(int)
    np.testing.assert_array_equal(token[:length], np.arange(length))
    return forest.mask(length, token.size, window), token


def by_element(batch: ChunkLayout, window: int | None, exact: bool) -> np.ndarray:
    """Return the mask as the kernel reads it: whole blocks are not masked, unlisted ones are skipped."""
    mask, token = mask_of(batch, window)
    lists = [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)]
    lists += [(mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices)]
    masked, full, masked_T, full_T = (expanded(count[0, 0], order[0, 0]) for count, order in lists)
    np.testing.assert_array_equal(masked_T, masked.T)
    np.testing.assert_array_equal(full_T, full.T)
    assert masked_T.sum(1).max() <= QUERIES_PER_COPY
    assert (masked | full).sum(0).max() <= QUERIES_PER_COPY
    num_queries, num_keys = mask.seq_lengths
    assert num_keys > num_queries  # equal sizes would compile apart
    zero, query, key = torch.tensor(0), torch.arange(num_queries)[:, None], torch.arange(num_keys)
    sees = mask.mask_mod(zero, zero, query, key).numpy()
    of_blocks = sees.reshape(num_queries // BLOCK, BLOCK, num_keys // BLOCK, BLOCK)
    assert not (masked & full).any()
    assert of_blocks.all((1, 3))[full].all()
    times = np.zeros((num_queries, num_queries), int)  # that a query sees a token, in all of its copies
    np.add.at(times.T, token, sees.T)
    assert times.max() == 1
    assert (masked | full)[of_blocks.any((1, 3))].all()
    if exact:
        np.testing.assert_array_equal(full, of_blocks.all((1, 3)))
        np.testing.assert_array_equal(masked | full, of_blocks.any((1, 3)))
    return times > 0


@pytest.mark.parametrize("window", [None, 1, 30, 150])
@pytest.mark.parametrize("scale", mostly_slow([1, 5]))
def test_the_block_mask_is_the_dense_definition(scale: int, window: int | None, rng: np.random.Generator) -> None:
    trees = [tree for _ in range(scale) for tree in some_trees(rng)]
    rng.shuffle(trees)
    tokens, expected = dense_definition(trees, window)
    batch = batch_of(trees)
    length = batch.token_T.size
    np.testing.assert_array_equal(batch.token_T[: tokens.size], tokens)
    got = by_element(batch, window, exact=window is None)
    np.testing.assert_array_equal(got[: tokens.size, : tokens.size], expected)
    padding = np.eye(length - tokens.size, dtype=bool)  # it sees itself
    np.testing.assert_array_equal(got[tokens.size :, tokens.size :], padding)
    assert not got[tokens.size :, : tokens.size].any()
    assert not got[: tokens.size, tokens.size :].any()
    assert length % BLOCK == 0
    assert length >= max(2 * BLOCK, tokens.size)


@pytest.mark.parametrize(
    "sizes",
    [
        *([pair] for pair in ((1, 2), (128, 129), (127, 129), (128, 257), (256, 385), (255, 258))),
        [(127, 140), (1, 5)],
        [(5, 9), (300, 1), (3, 4)],  # a prompt of several blocks that no node sees
    ],
)
def test_lengths_at_the_edges_of_blocks(sizes: list[tuple[int, int]], rng: np.random.Generator) -> None:
    """Sizes are pairs of the lengths of a prompt and its response."""
    trees = [long_response(rng, *pair) for pair in sizes]
    tokens, expected = dense_definition(trees, None)
    batch = batch_of(trees)
    got = by_element(batch, None, exact=True)
    np.testing.assert_array_equal(got[: tokens.size, : tokens.size], expected)


@pytest.mark.parametrize("window", [None, 30])
def test_a_run_of_responses_is_laid_out_as_a_tree_of_these_responses(
    window: int | None, rng: np.random.Generator
) -> None:
    """It also computes the nodes that earlier runs own; a target's row sees the tokens before it, in order."""
    trees = [*some_trees(rng), with_given(random_tree(rng, num_rollouts=40, max_length=30), rng)]
    slices, offsets = [], node_offsets(trees)
    for number, tree in enumerate(trees):
        start, stop = np.sort(rng.choice(tree.num_responses + 1, 2, replace=False)).tolist()
        slices.append(TreeSlice(number, start, stop))
    selected = [trees[s.tree].select(np.arange(s.start, s.stop))[0] for s in slices]
    tokens, expected = dense_definition(selected, window)
    batch = ChunkLayout(trees, offsets, slices, with_prompts=True)
    np.testing.assert_array_equal(batch.token_T[: tokens.size], tokens)
    got = by_element(batch, window, exact=window is None)
    np.testing.assert_array_equal(got[: tokens.size, : tokens.size], expected)
    before = [tokens[row] for row in dense_definition(selected, None)[1]]
    assert batch.position_T[: tokens.size].tolist() == [path.size - 1 for path in before]

    rows = batch.logit_rows.tolist()
    assert rows == sorted({rows[row] for row in batch.target_row})
    target = 0
    for tree, offset, responses in zip(trees, offsets, slices, strict=True):
        owned = range(tree.leaf[responses.start - 1] + 1 if responses.start else 0, tree.leaf[responses.stop - 1] + 1)
        for node in [node for node in owned if not tree.given[node]]:
            path = [*tree.prompt_ids, *tree.token[tree.path(node)].tolist()]
            row = batch.target_row[target]
            assert [*before[rows[row]], batch.target_token[target]] == path
            assert batch.length_R[row] == len(path) - len(tree.prompt_ids) - 1
            assert batch.target_index[target] == offset + node
            target += 1
    assert target == batch.target_index.size


def test_a_window_skips_blocks_far_away(rng: np.random.Generator) -> None:
    """A chain of n blocks with a window of one block touches 2 n - 1 blocks, of n (n + 1) / 2 without it."""
    batch = batch_of([long_response(rng, 1, 10 * BLOCK)])
    for window, expected in ((None, 55), (BLOCK, 19)):
        mask, _ = mask_of(batch, window)
        assert int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) == expected


def test_the_keys_of_a_long_prompt_are_copied(rng: np.random.Generator) -> None:
    """Of the queries of 40 responses of a block each, 8 blocks see a copy of a block of the prompt."""
    prompt = rng.integers(1, 17, 2 * BLOCK).tolist()
    responses = [[row, *rng.integers(1, 17, BLOCK).tolist()] for row in range(40)]
    batch = batch_of([RolloutTree.from_responses(prompt, responses, finished=[False] * 40)])
    mask, token = mask_of(batch, None)
    num_blocks = batch.token_T.size // BLOCK
    times = np.bincount(token[::BLOCK] // BLOCK, minlength=num_blocks)
    assert times[1] == -(-(num_blocks - 1) // QUERIES_PER_COPY)  # the second block of the prompt sees itself too
    assert (times[2:] == 1).all()
    assert (mask.q_num_blocks + mask.full_q_num_blocks).max() == QUERIES_PER_COPY


def test_the_gradients_of_copies_add_up(rng: np.random.Generator) -> None:
    """Of two heads of four numbers: each token gets the gradients of all keys that are copies of it."""
    prompt = rng.integers(1, 17, BLOCK).tolist()
    responses = [[row, *rng.integers(1, 17, BLOCK).tolist()] for row in range(20)]
    batch = batch_of([RolloutTree.from_responses(prompt, responses, finished=[False] * 20)])
    _, token = mask_of(batch, None)
    length = batch.token_T.size
    assert token.size >= length + 2 * BLOCK
    key = torch.from_numpy(rng.standard_normal((1, 2, length, 4))).requires_grad_()
    copied = context_of(batch, None)._with_copies(key)
    np.testing.assert_array_equal(copied[0].detach(), key[0].detach()[:, token])
    gradient = rng.standard_normal((1, 2, token.size, 4))
    copied.backward(torch.from_numpy(gradient))
    expected = np.zeros((length, 2, 4))
    np.add.at(expected, token, gradient[0].swapaxes(0, 1))
    assert key.grad is not None
    np.testing.assert_allclose(key.grad[0].transpose(0, 1), expected, rtol=0, atol=1e-13)


def test_chunks_hold_the_nodes_and_prompts_that_fit(rng: np.random.Generator) -> None:
    trees = [random_tree(rng, num_rollouts=40, max_length=9) for _ in range(9)]
    most = 60
    owned = np.zeros(sum(tree.num_responses for tree in trees), int)
    first = np.cumsum([0, *(tree.num_responses for tree in trees)])
    for slices in split_into_chunks(trees, most):
        nodes = prompts = 0
        for tree_slice in slices:
            owned[first[tree_slice.tree] + tree_slice.start : first[tree_slice.tree] + tree_slice.stop] += 1
            some, _ = trees[tree_slice.tree].select(np.arange(tree_slice.start, tree_slice.stop))
            nodes, prompts = nodes + some.num_unique_tokens, prompts + len(some.prompt_ids)
        assert nodes <= most
        assert prompts <= most
    assert (owned == 1).all()
    assert [len(chunk) for chunk in split_into_chunks(trees, 1)] == [1] * owned.size


@pytest.mark.parametrize("most", [1, 9, 60, 500])
def test_a_chunk_ends_before_the_first_response_that_does_not_fit(most: int, rng: np.random.Generator) -> None:
    trees = [*some_trees(rng), RolloutTree.from_responses([3], [(4, 5), (4, 5)], finished=[True, False])] * 2
    rng.shuffle(trees)
    expected: list[list[tuple[int, int]]] = [[]]  # each chunk as pairs of a tree and a response
    nodes: set[tuple[int, int]] = set()
    prompt_tokens = 0
    for number, tree in enumerate(trees):
        prompt_tokens += len(tree.prompt_ids)
        for response, leaf in enumerate(tree.leaf.tolist()):
            nodes |= {(number, node) for node in tree.path(leaf).tolist()}
            too_many = len(nodes) > most or (response == 0 and prompt_tokens > most)
            if too_many and expected[-1]:
                expected.append([])
                nodes = {(number, node) for node in tree.path(leaf).tolist()}
                prompt_tokens = len(tree.prompt_ids)
            expected[-1].append((number, response))
    chunks = list(split_into_chunks(trees, most))
    assert [[(s.tree, i) for s in chunk for i in range(s.start, s.stop)] for chunk in chunks] == expected


def test_a_response_that_ends_where_the_previous_one_ends_has_no_input_nodes() -> None:
    tree = RolloutTree.from_responses([3], [(4, 5), (4, 5), (4, 6)], finished=[True, False, True])
    assert [nodes.tolist() for nodes in input_nodes(tree, TreeSlice(0, 1, 2))] == [[], []]
    assert [nodes.tolist() for nodes in input_nodes(tree, TreeSlice(0, 1, 3))] == [[0], [2]]


Compile = Callable[[str], CompileCounterWithBackend]


@pytest.fixture
def compile_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compile]:
    """Compile as on CUDA with another backend, and count the compilations. A graph break is an error there."""
    original = torch.compile

    def compile_with(backend: str) -> CompileCounterWithBackend:
        counter = CompileCounterWithBackend(backend)
        monkeypatch.setattr(
            torch, "compile", lambda function, **options: original(function, **{"backend": counter, **options})
        )
        return counter

    torch.compiler.reset()
    compilation.compiled.cache_clear()
    yield compile_with
    compilation.compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize(
    "case", ["llama", "options", "qwen3", "gemma 3", "gemma 2", "checkpointing", "adapters", "bfloat16"]
)
def test_layers_are_compiled_once_for_all_passes(case: str, rng: np.random.Generator, compile_on_cpu: Compile) -> None:
    """Compiled up to the code that PyTorch generates: passes of other trees, in other numbers, compile nothing more."""
    counter = compile_on_cpu("aot_eager")
    torch.manual_seed(int(rng.integers(1 << 30)))
    if case.startswith("gemma"):
        model = gemma(int(case[-1])).float()
    else:
        name = case if case in ("llama", "qwen3") else "llama"
        options = {"num_hidden_layers": 4, "max_position_embeddings": 512, "dtype": torch.float32}
        model = small_model(name, seed=int(rng.integers(1 << 30)), **options)
    if case == "adapters":
        add_adapter(model, LoraSettings(rank=4))
    if case == "checkpointing":
        enable_gradient_checkpointing(model)
    model.train()
    flex_options = "bwd_BLOCK_M1=32 bwd_BLOCK_N1=64" if case == "options" else ""
    way = replace(PACKED, compiled=True, whole_logits=case == "gemma 2", flex_options=flex_options)
    autocast, bound = case == "bfloat16", 0.1 if case == "bfloat16" else 1e-4
    kinds = 2 if case.startswith("gemma") else 2 if case == "adapters" else 1  # the first input needs no gradient
    compilations = []
    for max_nodes in (None, 300, 60):
        trees = some_of_each(rng)
        weight_KO = weights_of(rng, trees).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, got_gradients = learned(model, trees, weight_KO, chunk_logprobs, max_nodes=max_nodes, forward=way)
            compilations.append(counter.frame_count)
            plain, plain_gradients = learned(model, trees, weight_KO, flat_chunk_logprobs, whole_logits=True)
        torch.testing.assert_close(got, plain, rtol=bound, atol=bound)
        largest = max(float(g.abs().max()) for g in plain_gradients.values())
        for name, gradient in plain_gradients.items():
            torch.testing.assert_close(got_gradients[name], gradient, rtol=bound, atol=bound * largest)
    outputs = 2  # a reduction of the logits, and its gradient
    assert compilations == [kinds + outputs] * 3


def called_with_checkpointing(layer: Any, *inputs: Any, **named: Any) -> Any:
    call = partial(nn.Module.__call__, layer, **named)
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(call, *inputs)
    return call(*inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("of_calls", [False, True])  # True as transformers did up to 5.17
def test_a_compiled_layer_is_checkpointed_once(
    of_calls: bool, rng: np.random.Generator, compile_on_cpu: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_on_cpu("eager")
    model = small_model(num_hidden_layers=3, dtype=torch.float32).train()
    enable_gradient_checkpointing(model)
    layers, times = list(model.get_decoder().layers), []
    if of_calls:
        monkeypatch.setattr(type(layers[0]), "forward", unwrap(layers[0].forward.__func__))
        monkeypatch.setattr(type(layers[0]), "__call__", called_with_checkpointing)
    for number, layer in enumerate(layers):
        checkpointed = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *args, n=number, run=checkpointed: times.append(n) or run(*args)
    (chunk,) = chunk_logprobs(model, some_of_each(rng), forward=replace(PACKED, compiled=True))
    chunk.logprob.sum().backward()
    assert times == [0, 1, 2]
    assert all(layer.gradient_checkpointing for layer in layers)


@pytest.mark.slow
def test_inductor_compiles_the_layers_once(rng: np.random.Generator, compile_on_cpu: Compile) -> None:
    """PyTorch's code for the CPU has no gradient of FlexAttention, so only the forward pass is computed."""
    counter = compile_on_cpu("inductor")
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = gemma(3, head_dim=16).float()
    compilations = []
    for _ in range(2):
        trees = some_of_each(rng)
        with torch.no_grad():
            got = torch.cat(tree_logprobs(model, trees, forward=replace(PACKED, compiled=True)))
            compilations.append(counter.frame_count)
            model.double()
            expected = torch.cat(tree_logprobs(model, trees, forward=PACKED))
            model.float()
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    assert compilations == [3, 3]  # full and sliding layers, and the reduction of the logits


def changed(factor: float, of_gradient: float = 1.0) -> Callable[..., Tensor]:
    """Return an attention whose output, or its gradient, is wrong by a factor."""
    attend = FlexContext.of_heads

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return factor * x

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return of_gradient * grad

    return lambda *args: Wrong.apply(attend(*args))


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("name", ["log-probs", "gradients"])
def test_a_pass_that_differs_is_not_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(dtype=torch.float32).train()
    check_packed(model, PACKED)
    check_packed(model, PACKED, autocast=True)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    factors = {"log-probs": (1.5, 1.5), "gradients": (1.0, 2.0)}
    monkeypatch.setattr(FlexContext, "of_heads", changed(*factors[name]))
    with pytest.raises(HooksError, match=f"the {name} of LlamaForCausalLM change"):
        check_packed(model, PACKED)
    assert model.training


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
def test_a_wrong_gradient_of_new_adapters_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first weight of an adapter has no gradient at first, since the second one is 0."""
    model = small_model(dtype=torch.float32)
    add_adapter(model, LoraSettings(rank=2))
    check_packed(model, PACKED)
    monkeypatch.setattr(FlexContext, "of_heads", changed(1.0, 2.0))
    with pytest.raises(HooksError, match="the gradients of LlamaForCausalLM change"):
        check_packed(model, PACKED)


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
def test_a_wrong_window_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gemma(3).float()
    check_packed(model, PACKED)
    mask = FlexContext.mask
    monkeypatch.setattr(FlexContext, "mask", lambda self, *lengths: mask(self, *lengths[:2], None))
    with pytest.raises(HooksError, match="the log-probs of Gemma3ForCausalLM change"):
        check_packed(model, PACKED)


@pytest.mark.usefixtures("backward_on_cpu")
def test_the_fastest_way_that_works_is_taken_and_one_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers, else layers as they are, else what is given; a rank that fails decides for all."""
    model, default = small_model(dtype=torch.float32), TreeForward()
    lines: list[str] = []
    faults: set[bool] = set()

    def check(_model: PreTrainedModel, way: TreeForward, _autocast: bool) -> None:
        assert way.packed
        if way.compiled in faults:
            raise HooksError(f"a fault with compiled = {way.compiled}")

    monkeypatch.setattr("brorl.model.forward.check_packed", check)

    def chosen(forward: TreeForward | FlatForward = default) -> tuple[Any, str]:
        lines.clear()
        found = with_packed_passes(model, forward, lines.append)
        (line,) = lines
        return found, line

    found, line = chosen()
    assert found == TreeForward(packed=True, compiled=True)
    assert "the decoder layers are compiled, in 0 s; later runs find the kernels in /" in line
    faults.add(True)
    found, line = chosen(FlatForward("a window"))
    assert found == TreeForward(packed=True)
    assert line == "FlexAttention without compiled layers: a fault with compiled = True"
    faults.add(False)
    assert chosen() == (default, "attention in tiles, without FlexAttention: a fault with compiled = False")
    faults.clear()
    lines.clear()
    assert with_packed_passes(model, default, lines.append, failed_anywhere=lambda _: True) is default
    assert lines == ["attention in tiles, without FlexAttention: a check fails on another rank"]


@pytest.mark.usefixtures("backward_on_cpu")
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no valid configuration\nmore")

    monkeypatch.setattr(compilation, "compiled", lambda _function: failing)
    with pytest.raises(HooksError, match=r"RuntimeError: no valid configuration more"):
        check_packed(small_model(dtype=torch.float32), replace(PACKED, compiled=True))


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", ["float32", "bfloat16", "adapters"])
def test_the_memory_plan_of_a_layer_is_what_its_compiled_graph_keeps(
    case: str, checkpointing: bool, rng: np.random.Generator, compile_on_cpu: Compile
) -> None:
    """The graph is split into a forward and a backward pass as on CUDA; no kernels are generated from them."""
    compile_on_cpu("aot_eager_decomp_partition")
    lora = LoraSettings(rank=1) if case == "adapters" else None
    dtype = "float32" if case == "float32" else "bfloat16"
    prompt, response = 64, 4 * BLOCK
    tree = long_response(rng, prompt, response)
    kept, planned = [], []
    for num_layers in (2, 4):
        sizes = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = small_model("qwen2", num_hidden_layers=num_layers, **sizes, dtype=torch.float32).train()
        if lora:
            add_adapter(model.bfloat16(), lora)
        if checkpointing:
            enable_gradient_checkpointing(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "bfloat16"):
            kept.append(kept_bytes(model, chunk_logprobs(model, [tree], forward=replace(PACKED, compiled=True))))
        settings = MemorySettings(dtype, 0, lora, gradient_checkpointing=checkpointing, device="cuda")
        passes = ModelMemory(model.config).passes
        planned.append(passes.pass_bytes(settings, batch_of([tree]).token_T.size, prompt + response))
    casts = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 640) if case == "bfloat16" and not checkpointing else 0
    of_layer = (kept[1] - kept[0]) / 2 - casts
    # In float32 the outputs of the heads have one layout here, and adapters also keep a few numbers of their rank.
    assert 0.9 < of_layer / ((planned[1] - planned[0]) / 2) < 1.05


@pytest.mark.slow
def test_long_responses_have_few_copies(rng: np.random.Generator) -> None:
    """Of a chain of 80 blocks, 8 blocks of queries a copy would make 360 copies."""
    batch = batch_of([long_response(rng, 1, 80 * BLOCK)])
    mask, token = mask_of(batch, None)
    num_copies = token.size // BLOCK - 80
    most = int((mask.q_num_blocks + mask.full_q_num_blocks).max())
    assert most == -(-(80 * 81 // 2) // MAX_COPIES) == 13
    assert num_copies == sum(-(-seen // most) - 1 for seen in range(1, 81)) <= MAX_COPIES
    assert BLOCK * num_copies <= copied_tokens(80 * BLOCK, 80 * BLOCK) <= BLOCK * MAX_COPIES
