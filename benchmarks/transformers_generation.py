"""The peer `transformers`: `generate(num_return_sequences=N)` on the prompts of a turn."""

from __future__ import annotations

import torch
from harness import timed
from measurement import Group, Job, Workload, sampling_run
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
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
        output: list[Tensor] = []
        turns.wait()
        turn_time = timed(lambda: output.append(generated(model, prompt_ids, mask, job.num_rollouts, workload)))  # noqa: B023
        responses = _responses(output[0][:, prompt_ids.shape[1] :], workload.eos_token_id)
        n = job.num_rollouts
        groups = [Group(len(prompt["token_ids"]), responses[p * n : (p + 1) * n]) for p, prompt in enumerate(prompts)]
        turns.reply(sampling_run(*turn_time, groups))


@torch.no_grad()
def generated(
    model: PreTrainedModel, prompt_ids: Tensor, mask: Tensor, num_rollouts: int, workload: Workload
) -> Tensor:
    """Sample N responses of each prompt, padded on the left; return the prompts with them, shape [P * N, S + T]."""
    output: Tensor = model.generate(
        prompt_ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=num_rollouts,
        max_new_tokens=workload.max_new_tokens,
        eos_token_id=workload.eos_token_id,
        pad_token_id=workload.eos_token_id,
    )
    return output


def _left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids padded with 0 on the left, and the mask of the other tokens."""
    longest = max(len(ids) for ids in prompts)
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    return padded, mask


def _responses(sampled_NT: Tensor, eos_token_id: int) -> list[list[int]]:
    """Cut off the padding after the end token, which is part of its response."""
    is_end_NT = sampled_NT == eos_token_id
    valid_NT = (is_end_NT.long().cumsum(1) - is_end_NT.long()) == 0
    return [row[valid].tolist() for row, valid in zip(sampled_NT, valid_NT, strict=True)]
