"""The peer `transformers`: `generate(num_return_sequences=N)` on one prompt a turn."""

from __future__ import annotations

import time

import torch
from measurement import Job, Run, Workload
from transformers import AutoModelForCausalLM
from worker import Turns


def measure(job: Job, workload: Workload, turns: Turns) -> None:
    """Sample N responses of one prompt per turn, from the untruncated distribution.

    Raises:
        ValueError: If the job asks for a training step; generate() does not train.
    """
    if job.quantity != "generation":
        raise ValueError(f"transformers has no {job.quantity} to measure, only generation")
    model = AutoModelForCausalLM.from_pretrained(workload.model_dir, dtype=torch.float32).eval()
    turns.ready()
    for turn in range(job.num_turns):
        prompt_ids = torch.tensor([workload.prompts[turn]["token_ids"]])
        torch.manual_seed(turn)
        turns.wait()
        start = time.perf_counter()
        with torch.no_grad():
            output = model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=job.num_rollouts,
                max_new_tokens=workload.max_new_tokens,
                eos_token_id=workload.eos_token_id,
                pad_token_id=workload.eos_token_id,
            )
        seconds = time.perf_counter() - start
        turns.reply(_run(seconds, output[:, prompt_ids.shape[1] :], workload, prompt_ids.shape[1]))


def _run(seconds: float, sampled_NT: torch.Tensor, workload: Workload, num_prompt: int) -> Run:
    """Count tokens up to the end token, which is one of them; what follows is padding."""
    is_end_NT = sampled_NT == workload.eos_token_id
    valid_NT = (is_end_NT.long().cumsum(1) - is_end_NT.long()) == 0
    position_T = torch.arange(1, sampled_NT.shape[1] + 1) + num_prompt
    return Run(
        seconds=seconds,
        sampled_tokens=int(valid_NT.sum()),
        sampled_context=int((valid_NT * position_T).sum()),
    )
