"""The way of weights to vLLM: adapters as peft writes them, and memory that a receiver maps.

CUDA IPC does not run here. Memory of the CPU takes the same way; the numbers of GPUs are replaced.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import reductions

from brorl.errors import UserError
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.rollout import vllm_process, vllm_transfer
from brorl.rollout.vllm_process import VllmProcess, VllmSettings
from brorl.rollout.vllm_transfer import mapped, publish, shared_handles, try_ipc
from small_models import small_model

CPU = torch.device("cpu")


def random_weights(rng: np.random.Generator) -> dict[str, Tensor]:
    """Tensors of several formats; one is not contiguous, two share memory, one needs a gradient."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    a, b = rng.integers(1, 40, 2).tolist()
    w = torch.randn(a, b, generator=generator)
    return {
        "w": w, "rows": w[a // 2 :], "columns": torch.randn(b, a, generator=generator).t(),
        "half": torch.randn(a, generator=generator).to(torch.bfloat16), "steps": torch.arange(b),
        "trained": torch.randn(a, b, generator=generator).requires_grad_(),
    }  # fmt: skip


def test_published_adapters_are_those_that_peft_saves(rng: np.random.Generator, tmp_path: Path) -> None:
    model = small_model("qwen3", dtype=torch.bfloat16)
    lora = LoraSettings(
        rank=int(rng.integers(1, 9)), alpha=float(rng.uniform(1, 40)), target_modules=("q_proj", "up_proj")
    )
    add_adapter(model, lora)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    folder = publish(model.named_parameters(), torch.bfloat16, lora)
    try:
        model.save_pretrained(tmp_path)
        found, saved = (load_file(path / "adapter_model.safetensors") for path in (folder.path, tmp_path))
        config, reference = (PeftConfig.from_pretrained(path) for path in (folder.path, tmp_path))
        text = json.loads((folder.path / "adapter_config.json").read_text())
    finally:
        folder.remove()
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32  # bfloat16 would round small updates away
        assert torch.equal(tensor, saved[name])
    assert (config.peft_type, config.r, config.lora_alpha) == (reference.peft_type, lora.rank, lora.alpha)
    assert isinstance(text["target_modules"], list)  # vLLM requires the key


def test_mapped_tensors_are_those_that_were_shared(rng: np.random.Generator) -> None:
    weights = random_weights(rng)
    received = dict(mapped(shared_handles(weights.items())))
    assert list(received) == list(weights)
    for name, tensor in weights.items():
        assert torch.equal(received[name], tensor)
        assert not received[name].requires_grad
    with torch.no_grad():
        weights["w"].zero_()
    assert not received["rows"].any()  # the memory is shared, not copied


def test_a_gpu_is_found_by_its_name_where_it_has_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild(*arguments: Any) -> tuple[Any, ...]:
        return arguments

    rebuild.__module__, rebuild.__qualname__ = reductions.__name__, "rebuild_cuda_tensor"
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(vllm_transfer, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i + 5}"))
    arguments = tuple(range(14))
    assert dict(mapped(pickle.dumps([("w", "GPU-7", rebuild, arguments)]))) == {
        "w": (*arguments[:6], 2, *arguments[7:])
    }
    with pytest.raises(RuntimeError, match="does not see the learner's GPU GPU-4"):
        dict(mapped(pickle.dumps([("w", "GPU-4", rebuild, arguments)])))


def arrived(handles: bytes) -> list[list[float]]:
    """What two workers of an engine read."""
    ((_, tensor),) = mapped(handles)
    return [tensor.tolist()] * 2


def one_differs(handles: bytes) -> list[list[float]]:
    first, second = arrived(handles)
    return [first, [*second[:-1], second[-1] + 1e-3]]


def fails(_: bytes) -> list[list[float]]:
    raise RuntimeError("CUDA error: invalid device context\nCompile with ...")


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (arrived, None),
        (one_differs, "the engine read other numbers"),
        (fails, "CUDA error: invalid device context"),
        (lambda _: [], "the engine read other numbers"),
    ],
)
@pytest.mark.parametrize("transfer", ["auto", "ipc"])
def test_ipc_is_chosen_if_the_trial_passes(
    engine: Callable[[bytes], list[list[float]]], problem: str | None, transfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert try_ipc(engine, CPU) == problem
    process, calls = VllmProcess.__new__(VllmProcess), list[str]()

    def rpc(method: str, args: tuple[bytes]) -> list[list[float]]:
        calls.append(method)
        return engine(*args)

    monkeypatch.setattr(process, "_llm", SimpleNamespace(collective_rpc=rpc), raising=False)
    monkeypatch.setattr(process, "close", lambda: calls.append("close"))
    monkeypatch.setattr(vllm_process, "try_ipc", lambda call, _: try_ipc(call, CPU))
    settings = VllmSettings("m", "float32", 8, 1, transfer=transfer, learner=torch.device("cuda"))
    if problem and transfer == "ipc":
        with pytest.raises(UserError, match=rf"ipc does not reach vLLM here: {problem}; set .*weight_transfer: auto"):
            process._choose_transfer(settings)
        assert calls == ["values_of", "close"]
        return
    assert process._choose_transfer(settings) == ("host" if problem else "ipc", problem)
    assert calls == ["values_of"]


@pytest.mark.parametrize(
    "given",
    [
        {"learner": CPU},
        {"learner": None},
        {"learner": torch.device("cuda"), "transfer": "host"},
        {"learner": torch.device("cuda"), "lora": LoraSettings(rank=4)},
    ],
)
def test_nothing_is_tried_where_weights_take_another_way(given: dict[str, Any]) -> None:
    settings = VllmSettings("m", "float32", 8, 1, **{"transfer": "auto", **given})
    assert VllmProcess.__new__(VllmProcess)._choose_transfer(settings) == ("host", None)
