"""The script for a GPU, on a CPU with tiny sizes: every kind of part runs, and the next call continues."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from gpu import exactness, measure
from gpu.device import Device
from gpu.exactness import Trial, computed_plainly, engine_part, learner_part, plain_logprobs
from gpu.models import VARIANTS, LearnerVariant, copy_of, small_model, speed_config, speed_model
from gpu.speed import Setting, Speed, flat_keys_read, tree_keys_read
from harness import Check, DeviceLostError, Findings, Limits, OtherOptionsError, Part, Record, run_parts

from brorl.model.forward import TreeForward
from brorl.rollout.vllm_process import VllmSettings
from brorl.tree import RolloutTree
from small_models import flattened_logprobs, random_tree, rollouts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "measure.py"
CPU = Device("cpu")
# Dependencies that a machine with PyTorch, transformers and pydantic may lack.
NOT_NEEDED = ("ruamel", "ruamel.yaml", "plotly", "math_verify", "ray", "vllm")
SUBSET = "ceilings|long responses|mamba, device|llama, learner float32|mamba2, engine bfloat16|speed: tiny low"


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
    options = ("--seed", str(rng.integers(1 << 30)), "--parts", SUBSET)
    done = call(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "result.json").read_text()
    parts = json.loads(written)["parts"]
    learners = {variant.name for variant in VARIANTS if variant.timed}
    skipped = {"vLLM"} | {f"learner {variant.name}" for variant in VARIANTS if variant.only_cuda}
    expected = {
        "ceilings",
        "exactness: long responses",
        "exactness: mamba, device",
        "exactness: llama, learner float32",
    }
    expected |= {"exactness: mamba2, engine bfloat16"}
    expected |= {f"speed: tiny low 16, {name}" for name in ("native", "generate", "vLLM")}
    assert set(parts) == expected | {f"speed: tiny low 16, learner {name}" for name in learners}
    assert {name for name, part in parts.items() if part["state"] != "done"} == {
        f"speed: tiny low 16, {name}" for name in skipped
    }
    for name, part in parts.items():
        assert bool(part["checks"]) == name.startswith("exactness")
    for facts in (parts[f"speed: tiny low 16, {name}"]["facts"] for name in ("native", "learner tree")):
        assert facts["predicted_bytes"] > 0
        assert facts["matmul_fraction"] > 0
    tables = (tmp_path / "tables.md").read_text()
    assert tables.count("speed: tiny low 16") == 3 + len(learners) - len(skipped)

    command = ["measure.py", str(tmp_path), "--device", "cpu", "--small", *options]
    monkeypatch.setattr(sys, "argv", command)
    assert measure.main() == 0
    assert (tmp_path / "result.json").read_text() == written
    monkeypatch.setattr(sys, "argv", [*command, "--nodes", "63"])
    assert measure.main() == 1


def test_a_failing_part_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    order: list[str] = []

    def part(name: str, error: Exception | None = None) -> Part:
        def run() -> Findings:
            order.append(name)
            if error:
                raise error
            return Findings([Check("a number", 1.0, 2.0)], {"name": name})

        return Part(name, run)

    record = Record(tmp_path, {"seed": 1})
    parts = [part("a"), part("b", RuntimeError("no kernel")), part("c"), replace(part("late"), least_s=100.0)]
    assert run_parts(parts, record, 50.0, lambda: False) == ["late"]
    assert order == ["a", "b", "c"]
    record = Record(tmp_path, {"seed": 1})
    assert record.failed_parts() == ["b"]
    assert "RuntimeError: no kernel" in record.parts["b"]["traceback"]
    assert record.parts["c"]["facts"] == {"name": "c"}
    order.clear()
    assert run_parts([part("a"), part("b"), part("c"), part("d")], record, 50.0, lambda: False) == []
    assert order == ["d", "b"]  # what failed comes last
    assert Record(tmp_path, {"seed": 1}).failed_parts() == []
    with pytest.raises(OtherOptionsError, match="give another folder"):
        Record(tmp_path, {"seed": 2})


def test_a_lost_device_ends_the_call_and_its_part_comes_last(tmp_path: Path) -> None:
    order: list[str] = []

    def part(name: str, lost: bool = False) -> Part:
        def run() -> Findings:
            order.append(name)
            if lost:
                raise RuntimeError("illegal access")
            return Findings()

        return Part(name, run)

    record = Record(tmp_path, {})
    with pytest.raises(DeviceLostError, match="lost in a"):
        run_parts([part("a", lost=True), part("b")], record, 50.0, lambda: True)
    assert order == ["a"]
    run_parts([part("a"), part("b")], record, 50.0, lambda: False)
    assert order == ["a", "b", "a"]


def test_a_part_that_ends_the_process_comes_last(tmp_path: Path) -> None:
    order: list[str] = []

    def ending() -> Findings:
        order.append("a")
        raise SystemExit  # such as a signal, after which nothing more is written

    parts = [Part("a", ending), Part("b", lambda: (order.append("b"), Findings())[1])]
    with pytest.raises(SystemExit):
        run_parts(parts, Record(tmp_path, {}), 50.0, lambda: False)
    record = Record(tmp_path, {})
    assert record.failed_parts() == ["a"]
    with pytest.raises(SystemExit):
        run_parts(parts, record, 50.0, lambda: False)
    assert order == ["a", "b", "a"]


def test_numbers_above_their_bound_and_nan_fail(tmp_path: Path) -> None:
    checks = [Check("equal", 2.0, 2.0), Check("above", 2.1, 2.0), Check("undefined", math.nan, 2.0)]
    record = Record(tmp_path, {})
    run_parts([Part("x", lambda: Findings(checks))], record, 50.0, lambda: False)
    assert [line.split(" is ")[0] for line in record.failed_checks()] == ["x: above", "x: undefined"]


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
    assert failed == ["engine: log-prob"]


class Wrong(TreeForward):
    """Tree attention whose log-probs are 1e-3 too large, relatively."""

    @property
    def chunk_logprobs(self):
        right = super().chunk_logprobs

        def chunks(*args, **options):
            for chunk in right(*args, **options):
                yield replace(chunk, logprob=chunk.logprob * 1.001)

        return chunks


def test_keys_read_are_those_of_every_step(rng: np.random.Generator) -> None:
    tree: RolloutTree = random_tree(rng)
    responses = [tokens for tokens, _ in tree.responses()]
    num_prompt, longest = len(tree.prompt_ids), max(map(len, responses))
    fed = {tokens[:end] for tokens in responses for end in range(1, len(tokens))}
    assert tree_keys_read(tree) == sum(len(prefix) for prefix in fed) + longest * num_prompt
    flat = sum(num_prompt + end for tokens in responses for end in range(1, len(tokens)))
    assert flat_keys_read(num_prompt, [len(tokens) for tokens in responses]) == flat


def test_small_sizes_have_every_part_of_the_full_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that only the full sizes have would never have run."""

    def kinds(*options: str) -> set[str]:
        found: set[str] = set()

        def record(parts, *_):
            found.update(re.sub(r"(tiny|300M|1.5B) (low|full) \d+", r"\2", part.name) for part in parts)
            return []

        monkeypatch.setattr(measure, "run_parts", record)
        monkeypatch.setattr(sys, "argv", ["measure.py", str(tmp_path / str(len(options))), "--device", "cpu", *options])
        assert measure.main() == 0
        return found

    assert kinds("--small") == kinds()


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


@pytest.mark.parametrize(("free", "limit"), [(None, 1 << 30), (1 << 40, 1 << 30), (1 << 28, None)])
def test_vllm_gets_a_cache_that_fits_beside_its_weights(
    free: int | None, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM allocates its cache at the start; 96 GiB of the default do not fit on every GPU."""
    asked: list[int] = []

    def engine(settings: VllmSettings, _: tuple[int, ...]) -> NoReturn:
        asked.append(settings.cache_bytes)
        raise InterruptedError

    monkeypatch.setattr("gpu.speed.find_spec", lambda _: True)
    monkeypatch.setattr("brorl.rollout.vllm.VllmEngine", engine)
    monkeypatch.setattr(Device, "free_bytes", lambda _: free)
    setting = Setting("tiny", False, 16, 4, 8, 1 << 30, 64, 0)
    with pytest.raises(InterruptedError):
        Speed(setting, CPU, Limits(1, 0, 1.0), lambda: pytest.fail("no ceilings are needed")).vllm()
    assert 0 < asked[0] == (limit or asked[0]) <= min(1 << 30, free or 1 << 30)
    if limit is None:
        assert free is not None
        weights = sum(p.numel() * 2 for p in speed_model(speed_config("tiny", 24), CPU, 1.0, 0).parameters())
        assert asked[0] == int(0.6 * (free - weights))
