"""The kernels in C against PyTorch in float64, and how they are compiled and chosen."""

import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.model import kernels as module
from brorl.model.kernels import (
    KEYS_PER_BLOCK,
    Kernels,
    KernelsError,
    NodeStack,
    compile_kernels,
    describe_kernels,
    in_blocks,
    kernels,
    kernels_of,
    use_kernels,
)
from small_models import mostly_slow, random_tree

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs a C compiler")


@pytest.fixture(
    scope="session", params=mostly_slow([(), ("-DLANES=4",), ("-DLANES=16",)]), ids=["native", "4 lanes", "16 lanes"]
)
def compiled(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of this processor, and those with vectors of other sizes, which the compiler divides or joins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FLAGS", (*module._FLAGS, *request.param))
        return Kernels(compile_kernels())


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape) * scale).float()


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Compare with a reference in float64, relative to its largest entry."""
    assert got.dtype == torch.float32
    assert expected.dtype == torch.float64
    error = (got.double() - expected).abs().max()
    assert error <= tolerance * max(1.0, float(expected.abs().max())), error


# -- element by element ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(5, 3), (700, 128), (4, 3, 20), (300, 2, 33)])
def test_norms_and_their_gradients(shape: tuple[int, ...], compiled: Kernels, rng: np.random.Generator) -> None:
    wide = normal(rng, shape[0], *[n + 2 for n in shape[1:-1]], shape[-1])
    x = wide[:, 1:-1] if len(shape) == 3 else wide  # heads of tokens that have others too
    weight, grad = normal(rng, shape[-1]), normal(rng, *shape)
    x64, weight64 = (t.double().requires_grad_() for t in (x.detach(), weight))
    expected = x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight64
    expected.backward(grad.double())
    assert_near(compiled.rms_norm(x, weight, 1e-3), expected.detach())
    grad_x, grad_weight = compiled.rms_norm_backward(x, weight, 1e-3, grad)
    assert x64.grad is not None
    assert weight64.grad is not None
    assert_near(grad_x, x64.grad)
    assert_near(grad_weight, weight64.grad)
    into = torch.full_like(wide, 7.0)
    part = into[:, 1:-1] if len(shape) == 3 else into
    assert torch.equal(compiled.rms_norm_backward(x, weight, 1e-3, grad, part)[0], grad_x)
    assert torch.equal(part, grad_x)
    if len(shape) == 3:
        assert (into[:, 0] == 7).all()
        assert (into[:, -1] == 7).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [2, 8, 20, 64])
def test_rotations(width: int, compiled: Kernels, rng: np.random.Generator) -> None:
    tokens = 400
    wide = normal(rng, tokens, 5, width)
    angle = torch.from_numpy(rng.normal(size=(tokens, width // 2)) * 10).repeat(1, 2)
    cos, sin = angle.cos().float(), angle.sin().float()
    pairs = torch.complex(*(wide[:, 1:4].double().unflatten(2, (2, -1)).unbind(2)))
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None, : width // 2]
    expected = torch.cat([turned.real, turned.imag], 2)
    assert_near(compiled.rotate(wide[:, 1:4], cos, sin), expected)
    into = torch.zeros(tokens, 6, width)
    compiled.rotate(wide[:, 1:4], cos, sin, into[:, 2:5])
    assert_near(into[:, 2:5], expected)
    assert not into[:, [0, 1, 5]].any()


@pytest.mark.usefixtures("threads")
def test_gates_and_their_gradients(compiled: Kernels, rng: np.random.Generator) -> None:
    gate, up, grad = (normal(rng, 123, 1001, scale=scale) for scale in (30.0, 1.0, 1.0))
    gate[0, :6] = torch.tensor([-1e4, -89.0, -87.5, 0.0, 89.0, 1e4])
    inputs = [x.double().requires_grad_() for x in (gate, up)]
    expected = torch.nn.functional.silu(inputs[0]) * inputs[1]
    expected.backward(grad.double())
    assert_near(compiled.gated(gate, up, torch.empty_like(gate)), expected.detach())
    of_gate = grad.clone()
    gated, of_up = compiled.gated_backward(gate, up, of_gate)
    assert_near(gated, expected.detach())
    for got, leaf in ((of_gate, inputs[0]), (of_up, inputs[1])):
        assert leaf.grad is not None
        assert_near(got, leaf.grad)
    assert_near(compiled.gated(gate, up, gate), expected.detach())  # in place


def test_the_exponential_is_exact_to_a_few_ulp(compiled: Kernels) -> None:
    """By the gate of large arguments, where it is x / (1 + exp(-x)) with 1 rounded away."""
    x = torch.linspace(-86, -17, 100_000)
    expected = x.double() * torch.exp(x.double())
    got = compiled.gated(x, torch.ones_like(x), torch.empty_like(x)).double()
    relative = ((got - expected) / expected).abs()
    assert float(relative.max()) < 5e-7


# -- draws -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocabulary", [1, 3, 8, 17, 64, 65, 300, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_equal_a_search_in_the_cumulative_distribution(
    vocabulary: int, temperature: float, compiled: Kernels, rng: np.random.Generator
) -> None:
    rows, draws = 5, 2000
    logits = normal(rng, rows, vocabulary, scale=3.0)
    logits[torch.from_numpy(rng.random(logits.shape) < 0.3)] = -float("inf")
    logits[torch.arange(rows), torch.from_numpy(rng.integers(0, vocabulary, rows))] = 1.0
    row, uniform = np.sort(rng.integers(0, rows, draws)), rng.random(draws)
    uniform[:2] = 0.0, np.nextafter(1.0, 0.0)
    token, logprob = (
        x.numpy() for x in compiled.draw_tokens(logits, temperature, torch.from_numpy(row), torch.from_numpy(uniform))
    )
    mass = (logits.double() / temperature).softmax(1).numpy()
    cumulative = mass.cumsum(1)
    assert (mass[row, token] > 0).all()
    np.testing.assert_allclose(logprob, np.log(mass[row, token]), atol=2e-6)
    # The number lies in the interval of the token, up to the rounding of its ends.
    target = uniform * cumulative[row, -1]
    assert (target < cumulative[row, token] + 1e-6).all()
    assert (target > cumulative[row, token] - mass[row, token] - 1e-6).all()
    other_order = rng.permutation(draws)
    again, _ = compiled.draw_tokens(
        logits, temperature, torch.from_numpy(row[other_order]), torch.from_numpy(uniform[other_order])
    )
    np.testing.assert_array_equal(again.numpy(), token[other_order])


# -- attention ---------------------------------------------------------------------------------------------------------


def attention64(query_HD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
    """Attention of the heads of one token in float64."""
    group = query_HD.shape[0] // key_SKD.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key_SKD, value_SKD))
    weight = torch.einsum("hd,shd->hs", query_HD.double(), key).softmax(1)
    return torch.einsum("hs,shd->hd", weight, value)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("group", [1, 2, 3, 7])
@pytest.mark.parametrize("width", [4, 20, 32, 72])
def test_rows_attend_to_their_prompts_and_to_themselves(
    group: int, width: int, compiled: Kernels, rng: np.random.Generator
) -> None:
    """Ragged prompts, and positions before, at and after the ends of blocks; unused memory is NaN."""
    rows, slots, num_kv_heads, num_blocks = 7, 9, 2, 3
    length_P = np.array([1, KEYS_PER_BLOCK, 37])
    prompt_R = rng.integers(0, 3, rows)
    prompt_key, prompt_value = (normal(rng, 3, num_kv_heads, 37, width) for _ in range(2))
    for position in (0, 1, KEYS_PER_BLOCK - 1, KEYS_PER_BLOCK, 2 * KEYS_PER_BLOCK + 5, num_blocks * KEYS_PER_BLOCK - 1):
        query = normal(rng, rows, num_kv_heads * group, width, scale=width**-0.5)
        mixed = normal(rng, rows, 2 * num_kv_heads, width)  # keys and values of a token are neighbors
        new_key, new_value = mixed[:, :num_kv_heads], mixed[:, num_kv_heads:]
        slot_BR = rng.integers(0, slots, (num_blocks, rows))
        slot_BR[position // KEYS_PER_BLOCK] = rng.permutation(slots)[:rows]
        keys, values = (normal(rng, num_blocks, slots, num_kv_heads, KEYS_PER_BLOCK, width) for _ in range(2))
        for stored in (keys, values):
            stored[position // KEYS_PER_BLOCK, :, :, position % KEYS_PER_BLOCK :] = stored[
                position // KEYS_PER_BLOCK + 1 :
            ] = float("nan")
        key_blocks = [in_blocks(keys[b])[:, :, 0].contiguous() for b in range(num_blocks)]
        pages = torch.tensor([[x.data_ptr() for x in key_blocks], [x.data_ptr() for x in values]])
        got = compiled.attend_rows(
            query, new_key, new_value, in_blocks(prompt_key), prompt_value, torch.from_numpy(prompt_R),
            torch.from_numpy(length_P), pages, torch.from_numpy(slot_BR), position,
        )  # fmt: skip
        keys = torch.stack([x.transpose(2, 3) for x in key_blocks])
        for r in range(rows):
            length = length_P[prompt_R[r]]
            path = [torch.cat([x[b, slot_BR[b, r]] for b in range(num_blocks)], 1) for x in (keys, values)]
            assert torch.equal(path[0][:, position], new_key[r])
            assert torch.equal(path[1][:, position], new_value[r])
            seen = (
                torch.cat([of_prompt[prompt_R[r], :, :length], own[:, : position + 1]], 1).transpose(0, 1)
                for of_prompt, own in zip((prompt_key, prompt_value), path, strict=True)
            )
            assert_near(got[r], attention64(query[r], *seen), 5e-6)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("group", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [4, 36])
def test_nodes_attend_to_their_prompts_and_ancestors(
    group: int, width: int, compiled: Kernels, rng: np.random.Generator
) -> None:
    """Values and gradients of all inputs, against dense attention in float64."""
    trees = [random_tree(rng) for _ in range(3)]
    trees.insert(1, None)  # a prompt without nodes in this chunk
    depth = np.concatenate([t.depth for t in trees if t])
    prompt = np.concatenate([np.full(t.depth.size, p) for p, t in enumerate(trees) if t])
    length_P, num_kv_heads, num_nodes = np.array([3, 5, KEYS_PER_BLOCK + 1, 1]), 2, depth.size
    inputs = [
        normal(rng, num_nodes, num_kv_heads * group, width, scale=width**-0.5),
        *(normal(rng, num_nodes, num_kv_heads, width) for _ in range(2)),
        *(normal(rng, 4, num_kv_heads, KEYS_PER_BLOCK + 1, width) for _ in range(2)),
    ]
    grad = normal(rng, num_nodes, num_kv_heads * group, width)
    exact = [x.double().requires_grad_() for x in inputs]
    query, key, value, prompt_key, prompt_value = exact
    expected, offset = [], 0
    for p, tree in enumerate(trees):
        for node in range(tree.depth.size if tree else 0):
            path = torch.from_numpy(offset + tree.path(node))
            length = length_P[p]
            keys = torch.cat([prompt_key[p, :, :length].transpose(0, 1), key[path]])
            values = torch.cat([prompt_value[p, :, :length].transpose(0, 1), value[path]])
            expected.append(attention64(query[offset + node], keys, values))
        offset += tree.depth.size if tree else 0
    reference = torch.stack(expected)
    reference.backward(grad.double())

    nodes = NodeStack(prompt, depth, length_P)
    out, lse = compiled.attend_nodes(nodes, *inputs)
    assert_near(out, reference.detach())
    for got, leaf in zip(compiled.attend_nodes_backward(nodes, tuple(inputs), out, lse, grad), exact, strict=True):
        assert leaf.grad is not None
        assert_near(got, leaf.grad, 1e-5)


# -- compilation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing loaded before or after. Compiling takes seconds with -O3."""
    monkeypatch.setattr(module, "_FLAGS", ("-O0", *module._FLAGS[1:]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_load", module._load.__wrapped__)
    monkeypatch.setattr(module, "_choice", "auto")
    return tmp_path / "cache" / "brorl"


@pytest.mark.slow
def test_the_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_kernels()
    assert library.parent == fresh
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    assert [path.name for path in fresh.iterdir()] == [library.name]
    commands = []
    run = subprocess.run
    monkeypatch.setattr(module.subprocess, "run", lambda command, **o: (commands.append(command), run(command, **o))[1])
    assert compile_kernels() == library
    assert len(commands) == 1  # the macros, which tell the compiler's version and the processor's instructions
    monkeypatch.setattr(module, "_FLAGS", (*module._FLAGS, "-DOTHER"))
    assert compile_kernels() != library


def fake_compiler(folder: Path, script: str) -> str:
    compiler = folder / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return str(compiler)


def test_a_compiler_that_fails_is_told_and_is_an_error_only_if_required(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", fake_compiler(tmp_path, "echo 'no such header' >&2; exit 1"))
    use_kernels("auto")
    assert kernels() is None
    assert describe_kernels() == f"not compiled: {tmp_path}/cc failed: no such header"
    with pytest.raises(KernelsError, match=r"engine.compile = on, and .*no such header; install a C compiler"):
        use_kernels("on")
    assert not fresh.exists()


@pytest.mark.usefixtures("fresh")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    assert kernels() is None
    assert "no C compiler is found" in describe_kernels()


def test_a_cache_folder_that_cannot_be_made(fresh: Path) -> None:
    fresh.parent.mkdir()
    fresh.write_text("a file")
    assert kernels() is None
    assert str(fresh) in describe_kernels()


@pytest.mark.usefixtures("fresh")
def test_a_library_that_cannot_be_loaded() -> None:
    compile_kernels().write_bytes(b"damaged")
    assert kernels() is None
    assert "damaged" not in describe_kernels()
    assert "kernels-" in describe_kernels()


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_choice", "auto")
    assert kernels_of(torch.empty(1)) is not None
    assert kernels_of(torch.empty(1, dtype=torch.float64)) is None
    assert describe_kernels() == "compiled"
    use_kernels("off")
    assert kernels() is None
    assert kernels_of(torch.empty(1)) is None
    assert describe_kernels() == "off (engine.compile)"
