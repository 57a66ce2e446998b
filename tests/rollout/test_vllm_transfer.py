"""The transfer of weights against vLLM's own senders and receivers, on the CPU.

The tests replace CUDA: streams, IPC handles, and the NCCL communicator. The packing, the payloads, the order of the
calls and the loading are vLLM's code. Neither NCCL nor CUDA IPC runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.errors import UserError
from brorl.rollout import vllm_transfer
from brorl.rollout.vllm_transfer import TransferError, WeightStream, WeightTransfer

pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM warns

NAMES = ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.0.b", "model.layers.1.a", "model.norm.weight"]
UPDATE = ["sleep 0 keep", "start", "update", "finish", "repack_tied_head", "reset_prefix_cache", "wake ['scheduling']"]


class DiedError(Exception):
    """Stands for vLLM's exception of a dead engine."""


class Model:
    """Keeps the weights that it loads."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.weights.update({name: tensor.clone() for name, tensor in weights})


class FakeLLM:
    """The calls of `vllm.LLM`, on a receiver in this process."""

    def __init__(self, receiver: Any = None) -> None:
        self.receiver = receiver
        self.calls: list[str] = []
        self.inits: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.calls.append("init")
        self.inits.append(request["init_info"])
        if self.receiver is not None:
            self.receiver.init_transfer_engine(self.receiver.parse_init_info(request["init_info"]))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        if self.receiver is not None:
            self.receiver.start_weight_update()

    def update_weights(self, request: dict[str, Any]) -> None:
        self.calls.append("update")
        self.updates.append(request["update_info"])
        if self.receiver is not None:
            self.receiver.update_weights(request["update_info"])

    def finish_weight_update(self, weight_version: str | None) -> None:
        assert weight_version is None
        self.calls.append("finish")
        if self.receiver is not None:
            self.receiver.finish_weight_update()

    def collective_rpc(self, method: str) -> None:
        self.calls.append(method)

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        assert reset_running_requests
        self.calls.append("reset_prefix_cache")
        return True

    def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")


class Communicator:
    """One end of a broadcast between two threads."""

    def __init__(self, queue: Queue[Tensor], sends: bool) -> None:
        self.queue, self.sends = queue, sends

    def broadcast(self, tensor: Tensor, src: int) -> None:
        assert src == 0
        if self.sends:
            self.queue.put(tensor.clone())
        else:
            tensor.copy_(self.queue.get(timeout=120))  # fails if the two sides cut the stream differently


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's code for CUDA run on the CPU."""
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.model_executor.model_loader import reload

    stream = SimpleNamespace(synchronize=lambda: None)
    empty = torch.empty

    def on_cpu(*shape: Any, **options: Any) -> Tensor:
        return empty(*shape, **{**options, "device": "cpu"})

    monkeypatch.setattr(packed_tensor, "_get_streams", lambda _, number: (stream,) * number)
    monkeypatch.setattr(torch, "empty", on_cpu)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-7"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda _: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda *_: None)
    monkeypatch.setattr(vllm_transfer, "_MIN_PACKED_BYTES", 1)  # several chunks


def random_weights(rng: np.random.Generator, updates: int = 1) -> list[dict[str, Tensor]]:
    """The weights of each update: parameters of different sizes; one is not contiguous in memory."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    shapes = dict(zip(NAMES, rng.integers(1, 40, (len(NAMES), 2)).tolist(), strict=True))

    def new(name: str) -> Tensor:
        a, b = shapes[name]
        tensor = torch.randn(a, b, generator=generator)
        return tensor.t() if name == NAMES[2] else tensor.requires_grad_()

    return [{name: new(name) for name in NAMES} for _ in range(updates)]


def receiver_of(engine: type[Any]) -> Any:
    """Make vLLM's receiver of a worker."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=2, rank=1), model_config=None
    )
    return engine(SimpleNamespace(backend="test"), config, torch.device("cpu", 0), Model())


def transfer(llm: FakeLLM, backend: Any, dtype: torch.dtype = torch.bfloat16, workers: int = 1) -> WeightTransfer:
    return WeightTransfer(llm, backend, dtype, workers, DiedError)


def assert_loaded(model: Model, weights: dict[str, Tensor]) -> None:
    assert list(model.weights) == list(weights)
    for name, tensor in weights.items():
        assert torch.equal(model.weights[name], tensor.to(torch.bfloat16))


def test_the_host_makes_the_four_calls_in_order(tmp_path: Path) -> None:
    llm = FakeLLM()
    sender = transfer(llm, "host")
    tensors = [("w", torch.ones(2))]
    sender.send(tmp_path)
    sender.send(tensors)
    assert llm.calls == ["init", *UPDATE, *UPDATE]
    assert llm.updates[0] == {"weights": str(tmp_path)}
    assert llm.updates[1]["weights"] is tensors


def test_keys_and_values_that_remain_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = FakeLLM()
    monkeypatch.setattr(llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(RuntimeError, match="did not clear its prefix cache"):
        transfer(llm, "host").send(tmp_path)


@pytest.mark.vllm
def test_metadata_describes_the_tensors_in_their_order(rng: np.random.Generator) -> None:
    stream = WeightStream(torch.bfloat16)
    stream.weights = [*random_weights(rng)[0].items(), ("steps", torch.arange(3))]
    sent = list(stream)
    assert [(one.name, one.dtype, one.shape) for one in stream.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent
    ]
    assert [name for name, _ in sent] == [*NAMES, "steps"]
    assert sent[-1][1].dtype == torch.int64
    assert all(tensor.dtype == torch.bfloat16 and not tensor.requires_grad for _, tensor in sent[:-1])
    assert stream.packed_bytes() >= max(tensor.nbytes for _, tensor in sent)


@pytest.mark.vllm
@pytest.mark.usefixtures("without_cuda")
def test_nccl_broadcasts_to_the_receiver(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    queue: Queue[Tensor] = Queue()
    joined: list[Any] = []

    def join(info: Any, sends: bool) -> Communicator:
        joined.append(info)
        return Communicator(queue, sends)

    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda info, _: join(info, False))
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: join(info, True))
    receiver = receiver_of(nccl_engine.NCCLWeightTransferEngine)
    llm = FakeLLM(receiver)
    sender = transfer(llm, "nccl", workers=2)
    for number, weights in enumerate(random_weights(rng, 2)):
        receiver.model.weights = {}
        sender.send(weights.items())
        assert_loaded(receiver.model, weights)
        assert llm.calls == ["init", *UPDATE] if number == 0 else UPDATE
        assert llm.updates[-1]["names"] == NAMES
        assert llm.updates[-1]["shapes"] == [list(tensor.shape) for tensor in weights.values()]
        assert set(llm.updates[-1]["dtype_names"]) == {"bfloat16"}
        llm.calls.clear()
    assert len(joined) == 2  # once from each side
    assert {(one.master_address, one.world_size, one.packed) for one in joined} == {("127.0.0.1", 3, True)}
    assert len({(one.master_port, one.packed_buffer_size_bytes, one.packed_num_buffers) for one in joined}) == 1
    assert llm.inits[0]["rank_offset"] == 1
    assert queue.empty()


@pytest.mark.vllm
@pytest.mark.usefixtures("without_cuda")
def test_ipc_sends_handles_as_plain_data(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    exported: list[Tensor] = []

    def export(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        exported.append(tensor)
        return torch.tensor, (len(exported) - 1, Tensor, torch.uint8, b"handle", None, None, 5)

    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda number, *_: exported[number])
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    receiver = receiver_of(ipc_engine.IPCWeightTransferEngine)
    llm = FakeLLM(receiver)
    sender = transfer(llm, "ipc")
    for number, weights in enumerate(random_weights(rng, 2)):
        receiver.model.weights = {}
        sender.send(weights.items())
        assert_loaded(receiver.model, weights)
        chunks = llm.calls.count("update")
        assert chunks > 1
        assert llm.calls == ["init"] * (number == 0) + UPDATE[:2] + ["update"] * chunks + UPDATE[3:]
        llm.calls.clear()
    assert llm.inits == [{"packed": True}]
    assert len(exported) == 2  # one buffer for each update
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    for update in llm.updates:
        assert MsgpackDecoder().decode(MsgpackEncoder().encode(update)) == update


@pytest.mark.vllm
@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_a_backend_that_cannot_start_names_the_setting(backend: Any, rng: np.random.Generator) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    with pytest.raises(TransferError, match=rf"{backend} did not deliver .*vllm\.weight_transfer: host") as e:
        transfer(FakeLLM(), backend).send(random_weights(rng)[0].items())
    assert isinstance(e.value, UserError)


@pytest.mark.vllm
def test_the_death_of_the_engine_is_no_fault_of_the_backend(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = FakeLLM()

    def die(_: Any) -> None:
        raise DiedError

    monkeypatch.setattr(llm, "init_weight_transfer_engine", die)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-7"))
    with pytest.raises(DiedError):
        transfer(llm, "ipc").send(random_weights(rng)[0].items())


@pytest.mark.vllm
@pytest.mark.usefixtures("without_cuda")
def test_an_engine_that_dies_during_a_broadcast_ends_the_run(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    begun, ended = Event(), Event()

    def wait(*_: Any, **__: Any) -> None:
        begun.set()
        ended.wait()

    def die(_: Any) -> None:
        begun.wait()
        raise DiedError("killed")

    receiver = receiver_of(nccl_engine.NCCLWeightTransferEngine)
    receiver.update_weights = die
    monkeypatch.setattr(vllm_transfer, "_GRACE_S", 0.1)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda *_: None)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda _: SimpleNamespace(broadcast=wait))
    try:
        with pytest.raises(TransferError, match=r"during a broadcast of the weights \(killed\).*resume the run"):
            transfer(FakeLLM(receiver), "nccl").send(random_weights(rng)[0].items())
    finally:
        ended.set()
