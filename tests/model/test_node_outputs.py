"""Log-probs and entropies of nodes against autograd in float64, and the memory of compiled reductions."""

import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from brorl.model import compiled
from brorl.model.logits import NextToken, RowLogits
from brorl.model.node_outputs import NodeOutputs, _gradient, _reduce

ROWS, NODES, VOCABULARY = 13, 40, 50
NEXT_TOKENS = [NextToken(), NextToken(0.7), NextToken(1.3, 3, (5, 9))]


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
        logprob = (logits[row, allowed] / next_token.temperature).log_softmax(0)
        logprobs.append(logprob[allowed.index(token)])
        entropies.append(-(logprob.exp() * logprob).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("next_token", NEXT_TOKENS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [False, True])
def test_values_and_gradients_equal_the_definition(
    blocks: bool, dtype: torch.dtype, next_token: NextToken, rng: np.random.Generator
) -> None:
    """Several nodes of a row, rows without nodes, tokens that cannot be drawn; blocks of 3 rows."""
    hidden = torch.from_numpy(rng.normal(size=(ROWS, 8))).to(dtype).requires_grad_()
    head = nn.Linear(8, VOCABULARY, dtype=dtype)
    length_R = torch.from_numpy(rng.integers(0, 6, ROWS))
    row_K, token_K = (
        torch.from_numpy(rng.integers(1, ROWS, NODES)),
        torch.from_numpy(rng.integers(10, VOCABULARY, NODES)),
    )
    weight_K, bonus_K = (torch.from_numpy(rng.normal(size=NODES)) for _ in range(2))
    outputs = NodeOutputs(next_token, entropy=True, logits_per_block=3 * VOCABULARY)
    rows = RowLogits(hidden, head, VOCABULARY) if blocks else RowLogits(head(hidden))
    chunk = outputs.of(rows, length_R, row_K, token_K, torch.arange(NODES))
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
    outputs = NodeOutputs(NextToken(1.0, 4, (2,)), entropy=False)
    index = torch.tensor([0, 1])
    chunk = outputs.of(RowLogits(logits), torch.tensor([1, 9]), index, torch.tensor([2, 2]), index)
    assert float(chunk.logprob[0].detach()) == -np.inf
    chunk.logprob[1].backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[0].any()
    assert logits.grad[1].all()


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [False, True])
def test_compiled_nothing_has_rows_times_vocabulary_but_the_gradient_of_the_logits(
    entropy: bool, rng: np.random.Generator
) -> None:
    """The code that PyTorch generates allocates vectors in float32, and one matrix in the dtype of the logits."""
    compiled.compiled.cache_clear()
    torch.compiler.reset()
    next_token = NextToken(0.7, 3, (5, 9))
    logits = torch.from_numpy(rng.normal(size=(ROWS, VOCABULARY))).bfloat16()
    length_R = torch.from_numpy(rng.integers(0, 6, ROWS))
    nodes = torch.from_numpy(rng.integers(1, ROWS, NODES)), torch.from_numpy(rng.integers(10, VOCABULARY, NODES))
    inputs = (next_token, entropy, logits, length_R)

    def matrices(code: list[str]) -> list[str]:
        return re.findall(r"= empty_strided_cpu\(\(\w+, \w+\), \(\w+, 1\), torch\.(\w+)\)", "\n".join(code))

    reduced, code = run_and_get_code(compiled.compiled(_reduce), *inputs, *nodes)
    assert "empty_strided_cpu(" in "\n".join(code)
    assert matrices(code) == []
    of_rows = (*reduced[1:], torch.randn(ROWS), torch.randn(ROWS))
    gradient, code = run_and_get_code(compiled.compiled(_gradient), *inputs, *of_rows)
    assert matrices(code) == ["bfloat16"]
    for got, expected in zip(reduced, _reduce(*inputs, *nodes), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, _gradient(*inputs, *of_rows), rtol=0.01, atol=0.01)
