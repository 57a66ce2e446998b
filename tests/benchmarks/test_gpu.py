import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
import torch
from gpu import exactness, measure
from gpu.decoding import NATIVE, Rows
from gpu.device import Device, bytes_in_use, peak_bytes, reset_peak
from gpu.exactness import Trial, computed_plainly, engine_part, learner_part, plain_logprobs
from gpu.launches import profiled
from gpu.learning import Responses
from gpu.models import (
    FLAT,
    LARGE_PASSES,
    NO_END_TOKEN,
    VARIANTS,
    LearnerVariant,
    TimedModel,
    copy_of,
    small_model,
    speed_config,
    speed_model,
)
from gpu.real_step import sums
from gpu.roofline import bytes_read, flops
from harness import Check, Findings, Part
from measurement import Work
from ours import tree_work
from torch.utils.flop_counter import FlopCounterMode

from brorl.model.tree_path import TreeForward
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from small_models import flattened_logprobs, random_tree, rollouts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "measure.py"
CPU = Device("cpu")
# Dependencies that a machine with PyTorch, transformers and pydantic may lack.
NOT_NEEDED = ("ruamel", "ruamel.yaml", "plotly", "math_verify", "ray", "vllm")
EXACT = "llama, learner float32|long responses|mamba, device|mamba2, engine bfloat16"
SUBSET = rf"^(?!exactness)|exactness: ({EXACT})"
TINY = TimedModel("tiny")


def call(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script where nothing but its needs can be imported."""
    program = (
        f"import runpy, sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\nsys.argv[0] = {str(SCRIPT)!r}\n"
        "import torch\ntorch.set_num_threads(1)\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(folder), "--device", "cpu", "--small", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_the_script_measures_every_kind_of_part_and_continues(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(rng.integers(1 << 30))
    options = ("--seed", str(seed), "--parts", SUBSET, "--part-s", "0.1", "--step-s", "2")
    done = call(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "result.json").read_text()
    parts = json.loads(written)["parts"]
    learners = [variant for variant in (*VARIANTS, *LARGE_PASSES) if variant.timed or variant.forward is FLAT]
    rows = ["tiny 4 x 1, 26 tokens", "tiny 3 x 2, 26 tokens"]
    decoded = {f"decoding: {of} by {way}" for of in rows for way in (*NATIVE, "generate", "vLLM")}
    learned = {f"learning: tiny 4 responses of 8 by {variant.name}" for variant in learners}
    steps = {f"step: 8 x 2, 12 tokens by {peer}" for peer in ("brorl", "TRL")}
    exact = {f"exactness: {name}" for name in EXACT.split("|")}
    assert set(parts) == {"ceilings"} | exact | decoded | learned | steps
    for name, part in parts.items():
        may_skip = name.endswith(("TRL", "vLLM")) or any(v.only_cuda and name.endswith(v.name) for v in learners)
        assert part["state"] == "done" or may_skip, name
        assert bool(part["checks"]) == name.startswith("exactness")
    for name in decoded:
        if "generate" in name or "vLLM" in name:
            continue
        check_decoding(parts[name]["facts"], parts["ceilings"]["facts"])
    for variant in learners:
        if variant.runs(CPU, "bfloat16"):
            name = f"learning: tiny 4 responses of 8 by {variant.name}"
            check_learning(parts[name]["facts"], parts["ceilings"]["facts"])
    check_step(parts["step: 8 x 2, 12 tokens by brorl"]["facts"])
    text = (tmp_path / "gpu.md").read_text()
    for name, part in parts.items():
        kind, _, rest = name.partition(": ")
        if kind != "exactness" and part["state"] == "done" and rest:
            assert "| " + " | ".join(rest.split(" by ")) + " |" in text, name
        assert part["state"] != "skipped" or f"- {name}: {part['reason']}" in text
        assert all(f"- {name}: {line.strip()}" in text for line in part.get("facts", {}).get("said", ()))
    assert any(
        "N = 8 rollouts x 2 prompts" in line for line in parts["step: 8 x 2, 12 tokens by brorl"]["facts"]["said"]
    )

    command = ["measure.py", str(tmp_path), "--device", "cpu", "--small", *options]
    commit = json.loads(written)["options"]["commit"]
    monkeypatch.setattr(measure, "_commit", lambda: commit)  # a commit during the test is another version
    monkeypatch.setattr(sys, "argv", command)
    assert measure.main() == 0
    assert (tmp_path / "result.json").read_text() == written
    monkeypatch.setattr(sys, "argv", [*command, "--nodes", "63"])
    assert measure.main() == 1


def check_decoding(facts: dict[str, Any], ceilings: dict[str, float]) -> None:
    """Compare with another call of the engine, and with counts of its prefixes, rows and weights."""
    rows = Rows(**(facts["setting"] | {"model": TimedModel(**facts["setting"]["model"])}))
    seconds, shape = median(facts["seconds"]), (rows.num_prompts, rows.prompt_tokens)
    assert facts["ms_per_position"] == pytest.approx(1e3 * seconds / rows.max_new_tokens)
    num_tokens = rows.num_prompts * rows.num_rollouts * rows.max_new_tokens
    assert facts["tokens_per_s"] == pytest.approx(num_tokens / seconds)
    model = rows.model.load(CPU, rows.prompt_tokens + rows.max_new_tokens, rows.seed).to(torch.bfloat16)
    prompts = np.random.default_rng(rows.seed).integers(1, model.config.vocab_size - 1, shape).tolist()
    sampling = SamplingParams(max_new_tokens=rows.max_new_tokens)
    trees = NativeEngine(model, NO_END_TOKEN).sample(SampleTask(prompts, rows.num_rollouts, sampling, rows.seed))
    distinct = [len(prefixes(tree, rows.max_new_tokens)) for tree in trees]
    assert facts["unique_fraction"] == pytest.approx(sum(distinct) / num_tokens)
    fed = [prefix for tree in trees for prefix in prefixes(tree, rows.max_new_tokens - 1)]
    config, positions = model.config, rows.max_new_tokens - 1
    keys = sum(map(len, fed)) + rows.num_prompts * rows.prompt_tokens * positions
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    weights = sum(p.numel() for p in model.parameters())
    read = 2 * (rows.max_new_tokens * weights + keys * numbers)
    assert facts["bandwidth_fraction"] == pytest.approx(read / seconds / ceilings["copy_bytes_per_s"])
    assert facts["kernels_per_position"] > 10 * config.num_hidden_layers  # projections, norms, attention
    assert facts["predicted_bytes"] > 2 * weights


def prefixes(tree: RolloutTree, length: int) -> set[tuple[int, ...]]:
    """Return the distinct prefixes of the responses, up to a length."""
    return {tuple(r[:end]) for r, _ in tree.responses() for end in range(1, min(length, len(r)) + 1)}


def check_learning(facts: dict[str, Any], ceilings: dict[str, float]) -> None:
    """Compare with counts of the responses' prefixes."""
    responses = Responses(**(facts["setting"] | {"model": TINY}))
    seconds, model = median(facts["seconds"]), TINY.load(CPU, 64, 0)
    tree = responses.tree(model.config.vocab_size)
    nodes = len(prefixes(tree, responses.tokens))
    assert facts["nodes"] == nodes
    assert facts["nodes_per_s"] == pytest.approx(nodes / seconds)
    assert facts["unique_fraction"] == pytest.approx(nodes / responses.num_responses / responses.tokens)
    fed = responses.num_responses * (responses.prompt_tokens + responses.tokens - 1)
    assert facts["flat_tokens"] == fed
    rate = flops(model, tree_work(tree), passes=3) / seconds / ceilings["matmul_flops_per_s"]
    assert facts["matmul_fraction"] == pytest.approx(rate)
    assert facts["predicted_bytes"] > 16 * sum(p.numel() for p in model.parameters())  # weights, gradients, moments


def check_step(facts: dict[str, Any]) -> None:
    counted = facts["seconds"][1:] or facts["seconds"]
    assert facts["step_s"] == fmean(counted)
    assert "training" in facts["parts"]
    assert (facts["parts"].get("generation", 0) > 0) == (facts["rounds"] > 0)  # carried groups may fill all steps
    assert 0 < sum(facts["parts"].values()) < 3 * max(counted)
    assert 0 < facts["unique_fraction"] < 1  # the shipped model's responses share prefixes
    assert facts["peak_bytes"] > 0 < facts["predicted_bytes"]


@pytest.mark.slow
def test_the_roofline_counts_operations_and_bytes(rng: np.random.Generator) -> None:
    for size in ("tiny", "135M"):
        model = speed_model(speed_config(size, 16), Device("meta"), 1.0, 0)
        model.set_attn_implementation("eager")
        length = int(rng.integers(2, 9))
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(1, length, dtype=torch.long, device="meta")).logits.sum().backward()
        work = Work(length, length * length, length, positions=3, cached=7)  # eager attention has the masked half too
        assert flops(model, work, 3) == counter.get_total_flops()
    model = TINY.load(CPU, 8, 0).to(torch.bfloat16)
    weights, config = sum(p.numel() for p in model.parameters()), model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert bytes_read(model, work) == 2 * (3 * weights + 7 * numbers)


def test_kernels_are_counted(rng: np.random.Generator) -> None:
    first, second = torch.randn(2, 8, 8)
    products, sums_ = int(rng.integers(3, 9)), int(rng.integers(3, 9))
    out = torch.empty(8, 8)

    def call() -> None:
        for _ in range(products):
            torch.mm(first, second, out=out)
        for _ in range(sums_):
            out.add_(first)

    found = profiled(call, CPU)
    assert found.count == Counter({"aten::mm": products, "aten::add_": sums_})
    assert found.launches == found.kernels == products + sums_
    assert {name for name, _, _ in found.top()} == set(found.count)


def test_the_answers_of_the_sums_are_right(rng: np.random.Generator) -> None:
    rows = sums(200, int(rng.integers(1 << 30)))
    for row in rows:
        words = row["question"].partition(": ")[2].removesuffix(" =").split()
        total = int(words[0])
        for sign, number in zip(words[1::2], words[2::2], strict=True):
            total += int(number) * {"+": 1, "-": -1}[sign]
        assert str(total) == row["answer"]
    assert {row["question"].count("+") + row["question"].count("-") for row in rows} == {1, 2}


def test_the_reference_is_the_flattened_batch(rng: np.random.Generator) -> None:
    model = copy_of(small_model("qwen3", int(rng.integers(1 << 30))), CPU, torch.float64)
    trees = [random_tree(rng) for _ in range(3)]
    weights = [torch.from_numpy(rng.normal(size=tree.num_unique_tokens)) for tree in trees]
    found = computed_plainly(model, trees, weights)
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for tree, weight_M, logprob_M, flat in zip(
        trees, weights, found.logprobs, flattened_logprobs(model, trees), strict=True
    ):
        seen: set[int] = set()
        for (_, path), expected in zip(rollouts(tree), flat, strict=True):
            torch.testing.assert_close(logprob_M[path], expected.detach(), rtol=0, atol=1e-10)
            new = [place for place, node in enumerate(path.tolist()) if node not in seen]
            seen.update(path.tolist())
            total = total + (weight_M[path[new]] * expected[new]).sum()
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradient[name], parameter.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_a_wrong_learner_or_engine_is_found(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs with an error of 1e-3 fail their checks, and right ones pass."""
    trial = Trial(4, 4, int(rng.integers(1 << 30)))
    right = LearnerVariant("tree")
    monkeypatch.setattr(exactness, "VARIANTS", (right, replace(right, name="wrong", forward=Wrong())))
    checks = learner_part("qwen3", "float64", CPU, trial).checks
    assert {check.passed for check in checks if check.name.startswith("tree")} == {True}
    wrong = {check.name: check.passed for check in checks if check.name.startswith("wrong")}
    assert not wrong["wrong: log-prob"]
    assert not wrong["wrong: gradient"]
    monkeypatch.setattr(exactness, "plain_logprobs", lambda *args: plain_logprobs(*args) + 1e-3)
    failed = [check.name for check in engine_part("qwen3", "float64", CPU, trial).checks if not check.passed]
    assert failed[0] == "engine: log-prob"
    assert "a row per rollout: log-prob" in failed
    assert all(name.endswith(": log-prob") for name in failed)


class Wrong(TreeForward):
    """Tree attention whose log-probs are 1e-3 too large, relatively."""

    @property
    def chunk_logprobs(self):
        right = super().chunk_logprobs

        def chunks(*args, **options):
            for chunk in right(*args, **options):
                yield replace(chunk, logprob=chunk.logprob * 1.001)

        return chunks


def full_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Return the parts of the full sizes, with a pretrained model."""
    config = speed_config("tiny", 64)
    config.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(
        sys, "argv", ["measure.py", str(tmp_path), "--device", "cpu", "--model", str(tmp_path / "model")]
    )
    arguments: argparse.Namespace = measure._arguments()
    return list(measure._parts(arguments, CPU))


def test_small_sizes_have_every_part_of_the_full_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that only the full sizes have would never have run here."""

    def kinds(parts: list[Part]) -> set[str]:
        return {re.sub(r": (?!.*exactness).* by ", " by ", part.name) for part in parts}

    full = kinds(full_parts(tmp_path, monkeypatch))
    monkeypatch.setattr(sys, "argv", ["measure.py", str(tmp_path), "--device", "cpu", "--small"])
    assert kinds(list(measure._parts(measure._arguments(), CPU))) == full


def test_the_exit_code_is_that_of_the_worst_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(folder: str, part, *options: str) -> int:
        monkeypatch.setattr(measure, "engine_part", part)
        command = ["measure.py", str(tmp_path / folder), "--device", "cpu", "--small", "--parts", "llama, engine"]
        monkeypatch.setattr(sys, "argv", [*command, *options])
        return measure.main()

    def fails(*_) -> Findings:
        raise RuntimeError("no kernel")

    assert code("good", lambda *_: Findings([Check("a number", 1.0, 2.0)])) == 0
    assert code("above", lambda *_: Findings([Check("a number", 3.0, 2.0)])) == 1
    assert code("failed", fails) == 1
    assert code("failed", lambda *_: Findings()) == 0  # the next call measures the part again
    assert code("late", lambda *_: Findings(), "--seconds", "0") == 3
    monkeypatch.setattr(Device, "is_lost", lambda _: True)
    assert code("lost", fails) == 4


def test_peak_memory_sees_what_comes_and_goes() -> None:
    device = torch.device("cpu")
    before = bytes_in_use(device)
    reset_peak(device)
    if before is None or peak_bytes(device) is None:
        pytest.skip("this system does not tell the memory of a process")
    block = np.ones(8 << 20)  # 64 MiB
    del block
    peak = peak_bytes(device)
    assert peak - before > 60 << 20
    assert bytes_in_use(device) - before < 30 << 20
    reset_peak(device)
    assert peak_bytes(device) < peak
