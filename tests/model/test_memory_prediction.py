"""The memory prediction: exact where it claims to be, against the bytes of real tensors; a refusal names the fix."""

import os
import platform
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from brorl.errors import UserError
from brorl.model.device import available_bytes, available_to_process, return_freed_memory
from brorl.model.lora import add_adapter
from brorl.model.memory_prediction import (
    MemoryLine,
    MemoryPrediction,
    ModelMemory,
    check_prediction,
    predict_memory,
)
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.settings import LoraSettings, States
from brorl.model.tree_attention import enable_gradient_checkpointing
from brorl.model.tree_path import chunk_logprobs
from brorl.training.adamw import AdamW
from brorl.tree import RolloutTree
from small_models import kept_bytes, mostly_slow, small_model

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
SETTINGS = MemorySettings("float32", 1 << 30, nodes_per_pass=256)


def named(plan: MemoryPrediction) -> dict[str, int]:
    return {line.name: line.num_bytes for line in plan.lines}


def bytes_of(tensors: object) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("architecture", mostly_slow(["llama", "qwen3"], "qwen3"))  # it has its own head dimension
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, "bfloat16"))
@pytest.mark.parametrize(
    "lora", [None, LoraSettings(rank=3), LoraSettings(rank=2, target_modules=("q_proj", "down_proj"))]
)
@pytest.mark.parametrize("states", ["device", "8bit"])
def test_what_is_kept_is_counted_exactly(
    architecture: str, dtype: str, lora: LoraSettings | None, states: States
) -> None:
    """Weights, gradients and moments of a real model after an AdamW step, tied embeddings counted once."""
    trained_dtype = torch.float32 if dtype == "bfloat16" and lora is None else DTYPES[dtype]
    large = {"intermediate_size": 300} if lora is None else {"intermediate_size": 2100}  # moments of some are in 8 bits
    model = small_model(architecture, tie_word_embeddings=True, dtype=trained_dtype, **large)
    settings = replace(SETTINGS, dtype=dtype, lora=lora, states=states)
    plan = predict_memory(model.config, replace(settings, reference=True), Workload())
    if lora:
        add_adapter(model, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(trained, states)
    sum(p.sum() for p in trained).backward()
    optimizer.step()
    moments = [moment for state in optimizer.state.values() for name, moment in state.items() if name != "step"]
    assert any(moment.dtype == torch.uint8 for moment in moments) == (states == "8bit")
    expected = {
        "weights": bytes_of(model.parameters()),
        "gradients": bytes_of(p.grad for p in trained),
        "AdamW": bytes_of(moments),
        "reference": bytes_of(trained),
    }
    if dtype == "bfloat16" and lora is None:
        expected["sampling copy"] = bytes_of(p.to(torch.bfloat16) for p in model.parameters())
    got = named(plan)
    assert {name: got.get(name) for name in expected} == expected
    assert set(got) == {*expected, "sampling", "learning"}
    assert plan.kept_bytes == sum(expected.values())
    assert "reference" not in named(predict_memory(model.config, settings, Workload()))


def test_moments_in_the_memory_of_the_cpu_are_not_on_the_device() -> None:
    """The allocator is the CPU's; only the prediction has the other device."""
    model = small_model(dtype=torch.float32)
    plans = {
        (device, states): named(
            predict_memory(model.config, replace(SETTINGS, device=device, states=states), Workload())
        )
        for device in ("cpu", "cuda")
        for states in ("device", "host")
    }
    assert plans["cuda", "device"]["AdamW"] == 2 * 4 * sum(p.numel() for p in model.parameters())
    assert "AdamW" not in plans["cuda", "host"]
    assert plans["cpu", "host"]["AdamW"] == plans["cpu", "device"]["AdamW"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_separate_engine_has_its_weights_a_file_of_them_and_its_whole_cache(
    dtype: str, rng: np.random.Generator
) -> None:
    model, limit = small_model(tie_word_embeddings=True, dtype=torch.float32), int(rng.integers(1 << 20, 1 << 40))
    settings = replace(SETTINGS, dtype=dtype, engine_bytes=limit, separate_engine=True)
    got = named(predict_memory(model.config, settings, Workload(num_rows=1)))
    assert got["sampling copy"] == 2 * bytes_of(p.to(DTYPES[dtype]) for p in model.parameters())
    assert got["sampling cache"] == limit
    adapted = named(predict_memory(model.config, replace(settings, lora=LoraSettings(rank=2)), Workload(num_rows=1)))
    assert 2 * adapted["sampling copy"] == got["sampling copy"]  # no file of all weights
    apart = named(predict_memory(model.config, replace(settings, engine_apart=True), Workload(num_rows=1)))
    own = ("sampling copy", "sampling cache", "sampling")
    assert apart == {name: size for name, size in got.items() if name not in own}


def test_an_engine_on_the_learners_gpu_sleeps_while_it_learns(rng: np.random.Generator) -> None:
    """On a CPU, its weights, the file of them and its cache are there all the time."""
    model, limit = small_model(tie_word_embeddings=True, dtype=torch.float32), int(rng.integers(1 << 20, 1 << 40))
    settings = replace(SETTINGS, engine_bytes=limit, separate_engine=True)
    workload = Workload(prompt_tokens=20, max_new_tokens=100, num_rows=1)
    awake = predict_memory(model.config, settings, workload)
    asleep = predict_memory(model.config, replace(settings, device="cuda"), workload)
    weights = bytes_of(model.parameters())
    assert asleep.sampling.num_bytes == awake.sampling.num_bytes + weights + limit
    process = named(asleep)["vLLM's process"]
    assert asleep.kept_bytes - process == awake.kept_bytes - 2 * weights - limit
    assert asleep.total_bytes == asleep.kept_bytes + max(asleep.sampling.num_bytes, asleep.learning.num_bytes)
    assert asleep.row_bytes == awake.row_bytes == 120 * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, numbers


def test_a_separate_engine_computes_logits_of_all_its_rows(rng: np.random.Generator) -> None:
    config = small_model(vocab_size=50_000).config
    rows = int(rng.integers(100, 1000))
    settings = replace(SETTINGS, separate_engine=True, engine_rows=rows)
    of_rows = predict_memory(config, settings, Workload()).sampling.num_bytes
    assert of_rows == rows * 50_000 * (2 + 4 * 4)
    assert predict_memory(config, settings, Workload(num_rows=50)).sampling.num_bytes < of_rows / 2


@pytest.mark.slow
def test_planning_a_model_far_too_large_takes_no_memory() -> None:
    config = small_model().config
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 8192, 28672, 80
    config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size = 64, 8, 128, 128_256
    plan = predict_memory(config, SETTINGS, Workload())
    assert 70e9 * 4 < named(plan)["weights"] < 71e9 * 4  # Llama 3 70B
    with pytest.raises(
        UserError, match=r"needs .*AdamW 52\d\.\d GiB \(shrinks with optimizer.states: 8bit, lora.rank\)"
    ):
        check_prediction(plan, 80 << 30)


def test_a_cache_that_is_kept_counts_beside_learning() -> None:
    model, workload = small_model(dtype=torch.bfloat16), Workload(20, 100, num_rows=500)
    on_cuda = replace(SETTINGS, device="cuda", nodes_per_pass=4096)
    freed, kept = (
        predict_memory(model.config, replace(on_cuda, graphs=choice), workload) for choice in ("off", "auto")
    )
    cache = named(kept)["sampling cache"]
    in_graphs = cache + kept.sampling.num_bytes - freed.sampling.num_bytes  # what a step takes stays beside the rows
    assert in_graphs >= 2 * 500 * 4 * (20 + 100) * 4  # scores and weights of 4 heads, while rows are short
    assert kept.total_bytes == freed.kept_bytes + cache + max(kept.sampling.num_bytes, kept.learning.num_bytes)
    assert "sampling cache" not in named(freed)
    joined = 2 * (4 + 2 + 2) * 8 * 32 + 2 * 2 * 48 * 32  # queries, keys and values, gates and what is gated
    on_cpu = predict_memory(model.config, SETTINGS, workload)
    assert named(freed)["joined weights"] == joined * 4
    assert "joined weights" not in named(on_cpu)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("vocabulary", mostly_slow([50, 2000]))
def test_the_learners_estimate_is_near_what_autograd_keeps(
    checkpointing: bool, vocabulary: int, rng: np.random.Generator
) -> None:
    model = small_model(
        vocab_size=vocabulary, num_hidden_layers=6, hidden_size=64, intermediate_size=192, dtype=torch.float32
    )
    model.train()
    if checkpointing:
        enable_gradient_checkpointing(model)
    responses = rng.integers(0, vocabulary, (16, 32)).tolist()
    tree = RolloutTree.from_responses(rng.integers(0, vocabulary, 32).tolist(), responses, finished=[False] * 16)
    settings, workload = replace(SETTINGS, nodes_per_pass=512), Workload(32, 32, num_rows=16, num_prompts=1)
    with_layers = predict_memory(model.config, settings, workload).learning.num_bytes
    settings = replace(settings, gradient_checkpointing=checkpointing)
    planned = predict_memory(model.config, settings, workload).learning.num_bytes
    kept = kept_bytes(model, chunk_logprobs(model, [tree], max_nodes=512))
    if checkpointing:  # most of it is there in passing only, which autograd does not count
        assert kept < planned < 0.85 * with_layers
    else:
        assert 1 < planned / kept < 3  # what is there in passing comes on top


def test_the_sizes_of_qwen3_06b_by_hand() -> None:
    model = ModelMemory(
        Qwen3Config(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        )
    )  # fmt: skip
    attention = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 2 * 128
    total = 28 * (attention + 3 * 1024 * 3072 + 2 * 1024) + 151_936 * 1024 + 1024
    passes = model.passes
    assert (model.num_weights, passes.layers, passes.hidden, passes.vocabulary) == (total, 28, 1024, 151_936)
    assert total == 596_049_920
    activations = 6 * 1024 * 4 + 2 * 1024 * 2 + (4 * 3072 + 7 * 16 * 128) * 2
    settings = replace(SETTINGS, dtype="bfloat16")
    again = replace(settings, gradient_checkpointing=True)
    assert passes.pass_bytes(settings, 10, 10) == 10 * (28 + 3) * activations
    assert passes.pass_bytes(again, 10, 10) == 10 * (28 * 1024 * 4 + (1 + 3) * activations)
    # compiled: a float32 hidden state; 3 h, 3 H D and 3 m in bfloat16; keys and values, and 8 copied blocks of them
    keys = 2 * 8 * 128 * 2
    compiled = 1280 * (1024 * 4 + 3 * (1024 + 16 * 128 + 3072) * 2 + keys) + 10 * (640 // 128 + 2) // 8 * 128 * keys
    assert passes.pass_bytes(replace(settings, device="cuda"), 1280, 640) == (28 + 3) * compiled
    assert passes.pass_bytes(replace(again, device="cuda"), 1280, 640) == 28 * 1280 * 1024 * 4 + (1 + 3) * compiled


def large_config() -> Qwen3Config:
    """Return a config of the size of Qwen3-1.7B."""
    return Qwen3Config(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=40_960,
    )  # fmt: skip


@pytest.mark.slow
def test_512_responses_of_16k_tokens_fit_on_one_device_and_errors_name_the_settings() -> None:
    available = 139 << 30
    workload = Workload(1024, 16_384, num_rows=32 * 512, num_prompts=8)
    settings = MemorySettings("bfloat16", 90 << 30, gradient_checkpointing=True)
    plan = predict_memory(large_config(), settings, workload, available)
    assert check_prediction(plan, available) is None
    with pytest.raises(UserError, match=r"sampling .* \(shrinks with engine.memory_gib\)"):
        check_prediction(predict_memory(large_config(), replace(settings, engine_bytes=120 << 30), workload), available)
    little = replace(settings, engine_bytes=8 << 30, gradient_checkpointing=False)
    warning = check_prediction(predict_memory(large_config(), little, workload), available=80 << 30)
    assert warning is not None
    assert "engine.gradient_checkpointing" in warning


@pytest.mark.slow
def test_the_learners_memory_grows_with_the_length_and_not_with_its_square() -> None:
    """Twice the tokens never take more than twice the memory, once logits and attention weights are at their limits."""
    settings = MemorySettings("bfloat16", 1 << 30, gradient_checkpointing=True)
    learning = [
        predict_memory(large_config(), settings, Workload(1024, length)).learning.num_bytes
        for length in (4096, 8192, 16_384, 32_768)
    ]
    assert all(a < b < 2 * a for a, b in pairwise(learning))
    whole = 3 * 16_384 * 151_936 * 4 + 16_384 * 16 * (1024 + 16_384) * 4  # logits, and attention weights of a layer
    assert learning[2] < whole


@pytest.mark.slow
def test_the_default_of_cuda_is_halved_until_it_fits() -> None:
    config, workload = small_model().config, Workload(64, 512, num_rows=1 << 20, num_prompts=8)

    def planned(available: int | None, nodes: int | None = None, device: str = "cuda") -> MemoryPrediction:
        settings = replace(SETTINGS, engine_bytes=1 << 20, nodes_per_pass=nodes, device=device)
        return predict_memory(config, settings, workload, available)

    sizes = {nodes: planned(None, nodes) for nodes in (1024, 2048, 4096, 8192, 16384)}
    assert planned(None).learning == sizes[16384].learning
    for nodes, plan in sizes.items():
        room = plan.kept_bytes + plan.learning.num_bytes
        assert planned(room).learning == plan.learning
        assert planned(room - 1).learning == sizes[max(1024, nodes // 2)].learning
        assert planned(0, nodes).learning == plan.learning  # a size that is set stays
    assert planned(None, device="cpu").learning == planned(0, device="cpu").learning == planned(0, 1024, "cpu").learning


PLAN = MemoryPrediction(
    (MemoryLine("weights", 3 << 30, "dtype"), MemoryLine("AdamW", 6 << 30, "lora.rank")),
    MemoryLine("sampling", 4 << 30, "engine.memory_gib"),
    MemoryLine("learning", 5 << 30, "engine.nodes_per_pass"),
)


def test_what_does_not_fit_is_refused_and_what_may_not_is_said() -> None:
    assert (PLAN.kept_bytes, PLAN.certain_bytes, PLAN.total_bytes) == (9 << 30, 13 << 30, 14 << 30)
    assert check_prediction(PLAN, None) is None
    assert check_prediction(PLAN, 14 << 30) is None
    warning = check_prediction(PLAN, (14 << 30) - 1)
    assert warning is not None
    assert "may need 14.0 GiB" in warning
    assert "learning 5.0 GiB (shrinks with engine.nodes_per_pass)" in warning
    assert check_prediction(PLAN, 13 << 30) == warning.replace("14.0 GiB are", "13.0 GiB are")
    with pytest.raises(UserError) as refusal:
        check_prediction(PLAN, (13 << 30) - 1)
    assert str(refusal.value) == (
        "the run needs 13.0 GiB of memory, but 13.0 GiB are available: AdamW 6.0 GiB (shrinks with lora.rank); "
        "sampling 4.0 GiB (shrinks with engine.memory_gib); weights 3.0 GiB (shrinks with dtype)"
    )


def test_the_summary_is_one_line() -> None:
    parts = "AdamW 6.0 GiB, learning 5.0 GiB, sampling 4.0 GiB, weights 3.0 GiB"
    assert PLAN.summary == f"memory: about 14.0 GiB predicted at most ({parts})"
    assert replace(PLAN, available_bytes=22 << 30).summary == f"{PLAN.summary}; 22.0 GiB available"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:    8000 kB"}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 8000 * 1024),
        (MEMINFO | {"proc/self/cgroup": "0::/", f"{V2}/memory.max": "max", f"{V2}/memory.current": 5}, 8000 * 1024),
        (MEMINFO | {"proc/self/cgroup": "0::/", f"{V2}/memory.max": 7000, f"{V2}/memory.current": 5000,
                    f"{V2}/memory.stat": "anon 9\ninactive_file 300"}, 2300),
        (MEMINFO | {"proc/self/cgroup": "0::/job/step", f"{V2}/job/step/memory.max": "max",
                    f"{V2}/job/step/memory.current": 10, f"{V2}/job/memory.max": 900, f"{V2}/job/memory.current": 200},
         700),
        (MEMINFO | {"proc/self/cgroup": "5:cpu:/x\n4:memory:/x", f"{V1}/x/memory.limit_in_bytes": 5000,
                    f"{V1}/x/memory.usage_in_bytes": 4000, f"{V1}/x/memory.stat": "total_inactive_file 50"}, 1050),
        (MEMINFO | {"proc/self/cgroup": "0::/", f"{V2}/memory.max": 10, f"{V2}/memory.current": 50}, 0),
    ],
)  # fmt: skip
def test_available_memory_is_the_least_of_the_kernels_and_the_limits(
    files: dict[str, object], expected: int | None, tmp_path: Path
) -> None:
    assert available_to_process(write(tmp_path, files)) == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory between blocks in use")
def test_freed_memory_between_blocks_in_use_is_returned() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size, number = 2**16, 2048  # 128 MiB in blocks that are small enough for the heap
    blocks = [np.ones(size, np.uint8) for _ in range(number)]
    del blocks[::2]
    before = resident()
    return_freed_memory()
    assert resident() < before - size * number // 4
    assert all(block.all() for block in blocks)


@pytest.mark.skipif(sys.platform != "linux", reason="reads files of Linux")
def test_this_machine_tells_its_memory() -> None:
    available = available_bytes(torch.device("cpu"))
    assert available is not None
    assert 1 << 26 < available < 1 << 46


@pytest.mark.slow
def test_the_rollouts_of_a_draw_are_planned_up_to_their_limit() -> None:
    """A draw of many rollouts on few rows: each needs the masses it searches among, until they are in blocks."""
    config = small_model(dtype=torch.float32, vocab_size=50_000).config
    rows = [1, 100, 1000, 100_000, 200_000]
    planned = [
        predict_memory(config, replace(SETTINGS, engine_bytes=1 << 21), Workload(1, 2, num_rows=n)).sampling.num_bytes
        for n in rows
    ]
    searched = 256 + 50_000 // 256 + 1
    assert planned[2] - planned[1] == pytest.approx(900 * searched * 16, rel=0.05)
    assert planned[4] == planned[3] >= (1 << 21) * 16
