"""Speed and peak memory on a random Qwen3-type model in bfloat16: sampling by each engine, and a step of the learner.

The prompt is random and every response has the same length. A measurement has a time budget. If a short trial predicts
more, the responses are shorter, or the learner gets fewer of them; the result has both numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from child import Limits
from flat_responses import Group, flat_work, sampling_run
from gpu.bandwidth import flat_keys_read, kv_bytes, tree_keys_read
from gpu.ceilings import Ceilings
from gpu.exactness import parity
from gpu.learners import LearnerVariant
from gpu.models import NO_END_TOKEN, low_entropy_scale, speed_config, speed_model, workload_of
from gpu.parts import Findings
from gpu.setting import Setting
from gpu.timing import Device, timed, turns
from measurement import Cell, Job, Peer, Quantity, Run
from ours import tree_run, tree_work
from transformers import PreTrainedModel
from transformers_generation import generated

from brorl.algorithms.advantages import reinforce_pp_baseline
from brorl.model.memory_plan import MemoryPlan
from brorl.rollout.native.engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.training.learner import LearnerSettings
from brorl.training.tree_learner import TreeLearner
from brorl.tree import RolloutTree

_TRIAL_TOKENS = 128
_TRIAL_RESPONSES = 8
_CACHE_FRACTION = 0.6  # of the free memory; `generate` copies a layer's cache in every step


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
        done = turns(lambda: sample(tokens), self._device, self._limits)
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
            workload = workload_of(sampler, setting.name, tokens)
            output[:] = [generated(sampler, prompt_ids, torch.ones_like(prompt_ids), num_rollouts, workload)]

        tokens = self._affordable_tokens(sample)
        self._device.reset_peak()
        done = turns(lambda: sample(tokens), self._device, self._limits)
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
                done = turns(lambda: sample(tokens), self._device, self._limits)
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
                learner.step(groups, reinforce_pp_baseline(groups), setting.seed)
                return tree

            trial = min(_TRIAL_RESPONSES, whole.num_responses)
            step(trial)  # allocates the optimizer's state
            trial_s = timed(lambda: step(trial), self._device).seconds
            affordable = int(trial * self._limits.cell_s / trial_s)
            num_responses = max(trial, min(whole.num_responses, affordable))
            self._device.reset_peak()
            done = turns(lambda: step(num_responses), self._device, self._limits)
        tree, _ = whole.select(np.arange(num_responses))
        runs = [
            Run(turn.seconds, turn.cpu_seconds, tree.num_sampled_tokens, tree.num_unique_tokens, tree_work(tree),
                {"training": turn.seconds})
            for turn in done
        ]  # fmt: skip
        cell = self._cell("ours", runs, tree.num_rollouts, before)
        gflops = cell.gflops_per_s(workload_of(model, setting.name, setting.max_new_tokens), "training")
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
        """Return the wanted length, halved until one call is predicted to take at most 1.5 times the budget.

        Args:
            sample: Samples responses of a length.
            token_bytes: Keys and values of a token, if rows that do not fit into the engine's memory wait.
        """
        tokens = self.setting.max_new_tokens
        trial = min(_TRIAL_TOKENS, tokens)
        sample(min(8, tokens))
        per_token = timed(lambda: sample(trial), self._device).seconds / trial
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
        """Return the facts of sampling.

        Args:
            cell: Its runs.
            sampler: The model.
            tokens: Tokens of a response.
            keys_read: Tokens whose keys and values are read, over all steps.
        """
        gflops = cell.gflops_per_s(workload_of(sampler, self.setting.name, tokens), "generation")
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
