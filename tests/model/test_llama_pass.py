"""The Llama pass and its operations against the modules of transformers, finite differences and plain products."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.model import fused_ops as product_module
from brorl.model import kernels as kernels_module
from brorl.model import llama_pass
from brorl.model.forward import choose_forward
from brorl.model.fused_ops import (
    Angles,
    Linear,
    Norm,
    add_gated_mlp,
    add_linear,
    fastest_product,
    linear,
    product,
    query_key_value,
    rms_norm,
)
from brorl.model.llama_pass import LlamaPass, has_llama_layout, num_copied_weights
from brorl.model.tree_attention import PromptContext, enable_gradient_checkpointing
from brorl.model.tree_path import TREE, TreeForward, tree_logprobs
from small_models import ARCHITECTURES, mostly_slow, random_tree, small_model

HIDDEN, INNER, ROWS = 6, 5, 4


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape)).requires_grad_()


def cases(rng: np.random.Generator) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Return each operation with its inputs."""
    x, norm = normal(rng, ROWS, HIDDEN), normal(rng, HIDDEN)
    wide, wide_bias = normal(rng, INNER, HIDDEN), normal(rng, INNER)
    narrow, narrow_bias = normal(rng, HIDDEN, INNER), normal(rng, HIDDEN)
    up, up_bias = normal(rng, INNER, HIDDEN), normal(rng, INNER)
    mixing, mixing_bias = normal(rng, 4 * 4, HIDDEN), normal(rng, 4 * 4)  # two query heads and one of keys and values
    angle = torch.from_numpy(rng.normal(size=(ROWS, 2))).repeat(1, 2)
    angles = Angles(0.5, 0.5 * angle.cos(), 0.5 * angle.sin(), angle.cos(), angle.sin())

    norms = normal(rng, 4), normal(rng, 4)

    def attention_inputs(
        x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor, *head_norms: Tensor
    ) -> tuple[Tensor, ...]:
        query_norm, key_norm = [Norm(n, 1e-3) for n in head_norms] or (None, None)
        return query_key_value(x, Norm(norm, 1e-3), Linear(weight, bias), query_norm, key_norm, angles, 2)

    def gated(x: Tensor, norm: Tensor, *maps: Tensor) -> Tensor:
        gate, up, down = (Linear(*maps[i : i + 2]) for i in (0, 2, 4))
        return add_gated_mlp(x, Norm(norm, 1e-3), gate, up, down)

    return {
        "rms_norm": (lambda x, w: rms_norm(x, Norm(w, 1e-3)), [x, norm]),
        "query_key_value": (attention_inputs, [x, norm, mixing, mixing_bias]),
        "query_key_value with norms": (attention_inputs, [x, norm, mixing, mixing_bias, *norms]),
        "linear": (linear, [x, wide, wide_bias]),
        "add_linear": (
            lambda x, y, w, b: add_linear(x, y, Linear(w, b)),
            [x, normal(rng, ROWS, INNER), narrow, narrow_bias],
        ),
        "add_gated_mlp": (gated, [x, norm, wide, wide_bias, up, up_bias, narrow, narrow_bias]),
    }


OPERATIONS = (
    "rms_norm", "query_key_value", "query_key_value with norms", "linear", "add_linear", "add_gated_mlp"
)  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_equal_finite_differences(operation: str, rng: np.random.Generator) -> None:
    function, inputs = cases(rng)[operation]
    assert torch.autograd.gradcheck(function, inputs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "linear"])
def test_without_gradients_the_values_are_the_same(operation: str, rng: np.random.Generator) -> None:
    function, inputs = cases(rng)[operation]
    expected = function(*inputs)
    with torch.no_grad():
        got = function(*(x.detach().clone() for x in inputs))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_frozen_parameters_get_no_gradient(rng: np.random.Generator) -> None:
    function, inputs = cases(rng)["add_gated_mlp"]
    for frozen in inputs[1:]:
        frozen.requires_grad_(False)
    function(*inputs).sum().backward()
    assert inputs[0].grad is not None
    assert all(x.grad is None for x in inputs[1:])


@pytest.mark.parametrize("compiled", mostly_slow([True, False]))
@pytest.mark.parametrize("architecture", mostly_slow([name for name in ARCHITECTURES if name != "hooked"]))
def test_gradients_in_float32_equal_those_of_the_modules_in_float64(
    architecture: str, compiled: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs of three trees in several chunks, with the kernels in C and with PyTorch's operations."""
    monkeypatch.setattr(kernels_module, "_choice", "auto" if compiled else "off")
    single = small_model(architecture, seed=int(rng.integers(1 << 30)), dtype=torch.float32, scale=0.1)
    double = copy.deepcopy(single).double()
    trees = [random_tree(rng) for _ in range(3)]
    weights = [torch.from_numpy(rng.normal(size=tree.num_unique_tokens)) for tree in trees]
    results = []
    for model, forward in ((single, TreeForward(llama_chunks=True)), (double, TREE)):
        logprobs = tree_logprobs(model, trees, forward=forward, max_nodes=16)
        torch.stack([(x.double() * w).sum() for x, w in zip(logprobs, weights, strict=True)]).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
        results.append((torch.cat(logprobs).double().detach(), gradient))
    (logprob, gradient), (logprob64, gradient64) = results
    torch.testing.assert_close(logprob, logprob64, rtol=0, atol=1e-5)
    assert float((gradient - gradient64).norm()) < 1e-5 * float(gradient64.norm())


def test_a_copy_in_bfloat16_is_near_the_weights(rng: np.random.Generator) -> None:
    model = small_model("qwen2", seed=1, dtype=torch.float32, scale=0.1)
    token_T = torch.from_numpy(rng.integers(0, 17, 6))

    def logits(packed: LlamaPass) -> Tensor:
        with torch.no_grad():
            context = PromptContext(np.array([6]), model.device)
            return packed.row_logits(token_T, torch.arange(6), context, None).row

    low, exact = logits(LlamaPass(model, torch.bfloat16)), logits(LlamaPass(model))
    assert low.dtype == torch.float32
    assert 0 < float((low - exact).abs().max()) < 0.05 * float(exact.abs().max())


@pytest.mark.parametrize("tied", [False, True])
def test_the_copied_weights_are_counted(tied: bool) -> None:
    for architecture in ("llama", "qwen2", "qwen3"):
        model = small_model(architecture, tie_word_embeddings=tied)
        copied = sum(copy.numel() for copy, _ in LlamaPass(model, torch.bfloat16)._copies)
        assert num_copied_weights(model, "cpu") == copied


def test_many_rows_have_the_rounded_output_embedding_too(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("qwen2", seed=1, dtype=torch.float32, scale=0.1)
    token_T = torch.from_numpy(rng.integers(0, 17, 6))
    packed = LlamaPass(model, torch.bfloat16)

    def logits() -> Tensor:
        with torch.no_grad():
            return packed.row_logits(token_T, torch.arange(6), PromptContext(np.array([6]), model.device), None).whole()

    few = logits()
    monkeypatch.setattr(llama_pass, "MAX_LOGITS", 0)
    assert torch.equal(logits(), few)


def test_only_plain_modules_of_known_layouts_have_a_pass_of_their_own() -> None:
    assert has_llama_layout(small_model())
    assert not has_llama_layout(small_model("hooked"))
    assert not has_llama_layout(small_model(hidden_act="gelu"))
    assert not has_llama_layout(small_model(attention_dropout=0.1))
    hooked = small_model()
    hooked.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not has_llama_layout(hooked)
    checkpointed = small_model()
    enable_gradient_checkpointing(checkpointed)
    assert not has_llama_layout(checkpointed)

    class OtherAttention(type(small_model().model.layers[0].self_attn)):  # type: ignore[misc]
        """An attention of someone else."""

    changed = small_model()
    changed.model.layers[0].self_attn.__class__ = OtherAttention
    assert not has_llama_layout(changed)


def test_a_pass_that_differs_from_the_modules_is_not_chosen() -> None:
    forward = choose_forward(small_model())
    assert isinstance(forward, TreeForward)
    assert forward.llama_chunks

    class Doubled(type(small_model().model.norm)):  # type: ignore[misc]
        """A norm with the name of transformers, and another function."""

        __module__ = "transformers.other"

        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = small_model()
    model.model.layers[1].input_layernorm.__class__ = Doubled
    assert has_llama_layout(model)
    forward = choose_forward(model)
    assert isinstance(forward, TreeForward)
    assert not forward.llama_chunks


def test_under_autocast_the_modules_compute(rng: np.random.Generator) -> None:
    model, tree = small_model(dtype=torch.float32, scale=0.1), random_tree(rng)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, expected = (tree_logprobs(model, [tree], forward=way) for way in (TreeForward(llama_chunks=True), TREE))
    assert torch.equal(got[0], expected[0])


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="needs torch with oneDNN")
@pytest.mark.parametrize("rows", [64, 71])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_of_onednn_and_its_gradient(
    bias: bool, transposed: bool, rows: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, against float64: weights in both memory layouts, and the strided products of the backward pass."""
    called = []
    original = product_module._onednn
    monkeypatch.setattr(product_module, "fastest_product", lambda: "onednn")
    monkeypatch.setattr(product_module, "_onednn", lambda *args: (called.append(args), original(*args))[1])
    inputs = [torch.from_numpy(rng.normal(size=s)) for s in ((rows, 80), (72, 80), (72,))][: 2 + bias]
    single = [x.float() for x in inputs]
    if transposed:
        single[1] = single[1].T.contiguous().T
    for x in (*inputs, *single):
        x.requires_grad_()
    grad = torch.from_numpy(rng.normal(size=(rows, 72)))
    expected = torch.nn.functional.linear(*inputs)
    got = linear(*single, *([] if bias else [None]))
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(
        torch.autograd.grad(got, single, grad.float()), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    assert len(called) == 3
    for x, weight in ((single[0][:8], single[1]), (single[0].double(), single[1].double())):
        product(x.detach(), weight.detach())  # few rows, and another dtype
    assert len(called) == 3


@pytest.mark.parametrize(
    ("torch_version", "onednn_s", "expected"),
    [("2.13.0", 0.5, "onednn"), ("2.13.0", 0.9, "mkl"), ("2.99.0", 0.5, "mkl")],
)
def test_onednn_is_chosen_only_by_a_wide_margin_and_where_it_was_tried(
    torch_version: str, onednn_s: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([onednn_s, 1.0])
    monkeypatch.setattr(product_module, "_seconds", lambda _: next(seconds))
    monkeypatch.setattr(torch, "__version__", torch_version)
    assert fastest_product.__wrapped__() == expected
