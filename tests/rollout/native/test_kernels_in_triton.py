"""Kernels in Triton against the operations of PyTorch in float64, interpreted where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import brorl.rollout.native_engine as native
from brorl.model import kernels
from brorl.model.fused_ops import Angles, Linear, Norm, add_joined_mlp, query_key_value
from brorl.model.kernels import KernelsError
from brorl.model.tree_attention import KVShape, PromptCache
from brorl.rollout.engine import SampleTask
from brorl.rollout.native import draw
from brorl.rollout.native.decoder import RowMemory
from brorl.rollout.native.draw import draw_tokens
from brorl.rollout.native.slot_attention import Grid, SlotCache, SlotContext, SlotPrompts, cells_of
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from engine_checks import EOS, ragged_prompts
from interpreted_kernels import DEVICE, kernels_on_this_machine
from small_models import small_model

# The largest error relative to the largest number. The kernels round once, the inputs are rounded before.
ERRORS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
DTYPES = list(ERRORS)


def normal(rng: np.random.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape)).to(DEVICE, dtype)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=ERRORS[dtype] * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_queries_and_keys_are_turned_in_place(dtype: torch.dtype, norms: bool, rng: np.random.Generator) -> None:
    rows, heads, kv_heads, dim, hidden = 5, 15, 3, 12, 8
    x, weight = normal(rng, dtype, rows, hidden), normal(rng, dtype, (heads + 2 * kv_heads) * dim, hidden)
    norm, head_norms = normal(rng, dtype, hidden), [normal(rng, dtype, dim) for _ in range(2)]
    angle = normal(rng, dtype, rows, dim // 2).repeat(1, 2)

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        pair = [Norm(w.to(dtype), 1e-3) for w in head_norms] if norms else [None, None]
        angles = Angles(0.3, 0.3 * cos, 0.3 * sin, cos, sin)
        one = Linear(weight.to(dtype), None)
        return query_key_value(x.to(dtype), Norm(norm.to(dtype), 1e-3), one, *pair, angles, heads)

    with kernels_on_this_machine():
        got, expected = inputs(dtype), inputs(torch.float64)
    for one, other in zip(got, expected, strict=True):
        assert_near(one, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_are_multiplied(dtype: torch.dtype, rng: np.random.Generator) -> None:
    rows, hidden, inner = 3, 8, 1100
    x, both, down = (normal(rng, dtype, *s) for s in ((rows, hidden), (2 * inner, hidden), (hidden, inner)))
    norm = normal(rng, dtype, hidden)

    def added(dtype: torch.dtype) -> Tensor:
        maps = (Linear(w.to(dtype), None) for w in (both, down))
        return add_joined_mlp(x.to(dtype, copy=True), Norm(norm.to(dtype), 1e-3), *maps)

    with kernels_on_this_machine():
        assert_near(added(dtype), added(torch.float64), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3, 30])
@pytest.mark.parametrize("lengths", [[70], [3, 1, 100]])
def test_slots_attend_to_their_prompts_and_to_themselves(
    dtype: torch.dtype, window: int | None, lengths: list[int], rng: np.random.Generator
) -> None:
    """Prompts longer than what a program reads at once, and more tokens of a slot; unused slots stay finite."""
    kv_heads, groups, dim, stored, num_rows, num_slots = 2, 3, 12, 37, 5, 8
    longest, prompt_R = max(lengths), rng.integers(0, len(lengths), num_rows)
    stored_prompts = [rng.normal(size=(len(lengths), kv_heads, longest, dim)) for _ in range(2)]
    own = [rng.normal(size=(stored + 1, num_slots, kv_heads, dim)) for _ in range(2)]
    query = rng.normal(size=(num_slots, kv_heads * groups, dim))
    stored_prompts, own, query = ([torch.from_numpy(x).to(dtype) for x in xs] for xs in (stored_prompts, own, [query]))

    def attended(dtype: torch.dtype) -> Tensor:
        model, shapes = small_model(dtype=dtype).to(DEVICE), [KVShape(kv_heads, dim, dim)]
        cache = SlotCache(model, shapes, RowMemory.of(model, shapes, 1 << 30, num_slots, stored + 1))
        cache.start(0)
        cache.place(np.arange(num_slots), np.arange(num_slots), 0, stored + 1)
        prompts = SlotPrompts(keeps=True)
        prompts.fill(PromptCache(*([x.to(DEVICE, dtype)] for x in stored_prompts), np.array(lengths)))
        num_prompts = prompts.shape[0]
        grid = Grid((1, num_slots), None, None)
        if num_prompts > 1:
            rank, width = cells_of(prompt_R, num_prompts)
            cell_R, slot_C = (torch.zeros(n, dtype=torch.int64) for n in (num_slots, num_prompts * width))
            cell_R[:num_rows] = torch.from_numpy(prompt_R * width + rank)
            slot_C[cell_R[:num_rows]] = torch.arange(num_rows)
            grid = Grid((num_prompts, width), slot_C.to(DEVICE), cell_R.to(DEVICE))
        for store, numbers in zip((cache.key[0], cache.value[0]), own, strict=True):
            store[:, :, :stored] = numbers[:stored].permute(1, 2, 0, 3)
        context = SlotContext(cache, prompts, grid, torch.tensor([stored], device=DEVICE), num_slots, 0)
        got = context.attend(0, *(x.to(DEVICE, dtype) for x in (*query, own[0][-1], own[1][-1])), window)
        assert got.isfinite().all()
        return torch.cat([got[:num_rows].flatten(), cache.key[0].flatten(), cache.value[0].flatten()])

    with kernels_on_this_machine():
        assert_near(attended(dtype), attended(torch.float64), dtype)


@pytest.mark.parametrize("vocabulary", [7, 700, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_are_those_of_the_operations(
    dtype: torch.dtype, vocabulary: int, temperature: float, rng: np.random.Generator
) -> None:
    """The numbers are far from the borders between tokens; some tokens cannot be drawn."""
    rows, rollouts, sampling = 4, 12, SamplingParams(temperature=temperature)
    logits = normal(rng, dtype, rows, vocabulary) * 3
    logits[:, rng.integers(0, vocabulary, vocabulary // 2)] = float("-inf")
    logits[:, 3] = 1.0
    row_K, uniform_K = np.sort(rng.integers(0, rows, rollouts)), rng.random(rollouts)
    edge_RV = (logits.double() / temperature).softmax(1).cumsum(1).cpu().numpy()
    distance_K = np.abs(edge_RV[row_K] - uniform_K[:, None]).min(1)
    kept = distance_K > 1e-5
    row_K, uniform_K = row_K[kept], uniform_K[kept]
    assert kept.any()
    with kernels_on_this_machine():
        token_K, logprob_K = draw_tokens(logits, row_K, uniform_K, sampling)
        expected_K, expected_logprob_K = draw_tokens(logits.double(), row_K, uniform_K, sampling)
        one_R = draw_tokens(logits, None, torch.full((rows,), uniform_K[0], device=DEVICE), sampling)[0]
    assert torch.equal(token_K, expected_K)
    torch.testing.assert_close(logprob_K, expected_logprob_K, rtol=0, atol=5e-6)
    assert one_R[row_K[0]] == token_K[0]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_least_and_the_greatest_number_draw_tokens_with_a_probability(
    uniform: float, rng: np.random.Generator
) -> None:
    logits = torch.full((2, 1000), float("-inf"), device=DEVICE)
    places = rng.choice(1000, 20, replace=False)
    logits[:, places] = normal(rng, torch.float32, 2, 20)
    with kernels_on_this_machine():
        uniform_R = torch.full((2,), uniform, dtype=torch.float64, device=DEVICE)
        token_R, logprob_R = draw_tokens(logits, None, uniform_R, SamplingParams())
    assert token_R.tolist() == 2 * [int(places.max() if uniform else places.min())]
    assert logprob_R.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_distribution_has_no_log_prob(bad: float, rng: np.random.Generator) -> None:
    logits, uniform = normal(rng, torch.float32, 3, 900), normal(rng, torch.float64, 3).sigmoid()
    broken = logits.clone()
    broken[1] = bad if bad == float("-inf") else broken[1]
    broken[1, int(rng.integers(900))] = bad
    with kernels_on_this_machine():
        expected = draw_tokens(logits, None, uniform, SamplingParams())
        token, logprob = draw_tokens(broken, None, uniform, SamplingParams())
    assert logprob.isnan().tolist() == [False, True, False]
    assert 0 <= int(token[1]) < 900
    assert torch.equal(token[[0, 2]], expected[0][[0, 2]])


def test_kernels_are_used(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Draws in blocks by the operations of PyTorch would fail here."""
    monkeypatch.setattr(draw, "_draw_block", None)
    with kernels_on_this_machine():
        uniform_R = torch.tensor([0.2, 0.3], dtype=torch.float64).to(DEVICE)
        draw_tokens(normal(rng, torch.bfloat16, 2, 50), None, uniform_R, SamplingParams())


def engine_of(
    architecture: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> NativeEngine:
    """Return an engine that decodes as on a GPU."""
    for module in (kernels, native):
        monkeypatch.setattr(module, "TRITON_DEVICES", {DEVICE})
    monkeypatch.setattr(native, "draws_on", lambda _: True)
    monkeypatch.setattr(kernels, "_load", lambda: "none in C")
    monkeypatch.setattr(kernels, "_choice", "on")
    model = small_model(architecture, seed=int(rng.integers(1 << 30)), scale=0.3, dtype=dtype).to(DEVICE)
    return NativeEngine(model, EOS)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "hooked"])
def test_an_engine_with_the_kernels_samples_what_one_without_them_does(
    architecture: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(architecture, rng, monkeypatch, torch.float32)
    prompts, sampling = ragged_prompts(rng, 2), SamplingParams(temperature=0.8, max_new_tokens=18)
    with np.errstate(all="ignore"):
        trees = engine.sample(SampleTask(prompts, 3, sampling, seed=1))
    assert engine._use_kernels
    other = NativeEngine(engine.model, EOS)
    other._use_kernels = False
    for tree, expected in zip(trees, other.sample(SampleTask(prompts, 3, sampling, seed=1)), strict=True):
        assert tree.responses() == expected.responses()
        np.testing.assert_allclose(tree.logprob, expected.logprob, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["brorl.model.triton_kernels.rotate", "brorl.model.triton_kernels.draw"])
def test_kernels_with_other_numbers_are_an_error(
    kernel: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama", rng, monkeypatch, torch.float32)
    wrong = (lambda *_: None) if "rotate" in kernel else (lambda _, row, *__: (row, row.double() - 40))
    monkeypatch.setattr(kernel, wrong)
    what = "logits" if "rotate" in kernel else "draws"
    with np.errstate(all="ignore"), pytest.raises(KernelsError, match=f"cannot decode: {what} change; set engine.comp"):
        engine.sample(SampleTask([[1, 2], [3]], 3, SamplingParams(max_new_tokens=4), seed=1))


def test_kernels_that_cannot_be_compiled_are_an_error(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama", rng, monkeypatch, torch.float32)

    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr("brorl.model.triton_kernels.attend", fails)
    with pytest.raises(KernelsError, match="cannot decode: RuntimeError: Failed to find C compiler; set"):
        engine.sample(SampleTask([[1, 2], [3]], 3, SamplingParams(max_new_tokens=4), seed=1))


def test_kernels_that_fail_their_trial_are_not_used(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", rng, monkeypatch, torch.float32)
    prompts, sampling, said = [[1, 2], [3]], SamplingParams(max_new_tokens=4), []
    monkeypatch.setattr(kernels, "_choice", "off")
    expected = [tree.responses() for tree in engine.sample(SampleTask(prompts, 3, sampling, seed=1))]
    assert not engine._use_kernels
    monkeypatch.setattr(kernels, "_choice", "auto")
    monkeypatch.setattr("brorl.model.triton_kernels.attend", None)
    engine = NativeEngine(engine.model, EOS, echo=said.append)
    assert [tree.responses() for tree in engine.sample(SampleTask(prompts, 3, sampling, seed=1))] == expected
    [line] = said
    assert line.startswith("decoding with PyTorch's operations instead of Triton kernels: TypeError: 'NoneType'")
