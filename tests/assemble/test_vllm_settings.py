"""`engine.kind: vllm` from the config: rejected before anything expensive, and passed on as it was set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from brorl.assemble import engine
from brorl.assemble.engine import build_vllm_settings
from brorl.assemble.inputs import prepare
from brorl.config.reading import make_config
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from run_support import command

SETTINGS = {"engine.kind": "vllm", "device": "cpu", "data.sources": {"task": "countdown", "max_number": 5}}


def config(**overrides: Any) -> TrainConfig:
    return make_config({}, {**SETTINGS, **overrides}, "test")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "check_installed", lambda: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, r"has no float64; set dtype: float32 or bfloat16"),
        ({"engine.clock": "cpu", "engine.threads": 1}, r"set engine\.clock: wall"),
    ],
)
def test_settings_that_contradict_vllm_are_rejected_when_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling.scheme": "systematic"}, r"sampling\.scheme = systematic is only in the native engine"),
        ({"sampling.top_p": 0.9}, r"sampling\.top_p = 0\.9 .* set sampling\.top_p: 1\.0"),
        ({"sampling.top_k": 5}, r"sampling\.top_k = 5"),
        ({"sampling.temperature": 0.001}, r"no temperature between 0 and 0\.01"),
        ({"lora.rank": 2}, r"lora\.rank = 2.*engine\.kind: native"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_training_that_vllm_cannot_sample_is_rejected_before_the_data_is_read(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brorl.assemble.inputs.build_questions", lambda _: pytest.fail("the data was read"))
    with pytest.raises(UserError, match=message):
        prepare(config(**settings), "quickstart")


@pytest.mark.parametrize("arguments", [("train", "--steps=1"), ("eval", "quickstart", "--samples=2")])
def test_a_missing_vllm_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise UserError("engine.kind = vllm needs the package vllm")

    monkeypatch.setattr(engine, "check_installed", missing)
    folder = "--output_dir" if arguments[0] == "train" else "--output-dir"
    done = command(*arguments, "--engine.kind=vllm", folder, tmp_path / "out")
    assert done.code == 2
    assert "engine.kind = vllm needs the package vllm" in done.said


def test_the_learner_recomputes_old_logprobs() -> None:
    assert config().recompute_old_logprobs
    assert not config(**{"engine.kind": "native"}).recompute_old_logprobs
    assert config(**{"importance.correction": "truncate"}).importance.correction == "truncate"


def test_settings_reach_the_engine() -> None:
    made = build_vllm_settings(
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
