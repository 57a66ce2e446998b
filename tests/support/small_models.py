"""Tiny random models, random trees, and the plain reference: N x T rows, padded on the right, no tree and no hooks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from brorl.tree import RolloutTree

ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 6}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 12, "sliding_window": None}),
    "hooked": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),  # its norms keep it from the Llama pass
}


def mostly_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters of a test, of which the default suite has some; without names, the first one."""
    values = list(values)
    kept = quick or values[:1]
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def small_model(
    architecture: str = "llama",
    *,
    vocab_size: int = 17,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    scale: float = 0.25,
    **overrides: object,
) -> PreTrainedModel:
    """Build a grouped-query model (4 query heads, 2 key-value heads) with every parameter random, biases and norms too.

    Its RMSNorms compute in the model's own dtype. (Those of transformers round to float32, which would hide
    errors up to 1e-7.)
    """
    config_class, model_class, options = ARCHITECTURES[architecture]
    config = config_class(**{
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        **options,
        **overrides,
    })  # fmt: skip
    model = model_class(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            center = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(center + scale * noise)
    use_exact_norms(model, replace_class=architecture != "hooked")
    return model.eval()


def use_exact_norms(model: PreTrainedModel, *, replace_class: bool = True) -> None:
    """Let the RMSNorms of a model compute in its own dtype; with their class replaced, they pass for unchanged ones."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            if replace_class:
                module.__class__ = ExactRMSNorm
            else:
                module.forward = MethodType(ExactRMSNorm.forward, module)


class ExactRMSNorm(torch.nn.Module):
    """An RMSNorm without rounding to float32."""

    __module__ = "transformers.exact"

    def forward(self, x: Tensor) -> Tensor:
        """Return x over its root mean square, times the weight."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def random_tree(
    rng: np.random.Generator,
    *,
    prompt_length: int | None = None,
    num_rollouts: int = 12,
    max_length: int = 7,
    vocab_size: int = 17,
    branching: int = 3,
    eos: int = 0,
) -> RolloutTree:
    """Random rollouts that share prefixes: ragged, with duplicates, some finished by `eos`, some truncated."""
    prompt = rng.integers(1, vocab_size, prompt_length or rng.integers(1, 10)).tolist()
    alphabet = rng.choice(np.arange(1, vocab_size), branching, replace=False)
    responses = []
    for _ in range(num_rollouts):
        body = rng.choice(alphabet, rng.integers(0, max_length)).tolist()
        responses.append([*body, eos] if rng.random() < 0.6 or not body else body)
    responses += [responses[i] for i in rng.integers(0, num_rollouts, num_rollouts // 2)]
    return RolloutTree.from_responses(prompt, responses, finished=[r[-1] == eos for r in responses])


def with_given(tree: RolloutTree, rng: np.random.Generator, fraction: float = 0.35) -> RolloutTree:
    """The tree with some of its nodes given: never a leaf, and never a first token."""
    given_M = (rng.random(tree.num_nodes) < fraction) & (tree.parent >= 0)
    given_M[tree.leaf] = False
    return replace(tree, given=given_M, logprob=np.where(given_M, 0.0, tree.logprob))


def rollouts(tree: RolloutTree) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (distinct response, its nodes) once for each of the N rollouts."""
    for leaf in range(tree.num_responses):
        for _ in range(tree.leaf_count[leaf]):
            yield leaf, tree.path(int(tree.leaf[leaf]))


def plain_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> list[Tensor]:
    """Log-probs of each response's tokens from one right-padded batch through the model as Hugging Face wrote it."""
    rows = [list(p) + list(r) for p, r in zip(prompts, responses, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logprob = torch.log_softmax(logits / temperature, dim=-1)
    found = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        predicting = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        found.append(logprob[i, predicting, torch.tensor(list(response))])
    return found


def flattened_logprobs(
    model: PreTrainedModel, trees: Sequence[RolloutTree], temperature: float = 1.0
) -> list[list[Tensor]]:
    """Log-probs of all N rollouts of each tree, duplicates computed again, in the order of `rollouts(tree)`."""
    prompts = [t.prompt_ids for t in trees for _ in range(t.num_rollouts)]
    responses = [t.token[path].tolist() for t in trees for _, path in rollouts(t)]
    flat = iter(plain_logprobs(model, prompts, responses, temperature))
    return [[next(flat) for _ in range(t.num_rollouts)] for t in trees]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copies of all parameter gradients; zeros where there is none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Compare each parameter's gradient, relative to its own norm (and refuse a reference that is all zero)."""
    total = float(torch.stack([g.norm() for g in expected.values()]).norm())
    assert total > 1e-6
    for name, gradient in expected.items():
        error = float((got[name] - gradient).norm())
        assert error <= tolerance * max(float(gradient.norm()), 1e-3 * total), (name, error, float(gradient.norm()))


def wide_heads(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a Llama with heads of twice the size that computes the same function.

    The new numbers of a head are 0. Number j of the old head is at 2 j, whose rotary frequency is the same in the wider
    head, and queries are multiplied by sqrt(2), since scores are divided by the root of the head's size.
    """
    old = model.config
    config = LlamaConfig.from_dict({**old.to_dict(), "head_dim": 2 * old.head_dim})
    wide = LlamaForCausalLM(config)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    half = old.head_dim // 2
    place = torch.cat([2 * torch.arange(half), old.head_dim + 2 * torch.arange(half)])
    for name, tensor in weights.items():
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            heads = tensor.unflatten(0, (-1, old.head_dim))
            spread = heads.new_zeros(heads.shape[0], 2 * old.head_dim, heads.shape[2])
            spread[:, place] = heads * 2**0.5 if part == "q_proj" else heads
            weights[name] = spread.flatten(0, 1)
        elif part == "o_proj":
            heads = tensor.unflatten(1, (-1, old.head_dim))
            spread = heads.new_zeros(*heads.shape[:2], 2 * old.head_dim)
            spread[:, :, place] = heads
            weights[name] = spread.flatten(1, 2)
    wide.load_state_dict(weights)
    return wide.eval()


def kept_bytes(model: PreTrainedModel, chunks: Iterable[Any], left_out: tuple[int, ...] | None = None) -> int:
    """Return the most bytes that autograd keeps for the backward pass of a chunk; each storage counts once.

    Weights do not count, and neither do tensors whose last two sizes are `left_out`.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and (tensor.dim() < 2 or tensor.shape[-2:] != left_out):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    most = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for chunk in chunks:
            most = max(most, sum(kept.values()))
            chunk.logprob.sum().backward()
            kept.clear()
    return most


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
