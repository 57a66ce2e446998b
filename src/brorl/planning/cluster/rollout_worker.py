"""One rollout worker: the rows that its memory holds, and the seconds of a decoding step.

In: a model, unit costs, the work of a step. Out: slots and seconds. A decoding step reads the weights once and the
keys and values of every row, or computes the rows' matrix products, whichever takes longer (the roofline), plus a
fixed time. An engine that shares rows decodes each distinct prefix once and reads a shared prompt once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brorl.planning.cluster.model_shape import ModelShape
from brorl.planning.cluster.step_work import StepWork
from brorl.planning.cluster.unit_costs import Case, Engine, UnitCosts

FloatArray = NDArray[np.float64]

_LOGITS = 3 * 4  # bytes per token of the vocabulary and row: logits, their softmax, a copy
_LEAST_SLOTS = 16  # fewer rows than this are not worth a worker


@dataclass(frozen=True)
class RolloutWorker:
    """An engine on one or more GPUs.

    Attributes:
        model: The model.
        work: The work of a step.
        costs: The unit costs.
        engine: `native` shares rows and reserves memory for full responses; `vllm` does neither.
        gpus: GPUs of the worker; more than 1 is tensor parallel.
        other_bytes: Memory of each GPU that other parts hold while the worker samples.
    """

    model: ModelShape
    work: StepWork
    costs: UnitCosts
    engine: Engine
    gpus: int = 1
    other_bytes: float = 0.0

    @property
    def rows_per_group(self) -> float:
        """Rows that decode the N rollouts of a prompt."""
        return self.work.rollouts * (self.work.distinct_fraction if self.engine == "native" else 1.0)

    @property
    def row_bytes(self) -> float:
        """Memory of one row, with its part of the prompt."""
        tokens = self.work.lengths.limit if self.engine == "native" else self.work.lengths.mean_progress
        prompt = self.work.prompt_tokens / self.rows_per_group if self.work.shares_prompts else self.work.prompt_tokens
        return (tokens + prompt) * self.model.kv_bytes + _LOGITS * self.model.vocabulary

    @property
    def free_bytes(self) -> float:
        """Memory for rows on all GPUs of the worker."""
        usable = self.costs.memory.best * self.costs.memory_fraction.best - self.other_bytes
        return self.gpus * usable - self.model.weight_bytes

    @property
    def slots(self) -> int:
        """Rows that fit; 0 if the weights do not."""
        return max(0, int(self.free_bytes / self.row_bytes))

    def step_seconds(self, rows: FloatArray, case: Case) -> FloatArray:
        """Return the seconds of a decoding step, with a token for every row.

        Args:
            rows: Numbers of rows, >= 0.
            case: Which end of the assumed ranges.
        """
        costs, model, work = self.costs, self.model, self.work
        shares_reading = self.engine == "native" and work.shares_prompts
        prompt = work.prompt_tokens / self.rows_per_group if shares_reading else work.prompt_tokens
        context = prompt + work.lengths.mean_progress
        read = model.weight_bytes + rows * context * model.kv_bytes
        computed = rows * (model.matmul_flops + model.attention_flops * (work.trained_context))
        seconds: FloatArray = costs.launch.at(case) + np.maximum(
            read / (self.gpus * costs.bandwidth.best * costs.read_fraction.at(case)),
            computed / (self.gpus * costs.flops.best * costs.prefill_fraction.at(case)),
        )
        return seconds

    def prefill_seconds(self, tokens: float, context: float, case: Case) -> float:
        """Return the seconds to compute the keys and values of tokens with this mean context."""
        operations = tokens * (self.model.matmul_flops + self.model.attention_flops * context)
        return operations / (self.gpus * self.costs.flops.best * self.costs.prefill_fraction.at(case))

    def group_prefill_seconds(self, case: Case) -> float:
        """Return the seconds to compute the prompt of a group, as often as it is computed."""
        tokens = self.work.prompt_copies * self.work.prompt_tokens
        return self.prefill_seconds(tokens, self.work.prompt_tokens / 2, case)

    def seconds(self, groups: float, case: Case) -> float:
        """Return the seconds to sample groups with as many rows in parallel as fit, without waiting for the longest.

        Args:
            groups: Groups of this worker, which may be a fraction.
            case: Which end of the assumed ranges.
        """
        rows = groups * self.rows_per_group
        parallel = max(min(self.slots, rows), 1e-9)
        step = float(self.step_seconds(np.array([max(parallel, 1.0)]), case)[0])
        return rows / max(parallel, 1.0) * self.work.lengths.mean * step + groups * self.group_prefill_seconds(case)

    def gpu_seconds_per_row(self, case: Case) -> float:
        """Return the GPU-seconds of a row where all slots are busy."""
        step = float(self.step_seconds(np.array([float(self.slots)]), case)[0])
        return self.gpus * self.work.lengths.mean * step / self.slots


def smallest_worker(
    model: ModelShape, work: StepWork, costs: UnitCosts, engine: Engine, most_gpus: int, other_bytes: float = 0.0
) -> RolloutWorker | None:
    """Return the worker with the fewest GPUs (1, 2, 4, ...) that holds a few rows; None if none does.

    Args:
        model: The model.
        work: The work of a step.
        costs: The unit costs.
        engine: The engine.
        most_gpus: Largest number of GPUs of a worker.
        other_bytes: Memory of each GPU that other parts hold while the worker samples.
    """
    gpus = 1
    while gpus <= most_gpus:
        worker = RolloutWorker(model, work, costs, engine, gpus, other_bytes)
        if worker.slots >= _LEAST_SLOTS:
            return worker
        gpus *= 2
    return None
