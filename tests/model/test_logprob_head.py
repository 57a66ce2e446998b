"""Log-probs and entropies of nodes against autograd in float64, and the memory of compiled reductions."""

import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from transformers import PreTrainedModel

from brorl.model.compilation import compiled
from brorl.model.forward import choose_forward
from brorl.model.logits import RowLogits
from brorl.model.logprobs import LogprobHead, NextToken, _gradient, _reduce, by_tree, smallest_kept
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from small_models import small_model

ROWS, NODES, VOCABULARY = 13, 40, 50
NEXT_TOKENS = [
    NextToken(),
    NextToken(0.7),
    NextToken(1.3, 3, (5, 9)),
    NextToken(0.7, top_p=0.8),
    NextToken(top_k=20),
    NextToken(1.3, 3, (5, 9), top_p=0.9, top_k=30),
]


def expected_outputs(
    logits: Tensor, next_token: NextToken, length_R: Tensor, row_K: Tensor, token_K: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probs and the entropies of nodes by definition, row by row, in float64."""
    logprobs, entropies = [], []
    for row, token in zip(row_K.tolist(), token_K.tolist(), strict=True):
        allowed = [
            t
            for t in range(logits.shape[1])
            if length_R[row] >= next_token.min_new_tokens or t not in next_token.stop_token_ids
        ]
        scaled_V = logits[row] / next_token.temperature
        ranked = sorted(allowed, key=scaled_V.tolist().__getitem__, reverse=True)[: next_token.top_k or None]
        mass_V, kept = scaled_V[ranked].softmax(0).tolist(), []
        while sum(mass_V[: len(kept)]) < next_token.top_p and len(kept) < len(ranked):
            kept.append(ranked[len(kept)])
        logprob = scaled_V[kept].log_softmax(0)
        entropies.append(-(logprob.exp() * logprob).sum())
        kept += [] if token in kept else [token]  # a token that was drawn counts as kept
        logprobs.append(scaled_V[kept].log_softmax(0)[kept.index(token)])
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("next_token", NEXT_TOKENS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [False, True])
def test_values_and_gradients_equal_the_definition(
    blocks: bool, dtype: torch.dtype, next_token: NextToken, rng: np.random.Generator
) -> None:
    """Several nodes of a row, rows without nodes, tokens that cannot be drawn; blocks of 3 rows."""
    if dtype == torch.bfloat16 and (next_token.top_k or next_token.top_p < 1):
        pytest.skip("rounded logits keep other tokens")
    torch.manual_seed(int(rng.integers(1 << 30)))  # unseeded weights can tie two logits within the rounding
    hidden = torch.from_numpy(rng.normal(size=(ROWS, 8))).to(dtype).requires_grad_()
    head = nn.Linear(8, VOCABULARY, dtype=dtype)
    length_R = torch.from_numpy(rng.integers(0, 6, ROWS))
    row_K, token_K = (
        torch.from_numpy(rng.integers(1, ROWS, NODES)),
        torch.from_numpy(rng.integers(10, VOCABULARY, NODES)),
    )
    weight_K, bonus_K = (torch.from_numpy(rng.normal(size=NODES)) for _ in range(2))
    logprob_head = LogprobHead(next_token, entropy=True, logits_per_block=3 * VOCABULARY)
    rows = RowLogits(hidden, head, VOCABULARY) if blocks else RowLogits(head(hidden))
    chunk = logprob_head.logprobs(rows, *(x.numpy() for x in (length_R, row_K, token_K)), np.arange(NODES))
    assert chunk.entropy is not None
    loss = (chunk.logprob * weight_K[chunk.index]).sum() + (chunk.entropy * bonus_K[chunk.index]).sum()
    gradients = torch.autograd.grad(loss, [hidden, head.weight, head.bias])

    exact = [x.detach().double().requires_grad_() for x in (hidden, head.weight, head.bias)]
    logits = exact[0] @ exact[1].T + exact[2]
    logprob_K, entropy_K = expected_outputs(logits, next_token, length_R, row_K, token_K)
    reference = torch.autograd.grad((logprob_K * weight_K).sum() + (entropy_K * bonus_K).sum(), exact)
    bound = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    order_K = chunk.index
    torch.testing.assert_close(chunk.logprob.double(), logprob_K[order_K], rtol=bound, atol=bound)
    torch.testing.assert_close(chunk.entropy.double(), entropy_K[order_K], rtol=bound, atol=bound)
    for got, gradient in zip(gradients, reference, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), gradient, rtol=bound, atol=bound * float(gradient.abs().max()))


def test_a_token_that_cannot_be_drawn_has_no_gradient() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    logprob_head = LogprobHead(NextToken(1.0, 4, (2,)), entropy=False)
    index = np.arange(2)
    chunk = logprob_head.logprobs(RowLogits(logits), np.array([1, 9]), index, np.array([2, 2]), index)
    assert float(chunk.logprob[0].detach()) == -np.inf
    chunk.logprob[1].backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[0].any()
    assert logits.grad[1].all()


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("next_token", [NextToken(0.7, 3, (5, 9)), NextToken(0.7, 3, (5, 9), top_p=0.9, top_k=20)])
def test_compiled_nothing_has_rows_times_vocabulary_but_the_gradient_of_the_logits(
    next_token: NextToken, entropy: bool, rng: np.random.Generator
) -> None:
    """The code that PyTorch generates allocates vectors in float32, and one matrix in the dtype of the logits."""
    compiled.cache_clear()
    torch.compiler.reset()
    logits = torch.from_numpy(rng.normal(size=(ROWS, VOCABULARY))).bfloat16()
    length_R = torch.from_numpy(rng.integers(0, 6, ROWS))
    nodes = torch.from_numpy(rng.integers(1, ROWS, NODES)), torch.from_numpy(rng.integers(10, VOCABULARY, NODES))
    smallest_R = next_token.smallest_kept(logits, length_R)
    inputs = (next_token, entropy, logits, length_R, smallest_R)

    def matrices(code: list[str]) -> list[str]:
        return re.findall(r"= empty_strided_cpu\(\(\w+, \w+\), \(\w+, 1\), torch\.(\w+)\)", "\n".join(code))

    reduced, code = run_and_get_code(compiled(_reduce), *inputs, *nodes)
    assert "empty_strided_cpu(" in "\n".join(code)
    assert matrices(code) == []
    of_rows = (*reduced[1:], torch.randn(ROWS), torch.randn(ROWS))
    gradient, code = run_and_get_code(compiled(_gradient), *inputs, *of_rows)
    assert matrices(code) == ["bfloat16"]
    for got, expected in zip(reduced, _reduce(*inputs, *nodes), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, _gradient(*inputs, *of_rows), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ties_at_the_edge_are_kept_however_they_are_rounded(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Equal logits that rounding moves by a unit in the last place, or by 16 after a long sum in 32 bits or more."""
    levels = [3.0, 2.0, 2.0, 2.0, 2.0, -1.0, -1.0, -6.0]
    halves = np.log([0.5, 0.25, 0.125, 0.0625, 0.0625]).tolist()
    rows = (
        (levels, {"top_p": 1.0, "top_k": 3}, 5),  # ties with the third
        (levels, {"top_p": 0.6, "top_k": 0}, 5),  # .38 + .14 each: the second of four ties
        (levels, {"top_p": 0.999, "top_k": 6}, 7),
        (halves, {"top_p": 0.75, "top_k": 0}, 2),  # the mass that is wanted is that of two tokens
        (halves, {"top_p": 6 / 7, "top_k": 3}, 2),  # that of two of the first three
    )
    units = torch.finfo(dtype).eps * (16 if dtype.itemsize > 2 else 0.5)
    for logits, kept, expected in rows:
        moved = np.array(logits) * (1 + units * rng.choice([-1, 0, 1], (50, len(logits))))
        logits_RV = torch.from_numpy(moved).to(dtype)
        smallest_R = smallest_kept(logits_RV, 1.0, **kept)
        is_kept_RV = logits_RV >= smallest_R[:, None]
        assert is_kept_RV.sum(1).tolist() == [expected] * 50, (kept, dtype)
        assert is_kept_RV[:, :expected].all()


def tied_model(seed: int) -> PreTrainedModel:
    """A model whose tokens r and 16 + r tie: both halves of its hidden states are equal, and their rows are swapped."""
    model = small_model(seed=seed, vocab_size=32, dtype=torch.float32, num_hidden_layers=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight[:, 16:] = weight[:, :16]
            elif "o_proj" in name or "down_proj" in name or "norm" in name:
                weight[16:] = weight[:16]
        head = model.get_output_embeddings().weight
        head[16:] = head[:16].roll(16, 1)
    return model


def test_engine_and_learner_keep_the_same_tied_tokens() -> None:
    """Each token ties with one whose sum has a different order, so the last bits differ by path."""
    for seed, kept in enumerate(({"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 11})):
        model = tied_model(seed)
        trees = NativeEngine(model, 31).sample(
            SampleTask([[1, 2, 3], [4, 5]], 60, SamplingParams(max_new_tokens=6, **kept), seed)
        )
        with torch.no_grad():
            chunks = list(
                choose_forward(model).chunk_logprobs(model, trees, next_token=NextToken(**kept), max_nodes=256)
            )
        for tree, logprob_M in zip(trees, by_tree(chunks, trees), strict=True):
            np.testing.assert_allclose(logprob_M.numpy(), tree.logprob, atol=1e-5)
