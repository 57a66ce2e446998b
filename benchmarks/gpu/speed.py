"""Speed and peak memory on a random Qwen3-type model in bfloat16: sampling by each engine, and a step of the learner.

The prompt is random and every response has the same length. A measurement has a time budget. If a short trial predicts
more, the responses are shorter, or the learner gets fewer of them; the result has both numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu.device import Device
from gpu.exactness import parity
from gpu.models import NO_END_TOKEN, LearnerVariant, fixed_workload, low_entropy_scale, speed_config, speed_model
from harness import ABSENT, Findings, Limits, Record, table, timed, turns
from measurement import Cell, Group, Job, Peer, Quantity, Run, flat_work, sampling_run
from ours import tree_run, tree_work
from transformers import PreTrainedConfig, PreTrainedModel
from transformers_generation import generated

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.settings import AdvantageSettings
from brorl.model.forward import TreeForward, choose_forward
from brorl.model.logprobs import DEFAULT_PASS
from brorl.model.memory_plan import MemoryPlan, MemorySettings, Workload, plan_memory
from brorl.rollout.native.engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.training.learner import LearnerSettings
from brorl.training.tree_learner import TreeLearner
from brorl.tree import RolloutTree

_TRIAL_TOKENS = 128
_TRIAL_RESPONSES = 8
_CACHE_FRACTION = 0.6  # of the free memory; `generate` copies a layer's cache in every step


@dataclass(frozen=True)
class Setting:
    """What is sampled and learned from."""

    size: str  # name of the model's size
    low_entropy: bool  # whether its head is sharpened to 0.14 nats per token
    max_new_tokens: int  # tokens of a response
    num_rollouts: int  # rollouts of the prompt, N
    prompt_tokens: int  # tokens of the prompt
    memory_bytes: int  # the engines' limit
    nodes: int  # nodes per forward pass of the learner
    seed: int  # seed of the weights, the prompt and the draws

    @property
    def name(self) -> str:
        """A short name: size, entropy, tokens."""
        return f"{self.size} {'low' if self.low_entropy else 'full'} {self.max_new_tokens}"

    def plan(self, config: PreTrainedConfig, tokens: int, variant: LearnerVariant | None = None) -> MemoryPlan:
        """Return the predicted memory of a run with these sizes."""
        settings = MemorySettings("bfloat16", self.memory_bytes, nodes_per_pass=self.nodes)
        if variant is not None:
            model_pass = variant.forward.model_pass if isinstance(variant.forward, TreeForward) else DEFAULT_PASS
            settings = replace(settings, gradient_checkpointing=variant.checkpointing, attention=model_pass.attention)
        return plan_memory(
            config, settings, Workload(self.prompt_tokens, tokens, num_rows=self.num_rollouts, num_prompts=1)
        )


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of a device."""

    copy_bytes_per_s: float  # bytes read and written by a large copy
    matmul_flops_per_s: float  # operations of a large bfloat16 product


def measure_ceilings(device: Device, small: bool, limits: Limits) -> Ceilings:
    """Measure both ceilings on random data."""
    numbers, width = (1 << 20, 256) if small else (1 << 31, 8192)  # 4 GiB, many times the cache
    copy_s = _copy_seconds(numbers, device, limits)
    left, right = torch.randn(2, width, width, device=device.name, dtype=torch.bfloat16)
    product_s = _median_seconds(lambda: left @ right, device, limits)
    return Ceilings(4 * numbers / copy_s, 2 * width**3 / product_s)


def _copy_seconds(numbers: int, device: Device, limits: Limits) -> float:
    """Return the median seconds in which bfloat16 numbers are copied; 2 bytes each are read, and 2 written."""
    source = torch.randn(numbers, device=device.name, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return _median_seconds(lambda: target.copy_(source), device, limits)


def _median_seconds(call: Callable[[], object], device: Device, limits: Limits) -> float:
    """Return the median seconds of the counted runs of a call."""
    return median(turn.seconds for turn in turns(call, limits, device.synchronize))


def tree_keys_read(tree: RolloutTree) -> int:
    """Count the tokens whose keys and values are read to sample a tree: in each step the prompt's, and each row's."""
    inner_F = np.unique(tree.parent[tree.parent >= 0])  # the last token of a response is not fed
    return int((tree.depth[inner_F] + 1).sum()) + int(tree.length.max()) * len(tree.prompt_ids)


def flat_keys_read(num_prompt_tokens: int, lengths: Sequence[int]) -> int:
    """Count these tokens if each response reads its own prompt."""
    return flat_work(num_prompt_tokens, lengths).attended - num_prompt_tokens * (num_prompt_tokens + 1) // 2


def kv_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the keys and values of a token in all layers."""
    return sum(shape.size for shape in choose_forward(model, "tree").kv_shapes) * model.dtype.itemsize


class Speed:
    """The measurements of one setting; the sampled tree is kept for the learner.

    Args:
        setting: The setting.
        device: The device.
        limits: Limits of the runs of one measurement.
        ceilings: Returns the ceilings of the device.
    """

    def __init__(self, setting: Setting, device: Device, limits: Limits, ceilings: Callable[[], Ceilings]) -> None:
        self.setting = setting
        self._device, self._limits, self._ceilings = device, limits, ceilings
        self._config = speed_config(setting.size, setting.prompt_tokens + setting.max_new_tokens)
        rng = np.random.default_rng(setting.seed)
        self._prompt = rng.integers(1, self._config.vocab_size - 1, setting.prompt_tokens).tolist()
        self._tree: RolloutTree | None = None

    def native(self) -> Findings:
        """Measure the native engine."""
        before = self._device.bytes_in_use()
        sampler = self._sampler()
        trees: list[RolloutTree] = []
        sample = self._native_call(sampler, trees)
        tokens = self._affordable_tokens(sample, kv_bytes(sampler))
        self._device.reset_peak()
        done = turns(lambda: sample(tokens), self._limits, self._device.synchronize)
        self._tree = trees[0]
        runs = [tree_run({"generation": turn.seconds}, turn.cpu_seconds, trees, {}) for turn in done]
        plan = self.setting.plan(self._config, tokens)
        predicted = _line(plan, "sampling copy") + plan.sampling.num_bytes
        cell = self._cell("ours", runs, self.setting.num_rollouts, before)
        facts = self._generation_facts(cell, sampler, tokens, keys_read=tree_keys_read(trees[0]))
        return Findings(facts=facts | {"predicted_bytes": predicted})

    def generate(self) -> Findings:
        """Measure `generate` of transformers."""
        before = self._device.bytes_in_use()
        sampler, setting = self._sampler(), self.setting
        num_rollouts = self._rollouts_that_fit(sampler)
        prompt_ids = torch.tensor([self._prompt], device=self._device.name)
        output: list[torch.Tensor] = []

        def sample(tokens: int) -> None:
            workload = fixed_workload(sampler, setting.name, tokens)
            output[:] = [generated(sampler, prompt_ids, torch.ones_like(prompt_ids), num_rollouts, workload)]

        tokens = self._affordable_tokens(sample)
        self._device.reset_peak()
        done = turns(lambda: sample(tokens), self._limits, self._device.synchronize)
        responses = output[0][:, setting.prompt_tokens :].tolist()
        run = sampling_run(0.0, 0.0, [Group(setting.prompt_tokens, responses)])
        runs = [
            replace(run, seconds=t.seconds, cpu_seconds=t.cpu_seconds, parts={"generation": t.seconds}) for t in done
        ]
        cell = self._cell("transformers", runs, num_rollouts, before)
        keys_read = flat_keys_read(setting.prompt_tokens, [len(response) for response in responses])
        return Findings(facts=self._generation_facts(cell, sampler, tokens, keys_read))

    def vllm(self) -> Findings:
        """Measure vLLM through its engine here, whose results are trees too."""
        if find_spec("vllm") is None:
            return Findings(skipped="vllm cannot be imported")
        from brorl.rollout.vllm import VllmEngine
        from brorl.rollout.vllm_process import VllmSettings

        setting, stop = self.setting, self._config.vocab_size - 1
        context = setting.prompt_tokens + setting.max_new_tokens
        with TemporaryDirectory() as folder:
            sampler = self._sampler()
            sampler.save_pretrained(Path(folder))
            cache_bytes = self._cache_that_fits(sampler)
            engine = VllmEngine(
                VllmSettings(
                    folder, "bfloat16", context, cache_bytes,
                    device="cpu" if self._device.is_cpu else "cuda", threads=torch.get_num_threads(),
                    max_rows=setting.num_rollouts, responses_per_request=setting.num_rollouts,
                ),
                (stop,),
            )  # fmt: skip
            trees: list[RolloutTree] = []

            def sample(tokens: int) -> None:
                sampling = SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens - 1)  # the stop token comes last
                trees[:] = engine.sample([self._prompt], setting.num_rollouts, sampling, setting.seed)

            try:
                tokens = self._affordable_tokens(sample)
                done = turns(lambda: sample(tokens), self._limits, self._device.synchronize)
            finally:
                engine.close()
        lengths = np.repeat(trees[0].length, trees[0].leaf_count).tolist()
        work = flat_work(setting.prompt_tokens, lengths)
        runs = [
            replace(tree_run({"generation": turn.seconds}, turn.cpu_seconds, trees, {}), work=work) for turn in done
        ]
        cell = self._cell("vllm", runs, setting.num_rollouts, 0)
        facts = self._generation_facts(cell, sampler, tokens, flat_keys_read(setting.prompt_tokens, lengths))
        del facts["peak_bytes"]  # the cache of another process, allocated in advance
        return Findings(facts=facts | {"cache_bytes": cache_bytes})

    def learner(self, variant: LearnerVariant) -> Findings:
        """Measure a step of the learner on the sampled tree: old log-probs, gradient and update."""
        if not variant.runs(self._device, "bfloat16"):
            return Findings(skipped="it needs a CUDA device")
        whole, setting = self._sampled_tree(), self.setting
        before = self._device.bytes_in_use()
        model = self._model()
        settings = LearnerSettings(
            1e-7, autocast=True, recompute_old_logprobs=True, max_nodes=setting.nodes, forward=variant.forward
        )
        with variant.applied(model):
            learner = TreeLearner(model, settings)

            def step(num_responses: int) -> RolloutTree:
                tree, _ = whole.select(np.arange(num_responses))
                groups = [parity(tree)]
                learner.learn(groups, advantage_estimator(AdvantageSettings()), setting.seed)
                return tree

            trial = min(_TRIAL_RESPONSES, whole.num_responses)
            step(trial)  # allocates the optimizer's state
            trial_s = timed(lambda: step(trial), self._device.synchronize).seconds
            affordable = int(trial * self._limits.cell_s / trial_s)
            num_responses = max(trial, min(whole.num_responses, affordable))
            self._device.reset_peak()
            done = turns(lambda: step(num_responses), self._limits, self._device.synchronize)
        tree, _ = whole.select(np.arange(num_responses))
        runs = [
            Run(turn.seconds, turn.cpu_seconds, tree.num_sampled_tokens, tree.num_unique_tokens, tree_work(tree),
                {"training": turn.seconds})
            for turn in done
        ]  # fmt: skip
        cell = self._cell("ours", runs, tree.num_rollouts, before)
        gflops = cell.gflops_per_s(fixed_workload(model, setting.name, setting.max_new_tokens), "training")
        assert gflops is not None
        plan = setting.plan(self._config, int(tree.length.max()), variant)
        predicted = plan.kept_bytes - _line(plan, "sampling copy") + plan.learning.num_bytes
        facts = {
            "step_s": cell.seconds,
            "seconds": [run.seconds for run in runs],
            "responses": num_responses,
            "responses_wanted": whole.num_responses,
            "tokens": int(tree.length.max()),
            "nodes": tree.num_unique_tokens,
            "nodes_per_s": tree.num_unique_tokens / cell.seconds,
            "flops_per_s": gflops * 1e9,
            "matmul_fraction": gflops * 1e9 / self._ceilings().matmul_flops_per_s,
            "peak_bytes": cell.above_baseline_bytes,
            "predicted_bytes": predicted,
        }
        return Findings(facts=self._described(facts))

    def _sampler(self) -> PreTrainedModel:
        return self._model().to(torch.bfloat16)  # type: ignore[arg-type]

    def _model(self) -> PreTrainedModel:
        setting = self.setting
        scale = 1.0
        if setting.low_entropy:
            scale = low_entropy_scale(setting.size, self._device, tuple(self._prompt), setting.seed)
        return speed_model(self._config, self._device, scale, setting.seed)

    def _native_call(self, sampler: PreTrainedModel, trees: list[RolloutTree]) -> Callable[[int], None]:
        engine = NativeEngine(sampler, NO_END_TOKEN, self.setting.memory_bytes)

        def sample(tokens: int) -> None:
            sampling = SamplingParams(max_new_tokens=tokens)
            trees[:] = engine.sample([self._prompt], self.setting.num_rollouts, sampling, self.setting.seed)

        return sample

    def _sampled_tree(self) -> RolloutTree:
        """Return the tree of the native engine; sample it again if an earlier call did."""
        if self._tree is None:
            trees: list[RolloutTree] = []
            sampler = self._sampler()
            sample = self._native_call(sampler, trees)
            sample(self._affordable_tokens(sample, kv_bytes(sampler)))
            self._tree = trees[0]
        return self._tree

    def _affordable_tokens(self, sample: Callable[[int], None], token_bytes: int = 0) -> int:
        """Return the wanted length, halved until one call is predicted to take at most 1.5 times the budget."""
        tokens = self.setting.max_new_tokens
        trial = min(_TRIAL_TOKENS, tokens)
        sample(min(8, tokens))
        per_token = timed(lambda: sample(trial), self._device.synchronize).seconds / trial
        while tokens > trial:
            waves = max(1.0, self.setting.num_rollouts * tokens * token_bytes / self.setting.memory_bytes)
            if per_token * tokens * waves <= 1.5 * self._limits.cell_s:
                break
            tokens = max(trial, tokens // 2)
        return tokens

    def _rollouts_that_fit(self, sampler: PreTrainedModel) -> int:
        """Return N, halved until the cache of `generate` fits into the memory."""
        free, num_rollouts = self._device.free_bytes(), self.setting.num_rollouts
        row_bytes = (self.setting.prompt_tokens + self.setting.max_new_tokens) * kv_bytes(sampler)
        while free is not None and num_rollouts > 1 and num_rollouts * row_bytes > _CACHE_FRACTION * free:
            num_rollouts //= 2
        return num_rollouts

    def _cache_that_fits(self, sampler: PreTrainedModel) -> int:
        """Return the bytes of vLLM's cache, which it allocates in advance, beside what other engines have left."""
        self._device.bytes_in_use()  # returns the reserve of this process
        free, limit = self._device.free_bytes(), self.setting.memory_bytes
        return limit if free is None else min(limit, int(_CACHE_FRACTION * (free - _weight_bytes(sampler))))

    def _cell(self, peer: Peer, runs: list[Run], num_rollouts: int, before: int) -> Cell:
        quantity: Quantity = "step" if "training" in runs[0].parts else "generation"
        job = Job(peer, quantity, "", num_rollouts, 1, self._limits.num_runs, 0)
        return Cell(job, runs, [], before, self._device.peak_bytes())

    def _generation_facts(self, cell: Cell, sampler: PreTrainedModel, tokens: int, keys_read: int) -> dict[str, Any]:
        """Return the facts of sampling."""
        gflops = cell.gflops_per_s(fixed_workload(sampler, self.setting.name, tokens), "generation")
        assert gflops is not None
        bytes_per_s = (tokens * _weight_bytes(sampler) + keys_read * kv_bytes(sampler)) / cell.seconds
        ceilings = self._ceilings()
        facts: dict[str, Any] = {
            "rollouts_per_s": cell.rollouts_per_s,
            "seconds": [run.seconds for run in cell.runs],
            "tokens": tokens,
            "tokens_wanted": self.setting.max_new_tokens,
            "rollouts": cell.job.num_rollouts,
            "rollouts_wanted": self.setting.num_rollouts,
            "unique_fraction": cell.unique_fraction,
            "nats_per_token": cell.fact("nats_per_token"),
            "bytes_per_s": bytes_per_s,
            "bandwidth_fraction": bytes_per_s / ceilings.copy_bytes_per_s,
            "matmul_fraction": gflops * 1e9 / ceilings.matmul_flops_per_s,
            "peak_bytes": cell.above_baseline_bytes,
        }
        return self._described(facts)

    def _described(self, facts: dict[str, Any]) -> dict[str, Any]:
        return facts | {"setting": asdict(self.setting), "ceilings": asdict(self._ceilings())}


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _line(plan: MemoryPlan, name: str) -> int:
    return sum(line.num_bytes for line in plan.kept if line.name == name)


def markdown(record: Record) -> str:
    """Return the tables of sampling and of learning; empty if nothing was timed."""
    parts = [(name, entry.get("facts") or {}) for name, entry in record.parts.items()]
    sampling = [
        (
            name, _of(facts, "tokens"), _of(facts, "rollouts"), _number(facts["nats_per_token"], ".2f"),
            _number(facts["unique_fraction"], ".3f"), f"{facts['rollouts_per_s']:.4g}", *_rest(facts),
        )
        for name, facts in parts
        if "rollouts_per_s" in facts
    ]  # fmt: skip
    learning = [
        (
            name, facts["tokens"], _of(facts, "responses"), f"{facts['nodes']:,}", f"{facts['step_s']:.3g}",
            f"{facts['nodes_per_s']:,.0f}", *_rest(facts),
        )
        for name, facts in parts
        if "step_s" in facts
    ]  # fmt: skip
    rest = ("runs", "bandwidth", "matmul", "peak / predicted, GiB")
    tables = (
        table(("part", "tokens", "N", "nats/token", "distinct", "rollouts/s", *rest), sampling),
        table(("part", "tokens", "responses", "nodes", "step, s", "nodes/s", *rest), learning),
    )
    return "\n\n".join(text for text in tables if text)


def _rest(facts: dict[str, Any]) -> tuple[str, ...]:
    """Return the last columns of both tables."""
    sizes = (facts.get(key) for key in ("peak_bytes", "predicted_bytes"))
    memory = " / ".join(ABSENT if size is None else f"{size / 2**30:.2f}" for size in sizes)
    rates = (facts.get(f"{ceiling}_fraction") for ceiling in ("bandwidth", "matmul"))
    return str(len(facts["seconds"])), *(_number(rate, ".2%") for rate in rates), memory


def _number(value: float | None, form: str) -> str:
    return ABSENT if value is None else f"{value:{form}}"


def _of(facts: dict[str, Any], key: str) -> str:
    """Return a size, and the wanted one if it was reduced."""
    value, wanted = facts[key], facts[f"{key}_wanted"]
    return str(value) if value == wanted else f"{value} of {wanted}"
