"""The phases of a step on GPUs: sampling by a rollout worker, and learning on R ranks, with their memory.

A decoding step reads the weights once and the keys and values of every row, or computes the rows' matrix products,
whichever takes longer (the roofline), plus a fixed time. An engine that shares rows decodes each distinct prefix once
and reads a shared prompt once. The learner's weights, gradients, AdamW's moments and reference are float32 and sharded
over the ranks; each layer is gathered in bfloat16 for a pass. Attention does not store its weights, and logits exist
for a part of the nodes, as in the sharded learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from brorl.model.model_shape import ModelShape
from brorl.planning.cluster.hardware import Case, Engine, Gpu, UnitCosts
from brorl.planning.cluster.step_work import StepWork
from brorl.tree import FloatArray

TREE_BYTES = 32
"""Bytes of a node of a rollout tree: token, parent, count and log-prob of 8 bytes each."""
WORTHWHILE_ROWS = 16
"""A worker with fewer rows is not worth its GPUs."""
_ROW_LOGITS = 3 * 4  # bytes per token of the vocabulary and row: logits, their softmax, a copy
_PASS_NODES = 8_192  # of a forward pass where the recipe does not set them, as in brorl.model.logprobs
_LOGIT_NODES = 1024  # nodes whose logits exist at once


@dataclass(frozen=True)
class Job:
    """The part of a plan that does not depend on the number of GPUs."""

    model: ModelShape
    work: StepWork  # the work of a step
    gpu: Gpu  # the figures of each GPU
    costs: UnitCosts  # the unit costs
    # the engine that samples: `native` shares rows and reserves memory for full responses; `vllm` does neither
    engine: Engine
    reference: bool  # whether a reference policy is in the memory of the GPUs
    gradient_checkpointing: bool  # whether activations are computed again
    average: bool = False  # whether averaged weights are in the memory of the GPUs
    lora_rank: int = 0  # rank of the adapters; 0 trains all weights
    # nodes of a forward pass; None for 8,192, or one response of the maximum length if that is more
    nodes_per_pass: int | None = None

    def bandwidth(self, num_gpus: int, case: Case) -> float:
        """Return the bytes per second of collectives between GPUs: over the link of one machine, or the network."""
        wire = self.costs.link if num_gpus <= self.gpu.per_machine else self.costs.network
        return wire.best * self.costs.link_fraction.at(case)


@dataclass(frozen=True)
class RolloutWorker:
    """An engine on one or more GPUs."""

    job: Job
    gpus: int = 1  # GPUs of the worker; more than 1 is tensor parallel
    other_bytes: float = 0.0  # memory of each GPU that other parts hold while the worker samples

    @property
    def rows_per_group(self) -> float:
        """Rows that decode the N rollouts of a prompt."""
        return self.job.work.rollouts * (self.job.work.distinct_fraction if self.job.engine == "native" else 1.0)

    @property
    def row_bytes(self) -> float:
        """Memory of one row, with its part of the prompt."""
        work, model = self.job.work, self.job.model
        tokens = work.lengths.limit if self.job.engine == "native" else work.lengths.mean_progress
        return (tokens + self._prompt_tokens(work.shares_prompts)) * model.kv_bytes + _ROW_LOGITS * model.vocabulary

    @property
    def free_bytes(self) -> float:
        """Memory for rows on all GPUs of the worker."""
        return self.gpus * (self.job.costs.usable_bytes - self.other_bytes) - self.job.model.weight_bytes

    @property
    def slots(self) -> int:
        """Rows that fit; 0 if the weights do not."""
        return max(0, int(self.free_bytes / self.row_bytes))

    def _prompt_tokens(self, shared: bool) -> float:
        """Return the tokens of the prompt for each row."""
        return self.job.work.prompt_tokens / (self.rows_per_group if shared else 1)

    def step_seconds(self, rows: FloatArray, case: Case) -> FloatArray:
        """Return the seconds of a decoding step with a token for every row, for each number of rows >= 0."""
        costs, model, work = self.job.costs, self.job.model, self.job.work
        shared = self.job.engine == "native" and work.shares_prompts
        context = self._prompt_tokens(shared) + work.lengths.mean_progress
        read = model.weight_bytes + rows * context * model.kv_bytes
        computed = rows * (model.matmul_flops + model.attention_flops * work.trained_context)
        seconds: FloatArray = costs.launch.at(case) + np.maximum(
            read / (self.gpus * costs.bandwidth.best * costs.read_fraction.at(case)),
            computed / (self.gpus * costs.flops.best * costs.prefill_fraction.at(case)),
        )
        return seconds

    def prefill_seconds(self, case: Case) -> float:
        """Return the seconds to compute the prompt of a group, as often as it is computed."""
        costs, model, work = self.job.costs, self.job.model, self.job.work
        per_token = model.matmul_flops + model.attention_flops * work.prompt_tokens / 2
        operations = work.prompt_copies * work.prompt_tokens * per_token
        return operations / (self.gpus * costs.flops.best * costs.prefill_fraction.at(case))

    def seconds(self, groups: float, case: Case) -> float:
        """Return the seconds to sample groups with as many rows in parallel as fit, without waiting for the longest."""
        rows = groups * self.rows_per_group
        parallel = max(min(self.slots, rows), 1.0)
        step = float(self.step_seconds(np.array([parallel]), case)[0])
        return rows / parallel * self.job.work.lengths.mean * step + groups * self.prefill_seconds(case)

    def gpu_seconds_per_row(self, case: Case) -> float:
        """Return the GPU-seconds of a row where all slots are busy."""
        step = float(self.step_seconds(np.array([float(self.slots)]), case)[0])
        return self.gpus * self.job.work.lengths.mean * step / self.slots


def smallest_worker(job: Job, max_gpus: int, other_bytes: float = 0.0) -> RolloutWorker | None:
    """Return the worker with the fewest GPUs (1, 2, 4, ...) that holds a few rows; None if none does."""
    sizes = (1 << power for power in range(max(0, max_gpus).bit_length()))
    workers = (RolloutWorker(job, gpus, other_bytes) for gpus in sizes)
    return next((worker for worker in workers if worker.slots >= WORTHWHILE_ROWS), None)


@dataclass(frozen=True)
class ShardedLearner:
    """A learner on R ranks of one GPU each."""

    job: Job
    ranks: int  # R >= 1

    @property
    def trained_parameters(self) -> int:
        """Weights with a gradient."""
        m, rank = self.job.model, self.job.lora_rank
        widths = 4 * (m.hidden + m.heads * m.head_dim) + 3 * (m.hidden + m.inner)
        return rank * m.layers * widths if rank else m.parameters

    @property
    def nodes(self) -> int:
        """Tokens of a forward pass: halved until a pass fits, but never below the longest response with its prompt."""
        longest = ceil(self.job.work.lengths.limit + self.job.work.prompt_tokens)
        nodes = max(self.job.nodes_per_pass or _PASS_NODES, longest)
        while nodes > longest and self.state_bytes + self._pass_bytes(nodes) > self.job.costs.usable_bytes:
            nodes = max(nodes // 2, longest)
        return nodes

    @property
    def state_bytes(self) -> float:
        """Weights, gradients, moments, reference and average on one rank; they stay between steps."""
        copies = 4 + 4 + 8 + 4 * (self.job.reference + self.job.average)
        frozen = self.job.model.weight_bytes if self.job.lora_rank else 0
        return (copies * self.trained_parameters + frozen) / self.ranks

    @property
    def pass_bytes(self) -> float:
        """Activations, logits and gathered weights of a forward and a backward pass on one rank."""
        return self._pass_bytes(self.nodes)

    def _pass_bytes(self, nodes: int) -> float:
        m = self.job.model
        activations = m.pass_bytes(nodes, nodes * m.activation_bytes(), self.job.gradient_checkpointing)
        logits = 3 * min(nodes, _LOGIT_NODES) * m.vocabulary * 4
        gathered = 2 * (m.weight_bytes / m.layers + 2 * m.vocabulary * m.hidden) if self.ranks > 1 else m.weight_bytes
        return activations + logits + gathered

    @property
    def fits(self) -> bool:
        """Whether a rank's memory holds its state and a pass."""
        return self.state_bytes + self.pass_bytes <= self.job.costs.usable_bytes

    @property
    def flops(self) -> float:
        """Operations of all passes of a step."""
        model, work = self.job.model, self.job.work
        per_token = model.matmul_flops + model.attention_flops * work.trained_context
        return work.passes * work.trained_tokens * per_token

    def seconds(self, case: Case) -> float:
        """Return the seconds of a step: computing or communicating, which overlap, times the imbalance."""
        return max(self.computing_seconds(case), self.communication_seconds(case)) * self.job.costs.imbalance.at(case)

    def computing_seconds(self, case: Case) -> float:
        """Return the seconds of the operations of a step, dealt evenly."""
        return self.flops / (self.ranks * self.job.costs.flops.best * self.job.costs.train_fraction.at(case))

    def communication_seconds(self, case: Case) -> float:
        """Return the seconds of all collectives of a step; 0 for one rank.

        For every forward pass each rank gathers the weights in bfloat16, and every backward pass also scatters the
        gradients in float32.
        """
        if self.ranks == 1:
            return 0.0
        work = self.job.work
        passes = work.mini_batches * ceil(work.trained_tokens / (work.mini_batches * self.ranks * self.nodes))
        moved = (work.passes - 1) * self.job.model.weight_bytes + 4 * self.trained_parameters
        return passes * moved * (1 - 1 / self.ranks) / self.job.bandwidth(self.ranks, case)

    def tree_seconds(self, case: Case) -> float:
        """Return the seconds in which every machine of the learner receives the trees of a step."""
        return self.job.work.trained_tokens * TREE_BYTES / self.job.costs.tree_rate.at(case)
