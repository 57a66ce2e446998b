"""The recipe `calculator`: what its model can do before training, and that it learns when to call."""

import importlib.util
import json
import re
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import brorl
from brorl.prompts.row_readers import read_rows
from run_support import command, metrics_without_times

ROOT = Path(__file__).parents[2]
PACKAGE = Path(brorl.__file__).parent


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def mean_with_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / sqrt(len(values)))


def test_the_questions_are_right_and_what_the_script_writes() -> None:
    script = module("scripts/make_calculator_model.py")
    text = (PACKAGE / "prompts" / "products.jsonl").read_text("utf-8")
    assert text == "".join(script.question_lines(100, script.random.Random(0)))
    sizes = []
    for row in map(json.loads, text.splitlines()):
        first, second = map(int, re.fullmatch(r"(\d+)\*(\d+)", row["prompt"]).groups())  # type: ignore[union-attr]
        assert row["answer"] == str(sum(first for _ in range(second)))
        sizes.append((len(str(first)), len(str(second))))
    assert sorted(sizes) == [(digits, digits) for digits in (1, 2, 3) for _ in range(100)]


def test_the_model_calls_at_random_and_knows_only_products_of_digits(rng: np.random.Generator) -> None:
    script = module("scripts/make_calculator_model.py")
    folder = PACKAGE / "calculator_model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for digits in (1, 2, 3):
        calls, alone, copied = [], [], []
        for first, second in rng.integers(10 ** (digits - 1), 10**digits, (24, 2)).tolist():
            prompt, call, reply, answer = script.conversation((first, second), True, True)
            calls.append(script.turn_probability(model, tokenizer, prompt, script.CALL))
            alone.append(script.turn_probability(model, tokenizer, prompt, answer) / (1 - calls[-1]))
            copied.append(script.turn_probability(model, tokenizer, prompt + call + reply, answer))
        assert 0.15 < np.mean(calls) < 0.45
        assert np.mean(copied) > 0.97
        assert np.mean(alone) > 0.9 if digits == 1 else np.mean(alone) < 0.25


def test_the_questions_are_found_by_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name takes precedence."""
    monkeypatch.chdir(tmp_path)
    assert len([*read_rows("products", None, "train", None)]) == 300
    Path("products").mkdir()
    Path("products/mine.jsonl").write_text('{"prompt": "6*7", "answer": "42"}\n')
    assert [row.values["prompt"] for row in read_rows("products", None, "train", None)] == ["6*7"]


@pytest.mark.slow
def test_the_model_learns_when_to_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the recipe's prompts, in a quarter of a minute."""
    monkeypatch.chdir(tmp_path)
    fewer = ("--prompts_per_step=8", "--evaluation.every=0", "--report=false", "--seed=11")
    outcome = command("train", "calculator", *fewer, "--output_dir=run")
    assert outcome.code == 0, outcome

    difference, variance = 0.0, 0.0
    rates = module("examples/calculator/call_rates.py").before_and_after(Path("run"))
    for sign, counts in zip((-1, 1), rates, strict=True):
        small, small_error = mean_with_error([count.call_rate for count in counts if count.digits == 1])
        large, large_error = mean_with_error([count.call_rate for count in counts if count.digits > 1])
        if sign < 0:
            assert 0.15 < small < 0.45
            assert 0.15 < large < 0.45
        else:
            assert small < 0.3
            assert large > 0.9
        difference += sign * (large - small)
        variance += small_error**2 + large_error**2
    assert difference - 1.96 * sqrt(variance) > 0.4

    records = metrics_without_times(Path("run"))
    before, after = (records[place]["evaluation"]["pass_at"]["1"] for place in (0, -1))
    assert after["low"] > before["high"] + 0.2
    tools = [record["tools"] for record in records if "tools" in record]
    assert sum(use["calls"] for use in tools) > 50 * sum(use["distinct_calls"] for use in tools)
