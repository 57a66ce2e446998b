"""The peer `transformers`: `generate(num_return_sequences=N)` on the prompts of a turn."""

from __future__ import annotations

import time

import torch
from measurement import Job, Run, Workload
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker import Turns


def measure(job: Job, workload: Workload, turns: Turns) -> None:
    """Sample N responses of each prompt, from the untruncated distribution.

    Raises:
        ValueError: If the job asks for a training step; generate() does not train.
    """
    if job.quantity != "generation":
        raise ValueError(f"transformers has no {job.quantity} to measure, only generation")
    model = AutoModelForCausalLM.from_pretrained(workload.model_dir, dtype=torch.float32).eval()
    turns.ready()
    for turn in range(job.num_turns):
        prompts = workload.prompts_of(turn, job.prompts_per_step)
        prompt_ids, mask = _left_padded([prompt["token_ids"] for prompt in prompts])
        torch.manual_seed(turn)
        turns.wait()
        start, cpu_start = time.perf_counter(), time.process_time()
        with torch.no_grad():
            output = model.generate(
                prompt_ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=job.num_rollouts,
                max_new_tokens=workload.max_new_tokens,
                eos_token_id=workload.eos_token_id,
                pad_token_id=workload.eos_token_id,
            )
        seconds = time.perf_counter() - start, time.process_time() - cpu_start
        num_prompt_N = mask.sum(1).repeat_interleave(job.num_rollouts)
        turns.reply(_run(seconds, output[:, prompt_ids.shape[1] :], workload, num_prompt_N))


def _left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids padded with 0 on the left, and the mask of what is no padding."""
    longest = max(len(ids) for ids in prompts)
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    return padded, mask


def _run(
    seconds: tuple[float, float],
    sampled_NT: Tensor,
    workload: Workload,
    num_prompt_N: Tensor,
) -> Run:
    """Count tokens up to the end token, which is one of them; what follows is padding."""
    is_end_NT = sampled_NT == workload.eos_token_id
    valid_NT = (is_end_NT.long().cumsum(1) - is_end_NT.long()) == 0
    context_NT = torch.arange(1, sampled_NT.shape[1] + 1) + num_prompt_N[:, None]
    return Run(
        seconds=seconds[0],
        cpu_seconds=seconds[1],
        sampled_tokens=int(valid_NT.sum()),
        sampled_context=int((valid_NT * context_NT).sum()),
    )
