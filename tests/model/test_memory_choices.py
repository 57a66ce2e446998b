"""The smallest change with which a run fits, against all changes, and against the check of a run."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from transformers import PreTrainedConfig

from brorl.config.reading import make_config
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model.memory_choices import MemoryChoices
from brorl.model.memory_prediction import MemoryPrediction, ModelMemory, check_prediction
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.settings import LoraSettings
from brorl.training import inputs as memory
from small_models import mostly_slow, small_model

GIB = 1 << 30
SETTINGS = MemorySettings("bfloat16", 3 * GIB, reference=True, device="cuda", graphs="auto")
WORKLOAD = Workload(100, 400, num_rows=1 << 14, num_prompts=4)


def config_of(hidden: int = 1280, layers: int = 2, **overrides: Any) -> PreTrainedConfig:
    """Return a config of some hundred million weights."""
    config = small_model(**overrides).config
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = hidden, 4 * hidden, layers
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = hidden // 64, hidden // 64, 64
    config.vocab_size = 32_000
    return config


def every_change(settings: MemorySettings) -> list[list[MemorySettings]]:
    """Return every run that a change may lead to: a list for each way to train, the least changed first."""
    lora, nf4 = LoraSettings(rank=16), LoraSettings(rank=16, quantization="nf4")
    ways = [settings, replace(settings, states="host"), replace(settings, states="8bit")]
    ways += [replace(settings, lora=lora), replace(settings, lora=nf4)]
    return [
        [
            replace(way, gradient_checkpointing=again, reference=kept, graphs=graphs, engine_bytes=gib * GIB)
            for again, kept, graphs, gib in product((False, True), (False, True), ("off", "auto"), (1, 2, 3))
        ]
        for way in ways
    ]


@pytest.mark.slow
def test_the_smallest_change_fits_and_no_smaller_one_does(rng: np.random.Generator) -> None:
    config = config_of(hidden=64 * int(rng.integers(18, 24)))
    model, found_at = ModelMemory(config), set()
    own = replace(SETTINGS, nodes_per_pass=1024)
    ways = every_change(own)
    least = [min(model.predict(one, WORKLOAD).total_bytes for one in changed) for changed in ways]
    most = model.predict(own, WORKLOAD).total_bytes
    for available in (*np.geomspace(most, GIB, 5).astype(int).tolist(), *least):
        fitting = [
            any(model.predict(one, WORKLOAD, available).total_bytes <= available for one in changed) for changed in ways
        ]
        smallest = MemoryChoices(config, own, WORKLOAD, available).smallest_change()
        if True not in fitting:
            assert smallest is None or smallest.prediction.total_bytes > available
            continue
        assert smallest is not None
        first = fitting.index(True)
        assert smallest.settings in ways[first]
        again = model.predict(smallest.settings, WORKLOAD, available)
        assert again == smallest.prediction
        assert check_prediction(again, available) is None
        found_at.add(first)
    assert {0, 1, 3, 4} <= found_at  # 8 bits take more of the device than the memory of the CPU does


@pytest.mark.parametrize("states", mostly_slow(["device", "8bit", "host"]))
def test_a_run_fits_at_the_border_and_not_a_byte_below_it(states: Any) -> None:
    settings = replace(SETTINGS, states=states, graphs="off", nodes_per_pass=8192, engine_bytes=GIB // 4)
    config = config_of()
    model = ModelMemory(config)
    plan = model.predict(settings, WORKLOAD)
    assert plan.certain_bytes < plan.total_bytes
    for border, needed in ((plan.total_bytes, "total_bytes"), (plan.certain_bytes, "certain_bytes")):
        assert getattr(model.predict(settings, WORKLOAD, border), needed) == border
        fits, short = (MemoryChoices(config, settings, WORKLOAD, border - missing) for missing in (0, 1))
        if needed == "total_bytes":
            smallest = fits.smallest_change()
            assert smallest is not None
            assert smallest.changes == {}
            assert check_prediction(plan, border, fits.fix) is None
            assert "the smallest change that fits: " in str(check_prediction(plan, border - 1, short.fix))
        else:
            assert check_prediction(plan, border, fits.fix) is not None
            with pytest.raises(UserError, match=r"; the smallest change (that fits|with which it starts): "):
                check_prediction(plan, border - 1, short.fix)


def fix_of(error: str) -> dict[str, Any]:
    """Read the settings that a message names, as a recipe would."""
    text = error.rpartition("the smallest change that fits: ")[2].rpartition(" (")[0]
    return {name: YAML(typ="safe").load(value) for name, value in (one.split(": ") for one in text.split(", "))}


@pytest.mark.slow
def test_few_rows_are_a_larger_change_than_gradient_checkpointing() -> None:
    """The engine's cache, which graphs keep, could shrink to a few rows instead."""
    config = config_of(layers=28)
    workload = replace(WORKLOAD, max_new_tokens=8192)
    own = replace(SETTINGS, reference=False, engine_bytes=60 * GIB)
    row_bytes = ModelMemory(config).predict(own, workload).row_bytes
    many, few = (int(rows * row_bytes / GIB) for rows in (40, 8))
    for gib, expected in ((many, "engine.memory_gib"), (few, "engine.gradient_checkpointing")):
        available = ModelMemory(config).predict(replace(own, engine_bytes=gib * GIB), workload).total_bytes
        smallest = MemoryChoices(config, own, workload, available).smallest_change()
        assert smallest is not None
        assert expected in smallest.changes
        assert ("engine.gradient_checkpointing" in smallest.changes) == (gib == few)


def test_nodes_per_pass_that_are_too_many_are_left_to_the_learner() -> None:
    config = config_of(layers=8)
    own = replace(SETTINGS, reference=False, engine_bytes=GIB, nodes_per_pass=1 << 17)
    model = ModelMemory(config)
    available = model.predict(own, WORKLOAD).total_bytes - 1
    smallest = MemoryChoices(config, own, WORKLOAD, available).smallest_change()
    assert smallest is not None
    assert smallest.changes == {"engine.nodes_per_pass": None}
    assert (
        "the smallest change that fits: engine.nodes_per_pass: null ("
        in MemoryChoices(config, own, WORKLOAD, available).fix()
    )


def test_a_run_that_never_fits_at_the_length_limit_is_told_so() -> None:
    own, config = replace(SETTINGS, forward="flat", graphs="off", engine_bytes=GIB), config_of()
    workload = replace(WORKLOAD, max_new_tokens=1 << 17)
    starts = ModelMemory(config, "flat").predict(own, workload).certain_bytes
    assert "; no change of optimizer.states" in MemoryChoices(config, own, workload, starts).fix()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_change_that_the_error_names_is_accepted(
    dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the message of a run on a GPU into its recipe, and through the check again."""
    free = 0
    monkeypatch.setattr(memory, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(memory, "available_bytes", lambda _: free)
    model_config = config_of(hidden=64 * int(rng.integers(18, 24)))
    prompts: Any = SimpleNamespace(longest_tokens=100, held_out=())
    recipe = {"dtype": dtype, "kl.coefficient": 0.1, "engine.memory_gib": 2, "sampling.max_new_tokens": 300}
    recipe |= {"data.sources": "a.jsonl", "prompts_per_step": 16}

    def checked(changes: dict[str, Any]) -> tuple[TrainConfig, MemoryPrediction, str | None]:
        config = make_config({}, recipe | changes, "test")
        return config, *memory.check_memory(config, model_config, prompts)

    free = 1 << 50
    _, plan, warning = checked({})
    assert warning is None
    named, at = set(), plan.certain_bytes - 1
    while True:
        free = at
        with pytest.raises(UserError, match=r"the run needs .* of memory, but") as refused:
            checked({})
        if "no change of optimizer.states" in str(refused.value):
            break
        if "with which it starts" in str(refused.value):
            at = int(0.85 * at)
            continue
        changes = fix_of(str(refused.value))
        named |= {*changes}
        config, plan, warning = checked(changes)
        assert warning is None
        assert plan.total_bytes <= at
        assert config.optimizer.states in ("device", "host")
        at = int(0.85 * at)
    assert {"optimizer.states", "engine.memory_gib", "lora.rank", "reference.offload"} <= named


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (SETTINGS, ["optimizer.states: device (this run)", "optimizer.states: host", "optimizer.states: 8bit",
                    "lora.rank: 16", "lora.rank: 16, lora.quantization: nf4"]),
        (replace(SETTINGS, device="cpu", states="8bit", graphs="off"),
         ["optimizer.states: device", "optimizer.states: 8bit (this run)", "lora.rank: 16",
          "lora.rank: 16, lora.quantization: nf4"]),
        (replace(SETTINGS, dtype="float64", device="cpu", graphs="off", lora=LoraSettings(rank=4)),
         ["optimizer.states: device", "lora.rank: 4 (this run)"]),
        (replace(SETTINGS, separate_engine=True, states="host"),
         ["optimizer.states: device", "optimizer.states: host (this run)", "optimizer.states: 8bit", "lora.rank: 16"]),
    ],
)  # fmt: skip
def test_the_table_has_the_ways_that_exist_and_what_each_needs(settings: MemorySettings, expected: list[str]) -> None:
    config, available = config_of(), 5 * GIB
    choices = MemoryChoices(config, settings, WORKLOAD, available)
    table = choices.table()
    assert [row[0] for row in table.rows] == expected
    [own] = table.strong
    assert expected[own].endswith("(this run)")
    model = ModelMemory(config)
    for choice, row in zip(choices.all(), table.rows, strict=True):
        plan = model.predict(choice.settings, WORKLOAD, available)
        for cell, size in zip(row[1:3], (plan.kept_bytes, plan.total_bytes), strict=True):
            number, unit = cell.split()
            assert float(number) * {"GiB": GIB, "MiB": 1 << 20}[unit] == pytest.approx(size, rel=0.04)
        assert (row[3] == "yes") == (plan.total_bytes <= available)
        if row[3].startswith("with "):
            assert choices.fitted(choice) is not None
