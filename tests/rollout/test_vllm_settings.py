"""`engine.kind: vllm` from the config: rejected before anything expensive, and passed on as it was set."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from brorl.activity import Observe, unobserved
from brorl.config.reading import make_config
from brorl.config.settings import TrainConfig
from brorl.distributed import remote_parts
from brorl.errors import UserError
from brorl.model.forward import choose_forward
from brorl.model.load import load_model, load_tokenizer
from brorl.model.lora import saved_adapter
from brorl.model.settings import LoraSettings
from brorl.rollout import vllm_engine
from brorl.rollout.chosen_engine import build_engine, build_sampling_model, check_cache, check_engine
from brorl.rollout.native_engine import NativeEngine
from brorl.rollout.vllm_engine import vllm_setup
from brorl.rollout.vllm_process import VllmSetup
from brorl.training.inputs import format_lines, input_lines, prepare_run
from run_support import SMALL, command

BFLOAT16 = {"dtype": "bfloat16", "importance.correction": "truncate", "optimizer.old_logprobs": "recompute"}
SETTINGS = {"engine.kind": "vllm", "device": "cpu", "data.sources": {"task": "countdown", "max_number": 5}}


def config(**overrides: Any) -> TrainConfig:
    return make_config({}, {**SETTINGS, **overrides}, "test")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "check_installed", lambda: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, r"does not support float64; set dtype: float32 or bfloat16"),
        ({"engine.clock": "cpu", "engine.threads": 1}, r"set engine\.clock: wall"),
        ({"lora.rank": 4, "lora.quantization": "nf4"}, r"nf4 .*set lora\.quantization: none, or engine\.kind: native"),
        ({"lora.rank": 513}, r"up to rank 512, but lora\.rank = 513"),
        ({"engine.vllm.placement": "apart", "cluster.nodes": 1}, r"remove it and set cluster\.placement: apart"),
    ],
)
def test_settings_that_contradict_vllm_are_rejected_when_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling.temperature": 0.001}, r"temperatures between 0 and 0\.01"),
        ({"sampling.temperature": 2.5}, r"temperatures above 2\.0, but sampling\.temperature = 2\.5; lower it"),
        ({"engine.vllm.placement": "apart"}, r"on the CPU .*set engine\.vllm\.placement: colocated"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_training_that_vllm_cannot_sample_is_rejected_before_the_data_is_read(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brorl.training.inputs.build_questions", lambda _: pytest.fail("the data was read"))
    with pytest.raises(UserError, match=message):
        prepare_run(config(**settings), "quickstart")


@pytest.mark.usefixtures("installed")
def test_a_cache_that_cannot_hold_one_response_is_rejected() -> None:
    gib = 1 << 30
    check_cache(config(**{"engine.memory_gib": 2}), 2 * gib)
    with pytest.raises(UserError, match=r"engine\.memory_gib = 2 is too small for vLLM: .* need 3 GiB; raise it, or"):
        check_cache(config(**{"engine.memory_gib": 2}), 3 * gib)
    check_cache(config(**{"engine.memory_gib": 2, "engine.vllm.tensor_parallel": 2}), 4 * gib)
    check_cache(config(**{"engine.memory_gib": 2, "engine.kind": "native"}), 3 * gib)  # its rows may end early


@pytest.mark.parametrize("several", [{}, {"cluster.nodes": 1, "cluster.gpus_per_rollout_worker": 1, "device": "auto"}])
@pytest.mark.usefixtures("installed")
def test_adapters_in_float32_on_a_gpu_are_rejected(several: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = {"device": "cuda", "lora.rank": 4} | several
    with pytest.raises(UserError, match=r"float32 adapters on a GPU, .*set dtype: bfloat16"):
        check_engine(config(**given))
    check_engine(config(**given, dtype="bfloat16"))
    check_engine(config(**given | {"lora.rank": 0}))


def test_a_learner_without_a_gpu_is_rejected_before_the_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.training.inputs.build_questions", lambda _: pytest.fail("the data was read"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = {"device": "cuda", "cluster.nodes": 1, "cluster.gpus_per_rollout_worker": 1, "engine.kind": "native"}
    with pytest.raises(UserError, match=r"learns on CPUs; set cluster\.gpus_per_learner_rank: 1, or device: auto"):
        prepare_run(config(**settings), "quickstart")


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"device": "cuda"}, "set dtype: bfloat16 and importance.correction: truncate"),
        (
            {"device": "cuda", "importance.correction": "mask", "optimizer.old_logprobs": "recompute"},
            "set dtype: bfloat16",
        ),
        ({"device": "cuda", "dtype": "bfloat16"}, None),
        ({"device": "cpu"}, None),
        ({"cluster.nodes": 1, "cluster.gpus_per_rollout_worker": 1, "device": "auto"}, None),
    ],
)
def test_float32_on_a_gpu_warns_with_the_settings_of_the_tensor_cores(
    settings: dict[str, Any], fix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(**{"engine.kind": "native", **settings})
    ready = prepare_run(config(**{"engine.kind": "native", "sampling.max_new_tokens": 8}), "quickstart")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = [line for line in input_lines(ready, made) if "tensor cores" in line]
    warning = f"warning: dtype = float32 leaves the tensor cores of the GPU idle; {fix}"
    assert lines == ([] if fix is None else [warning])


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (BFLOAT16, "dtype = bfloat16 is slow .* 40 times .* set dtype: float32 and importance.correction: none"),
        (
            {"dtype": "bfloat16", "importance.correction": "none"},
            "dtype = bfloat16 is slow .* 40 times .* set dtype: float32$",
        ),
        (
            {"engine.dtype": "bfloat16", "optimizer.old_logprobs": "recompute", "importance.correction": "mask"},
            "engine.dtype = bfloat16 is slow .* 40 times .* set engine.dtype: auto$",
        ),
        ({}, None),
    ],
)
def test_bfloat16_warns_on_a_processor_that_multiplies_it_slowly(
    settings: dict[str, Any], warning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products are timed; here the clock has what a product costs."""
    made, now = config(**{"engine.kind": "native", **settings}), 0.0
    for slowdown in (40.0, 1.5):

        def linear(x: torch.Tensor, weight: torch.Tensor, slowdown: float = slowdown) -> None:
            nonlocal now
            now += slowdown if x.dtype is weight.dtype is torch.bfloat16 else 1.0

        monkeypatch.setattr(torch.nn.functional, "linear", linear)
        monkeypatch.setattr(time, "process_time", lambda: now)
        lines = format_lines(made)
        assert len(lines) == (warning is not None and slowdown == 40)
        assert all(re.search(str(warning), line) for line in lines)


@pytest.mark.parametrize("arguments", [("train", "--steps=1"), ("eval", "quickstart", "--samples=2")])
def test_a_missing_vllm_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise UserError("engine.kind = vllm needs the package vllm")

    monkeypatch.setattr(vllm_engine, "check_installed", missing)
    folder = "--output_dir" if arguments[0] == "train" else "--output-dir"
    done = command(*arguments, "--engine.kind=vllm", folder, tmp_path / "out")
    assert done.code == 2
    assert "engine.kind = vllm needs the package vllm" in done.said


def test_the_learner_recomputes_old_logprobs() -> None:
    assert config().recompute_old_logprobs
    assert not config(**{"engine.kind": "native"}).recompute_old_logprobs
    assert config(**{"importance.correction": "truncate"}).importance.correction == "truncate"


def test_settings_reach_the_engine() -> None:
    made = vllm_setup(
        config(
            **{
                "dtype": "bfloat16", "engine.memory_gib": 0.5, "engine.vllm.max_rows": 33,
                "engine.vllm.responses_per_request": 7, "engine.vllm.tensor_parallel": 2,
            }
        ),
        "quickstart",
        context=123,
    )  # fmt: skip
    assert Path(made.source, "model.safetensors").is_file()
    assert (made.dtype, made.context, made.cache_bytes, made.device) == ("bfloat16", 123, 1 << 29, "cpu")
    assert (made.max_rows, made.responses_per_request, made.tensor_parallel) == (33, 7, 2)
    assert (made.separate, made.sleeps, made.threads) == (True, False, torch.get_num_threads())
    assert (made.gpus, made.lora) == ((), None)
    with_adapters = config(**{"lora.rank": 5, "lora.alpha": 7, "lora.target_modules": ["q_proj"]})
    assert vllm_setup(with_adapters, "quickstart", 9).lora == with_adapters.lora


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses deprecated parts of transformers
@pytest.mark.parametrize(
    ("rank", "worker"),
    [(4, False), *(pytest.param(0, worker, marks=pytest.mark.slow) for worker in (False, True))],
)
def test_an_adapter_is_given_to_the_engine_at_its_start(
    rank: int, worker: bool, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation and a run that continues them: merged into all weights, or as they are."""
    lora, given = LoraSettings(rank=4), dict[str, torch.Tensor]()
    trained = load_model("quickstart", torch.device("cpu"), torch.float32, lora)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    trained.save_pretrained(tmp_path)

    class Started:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            assert version == 0
            given.update(weights)

    monkeypatch.setattr(vllm_engine, "VllmEngine", Started)
    settings = config(**{"lora.rank": rank})
    model, tokenizer = build_sampling_model(settings, str(tmp_path)), load_tokenizer("quickstart")
    forward = choose_forward(model, "auto", 64)
    if worker:
        remote_parts._make_engine(settings.model_copy(update={"model": str(tmp_path)}), 64, shares_gpu=False)
    else:
        build_engine(settings, str(tmp_path), model, tokenizer, forward, 64)
    if rank:
        saved = load_file(tmp_path / "adapter_model.safetensors")
        got = dict(saved_adapter(given.items()))
    else:
        base = load_model("quickstart", torch.device("cpu"), torch.float32)
        saved = dict(PeftModel.from_pretrained(base, tmp_path).merge_and_unload().named_parameters())
        got = given
    assert set(got) == set(saved)
    for name, tensor in got.items():
        assert torch.equal(tensor, saved[name])


class _Engine(NativeEngine):
    """A native engine instead of vLLM; it counts the engines that run."""

    running = 0

    def __init__(
        self, settings: VllmSetup, stop_token_ids: tuple[int, ...], observe: Observe = unobserved, *_: object
    ) -> None:
        model = load_model(settings.source, torch.device("cpu"), torch.float32)
        super().__init__(model, stop_token_ids, 1 << 30, observe=observe)
        _Engine.running += 1

    def close(self) -> None:
        _Engine.running -= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["train", "quickstart", *SMALL, "--steps=1", "--output_dir=out"], ""),
        (["train", "quickstart", *SMALL, "--steps=1", "--output_dir=out", "--optimizer.learning_rate=1e38"], "nan"),
        (["eval", "quickstart", "--samples=2", "--evaluation.num_prompts=2", "--max-new-tokens=4"], ""),
        (["check", "quickstart", *SMALL], ""),
    ],
)
@pytest.mark.usefixtures("installed")
def test_the_process_of_the_engine_ends_with_the_work(
    arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_engine, "VllmEngine", _Engine)
    monkeypatch.setattr(_Engine, "running", 0)
    sampled: list[int] = []
    sample = NativeEngine.sample
    monkeypatch.setattr(NativeEngine, "sample", lambda *given: sampled.append(_Engine.running) or sample(*given))
    outcome = command(*arguments, "--engine.kind=vllm")
    assert (outcome.code == 0) == (not error), outcome.said
    assert set(sampled) == {1}
    assert _Engine.running == 0


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_the_engine_has_the_gpus_of_its_placement(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    settings = {"device": "cuda:1", "engine.vllm.placement": placement}
    made = vllm_setup(config(**settings), "quickstart", context=9)
    assert made.gpus == ((0,) if placement == "apart" else (1,))
    assert made.sleeps == (placement == "colocated")
    wide = vllm_setup(config(**settings, **{"engine.vllm.tensor_parallel": 3}), "quickstart", context=9)
    assert wide.gpus == ((0, 2, 3) if placement == "apart" else (1, 0, 2))


@pytest.mark.usefixtures("installed")
def test_too_few_gpus_are_rejected_before_the_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.training.inputs.build_questions", lambda _: pytest.fail("the data was read"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"needs 3 GPUs, .*torch finds 2; set engine\.vllm\.placement: colocated"):
        prepare_run(
            config(**{"device": "cuda", "engine.vllm.placement": "apart", "engine.vllm.tensor_parallel": 2}),
            "quickstart",
        )
