"""Sampling: milliseconds per decoding position by rows, the share of the memory's bandwidth, kernels and peak memory.

The prompts are random and every response has the same length. All engines are measured against the same least work,
that of the distinct tokens that they sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu.device import Device
from gpu.launches import profiled
from gpu.models import NO_END_TOKEN, TimedModel, fixed_workload
from gpu.roofline import Ceilings, bytes_read, flops, weight_bytes
from harness import Findings, Limits, timed, turns
from measurement import Work
from ours import tree_work
from transformers import PreTrainedModel
from transformers_generation import generated

from brorl.model.cuda_graphs import GraphChoice
from brorl.model.kernels import CompileChoice, use_kernels
from brorl.model.memory_prediction import predict_memory
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree

# Ways of the native engine: `engine.cuda_graphs`, and `engine.compile`.
NATIVE: dict[str, tuple[GraphChoice, CompileChoice]] = {
    "brorl": ("auto", "auto"), "PyTorch in graphs": ("auto", "off"), "PyTorch": ("off", "off")
}  # fmt: skip
# Tokens of the two profiled calls, whose difference is that of single positions. The host looks for ended rows at
# intervals that divide it.
_PROFILED = (4, 20)
_CACHE_FRACTION = 0.6  # of the free memory, for vLLM's cache
Sample = Callable[[int], list[RolloutTree]]  # from a number of tokens


@dataclass(frozen=True)
class Rows:
    """What is sampled."""

    model: TimedModel
    num_rollouts: int  # of each prompt, N
    num_prompts: int  # P
    prompt_tokens: int  # of each prompt
    max_new_tokens: int  # of each response
    memory_bytes: int  # the engines' limit
    seed: int  # of weights, prompts and draws

    @property
    def name(self) -> str:
        """The model, the rows and the length."""
        return f"{self.model.name} {self.num_rollouts} x {self.num_prompts}, {self.max_new_tokens} tokens"


class Decoding:
    """The measurements of some rows.

    Args:
        rows: What is sampled.
        device: The device.
        limits: Limits of the runs after the first one.
        ceilings: Returns the ceilings of the device.
    """

    def __init__(self, rows: Rows, device: Device, limits: Limits, ceilings: Callable[[], Ceilings]) -> None:
        self.rows = rows
        self._device, self._limits, self._ceilings = device, limits, ceilings
        self._config = rows.model.config(rows.prompt_tokens + rows.max_new_tokens)
        rng = np.random.default_rng(rows.seed)
        shape = rows.num_prompts, rows.prompt_tokens
        self._prompts: list[list[int]] = rng.integers(1, self._config.vocab_size - 1, shape).tolist()

    def native(self, graphs: GraphChoice, kernels: CompileChoice) -> Findings:
        """Measure the native engine, and profile some of its positions."""
        before = self._device.bytes_in_use()
        model, rows = self._model(), self.rows
        said: list[str] = []
        use_kernels(kernels)
        engine = NativeEngine(model, NO_END_TOKEN, rows.memory_bytes, graphs=graphs, echo=said.append)

        def sample(tokens: int) -> list[RolloutTree]:
            return engine.sample(
                SampleTask(self._prompts, rows.num_rollouts, SamplingParams(max_new_tokens=tokens), rows.seed)
            )

        facts = self._facts(model, sample, before)
        profiles = []
        for tokens in _PROFILED:
            sample(tokens)  # records graphs, if it has some for this length
            profiles.append(profiled(lambda: sample(tokens), self._device))  # noqa: B023
        few, many = profiles
        positions = _PROFILED[1] - _PROFILED[0]
        return Findings(
            facts=facts
            | {
                "predicted_bytes": self._predicted(),
                "kernels_per_position": (many.kernels - few.kernels) / positions,
                "launches_per_position": (many.launches - few.launches) / positions,
                "waits_per_position": (many.waits - few.waits) / positions,
                "top": many.top(),
                "said": said,
            }
        )

    def generate(self) -> Findings:
        """Measure `generate` of transformers."""
        before = self._device.bytes_in_use()
        model, rows = self._model(), self.rows
        prompt_ids = torch.tensor(self._prompts, device=self._device.name)

        def sample(tokens: int) -> torch.Tensor:
            workload = fixed_workload(model, rows.name, tokens)
            return generated(model, prompt_ids, torch.ones_like(prompt_ids), rows.num_rollouts, workload)

        def trees(output: torch.Tensor) -> list[RolloutTree]:
            responses = output[:, rows.prompt_tokens :].reshape(rows.num_prompts, rows.num_rollouts, -1)
            no_logprobs = np.zeros(responses.shape[1:]).tolist()
            return [
                RolloutTree.from_responses(prompt, of_prompt, no_logprobs)
                for prompt, of_prompt in zip(self._prompts, responses.tolist(), strict=True)
            ]

        return Findings(facts=self._facts(model, sample, before, trees))

    def vllm(self) -> Findings:
        """Measure vLLM through its engine here, whose results are trees too."""
        if find_spec("vllm") is None:
            return Findings(skipped="vllm cannot be imported")
        from brorl.rollout.vllm_engine import VllmEngine
        from brorl.rollout.vllm_process import VllmSetup

        rows, stop = self.rows, self._config.vocab_size - 1
        num_rows = rows.num_rollouts * rows.num_prompts
        with TemporaryDirectory() as folder:
            model = self._model()
            model.save_pretrained(Path(folder))
            cache_bytes = self._cache_that_fits(model)
            engine = VllmEngine(
                VllmSetup(
                    folder, "bfloat16", rows.prompt_tokens + rows.max_new_tokens, cache_bytes,
                    device="cpu" if self._device.is_cpu else "cuda", threads=torch.get_num_threads(),
                    max_rows=num_rows, responses_per_request=rows.num_rollouts,
                ),
                (stop,),
            )  # fmt: skip

            def sample(tokens: int) -> list[RolloutTree]:
                sampling = SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens - 1)  # the stop token comes last
                return engine.sample(SampleTask(self._prompts, rows.num_rollouts, sampling, rows.seed))

            try:
                facts = self._facts(model, sample, 0)
            finally:
                engine.close()
        del facts["peak_bytes"]  # the cache of another process, allocated in advance
        return Findings(facts=facts | {"cache_bytes": cache_bytes})

    def _model(self) -> PreTrainedModel:
        rows = self.rows
        model = rows.model.load(self._device, rows.prompt_tokens + rows.max_new_tokens, rows.seed)
        return model.to(torch.bfloat16)  # type: ignore[arg-type]

    def _cache_that_fits(self, model: PreTrainedModel) -> int:
        """Return the bytes of vLLM's cache, which it allocates in advance, beside what other engines have left."""
        self._device.bytes_in_use()  # returns the reserve of this process
        free, limit = self._device.free_bytes(), self.rows.memory_bytes
        return limit if free is None else min(limit, int(_CACHE_FRACTION * (free - weight_bytes(model))))

    def _predicted(self) -> int:
        """Return the predicted bytes of the sampler: its weights, keys and values, and logits."""
        rows = self.rows
        settings = MemorySettings("bfloat16", rows.memory_bytes, device=self._device.torch.type)
        sizes = Workload(rows.prompt_tokens, rows.max_new_tokens, rows.num_rollouts * rows.num_prompts, 1)
        plan = predict_memory(self._config, settings, sizes)
        weights = sum(line.num_bytes for line in plan.kept if line.name == "sampling copy")
        return weights + plan.sampling.num_bytes

    def _facts(
        self, model: PreTrainedModel, sample: Callable[[int], Any], before: int, trees: Callable[[Any], Any] = list
    ) -> dict[str, Any]:
        """Time a way to sample, and return what all ways have: times, shares of the ceilings, and peak memory."""
        rows, sampled = self.rows, []
        self._device.reset_peak()
        first_s = timed(lambda: sampled.append(sample(rows.max_new_tokens)), self._device.synchronize).seconds

        def again() -> None:
            sampled[:] = [sample(rows.max_new_tokens)]

        done = [turn.seconds for turn in turns(again, self._limits, self._device.synchronize)]
        peak = self._device.peak_bytes() - before
        found: list[RolloutTree] = trees(sampled[0])
        seconds, works = median(done), [tree_work(tree) for tree in found]
        ceilings, work = self._ceilings(), Work.total(works)
        tokens = sum(tree.num_sampled_tokens for tree in found)
        bytes_per_s = bytes_read(model, work) / seconds
        return {
            "ms_per_position": 1e3 * seconds / rows.max_new_tokens,
            "first_s": first_s,
            "seconds": done,
            "tokens_per_s": tokens / seconds,
            "unique_fraction": sum(tree.num_unique_tokens for tree in found) / tokens,
            "bandwidth_fraction": bytes_per_s / ceilings.copy_bytes_per_s,
            "matmul_fraction": flops(model, work) / seconds / ceilings.matmul_flops_per_s,
            "peak_bytes": peak,
            "setting": asdict(rows),
        }
