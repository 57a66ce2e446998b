"""The peer `vllm`: vLLM on the CPU samples N responses of each prompt, with prefix caching.

It runs in a separate environment (`vllm_environment.sh`), because vLLM pins other versions. The engine
runs in this process, on this core, in float32, and may decode the rows of all rollouts together. Its cache is
allocated in advance, so its peak memory does not depend on N.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from harness import timed
from measurement import Group, Job, Workload, sampling_run
from worker import Turns

CACHE_GIB = 4  # keys and values: 260,000 tokens of the big model
# The same for all N: they determine the compilation, which should happen once per workload.
MIN_ROWS = 512
MIN_BATCHED_TOKENS = 4096


def measure(job: Job, workload: Workload, turns: Turns) -> None:
    """Sample N responses of each prompt, from the untruncated distribution.

    Raises:
        ValueError: If the job asks for a training step; vLLM does not train.
    """
    if job.quantity != "generation":
        raise ValueError(f"vllm has no {job.quantity} to measure, only generation")
    (core,) = os.sched_getaffinity(0)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CACHE_ROOT": str(Path(workload.folder) / "vllm-cache"),  # compiled once per workload, not per N
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams, TokensPrompt

    num_rows = job.num_rollouts * job.prompts_per_step
    longest = max(len(prompt["token_ids"]) for prompt in workload.prompts) + workload.max_new_tokens
    engine = LLM(
        str(workload.model_dir),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=max(MIN_ROWS, num_rows),
        max_num_batched_tokens=max(MIN_BATCHED_TOKENS, num_rows, longest),
        enable_prefix_caching=True,
        seed=0,
    )
    sampling = SamplingParams(
        n=job.num_rollouts,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=workload.max_new_tokens,
        ignore_eos=True,
        stop_token_ids=None if workload.fixed_length else [workload.eos_token_id],
        detokenize=False,
    )
    turns.ready()
    for turn in range(job.num_turns):
        prompts = workload.prompts_of(turn, job.prompts_per_step)
        requests = [TokensPrompt(prompt_token_ids=prompt["token_ids"]) for prompt in prompts]
        outputs: list[Any] = []
        turns.wait()
        turn_time = timed(lambda: outputs.extend(engine.generate(requests, sampling, use_tqdm=False)))  # noqa: B023
        groups = [
            Group(len(prompt["token_ids"]), [list(response.token_ids) for response in output.outputs])
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        turns.reply(sampling_run(*turn_time, groups))
