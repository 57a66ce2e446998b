"""Learner ranks: each has the same model, and a part of the responses."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import rank_model_cases
from brorl.errors import UserError
from brorl.model.chunks import tree_costs
from brorl.model.flat_path import flat_costs
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.training.ranks import ALONE, deal, join
from rank_model_cases import Loading
from rank_processes import RankProcesses
from small_models import random_tree

SIZES = {
    "vocab_size": 17, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma3_text": {"head_dim": 8},  # its embedding has a buffer, and there are two rotations
    "mamba": {"state_size": 4},
}
LORA = LoraSettings(rank=2)  # rank 2: a rank of 3 has no rows of an adapter


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses(3)
    yield started
    started.close()


def save(folder: Path, kind: str, rng: np.random.Generator, **overrides: object) -> Path:
    """Save a model with random weights."""
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind], **overrides})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(float(parameter.dim() == 1), 0.25, parameter.shape)))
    model.save_pretrained(folder)
    return folder


def check(processes: RankProcesses, size: int, loading: Loading) -> rank_model_cases.Described:
    expected = rank_model_cases.describe(loading.load())
    assert expected.buffers or loading.folder.name == "mamba"
    for got, on_meta in processes.run(size, rank_model_cases.loaded, loading):
        assert all(on_meta)
        for name in ("parameters", "buffers"):
            assert getattr(got, name).keys() == getattr(expected, name).keys()
            for tensor, value in getattr(expected, name).items():
                assert getattr(got, name)[tensor] == value, tensor
        assert got == expected
        # Rounding: sums of at most 48 terms through 2 layers. A wrong weight, mask or scale moves logits by their size.
        bound = min(1000 * torch.finfo(loading.dtype).eps, 0.25) * np.abs(expected.logits).max()
        np.testing.assert_allclose(got.logits, expected.logits, rtol=0, atol=bound)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_every_rank_has_the_model_that_one_process_loads(
    kind: str, size: int, processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    results = check(processes, size, Loading(save(tmp_path / kind, kind, rng)))
    tied = ["lm_head.weight", "model.embed_tokens.weight"]
    assert any(sorted(names) == tied for names in results.same_objects) == (kind in ("llama", "gemma3_text"))


def test_matrices_that_are_in_memory_column_by_column(
    processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    check(processes, 2, Loading(save(tmp_path / "qwen3", "qwen3", rng), torch.float64, transposed=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_in_float32_on_a_frozen_base(
    dtype: torch.dtype, processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    folder = save(tmp_path, "qwen3", rng)
    results = check(processes, 3, Loading(folder, dtype, LORA, gradient_checkpointing=True))
    trained = {name: values[1] for name, values in results.parameters.items() if values[0]}
    assert set(trained.values()) == {torch.float32}
    assert all("lora_" in name for name in trained)
    assert {values[1] for values in results.parameters.values() if not values[0]} == {dtype}


@pytest.mark.parametrize("lora", [None, LORA])
def test_saved_adapters_are_merged_or_continued(
    lora: LoraSettings | None, processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    base = save(tmp_path / "base", "llama", rng)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.name_or_path = str(base)
    add_adapter(model, LORA)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.from_numpy(rng.normal(size=parameter.shape)))
    model.save_pretrained(tmp_path / "adapter")
    check(processes, 2, Loading(tmp_path / "adapter", torch.bfloat16, lora))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_rank_but_the_first_has_more_than_its_shards_and_one_weight(
    size: int, processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 257}
    loading = Loading(save(tmp_path, "qwen3", rng, **sizes))
    weights = [p.nbytes for p in loading.load().parameters()]
    blueprint_bytes = 1 << 15  # about 4 times its size
    for rank, (peak, shards, buffers) in enumerate(processes.run(size, rank_model_cases.memory, loading)):
        assert sum(weights) / size * 0.9 < shards < sum(weights) / size * 1.1
        if rank == 0:
            assert sum(weights) <= peak < sum(weights) + max(weights) + buffers + blueprint_bytes
        else:
            assert shards <= peak < shards + max(weights) + buffers + blueprint_bytes < sum(weights)


def test_all_ranks_end_with_the_error_of_the_first_one(
    processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    loading = Loading(save(tmp_path / "damaged", "qwen3", rng))
    weights = tmp_path / "damaged" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    place = f"learner rank 0 on machine {socket.gethostname()}: "
    for error, text in [
        (loading, f"the weights of '{loading.folder}' are damaged"),
        (replace(loading, folder=tmp_path / "nowhere"), f"model folder {tmp_path / 'nowhere'} does not exist"),
    ]:
        first, *others = processes.run(3, rank_model_cases.failure, error)
        assert first.startswith(f"UserError: {text}")
        assert others == [first.replace("UserError: ", f"FirstRankError: {place}")] * 2
    first, *others = processes.run(3, rank_model_cases.failure, None)
    assert first == "KeyError: 'a fault'"
    assert others == [f"RuntimeError: {place}KeyError: 'a fault'"] * 2
    check(processes, 3, Loading(save(tmp_path / "whole", "qwen3", rng)))  # the ranks are still in step


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_passes_are_checked_on_shards(
    compiled: bool, processes: RankProcesses, rng: np.random.Generator, tmp_path: Path
) -> None:
    loading = Loading(save(tmp_path, "llama", rng))
    assert processes.run(2, rank_model_cases.checked_packed, loading, 1.0, compiled) == ["", ""]
    for error in processes.run(2, rank_model_cases.checked_packed, loading, 2.0, compiled):
        assert error.startswith("the log-probs of FSDPLlamaForCausalLM change")


def test_one_process_joins_nothing_and_is_its_own_sum() -> None:
    assert join(0, 1, "nowhere", 1) == ALONE
    numbers = torch.tensor([1.5, -2.0])
    assert ALONE.sum(numbers) is numbers
    assert ALONE.maximum(3) == 3
    assert ALONE.gather("mine") == ["mine"]
    assert ALONE.call_on_first_rank(lambda: "mine") == "mine"


def test_a_rank_that_meets_no_others_ends_with_an_error() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=rf"could not reach the other learner ranks at 127\.0\.0\.1:{port} within"):
            join(1, 2, "127.0.0.1", port, timeout_s=0.5)
    assert not torch.distributed.is_initialized()


def best_largest(cost: np.ndarray, num_ranks: int) -> float:
    """The largest fraction of the best of all contiguous cuts."""
    cuts = combinations_with_replacement(range(cost.size + 1), num_ranks - 1)
    ends = ([0, *cut, cost.size] for cut in cuts)
    return min(max(cost[a:b].sum() for a, b in pairwise(e)) for e in ends)


@given(seed=st.integers(0, 1 << 30), num_trees=st.integers(0, 4), num_ranks=st.integers(1, 5))
def test_every_response_goes_to_one_rank_and_shares_cost_nearly_the_same(
    seed: int, num_trees: int, num_ranks: int
) -> None:
    rng = np.random.default_rng(seed)
    costs = [np.exp(rng.normal(size=rng.integers(1, 6))) for _ in range(num_trees)]
    shares = deal(costs, num_ranks)
    assert len(shares) == num_ranks
    dealt = [(p.tree, leaf) for share in shares for p in share for leaf in range(p.start, p.stop)]
    assert dealt == [(tree, leaf) for tree, cost_L in enumerate(costs) for leaf in range(cost_L.size)]
    assert all(piece.start < piece.stop for share in shares for piece in share)
    assert sum(map(len, shares)) <= num_trees + num_ranks - 1
    if not num_trees:
        return
    cost = np.concatenate(costs)
    totals = np.array([sum(costs[p.tree][p.start : p.stop].sum() for p in share) for share in shares])
    assert np.abs(totals - cost.sum() / num_ranks).max() <= cost.max() * (1 + 1e-12)
    assert totals.max() <= best_largest(cost, num_ranks) + cost.max() * (1 + 1e-12)


@pytest.mark.parametrize("per_position", [0.0, 0.1])
def test_a_response_costs_its_new_tokens_on_the_tree_and_all_of_them_as_a_row(
    per_position: float, rng: np.random.Generator
) -> None:
    tree = random_tree(rng, num_rollouts=30, branching=4)
    prompt = [1 + per_position * position for position in range(len(tree.prompt_ids))]
    tree_cost, row_cost, seen = [], [], set()
    for index, (tokens, _) in enumerate(tree.responses()):
        prefixes = [tokens[: i + 1] for i in range(len(tokens))]
        of = {p: 1 + per_position * (len(prompt) + len(p) - 1) for p in prefixes}
        tree_cost.append(sum(of[p] for p in prefixes if p not in seen) + (sum(prompt) if index == 0 else 0))
        row_cost.append(sum(prompt) + sum(of.values()))
        seen.update(prefixes)
    np.testing.assert_allclose(tree_costs(tree, per_position), tree_cost, rtol=1e-12, atol=1e-8)
    np.testing.assert_allclose(flat_costs(tree, per_position), row_cost, rtol=1e-12)
