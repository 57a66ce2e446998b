"""Log-probs and entropies of nodes against autograd in float64, and the memory of compiled reductions."""

import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from brorl.model.flex_attention import compiled
from brorl.model.logits import RowLogits
from brorl.model.logprobs import LogprobHead, NextToken, _gradient, _reduce

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
    found = torch.autograd.grad(loss, [hidden, head.weight, head.bias])

    exact = [x.detach().double().requires_grad_() for x in (hidden, head.weight, head.bias)]
    logits = exact[0] @ exact[1].T + exact[2]
    logprob_K, entropy_K = expected_outputs(logits, next_token, length_R, row_K, token_K)
    reference = torch.autograd.grad((logprob_K * weight_K).sum() + (entropy_K * bonus_K).sum(), exact)
    bound = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    order_K = chunk.index
    torch.testing.assert_close(chunk.logprob.double(), logprob_K[order_K], rtol=bound, atol=bound)
    torch.testing.assert_close(chunk.entropy.double(), entropy_K[order_K], rtol=bound, atol=bound)
    for got, gradient in zip(found, reference, strict=True):
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
